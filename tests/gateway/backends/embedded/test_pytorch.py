"""Embedded PyTorch: every datatype, the names of Triton's rules, and archives that are refused."""

from __future__ import annotations

import gc
import io
import json
import pickle
import platform
import sys
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from modelport.gateway.backends.embedded import embedded_backend, pytorch
from modelport.gateway.backends.embedded.pytorch_archives import open_exported, open_torchscript
from modelport.gateway.errors import (
    IntegrityError,
    Internal,
    InvalidArgument,
    ModelportError,
)
from modelport.gateway.types import NUMPY_DTYPES, Datatype, Tensor
from tests import models
from tests.gateway.backends.embedded.runtimes import fp32, load, run

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def text(inputs: list[str], outputs: list[str], extra: str = "", batch: int = 4) -> str:
    described = models.config("m", inputs, outputs, batch, "pytorch", extra)
    return described if "platform" in extra else described + ' platform: "pytorch_libtorch"'


XY = text(["x FP32 4"], ["y FP32 4"])
PT2 = text(["x FP32 4"], ["y FP32 4"], 'platform: "torch_export"')


def traced(version: Path, module: nn.Module, *example: Any) -> Path:
    version.mkdir(exist_ok=True)
    torch.jit.trace(module, example, strict=False).save(version / "model.pt")
    return version


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Subtract(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a - b, b - a


def refused(version: Path, described: str) -> ModelportError:
    with pytest.raises(ModelportError) as caught:
        load(version, described)
    assert str(version) not in str(caught.value)
    return caught.value


# -- tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", [d for d in Datatype if d is not Datatype.BYTES])
def test_every_datatype_comes_back_bit_by_bit(datatype: Datatype, tmp_path: Path) -> None:
    example = torch.zeros(2, 4).to(pytorch._DTYPES[datatype])
    version = traced(tmp_path / "1", Function(torch.clone), example)
    backend = load(version, text([f"x {datatype} 4"], [f"y {datatype} 4"]))
    size = NUMPY_DTYPES[datatype].itemsize * 4
    bits = bytes([0, 1] * (size // 2)) if datatype is Datatype.BOOL else bytes(range(1, size + 1))
    data = np.frombuffer(b"\0" + bits, NUMPY_DTYPES[datatype], 4, 1).reshape(1, 4)  # unaligned
    (y,) = run(backend, Tensor("x", datatype, data)).outputs
    assert (y.name, y.datatype, y.data.dtype) == ("y", datatype, NUMPY_DTYPES[datatype])
    assert y.data.tobytes() == bits


class Joined(nn.Module):
    """Strings by name: every kind of result."""

    def forward(self, a: list[str], n: torch.Tensor) -> tuple[list[str], torch.Tensor]:
        return [s + s for s in a], n + 1


class RepeatedStrings(nn.Module):
    def forward(self, a: list[str]) -> list[str]:
        return [s + s for s in a]


def strings(data: Any, name: str = "a") -> Tensor:
    return Tensor(name, Datatype.BYTES, np.array(data, object))


def test_strings_are_lists_of_torchscript(tmp_path: Path) -> None:
    version = scripted(tmp_path / "1", Joined())
    described = text(["n FP32 1", "a BYTES -1"], ["s BYTES -1", "m FP32 1"], batch=0)
    said = [b"x", "\N{SNOWMAN}".encode(), b"", b"\0"]
    joined, number = run(load(version, described), strings(said), fp32([1], "n")).outputs
    assert joined.data.tolist() == [item + item for item in said]
    assert number.data.tolist() == [2.0]


@pytest.mark.parametrize(
    ("extra", "given", "answer"),
    [
        ("", [[b"p", b"q"], [b"r", b"s"]], [[b"pp", b"qq"], [b"rr", b"ss"]]),
        (" reshape {}", [b"p", b"r"], [b"pp", b"rr"]),  # Triton's own models of strings
    ],
)
def test_the_strings_of_a_batch_come_back_by_rows(
    extra: str, given: Any, answer: Any, tmp_path: Path
) -> None:
    dims = 1 if extra else 2
    described = text([f"a BYTES {dims}{extra}"], [f"s BYTES {dims}{extra}"])
    (found,) = run(
        load(scripted(tmp_path / "1", RepeatedStrings()), described), strings(given)
    ).outputs
    assert found.data.tolist() == answer


def test_a_string_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    backend = load(scripted(tmp_path / "1", RepeatedStrings()), text(["a BYTES 1"], ["s BYTES 1"]))
    with pytest.raises(InvalidArgument, match="input 'a' has a string that is not UTF-8"):
        run(backend, strings([[b"\xff"]]))


@pytest.mark.parametrize(
    ("module", "described", "reason"),
    [
        (Function(torch.clone), text(["x BYTES 4"], ["y FP32 4"]), "'x' is BYTES, but forward() "),
        (
            RepeatedStrings(),
            text(["a FP32 4"], ["y FP32 4"]),
            "'a' is FP32, but forward() takes List[str]",
        ),
        (RepeatedStrings(), text(["a BYTES 2,2"], ["s BYTES 4"]), "declare it with one dimension"),
        (RepeatedStrings(), text(["a BYTES 4"], ["s FP32 4"]), "the model returns no tensor"),
        (Joined(), text(["a BYTES 4", "n FP32 4"], ["s BYTES 4", "m BYTES 4"]), "no List[str]"),
    ],
)
def test_strings_that_the_module_does_not_have_are_refused_by_name(
    module: nn.Module, described: str, reason: str, tmp_path: Path
) -> None:
    assert reason in str(refused(scripted(tmp_path / "1", module), described))


def test_strings_are_torchscripts_alone(tmp_path: Path) -> None:
    error = refused(exported(tmp_path / "1", nn.ReLU()), PT2.replace("TYPE_FP32", "TYPE_STRING"))
    assert "which PyTorch has in TorchScript alone" in str(error)


def test_a_view_that_negates_is_answered_with_its_values(tmp_path: Path) -> None:
    module = Function(lambda x: torch.complex(x, x).conj().imag[:, :1])  # contiguous, of one row
    version = traced(tmp_path / "1", module, torch.zeros(2, 4))
    backend = load(version, text(["x FP32 4"], ["y FP32 1"]))
    (y,) = run(backend, fp32([[1, 2, 3, 4]])).outputs
    assert y.data.tolist() == [[-1]]


def test_a_model_that_writes_to_its_input_does_not_write_to_the_request(tmp_path: Path) -> None:
    version = traced(tmp_path / "1", Function(lambda x: x.add_(1)), torch.zeros(2, 4))
    backend = load(version, XY)
    data = np.zeros((1, 4), np.float32)
    assert run(backend, fp32(data)).outputs[0].data.tolist() == [[1.0] * 4]
    assert run(backend, fp32(data)).outputs[0].data.tolist() == [[1.0] * 4]
    assert not data.any()


@pytest.mark.parametrize("mode", ["true", "false"])
def test_no_run_tracks_gradients(mode: str, tmp_path: Path) -> None:
    version = traced(tmp_path / "1", nn.Linear(4, 4), torch.zeros(2, 4))
    extra = "".join(
        f' parameters {{ key: "{key}" value {{ string_value: "{mode}" }} }}'
        for key in ("INFERENCE_MODE", "DISABLE_OPTIMIZED_EXECUTION")
    )
    described = text(["input FP32 4"], ["y FP32 4"], extra + " instance_group { count: 2 }")
    (y,) = run(load(version, described), fp32([[1, 2, 3, 4]], "input")).outputs
    assert y.data.shape == (1, 4)


# -- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (("a", "b"), ("first", "second")),
        (("b", "a"), ("first", "second")),  # by the arguments' names, whatever their order
        (("INPUT__0", "INPUT__1"), ("OUTPUT__0", "OUTPUT__1")),
        (("INPUT__1", "INPUT__0"), ("OUTPUT__1", "OUTPUT__0")),
        (("left", "right"), ("first", "second")),  # in order
    ],
)
def test_names_follow_tritons_rules(
    inputs: tuple[str, str], outputs: tuple[str, str], tmp_path: Path
) -> None:
    version = traced(tmp_path / "1", Subtract(), torch.zeros(2, 4), torch.zeros(2, 4))
    described = text([f"{i} FP32 4" for i in inputs], [f"{o} FP32 4" for o in outputs])
    first, second = (inputs[1], inputs[0]) if inputs[0] in ("b", "INPUT__1") else inputs
    response = run(load(version, described), fp32([[5] * 4], first), fp32([[3] * 4], second))
    assert [t.name for t in response.outputs] == list(outputs)
    by_name = {tensor.name: tensor.data[0, 0] for tensor in response.outputs}
    expected = sorted(outputs) if outputs[0].startswith("OUTPUT") else outputs
    assert [by_name[name] for name in expected] == [2.0, -2.0]


def test_a_dict_is_taken_apart_by_its_keys(tmp_path: Path) -> None:
    module = Function(lambda x: {"less": x - 1, "more": x + 1})
    version = traced(tmp_path / "1", module, torch.zeros(2, 4))
    backend = load(version, text(["x FP32 4"], ["more FP32 4", "less FP32 4"]))
    response = run(backend, fp32([[1] * 4]))
    assert [(t.name, t.data[0, 0]) for t in response.outputs] == [("more", 2.0), ("less", 0.0)]
    only = run(backend, fp32([[1] * 4]), outputs=("less",))
    assert [t.name for t in only.outputs] == ["less"]


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ('platform: "pytorch_libtorch"', "declare every 'input' and 'output' in config.pbtxt"),
        (text(["x FP32 4", "z FP32 4"], ["y FP32 4"]), "declares 2 inputs, but forward() takes x"),
        (text(["x FP32 4"], ["y FP64 4"]), "'y' is declared FP64, but the model returns FP32"),
        (text(["x FP32 4"], ["y FP32 5"]), "as FP32 with shape [-1, 5], but the model returns"),
        (text(["x FP32 4"], ["y FP32 4", "z FP32 4"]), "returns 1 tensors, but the configuration"),
    ],
)
def test_a_configuration_that_contradicts_the_module_is_refused(
    described: str, reason: str, tmp_path: Path
) -> None:
    version = traced(tmp_path / "1", Function(torch.relu), torch.zeros(2, 4))
    error = refused(version, described)
    assert isinstance(error, InvalidArgument)
    assert reason in str(error)


# -- kinds of archives ----------------------------------------------------------------------------


def exported(version: Path, module: nn.Module) -> Path:
    version.mkdir()
    batch = torch.export.Dim("batch")
    program = torch.export.export(module, (torch.zeros(2, 4),), dynamic_shapes=({0: batch},))
    program.example_inputs = None
    torch.export.save(program, version / "model.pt2")
    return version


@pytest.mark.parametrize("word", ["torch_export", "torch_aoti"])
def test_what_a_pt2_archive_is_is_read_from_it(word: str, tmp_path: Path) -> None:
    version = exported(tmp_path / "1", nn.ReLU())
    backend = load(version, text(["x FP32 4"], ["y FP32 4"], f'platform: "{word}"'))
    assert backend.config.platform == "torch_export"
    assert run(backend, fp32([[-1, 0, 1, 2]])).outputs[0].data.tolist() == [[0, 0, 1, 2]]
    backend.unload()


class Trap:
    """An object whose code runs when it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (pytest.fail, ("a pickle was loaded",))


def test_pickled_objects_in_a_pt2_archive_are_refused(tmp_path: Path) -> None:
    version = exported(tmp_path / "1", nn.Linear(4, 4))
    with zipfile.ZipFile(version / "model.pt2", "a") as file:
        root = file.namelist()[0].split("/")[0]
        file.writestr(f"{root}/data/sample_inputs/more.pt", pickle.dumps(Trap()))
    error = refused(version, PT2)
    assert isinstance(error, IntegrityError)
    assert "which run code when" in str(error)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_checkpoint_is_no_model(legacy: bool, tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save({"trap": Trap()}, content, _use_new_zipfile_serialization=not legacy)
    (tmp_path / "model.pt").write_bytes(content.getvalue())
    reason = str(refused(tmp_path, XY))
    assert ("damaged" if legacy else "neither TorchScript nor a pt2 archive") in reason


def test_a_folder_in_the_files_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.pt").mkdir()
    assert "'model.pt' of version 1 is not a file" in str(refused(tmp_path, XY))


def test_what_the_module_raises_is_an_internal_error_without_paths(tmp_path: Path) -> None:
    version = traced(tmp_path / "1", nn.Linear(4, 4), torch.zeros(2, 4))
    backend = load(version, text(["input FP32 4"], ["y FP32 4"]))
    with pytest.raises(Internal, match="inference failed") as caught:
        run(backend, fp32([[1, 2, 3]], "input"))
    assert "/" not in str(caught.value)
    assert run(backend, fp32([[1, 2, 3, 4]], "input")).outputs[0].data.shape == (1, 4)


# -- threads --------------------------------------------------------------------------------------


def test_the_first_model_that_asks_sets_the_threads_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pytorch, "_counts", {})
    version = traced(tmp_path / "1", Function(torch.relu), torch.zeros(2, 4))

    def asking(count: int) -> str:
        key = "INTRA_OP_THREAD_COUNT"
        return f'parameters {{ key: "{key}" value {{ string_value: "{count}" }} }} '

    for asked, is_set in ((2, 2), (1, 2)):
        load(version, text(["x FP32 4"], ["y FP32 4"], asking(asked))).unload()
        assert torch.get_num_threads() == is_set
    assert "another model has set this one" in "".join(capfd.readouterr())
    error = refused(version, text(["x FP32 4"], ["y FP32 4"], asking(-1)))
    assert "'INTRA_OP_THREAD_COUNT' must be a whole number of at least 0" in str(error)


def test_opening_an_exported_program_leaves_nothing_in_torchs_own_caches(tmp_path: Path) -> None:
    sizes = ({0: torch.export.Dim("batch", min=1, max=4)},)
    program = torch.export.export(nn.Linear(4, 4), (torch.zeros(2, 4),), dynamic_shapes=sizes)
    program._example_inputs = None  # which are pickled
    (tmp_path / "1").mkdir()
    path = tmp_path / "1" / "model.pt2"
    torch.export.save(program, path)
    FakeTensorMode.cache_clear()

    def noted() -> int:
        gc.collect()
        return sum(type(each).__name__ == "_DispatchCacheKey" for each in gc.get_objects())

    before = noted()
    torch.export.load(path)
    assert noted() > before, "it is what grew with every reload"
    before = noted() - len(FakeTensorMode.cache)
    load(path.parent, text(["input FP32 4"], ["y FP32 4"], 'platform: "torch_export"')).unload()
    assert noted() <= before


# -- models that do not keep to what they say ---------------------------------------------------


class CountingLoop(nn.Module):
    """Adds one as often as the first value says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = float(x.reshape(-1)[0])
        while left > 0.0:
            x = x + 1
            left -= 1.0
        return x


class FailingAboveZero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            raise RuntimeError("no value above 0 in /opt/somewhere/else")
        return x


class Shrinking(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() < 0):
            return torch.cat([x, x])
        return x[:, :2] if bool(x.sum() > 0) else x


def scripted(folder: Path, module: nn.Module) -> Path:
    folder.mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):
        torch.jit.script(module).save(folder / "model.pt")  # type: ignore[no-untyped-call]
    return folder


@pytest.mark.parametrize(("module", "inline"), [(CountingLoop(), False), (nn.Identity(), True)])
def test_a_loop_that_a_value_decides_over_never_runs_on_the_event_loop(
    module: nn.Module, inline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_backend, "INLINE_SECONDS", 1.0)  # however busy the machine is
    backend = load(scripted(tmp_path / "1", module), XY)
    assert (backend._infer._inline_elements > 0) is inline


def test_a_failure_says_what_the_model_says(tmp_path: Path) -> None:
    backend = load(scripted(tmp_path / "1", FailingAboveZero()), XY)
    with pytest.raises(Internal) as caught:
        run(backend, fp32([[1] * 4]))
    assert str(caught.value) == "inference failed: no value above 0 in else"


def test_an_answer_of_another_shape_than_declared_is_no_answer(tmp_path: Path) -> None:
    backend = load(scripted(tmp_path / "1", Shrinking()), XY)
    assert run(backend, fp32([[0] * 4])).outputs[0].data.shape == (1, 4)
    for value, given in ((1, [1, 2]), (-1, [2, 4])):
        with pytest.raises(Internal) as caught:
            run(backend, fp32([[value] * 4]))
        assert str(caught.value) == (
            f"output 'y' must have shape [1, 4], but the model returns {given}"
        )


# -- devices --------------------------------------------------------------------------------------


class MakesTensors(nn.Module):
    """Makes tensors on the device of its input, which a trace writes down as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Function(lambda x: x + torch.ones(x.shape[1], device=x.device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0], device=x.device) + torch.zeros(1, device=x.device)
        return self.inner(x) + rows[:, None].to(x.device) + torch.full_like(x, 2)


def opened(version: Path, device: str) -> Any:
    """Open an archive as for a GPU. Torch's device ``meta`` stands for it: its tensors have no
    content, and do not mix with others either."""
    if (version / "model.pt").exists():
        archive = pytorch.Archive(version / "model.pt")
        return open_torchscript(archive, torch.device(device), native=False).forward
    archive = pytorch.Archive(version / "model.pt2")
    return open_exported(archive, None, torch.device(device)).forward


@pytest.mark.parametrize("make", [traced, lambda version, module, _: exported(version, module)])
def test_what_a_model_makes_is_where_its_inputs_are(make: Any, tmp_path: Path) -> None:
    version = make(tmp_path / "1", MakesTensors().eval(), torch.zeros(2, 4))
    expected = MakesTensors()(torch.ones(3, 4))
    assert torch.equal(opened(version, "cpu")(torch.ones(3, 4)), expected)
    with torch.inference_mode():
        answer = opened(version, "meta")(torch.ones(3, 4, device="meta"))
    assert (answer.device.type, answer.shape) == ("meta", (3, 4))


def test_a_model_that_stays_where_it_was_traced_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = traced(tmp_path / "1", MakesTensors().eval(), torch.zeros(2, 4))
    monkeypatch.setattr(pytorch.torchscript_guard, "use_device", lambda graph, device: None)
    with pytest.raises(RuntimeError, match="not on the expected device"):
        opened(version, "meta")(torch.ones(3, 4, device="meta"))


@pytest.mark.parametrize(
    ("built_for", "kind", "reason"),
    [
        ("cpu", "KIND_GPU", "'model.pt2' was compiled for cpu"),
        ("cuda", "KIND_CPU", "was compiled for cuda; set KIND_GPU in its instance_group"),
    ],
)
def test_a_compiled_archive_runs_only_where_it_was_compiled_for(
    built_for: str, kind: str, reason: str, tmp_path: Path
) -> None:
    metadata = {
        "AOTI_PLATFORM": sys.platform,
        "AOTI_MACHINE": platform.machine(),
        "AOTI_CPU_ISA": "DEFAULT",
        "AOTI_DEVICE_KEY": built_for,
    }
    (version := tmp_path / "1").mkdir()
    with zipfile.ZipFile(version / "model.pt2", "w") as file:
        file.writestr("m/data/aotinductor/model/m.wrapper_metadata.json", json.dumps(metadata))
    group = f'platform: "torch_aoti" instance_group {{ kind: {kind} }}'
    with pytest.raises(ModelportError, match=reason):
        load(version, text(["x FP32 4"], ["y FP32 4"], group), native=True)


def test_the_trial_of_a_module_for_a_gpu_is_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    version = traced(tmp_path / "1", nn.ReLU(), torch.zeros(2, 4))
    described = XY + " instance_group { kind: KIND_GPU }"
    pytorch.try_load(version / "model.pt", model="m", version=1, config=described, threads=1)
    tried: list[str] = []
    monkeypatch.setattr(pytorch.trial_load, "run", lambda *_, **given: tried.append(given["model"]))
    refused(version, described)
    assert tried == []  # without a GPU it is refused before


def test_programs_are_opened_in_one_thread_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A build of torch for CUDA ends the process otherwise, where there is no GPU."""
    version = exported(tmp_path / "1", nn.ReLU())
    opening: list[threading.Thread] = []
    real = torch.export.load
    monkeypatch.setattr(
        torch.export, "load", lambda path: opening.append(threading.current_thread()) or real(path)
    )
    for _ in range(2):
        loading = threading.Thread(target=lambda: load(version, PT2).unload())
        loading.start()
        loading.join()
    assert len(opening) == 2
    assert opening[0] is opening[1]
    assert opening[0].is_alive()
    monkeypatch.setattr(torch.export, "load", lambda path: 1 / 0)
    assert "does not load" in str(refused(version, PT2))
