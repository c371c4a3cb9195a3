"""``.pt2``, exported and compiled: sizes dynamic, everything by name, nothing of the machine."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from modelport.exporters.errors import ParityError
from modelport.exporters.formats import aoti, pt2
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.torch_binding import TorchParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.proof import parity
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.repository.artifact_checks import pt2_guard
from modelport.gateway.repository.artifact_checks.torch_archive import Archive
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.pickle_bomb import PickleBomb
from tests.thorough import thorough
from tests.torch_subjects import (
    RECURRENT,
    Recurrent,
    SumAndDifference,
    fp32,
    rewritten,
    subject,
    worst,
)

SIGNATURE = "extra/modelport/signature.json"


def convert(subject: Source, path: Path, dtype: str = "fp32") -> TorchParitySession:
    pt2.export(subject, path, ExportTarget(dtype=dtype))
    return pt2.open_session(path)


def assert_nothing_of_this_machine(path: Path) -> None:
    folders = (os.getcwd(), str(Path(torch.__file__).parent), tempfile.gettempdir() + os.sep)
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            for folder in folders:
                assert folder.encode() not in archive.read(name), f"{folder} is in {name}"


@pytest.mark.thorough
def test_the_fraud_model_agrees_at_every_batch_and_length_and_says_nothing(
    fraud: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt2"
    session = convert(subject(fraud), path)
    with quiet():
        program = torch.export.load(path).module()
    check_program(program)
    assert worst(subject(fraud), session) <= 1.2e-7
    assert Archive(path).signature() == subject(fraud).signature
    assert capfd.readouterr() == ("", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt2"]
    assert_nothing_of_this_machine(path)


def test_the_vision_transformer_agrees_at_every_batch(vit: nn.Module, tmp_path: Path) -> None:
    assert worst(subject(vit), convert(subject(vit), tmp_path / "model.pt2")) <= 1.3e-6


@pytest.mark.parametrize(("dtype", "bound"), [thorough("fp16", 5e-3), ("bf16", 4e-2)])
def test_half_precision_stays_inside(
    fraud: nn.Module, tmp_path: Path, dtype: str, bound: float
) -> None:
    assert 0 < worst(subject(fraud), convert(subject(fraud), tmp_path / "m.pt2", dtype)) < bound
    assert {p.dtype for p in fraud.parameters()} == {torch.float32}, "the model was changed"


def check_program(program: Any) -> None:
    """The program itself takes and gives names, and refuses sizes out of bounds."""
    lengths = torch.tensor([3, 4])
    result = program(seq_lens=lengths, tokens=torch.zeros(2, 5, dtype=torch.int64))
    assert list(result) == ["probability"]
    with pytest.raises(RuntimeError, match=r"to be <= 12, but got 13"):
        program(tokens=torch.zeros(2, 13, dtype=torch.int64), seq_lens=lengths)


def pair(kind: TensorSpec, outputs: TensorSpec) -> Any:
    names = ("input-0", "class"), ("a sum", "difference")
    both = ((kind, names[0]), (outputs, names[1]))
    return tuple(
        tuple(TensorSpec(n, s.datatype, s.dims, s.minimum, s.maximum, s.reshape) for n in each)
        for s, each in both
    )


SCALAR = TensorSpec("", Datatype.INT32, (1,), -9, 9, reshape=())


@pytest.mark.parametrize(
    "declared",
    [
        ModelSignature(*pair(fp32("", 3), fp32("", 3)), 1),
        ModelSignature(*pair(fp32("", "n"), fp32("", "n")), 0, {"n": Axis("n", 1, 9)}),
        ModelSignature(*pair(fp32("", "n"), fp32("", "n")), 4, {"n": Axis("n", 5, 5)}),
        ModelSignature(*pair(SCALAR, SCALAR), 4),
    ],
    ids=["largest batch of one", "no batch", "one size", "scalars"],
)
def test_unusual_signatures_and_names_hold(tmp_path: Path, declared: ModelSignature) -> None:
    model = subject(SumAndDifference(), declared)
    assert worst(model, convert(model, tmp_path / "model.pt2")) == 0
    assert Archive(tmp_path / "model.pt2").signature() == declared


class NamedAsFields(nn.Module):
    """Inputs with the names of fields of an exported program, which the gateway checks."""

    def forward(
        self,
        target: torch.Tensor,
        as_operator: torch.Tensor,
        expr_str: torch.Tensor,
        guards_code: torch.Tensor,
        range_constraints: torch.Tensor,
        in_spec: torch.Tensor,
        metadata: torch.Tensor,
        as_custom_obj: torch.Tensor,
    ) -> torch.Tensor:
        some = target + as_operator + expr_str + guards_code
        return some + range_constraints + in_spec + metadata + as_custom_obj


def test_an_input_may_have_the_name_of_a_field_of_the_program(tmp_path: Path) -> None:
    names = [*inspect.signature(NamedAsFields.forward).parameters][1:]
    declared = ModelSignature(tuple(fp32(name, 3) for name in names), (fp32("y", 3),), 8)
    convert(subject(NamedAsFields(), declared), tmp_path / "model.pt2")
    pt2_guard.check(Archive(tmp_path / "model.pt2"))


@pytest.mark.thorough
def test_a_recurrent_layer_runs_for_every_length(tmp_path: Path) -> None:
    model = subject(Recurrent(), RECURRENT)
    assert worst(model, convert(model, tmp_path / "model.pt2")) <= 1.2e-7


class Neighbours(nn.Module):
    """Each step beside its neighbours; of one step, there are none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        after = nn.functional.pad(x[:, 1:], [0, 0, 0, 1])
        before = nn.functional.pad(x[:, :-1], [0, 0, 1, 0])
        return torch.cat([before, x, after], -1)


class Strided(nn.Module):
    """Attention among the frames of a convolution; the shortest input makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(3, 4, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frames = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        attended = torch.softmax(frames @ frames.transpose(1, 2), -1) @ frames
        mean: torch.Tensor = attended.mean(1)
        return mean


@pytest.mark.parametrize(
    ("module", "output", "least"),
    [(Neighbours(), fp32("y", "n", 9), 1), (Strided(), fp32("y", 4), 3)],
    ids=["neighbours", "strided"],
)
def test_the_shortest_inputs_may_make_an_inner_size_1(
    tmp_path: Path, module: nn.Module, output: TensorSpec, least: int
) -> None:
    signature = ModelSignature((fp32("x", "n", 3),), (output,), 4, {"n": Axis("n", least, 32)})
    model = subject(module.eval(), signature)
    assert worst(model, convert(model, tmp_path / "model.pt2")) <= 1.2e-7


class BranchesByLength(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[1] > 4 else -x


class BranchesByParity(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[1] % 2 else -x


@pytest.mark.parametrize("module", [BranchesByLength(), BranchesByParity()], ids=["length", "odd"])
def test_a_branch_by_length_is_not_proven(tmp_path: Path, module: nn.Module) -> None:
    sizes = {"n": Axis("n", 1, 32)}
    model = subject(module, ModelSignature((fp32("x", "n"),), (fp32("y", "n"),), 4, sizes))
    with pytest.raises((ParityError, Unsupported), match=r"differs|fails at|cannot export"):
        parity.check(
            model,
            convert(model, tmp_path / "model.pt2"),
            samples=8,
            seed=0,
            atol=1e-5,
            rtol=1e-5,
        )


class Branchy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x


LINEAR = ModelSignature((fp32("x", 3),), (fp32("y", 3),), 8)


def test_a_model_that_cannot_be_exported_is_unsupported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"torch.export cannot export this model") as caught:
        convert(subject(Branchy(), LINEAR), tmp_path / "model.pt2")
    assert exit_code(caught.value) == 4
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_pickle_in_an_archive_is_refused_and_not_run(tmp_path: Path) -> None:
    path, marker = tmp_path / "model.pt2", tmp_path / "ran"
    convert(subject(nn.Linear(3, 3), LINEAR), path)
    evil = pickle.dumps(PickleBomb(marker))
    weights = "data/weights/model_weights_config.json"
    config = Archive(path).json(weights)
    next(iter(config["config"].values()))["use_pickle"] = True
    for changes in (
        {"data/sample_inputs/model.pt": evil},
        {weights: json.dumps(config).encode(), "data/weights/weight_0": evil},
    ):
        changed = rewritten(path, changes)
        with pytest.raises(IntegrityError, match="run code when they are loaded") as caught:
            pt2.open_session(changed)
        assert exit_code(caught.value) == 5
        assert not marker.exists()
        with quiet(), pytest.raises(Exception):  # noqa: B017, PT011
            torch.export.load(changed)
        assert marker.is_dir(), "torch itself does run it"
        marker.rmdir()


def test_damaged_and_foreign_artifacts_get_different_errors(tmp_path: Path) -> None:
    path, short = tmp_path / "model.pt2", tmp_path / "short.pt2"
    convert(subject(nn.Linear(3, 3), LINEAR), path)
    short.write_bytes(path.read_bytes()[:-200])
    for damaged in (short, rewritten(path, {"models/model.json": b"{}"})):
        with pytest.raises(IntegrityError, match="is damaged"):
            pt2.open_session(damaged)
    with pytest.raises(Unsupported, match="does not name its inputs and outputs"):
        pt2.open_session(rewritten(path, {SIGNATURE: None}))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    """One model, because compiling one takes most of this file's time."""

    class ScaledSigmoid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
            return torch.sigmoid(self.linear(x)) * scale[:, None, None], x.sum(dim=(1, 2))

    declared = ModelSignature(
        (fp32("class", "n", 4), TensorSpec("scale", Datatype.INT64, (1,), 1, 9, reshape=())),
        (fp32("scaled", "n", 4), TensorSpec("sum", Datatype.FP32, (1,), reshape=())),
        8,
        {"n": Axis("n", 1, 9)},
    )
    model = subject(ScaledSigmoid(), declared)
    path, scratch = tmp_path_factory.mktemp("compiled") / "model.pt2", tmp_path_factory.mktemp("t")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(scratch))
        patched.setattr(tempfile, "tempdir", None)
        aoti.export(model, path, ExportTarget())
    assert not list(scratch.iterdir()), "the compilation left something behind"
    return model, path


@pytest.mark.thorough
def test_a_compiled_model_agrees_and_holds_nothing_of_this_machine(
    compiled: tuple[Source, Path],
) -> None:
    model, path = compiled
    session = aoti.open_session(path, trusted=True)
    assert worst(model, session) <= 2e-6
    assert Archive(path).signature() == model.signature
    assert_nothing_of_this_machine(path)
    assert not Archive(path).below("data/", ".cpp")


@pytest.mark.thorough
def test_a_compiled_model_is_not_opened_on_another_kind_of_machine(
    compiled: tuple[Source, Path],
) -> None:
    record = Archive(compiled[1]).below("data/aotinductor/", "wrapper_metadata.json")[0]
    metadata = Archive(compiled[1]).json(record)
    other = json.dumps({**metadata, "AOTI_MACHINE": "vax"}).encode()
    with pytest.raises(Unsupported, match=r"compiled for linux on vax .* export the model here"):
        aoti.open_session(rewritten(compiled[1], {record: other}), trusted=True)
    with pytest.raises(IntegrityError, match="holds no compiled model"):
        aoti.open_session(rewritten(compiled[1], {record: None}), trusted=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("built", "here", "opens"),
    [("AVX512 AMX_TILE", "AVX2", False), ("AVX2", "AVX512", True), ("ASIMD", "DEFAULT", True)],
)
def test_vector_instructions_that_are_not_there_are_refused_before_they_run(
    compiled: tuple[Source, Path],
    monkeypatch: pytest.MonkeyPatch,
    built: str,
    here: str,
    opens: bool,
) -> None:
    record = Archive(compiled[1]).below("data/aotinductor/", "wrapper_metadata.json")[0]
    metadata = {**Archive(compiled[1]).json(record), "AOTI_CPU_ISA": built}
    changed = rewritten(compiled[1], {record: json.dumps(metadata).encode()})
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: here)
    if opens:
        aoti.open_session(changed, trusted=True)
    else:
        with pytest.raises(Unsupported, match=r"with AVX512, this is .* with AVX2"):
            aoti.open_session(changed, trusted=True)


def test_without_a_compiler_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import config as inductor  # seconds, which other tests need not wait for

    monkeypatch.setattr(inductor.cpp, "cxx", (None, "no-such-compiler"))
    with pytest.raises(Unsupported, match=r"'no-such-compiler' .* apt-get install g\+\+") as caught:
        aoti.export(subject(nn.Linear(3, 3), LINEAR), tmp_path / "model.pt2", ExportTarget())
    assert exit_code(caught.value) == 4
