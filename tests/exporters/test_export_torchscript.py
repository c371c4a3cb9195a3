"""TorchScript keeps sizes dynamic and names true, and carries nothing of the machine."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from torch import nn

from modelport.exporters.formats import torchscript, tracing
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.torch_archive import seal
from modelport.exporters.formats.torch_binding import TorchParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.repository.artifact_checks.torch_archive import Archive
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from tests.pickle_bomb import PickleBomb
from tests.torch_subjects import (
    RECURRENT,
    Recurrent,
    SumAndDifference,
    fp32,
    rewritten,
    subject,
    worst,
)


def convert(subject: Source, path: Path, dtype: str = "fp32") -> TorchParitySession:
    torchscript.export(subject, path, ExportTarget(dtype=dtype))
    return torchscript.open_session(path)


def load(path: Path, **options: Any) -> Any:
    with quiet():  # it announces its end
        return torch.jit.load(path, **options)


def test_the_fraud_model_agrees_at_every_batch_and_length_and_says_nothing(
    fraud: nn.Module, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.pt"
    session = convert(subject(fraud), path)
    assert worst(subject(fraud), session) <= 1.2e-7
    assert (session.inputs, session.outputs) == (["tokens", "seq_lens"], ["probability"])
    assert capfd.readouterr() == ("", "")
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.pt"]


def test_the_vision_transformer_agrees_at_every_batch(vit: nn.Module, tmp_path: Path) -> None:
    assert worst(subject(vit), convert(subject(vit), tmp_path / "model.pt")) <= 3.3e-6


@pytest.mark.parametrize(("dtype", "bound"), [("fp16", 5e-3), ("bf16", 4e-2)])
def test_half_precision_stays_inside(
    fraud: nn.Module, tmp_path: Path, dtype: str, bound: float
) -> None:
    full, half = tmp_path / "full.pt", tmp_path / "half.pt"
    convert(subject(fraud), full)
    session = convert(subject(fraud), half, dtype)
    assert 0 < worst(subject(fraud), session) < bound
    assert half.stat().st_size < full.stat().st_size
    assert {p.dtype for p in fraud.parameters()} == {torch.float32}, "the model was changed"


class EncoderClassifier(nn.Module):
    """A user's model with an encoder somewhere inside, as ``nn.TransformerEncoder`` comes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body["encoder"](x).mean(dim=1)


@pytest.mark.filterwarnings("ignore")
def test_no_fused_encoder_layer_is_baked_in(tmp_path: Path) -> None:
    declared = ModelSignature((fp32("x", "n", 8),), (fp32("y", 8),), 8, {"n": Axis("n", 1, 9)})
    module = EncoderClassifier().eval()
    with torch.no_grad():
        naive = torch.jit.trace(module, tracing.example_inputs(declared))
    assert "aten::_transformer_encoder_layer_fwd" in str(naive.inlined_graph)
    path = tmp_path / "model.pt"
    assert worst(subject(module, declared), convert(subject(module, declared), path)) < 1e-6
    kinds = [node.kind() for node in load(path).inlined_graph.nodes()]
    assert not [kind for kind in kinds if "_fwd" in kind or "_native_multi" in kind]
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_model_left_in_training_mode_is_exported_for_inference(tmp_path: Path) -> None:
    declared = ModelSignature((fp32("x", 4),), (fp32("y", 4),), 8)
    model = subject(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), declared)
    model.model.train()
    session = convert(model, tmp_path / "model.pt")
    assert worst(model, session) == 0


@pytest.mark.parametrize(
    "names",
    [
        ["image", "mask"],
        ["input-0", "a.b"],
        ["class", "é"],
        ["torch", "ops"],
        ["self", "CONSTANTS"],
        ["b", "a"],
        ["input_1", "input-1"],
    ],
)
def test_inputs_have_the_names_of_the_signature_whatever_they_are(
    tmp_path: Path, names: list[str]
) -> None:
    specs = tuple(fp32(name, 3) for name in names)
    declared = ModelSignature(specs, (fp32("sum", 3), fp32("a difference", 3)), 8)
    model = subject(SumAndDifference(), declared)
    path = tmp_path / "model.pt"
    assert worst(model, convert(model, path)) == 0
    if names in (["image", "mask"], ["b", "a"]):
        taken = [argument.name for argument in load(path).forward.schema.arguments]
        assert taken == ["self", *names]


def test_the_signature_travels_in_the_archive_and_torch_hands_it_out(
    fraud: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    convert(subject(fraud), path)
    assert Archive(path).signature() == subject(fraud).signature
    extra = {"modelport/signature.json": ""}
    load(path, _extra_files=extra)
    assert b'"tokens"' in extra["modelport/signature.json"]


def test_nothing_in_the_archive_names_a_file_of_this_machine(
    fraud: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    convert(subject(fraud), path)
    content = path.read_bytes()
    for place in (os.getcwd(), str(Path(torch.__file__).parent), str(tmp_path)):
        assert place.encode() not in content
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if "debug" in name]
        for info in archive.infolist():  # torch maps tensors from there
            if "/constants/" in info.filename:
                extra = int.from_bytes(content[info.header_offset + 28 :][:2], "little")
                assert (info.header_offset + 30 + len(info.filename) + extra) % 64 == 0


@pytest.mark.parametrize(
    "declared",
    [
        ModelSignature((fp32("a", 3), fp32("b", 3)), (fp32("s", 3), fp32("d", 3)), 1),
        ModelSignature(
            (fp32("a", "n"), fp32("b", "n")),
            (fp32("s", "n"), fp32("d", "n")),
            0,
            {"n": Axis("n", 1, 9)},
        ),
        ModelSignature(
            (fp32("a", "n"), fp32("b", "n")),
            (fp32("s", "n"), fp32("d", "n")),
            4,
            {"n": Axis("n", 5, 5)},
        ),
        ModelSignature(
            tuple(TensorSpec(n, Datatype.INT32, (1,), -9, 9, reshape=()) for n in "ab"),
            tuple(TensorSpec(n, Datatype.INT32, (1,), reshape=()) for n in "sd"),
            4,
        ),
        ModelSignature((fp32("a", -1, 2), fp32("b", 1)), (fp32("s", -1, 2), fp32("d", -1, 2)), 0),
        ModelSignature(
            (TensorSpec("a", Datatype.FP64, (2,)), TensorSpec("b", Datatype.UINT8, (2,))),
            (TensorSpec("s", Datatype.FP64, (2,)), TensorSpec("d", Datatype.FP64, (2,))),
            2,
        ),
    ],
    ids=["largest batch of one", "no batch", "one size", "scalars", "no names", "mixed types"],
)
def test_unusual_signatures_hold(tmp_path: Path, declared: ModelSignature) -> None:
    model = subject(SumAndDifference(), declared)
    assert worst(model, convert(model, tmp_path / "model.pt")) == 0
    assert Archive(tmp_path / "model.pt").signature() == model.signature  # has found ranges


def test_a_recurrent_layer_runs_for_every_length(tmp_path: Path) -> None:
    model = subject(Recurrent(), RECURRENT)
    assert worst(model, convert(model, tmp_path / "model.pt")) <= 1.2e-7


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_part_that_is_scripted_already_stays_whole(tmp_path: Path, dtype: str) -> None:
    with quiet():
        part = torch.jit.script(nn.Linear(3, 3))
    model = subject(nn.Sequential(part), ModelSignature((fp32("x", 3),), (fp32("y", 3),), 8))
    assert worst(model, convert(model, tmp_path / "model.pt", dtype)) < 5e-3


class FailingForward(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda x: {"y": "x"}, "forward\\(\\) returns str"),
        (lambda x: x @ torch.zeros(7, 7), "torch.jit.trace cannot export this model"),
        (lambda x: x.no_such_method(), "torch.jit.trace cannot export this model"),
    ],
    ids=["a text", "shapes that do not fit", "a bug"],
)
def test_a_model_that_cannot_be_traced_is_unsupported_in_one_line(
    tmp_path: Path, body: Callable[[torch.Tensor], Any], reason: str
) -> None:
    declared = ModelSignature((fp32("x", 3),), (fp32("y", 3),), 8)
    with pytest.raises(Unsupported, match=reason) as caught:
        convert(subject(FailingForward(body), declared), tmp_path / "model.pt")
    assert exit_code(caught.value) == 4
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from modelport.exporters.formats import pt2, torchscript
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.sources.pytorch import source
from modelport.exporters.model_spec import ModelSpec
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
tensor = lambda name: TensorSpec(name, Datatype.FP32, (256,))
declared = ModelSignature((tensor("x"),), (tensor("y"),), 8)
spec = ModelSpec("m", lambda module, batch: declared)
model = source(torch.nn.Linear(256, 256), spec, declared)
sys.dont_write_bytecode = True  # it would be cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for row in (torchscript, pt2):
    try:
        row.export(model, Path("model"), ExportTarget())
    except OSError as error:
        print(error.strerror)
"""


@pytest.mark.thorough
def test_a_full_disk_is_an_error_and_does_not_end_the_process(
    python: Callable[..., CompletedProcess[str]],
) -> None:
    result = python("-c", FULL_DISK)
    assert (result.returncode, result.stdout) == (0, "File too large\n" * 2), result.stderr


def test_a_pickle_in_an_archive_is_not_run(vit: nn.Module, tmp_path: Path) -> None:
    path, marker = tmp_path / "model.pt", tmp_path / "ran"
    convert(subject(vit), path)
    content = pickle.dumps(PickleBomb(marker), protocol=2)
    pickle.loads(pickle.dumps(PickleBomb(tmp_path / "control")))
    assert (tmp_path / "control").is_dir()
    for record in ("data.pkl", "constants.pkl"):
        with pytest.raises(IntegrityError, match=r"names 'posix\.mkdir' .* not run"):
            torchscript.open_session(rewritten(path, {record: content}))
    assert not marker.exists()


def test_damaged_and_foreign_artifacts_get_different_errors(vit: nn.Module, tmp_path: Path) -> None:
    path, short = tmp_path / "model.pt", tmp_path / "short.pt"
    convert(subject(vit), path)
    short.write_bytes(path.read_bytes()[:-200])
    signature = "extra/modelport/signature.json"
    for damaged in (short, rewritten(path, {"code/__torch__.py": b"", "constants.pkl": b""})):
        with pytest.raises(IntegrityError, match="is damaged") as caught:
            torchscript.open_session(damaged)
        assert exit_code(caught.value) == 5
        assert "\n" not in str(caught.value)
    for content in (b"{", b"[]", b'{"input": [{"name": 7}]}', b"\xff"):
        with pytest.raises(IntegrityError, match="is damaged"):
            torchscript.open_session(rewritten(path, {signature: content}))
    with pytest.raises(Unsupported, match="does not name its inputs and outputs"):
        torchscript.open_session(rewritten(path, {signature: None}))


def test_records_are_copied_byte_for_byte(tmp_path: Path) -> None:
    draft = io.BytesIO()
    records = {f"archive/data/{i}": os.urandom(100 * i + i) for i in range(9)}
    with zipfile.ZipFile(draft, "w") as file:
        for name, content in records.items():
            file.writestr(name, content)
    declared = ModelSignature((fp32("x", 3),), (fp32("y", 3),), 8)
    seal(draft, tmp_path / "model.pt", declared, without=("/7",))
    archive = Archive(tmp_path / "model.pt")
    for name, content in records.items():
        if name.endswith("/7"):
            assert name.partition("/")[2] not in archive
        else:
            assert archive.read(name.partition("/")[2]) == content
