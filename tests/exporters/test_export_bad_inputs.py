"""Bad inputs of ``modelport export``: one line that names the input and the remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.commands import modelport

USERS_MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)

class Raises(Net):
    def forward(self, x):
        raise ValueError("two\\nlines")

class Branches(Net):
    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)

class TakesTwo(Net):
    def forward(self, x, y):
        return self.layer(x + y)

class GivesText(Net):
    def forward(self, x):
        return "text"

class GivesNothing(Net):
    def forward(self, x):
        return None

class GivesComplex(Net):
    def forward(self, x):
        return torch.complex(self.layer(x), self.layer(x))

def raising():
    raise RuntimeError("two\\nlines")

def nothing():
    return None

def exiting():
    raise SystemExit
"""


@pytest.fixture(scope="module", autouse=True)
def users_module(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("project")
    (folder / "bad_inputs_net.py").write_text(USERS_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        __import__("bad_inputs_net")


def good(path: Path) -> Path:
    torch.save({"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(2)}, path)
    return path


def _written(content: bytes, name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _saved(content: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(content, folder / "net.pt")
        return folder / "net.pt"

    return write


def _truncated(folder: Path) -> Path:
    path = good(folder / "net.pt")
    path.write_bytes(path.read_bytes()[:-100])
    return path


def _cut_safetensors(folder: Path) -> Path:
    path = folder / "net.safetensors"
    save_file({"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(2)}, path)
    path.write_bytes(path.read_bytes()[:-4])
    return path


def _folder(**files: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "net").mkdir()
        for name, content in files.items():
            (folder / "net" / name.replace("__", ".")).write_text(content)
        return folder / "net"

    return write


def _pipe(folder: Path) -> Path:
    os.mkfifo(folder / "net.pt")
    return folder / "net.pt"


WEIGHT, BIAS = torch.ones(2, 3), torch.ones(2)
#: Checkpoints → exit codes, and the words of the error.
CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], int, str]] = {
    "absent": (lambda folder: folder / "net.pt", 2, "net.pt' does not exist"),
    "a broken name": (
        lambda folder: folder / "a\nb.pt",
        2,
        "b.pt' does not exist",
    ),
    "empty": (
        _written(b"", "net.pt"),
        5,
        "is truncated or damaged (EOFError); save or copy it again",
    ),
    "text": (
        _written(b"weights", "net.pt"),
        5,
        "is not a PyTorch checkpoint; give a file that torch.save",
    ),
    "truncated": (_truncated, 5, "'net.pt' is truncated or damaged; copy it again"),
    "another module as a whole": (_saved(nn.Linear(3, 2)), 2, "missing keys: layer.weight"),
    "a tensor": (_saved(WEIGHT), 5, "holds a Tensor, not a state dict; save model.state_dict()"),
    "no weights": (_saved({}), 5, "holds no state dict; save model.state_dict()"),
    "a list": (_saved([WEIGHT]), 5, "holds a list, not a state dict; save model.state_dict()"),
    "other names": (
        _saved({"head.weight": WEIGHT, "head.bias": BIAS}),
        2,
        "unexpected keys: head.weight, head.bias; check --model",
    ),
    "a weight too few": (
        _saved({"layer.weight": WEIGHT}),
        2,
        "missing keys: layer.bias; check --model",
    ),
    "wrong shapes": (
        _saved({"layer.weight": WEIGHT.T, "layer.bias": BIAS}),
        2,
        "layer.weight is [3, 2], but the model expects [2, 3]; check --model-kwargs",
    ),
    "numbers that are none": (
        _saved({"layer.weight": WEIGHT * torch.nan, "layer.bias": BIAS}),
        5,
        "'net.pt': 'layer.weight' contains NaN; use an earlier one",
    ),
    "text for a weight": (
        _saved({"layer.weight": "x", "layer.bias": BIAS}),
        5,
        "not tensors: layer.weight; save model.state_dict()",
    ),
    "an unknown suffix": (
        _written(b"weights", "net.xyz"),
        2,
        "has an unknown extension '.xyz'; give a model of one of",
    ),
    "an ONNX file": (
        _written(b"weights", "net.onnx"),
        2,
        "has an unknown extension '.onnx'; give a model of one of",
    ),
    "a damaged .safetensors": (
        _written(b"\xff" * 64, "net.safetensors"),
        5,
        "'net.safetensors' is truncated or damaged",
    ),
    "a cut .safetensors": (_cut_safetensors, 5, "'net.safetensors' is truncated or damaged"),
    "a damaged .keras": (_written(b"weights", "net.keras"), 5, "net.keras"),
    "a damaged .h5": (_written(b"\x89HDF\r\n\x1a\n", "net.h5"), 5, "'net.h5' is damaged"),
    "an empty folder": (_folder(), 2, "neither config.json (Hugging Face) nor saved_model.pb"),
    "a damaged config.json": (_folder(config__json="{"), 5, "config.json' is not JSON"),
    "a config.json of something else": (
        _folder(config__json='{"model_type": "nobody"}'),
        2,
        "holds no weights",
    ),
    "a config.json that is a list": (
        _folder(config__json="[]"),
        5,
        "config.json' is not a JSON object; copy the folder again",
    ),
    "a damaged SavedModel": (_folder(saved_model__pb="weights"), 5, "net"),
    "a pipe": (_pipe, 2, "net.pt' is not a file; give the path"),
}
#: Options → exit codes, and the words of the error. ``{}`` is the folder.
OPTIONS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "no such class": (
        ("--model", "bad_inputs_net:Absent"),
        2,
        "'bad_inputs_net' has no callable 'Absent'",
    ),
    "a factory that raises": (
        ("--model", "bad_inputs_net:raising"),
        2,
        "cannot be built with no arguments: two lines; correct --model-kwargs",
    ),
    "a factory that exits": (
        ("--model", "bad_inputs_net:exiting"),
        2,
        "cannot be built with no arguments: it exits (); correct --model-kwargs",
    ),
    "arguments that are no JSON": (
        ("--model-kwargs", '{"a": NaN}'),
        2,
        "--model-kwargs holds more than plain values (Out of range float values",
    ),
    "a factory of nothing": (
        ("--model", "bad_inputs_net:nothing"),
        2,
        "returns a NoneType; return a torch.nn.Module",
    ),
    "a model that raises": (
        ("--model", "bad_inputs_net:Raises"),
        2,
        "the model does not run on x [2, 3]: two; declare what forward() accepts",
    ),
    "a model that branches": (
        ("--model", "bad_inputs_net:Branches"),
        4,
        "torch.onnx cannot export this model",
    ),
    "a model of two inputs": (
        ("--model", "bad_inputs_net:TakesTwo"),
        2,
        "missing 1 required positional argument: 'y'; declare each with --input",
    ),
    "a model of text": (
        ("--model", "bad_inputs_net:GivesText"),
        4,
        "forward() returns str; return tensors",
    ),
    "a model of nothing": (
        ("--model", "bad_inputs_net:GivesNothing"),
        4,
        "forward() returns NoneType; return tensors",
    ),
    "a model of complex numbers": (
        ("--model", "bad_inputs_net:GivesComplex"),
        4,
        "is torch.complex64, which no protocol supports; return",
    ),
    "an input without a datatype": (
        ("--input", "x"),
        2,
        "--input 'x': it is not understood; write NAME",
    ),
    "an unknown datatype": (("--input", "x:FLOAT[3]"), 2, "'FLOAT' is not a datatype; BOOL"),
    "an open bracket": (
        ("--input", "x:FP32[3"),
        2,
        "--input 'x:FP32[3': it is not understood; write NAME",
    ),
    "a dimension of zero": (
        ("--input", "x:FP32[0]"),
        2,
        "'0' is neither a size, -1, nor the name of an axis; write",
    ),
    "a negative dimension": (
        ("--input", "x:FP32[-3]"),
        2,
        "'-3' is neither a size, -1, nor the name of an axis; write",
    ),
    "a huge dimension": (
        ("--input", "x:FP32[99999999999999999999]"),
        2,
        "is larger than 2147483647; write",
    ),
    "bounds the wrong way round": (
        ("--input", "x:FP32[n=9..1]"),
        2,
        "the bounds of axis 'n' are empty; write",
    ),
    "values the wrong way round": (
        ("--input", "x:INT64[3]=9..1"),
        2,
        "the range 9..1 is empty; write",
    ),
    "bounds of one axis that differ": (
        ("--input", "x:FP32[n=1..4]", "--input", "y:FP32[n=1..5]"),
        2,
        "1..4 and 1..5; write them once, or name two axes",
    ),
    "the same input twice": (
        ("--input", "x:FP32[3]", "--input", "x:FP32[3]"),
        2,
        "declares 'x' twice; declare each tensor once",
    ),
    "a size that the model lacks": (
        ("--input", "x:FP32[4]"),
        2,
        "(2x4 and 3x2); declare what forward() accepts with --input",
    ),
    "a datatype that the model lacks": (
        ("--input", "x:INT64[3]=0..1"),
        2,
        "but got Long and Float; declare what forward() accepts with --input",
    ),
    "an input in two lines": (("--input", "x\ny:FP32[3]"), 2, "is not printable; write NAME"),
    "a huge batch": (
        ("--max-batch-size", "2147483647"),
        2,
        "the inputs of one batch (x [2147483647, 3]) take 25.8 GB",
    ),
    "more samples than a proof has": (
        ("--samples", "1000001"),
        2,
        "--samples must be at most 1000000, not 1000001",
    ),
    "a seed that no certificate has": (
        ("--seed", "18446744073709551616"),
        2,
        "--seed must be at most 18446744073709551615",
    ),
    "a huge bound": (
        ("--input", "x:FP32[n=1..99999999999]"),
        2,
        "is larger than 2147483647; write",
    ),
    "data that is a pipe": (
        ("--data", "{}/pipe"),
        2,
        "pipe' is not a readable .npz file: it is not a regular file",
    ),
    "two names for one output": (
        ("--output-name", "a", "--output-name", "b"),
        2,
        "--output-name is given 2 times, the model has 1 outputs",
    ),
    "absent data": (
        ("--data", "{}/absent.npz"),
        2,
        "absent.npz' does not exist",
    ),
    "data that is none": (
        ("--data", "{}/text.txt"),
        2,
        "text.txt' is not a readable .npz file: it is not a zip archive; write one",
    ),
    "data of other inputs": (("--data", "{}/other.npz"), 2, "has no input 'x'; it has y"),
    "data of other shapes": (("--data", "{}/shapes.npz"), 2, "'x' is [4, 5], the signature says"),
    "data with too few labels": (("--data", "{}/labels.npz"), 2, "{'x': 4, 'labels': 3}"),
    "pickled data": (("--data", "{}/pickled.npz"), 2, "pickled.npz' is not a readable .npz file"),
    "absent labels": (("--labels", "{}/absent.txt"), 2, "absent.txt' does not exist"),
    "labels that are no text": (
        ("--labels", "{}/latin.txt"),
        2,
        "latin.txt' cannot be read: it is not UTF-8",
    ),
    "an absent adapter": (("--lora", "{}/absent"), 2, "absent' does not exist"),
    "an adapter that is none": (("--lora", "{}"), 2, "--lora needs a Hugging Face folder"),
    "an absent key": (
        ("--sign-key", "{}/absent.pem"),
        2,
        "absent.pem' does not exist",
    ),
    "a key that is none": (
        ("--sign-key", "{}/text.txt"),
        2,
        "text.txt' is not a key in PEM; make one with 'modelport keygen'",
    ),
    "a repository that is a file": (
        ("--repository", "{}/text.txt"),
        2,
        "choose another --repository",
    ),
    "a repository of an unknown scheme": (
        ("--repository", "ftp://host/path"),
        2,
        "'ftp://' is not supported; use s3://",
    ),
    "a repository without a bucket": (
        ("--repository", "s3://"),
        2,
        "has no bucket; write s3://BUCKET/PREFIX",
    ),
    "an operator set that is none": (
        ("--opset", "twenty"),
        2,
        "'--opset': 'twenty' is not a valid integer",
    ),
    "no precision": (("--dtype", "fp64"), 4, "--dtype 'fp64' is not supported; use fp32"),
    "a template of something else": (
        ("--name-template", "{owner}"),
        2,
        "is invalid ('owner'); it may hold {name}",
    ),
    "no samples": (("--samples", "0"), 2, "'--samples': 0 is not in the range"),
    "an output in no folder": (
        ("--output", "{}/text.txt/net.onnx"),
        2,
        "text.txt' is not a folder",
    ),
}


def files_of_options(folder: Path) -> None:
    (folder / "text.txt").write_text("text")
    (folder / "latin.txt").write_bytes(b"caf\xe9\n")
    os.mkfifo(folder / "pipe")
    rows = np.ones((4, 3), np.float32)
    np.savez(folder / "other.npz", y=rows)
    np.savez(folder / "shapes.npz", x=np.ones((4, 5), np.float32))
    np.savez(folder / "labels.npz", x=rows, labels=np.zeros(3, np.int64))
    np.savez(folder / "pickled.npz", x=np.array([{}], dtype=object))


def line_of(checkpoint: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    given = ["--format", "onnx", "--repository", str(folder / "repository"), "--quiet"]
    declares_itself = (
        checkpoint.suffix in (".keras", ".h5") or (checkpoint / "saved_model.pb").exists()
    )
    if "--model" not in arguments and not declares_itself:
        given += ["--model", "bad_inputs_net:Net"]
    if "--input" not in arguments and not declares_itself:
        given += ["--input", "x:FP32[3]"]
    done = modelport("export", str(checkpoint), *given, *arguments)
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return done.returncode, line


@pytest.mark.parametrize("what", CHECKPOINTS)
def test_a_bad_checkpoint_is_one_line(what: str, tmp_path: Path) -> None:
    make, code, words = CHECKPOINTS[what]
    found, line = line_of(make(tmp_path), tmp_path)
    assert (found, words in line) == (code, True), line


@pytest.mark.parametrize("what", OPTIONS)
def test_a_bad_option_is_one_line(what: str, tmp_path: Path) -> None:
    arguments, code, words = OPTIONS[what]
    files_of_options(tmp_path)
    filled = [each.replace("{}", str(tmp_path)) for each in arguments]
    found, line = line_of(good(tmp_path / "net.pt"), tmp_path, *filled)
    assert (found, words in line) == (code, True), line
