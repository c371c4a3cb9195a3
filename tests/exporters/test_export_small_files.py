"""Files that commands read whole are regular and of a bounded size: no pipe, device or disk image
stops a command, or fills the memory."""

from __future__ import annotations

import os
import resource
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from modelport.cli import modelport
from modelport.exporters import api
from modelport.exporters.requests import input_files
from modelport.gateway.cli.errors import NO_MEMORY
from modelport.gateway.errors import UsageError

FACTORY = "tests.exporters.test_export_small_files:build"
#: Memory that a command may take beyond what the test has.
MARGIN = 3 << 30


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def huge(path: Path) -> None:
    """A file of 64 GiB that takes no space."""
    with path.open("wb") as file:
        file.truncate(64 << 30)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": lambda path: os.mkfifo(path),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "huge": huge,
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 64),  # type: ignore[dict-item, return-value]
}
EXPORT = ("export", "{}/m.pt", "--model", FACTORY, "--input", "x:FP32[4]", "--quiet")
EXPORT += ("--format", "onnx", "--repository", "{}/repository", "--name", "net")
STATIC = (*EXPORT, "--quantize", "int8", "--calibrate")
#: Files that may be large, and one that may be a pipe, because secrets come from other commands.
LARGE = ("weights.pt", "weights.safetensors", "model.keras", "model.weights.h5", "artifact.onnx")
PIPED = ("private.pem",)
#: Commands by the file that they read.
COMMANDS: dict[str, tuple[str, ...]] = {
    "labels.txt": (*EXPORT, "--labels"),
    "data.npz": (*EXPORT, "--data"),
    "requests.json": STATIC,
    "requests.jsonl": STATIC,
    "rows.npz": STATIC,
    "private.pem": (*EXPORT, "--sign-key"),
    "weights.pt": ("export", "--format", "onnx", "--model", FACTORY),
    "weights.safetensors": ("export", "--format", "onnx", "--model", FACTORY),
    "model.keras": ("export", "--format", "tflite"),
    "model.weights.h5": ("convert", "--check", "--model", "fraud", "{}/m.pt"),
    "recorded.npz": ("certify", "{}/m.onnx", "--against"),
    "artifact.onnx": ("certify", "--against", "{}/rows.npz"),
    "slo.toml": ("gate", "{}/m", "{}/m", "--slo"),
    "options.toml": ("--config",),
    "config.pbtxt": EXPORT,
}


@pytest.fixture
def _little_memory() -> Iterator[None]:
    """Refuse memory for a file that has no end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MARGIN, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.usefixtures("_little_memory")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_none_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    torch.save(build().state_dict(), tmp_path / "m.pt")
    np.savez(tmp_path / "rows.npz", x=np.ones((4, 4), np.float32), y=np.ones(4, np.float32))
    datatype = onnx.TensorProto.FLOAT
    values = [onnx.helper.make_tensor_value_info(n, datatype, ["N", 4]) for n in "xy"]
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "relu", values[:1], values[1:])
    onnx.save(onnx.helper.make_model(graph), tmp_path / "m.onnx")
    left_out = {"pipe": PIPED, "huge": LARGE}.get(kind, ())
    for name in sorted(COMMANDS.keys() - set(left_out)):
        file = tmp_path / kind / name
        words = [word.format(tmp_path) for word in COMMANDS[name]] + [str(file)]
        if name == "options.toml":
            words += ["export", str(tmp_path / "m.pt")]
        elif name == "config.pbtxt":  # of the model that is published already
            file = tmp_path / "repository" / "net" / name
            words = words[:-1]
        file.parent.mkdir(exist_ok=True, parents=True)
        KINDS[kind](file)
        done = CliRunner().invoke(modelport, words)
        assert done.exit_code in (2, 5), (name, done.output, done.exception)
        assert isinstance(done.exception, SystemExit), (name, done.exception)
        assert done.stderr.count("\n") == 1, (name, done.stderr)
        assert name in done.stderr, (name, done.stderr)


@pytest.mark.usefixtures("_little_memory")
def test_arrays_that_do_not_fit_into_memory_are_not_unpacked(tmp_path: Path) -> None:
    path, page = tmp_path / "bomb.npz", bytes(1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in range(12):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                member.write(page)
    content = bytearray(path.read_bytes())
    size = (1 << 20).to_bytes(4, "little")  # claimed of each array: 3 GiB
    path.write_bytes(bytes(content).replace(size, (3 << 30).to_bytes(4, "little")))
    with pytest.raises(UsageError, match=r"bomb.npz' is not a readable .npz file: its arrays take"):
        input_files.read_arrays(path, "--data")


def test_a_member_that_is_no_array_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "notes.npz", "w") as archive:
        archive.writestr("x.npy", b"hello")
    with pytest.raises(
        UsageError, match=r"--calibrate .*notes.npz' is not .* 'x' in it is no array"
    ):
        input_files.read_arrays(tmp_path / "notes.npz", "--calibrate")


def test_far_more_rows_than_calibration_needs_are_refused(tmp_path: Path) -> None:
    torch.save(build().state_dict(), tmp_path / "m.pt")
    np.savez_compressed(tmp_path / "many.npz", x=np.zeros((1 << 20, 4), np.float32))
    words = [word.format(tmp_path) for word in STATIC] + [str(tmp_path / "many.npz")]
    done = CliRunner().invoke(modelport, words)
    assert (done.exit_code, "1048576 rows of inputs are more than" in done.stderr) == (2, True)


def test_memory_that_does_not_suffice_is_no_error_of_modelport(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(api, "export", exhausted)
    (tmp_path / "m.pt").touch()
    done = CliRunner().invoke(modelport, [word.format(tmp_path) for word in EXPORT])
    assert (done.exit_code, done.stderr) == (1, f"modelport: error: {NO_MEMORY}\n")
