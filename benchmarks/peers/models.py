"""The models that every server serves, from the same files, and their requests.

Each is made once under `.peers/models/`: a checkpoint, `modelport export`, and a repository of one
model; beside it the request's tensors and ONNX Runtime's own answer.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tiny_model
from benchmarks.peers import runtime_limit
from benchmarks.peers.model import PeerInput, PeerModel
from benchmarks.peers.servers import modelport
from benchmarks.peers.servers.base import INSIDE
from modelport.loadtests.system import environments

#: One thread for every server, as each has one core.
ONE_THREAD = """
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
ONE_INSTANCE = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
DYNAMIC_BATCHING = "dynamic_batching {{ preferred_batch_size: [ {} ] }}\n"
#: Answers of one model from different numbers of rows differ in the last bits.
ABSOLUTE_TOLERANCE = 1e-4


def _fraud(name: str, title: str, **times: Any) -> PeerModel:
    inputs = (
        PeerInput("tokens", "INT64", (1, 64), high=512),
        PeerInput("seq_lens", "INT64", (1, 1), values=(64,)),
    )
    return PeerModel(name, title, inputs, family="fraud", **times)


ALL: dict[str, PeerModel] = {
    model.name: model
    for model in (
        PeerModel(
            tiny_model.NAME,
            "4 floats (y = 2x)",
            (PeerInput("x", "FP32", (1, 4), values=tiny_model.VALUES),),
            seconds=2,
            rounds=4,
            protocols=("json", "grpc", "perf_analyzer"),
            in_flight=(1, 16),
            batch_sizes=(),
            baseline="mlserver",
        ),
        _fraud(
            "fraud",
            "fraud demo (d_model 64, 2 layers)",
            seconds=1,
            rounds=3,
            demo=True,
            preferred_batch_size=8,
        ),
        _fraud(
            "fraud128",
            "fraud 128 (d_model 128, 4 layers)",
            seconds=2,
            rounds=3,
            preferred_batch_size=4,
        ),
        PeerModel(
            "vit_b16",
            "ViT-B/16 (86 M parameters, 602 KB image)",
            (PeerInput("image", "FP32", (1, 3, 224, 224)),),
            family="vit",
            seconds=8,
            rounds=3,
            protocols=("grpc", "binary"),
            one_protocol=True,
            batch_sizes=(1, 2, 4, 8, 16),
            answers=32,
        ),
    )
}


@dataclass(frozen=True)
class Files:
    """A model's files, its request and its expected answer."""

    model: PeerModel
    repository: Path
    batching: Path  # the same files, with dynamic batching in the configuration
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    expected: Mapping[str, np.ndarray] = field(repr=False)

    @property
    def onnx(self) -> Path:
        return self.repository / self.model.name / "1" / "model.onnx"

    @property
    def request(self) -> Path:
        return self.repository.parent / "request.npz"

    def problem(self, answer: Mapping[str, np.ndarray]) -> str | None:
        """The problem of an answer, or None."""
        for name, wanted in self.expected.items():
            if name not in answer:
                return f"no output '{name}' among {list(answer)}"
            got = np.asarray(answer[name], wanted.dtype)
            if got.size != wanted.size:
                return f"'{name}' has {got.size} elements, not {wanted.size}"
            error = float(np.abs(got.ravel() - wanted.ravel()).max())
            if not error <= ABSOLUTE_TOLERANCE:
                return f"'{name}' is off by {error:.1e}"
        return None


def prepare(model: PeerModel) -> Files:
    """The model's files, made if they are missing or their definition changed."""
    home = environments.folder("models") / model.name
    marker = home / "definition.json"
    program = (INSIDE / "checkpoint.py").read_text() if model.family else tiny_model.CONFIG
    definition = json.dumps(
        [model.name, repr(model.inputs), model.batch_sizes, ONE_THREAD, program]
    )
    if not (marker.is_file() and marker.read_text() == definition):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        _make(model, home)
        marker.write_text(definition)
    _batching(model, home)
    with np.load(home / "answer.npz") as answer:
        expected = dict(answer)
    return Files(model, home / "repository", home / "batching", model.tensors, expected)


def _make(model: PeerModel, home: Path) -> None:
    repository = home / "repository"
    if model.family:
        _export(model, home, repository)
    else:
        shutil.copytree(tiny_model.repository() / model.name, repository / model.name)
    config = repository / model.name / "config.pbtxt"
    text = config.read_text() + ONE_THREAD
    config.write_text(text if "instance_group" in text else text + ONE_INSTANCE)
    tensors: Mapping[str, Any] = model.tensors
    np.savez(home / "request.npz", **tensors)
    runtime_limit.answer(repository / model.name / "1" / "model.onnx", home / "request.npz", home)


def _batching(model: PeerModel, home: Path) -> None:
    """Link the same files with batching in the configuration; no new export is needed."""
    repository, batching = home / "repository", home / "batching"
    shutil.rmtree(batching, ignore_errors=True)
    shutil.copytree(repository, batching, copy_function=os.link)
    config = batching / model.name / "config.pbtxt"
    text = config.read_text()
    config.unlink()  # it is a hard link: writing to it would change both
    config.write_text(text + DYNAMIC_BATCHING.format(model.preferred_batch_size))


def _export(model: PeerModel, home: Path, repository: Path) -> None:
    print(f"exporting {model.title}", file=sys.stderr, flush=True)
    command = modelport.executable()
    if model.demo:
        checkpoint = environments.ROOT / "checkpoints" / f"{model.family}.pt"
        if not checkpoint.is_file():
            _run([*command, "demo"])
    else:
        checkpoint = home / f"{model.name}.pt"
        python = str(Path(command[0]).with_name("python"))
        _run([python, str(INSIDE / "checkpoint.py"), model.name, str(checkpoint)])
    options = ["--model", model.family, "--format", "onnx", "--name", model.name]
    # Few samples, as only time is measured here and every batch size is tried on each.
    # The batcher may form every size that is tried by hand.
    options += ["--max-batch-size", str(max(model.batch_sizes)), "--samples", "4"]
    _run([*command, "export", str(checkpoint), *options, "--repository", str(repository)])
    if not model.demo:
        checkpoint.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, cwd=environments.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-1000:]
        raise environments.Missing(f"{' '.join(command)} failed: {said}")
