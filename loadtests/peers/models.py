"""The models that every server serves, from the same files, and the requests they are asked.

Each is made once under `.peers/models/`: a checkpoint, `modelport export`, and a repository of one
model; beside it the request's tensors and the answer that ONNX Runtime gives by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from modelport.loadtests import environments
from modelport.loadtests.benchmarks import tiny_model
from modelport.loadtests.peers import raw
from modelport.loadtests.peers.servers import modelport
from modelport.loadtests.peers.servers.base import INSIDE

#: One thread for everybody: a server has one core.
ONE_THREAD = """
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
"""
ONE_INSTANCE = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
DYNAMIC_BATCHING = "dynamic_batching {{ preferred_batch_size: [ {} ] }}\n"
SEED = 0
#: Answers of one model from different numbers of rows differ in the last bits.
ABSOLUTE_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Input:
    """A tensor of the request: random integers below ``high``, or random floats without it."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # with its batch dimension of 1
    high: int | None = None
    values: tuple[float, ...] | None = None

    def array(self, generator: np.random.Generator) -> np.ndarray:
        if self.values is not None:
            return np.array(self.values, DTYPES[self.datatype]).reshape(self.shape)
        if self.high is not None:
            return generator.integers(0, self.high, self.shape).astype(DTYPES[self.datatype])
        return generator.standard_normal(self.shape).astype(DTYPES[self.datatype])


DTYPES: Mapping[str, Any] = {"FP32": np.float32, "INT64": np.int64}


@dataclass(frozen=True)
class Model:
    """A model, and how long it is measured.

    ``baseline``: the server that the ratios are to. ``protocols``: how it is asked; a server that
    does not know one is left out of its column, and where ``one_protocol`` is enough, is asked only
    in the first it knows. ``answers``: a run ends after this many instead of
    after ``seconds``, for models so slow that whole seconds hold few. ``preferred_batch_size``: as
    a user writes it who has tried the sizes by hand: the best of those of which two are in flight
    at once, so that one batch gathers while another runs.
    """

    name: str
    title: str
    inputs: tuple[Input, ...]
    seconds: float
    rounds: int
    family: str = ""  # what `modelport export --model` calls it; empty: no export
    demo: bool = False  # its checkpoint is the one that `modelport demo` trains
    protocols: tuple[str, ...] = ("json", "grpc")
    in_flight: tuple[int, ...] = (16,)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    preferred_batch_size: int = 1
    baseline: str = raw.NAME
    answers: int | None = None
    one_protocol: bool = False

    def timed(self, rounds: int | None, seconds: float | None) -> Model:
        """Measured for other times, and as many answers fewer or more."""
        answers = self.answers
        if answers is not None and seconds is not None:
            answers = max(max(self.in_flight), round(answers * seconds / self.seconds))
        seconds = seconds or self.seconds
        return replace(self, rounds=rounds or self.rounds, seconds=seconds, answers=answers)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(SEED)
        return {one.name: one.array(generator) for one in self.inputs}

    @property
    def datatypes(self) -> dict[str, str]:
        return {one.name: one.datatype for one in self.inputs}


def _fraud(name: str, title: str, **times: Any) -> Model:
    inputs = (
        Input("tokens", "INT64", (1, 64), high=512),
        Input("seq_lens", "INT64", (1, 1), values=(64,)),
    )
    return Model(name, title, inputs, family="fraud", **times)


ALL: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            tiny_model.NAME,
            "4 floats (y = 2x)",
            (Input("x", "FP32", (1, 4), values=tiny_model.VALUES),),
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
        Model(
            "vit_b16",
            "ViT-B/16 (86 M parameters, 602 KB image)",
            (Input("image", "FP32", (1, 3, 224, 224)),),
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
    """Where a model's files lie, and what is asked and answered."""

    model: Model
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
        """What is wrong with an answer, if anything."""
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


def prepare(model: Model) -> Files:
    """The model's files, made when absent or when what they are made from changed."""
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


def _make(model: Model, home: Path) -> None:
    repository = home / "repository"
    if model.family:
        _export(model, home, repository)
    else:
        shutil.copytree(tiny_model.repository() / model.name, repository / model.name)
    config = repository / model.name / "config.pbtxt"
    text = config.read_text() + ONE_THREAD
    config.write_text(text if "instance_group" in text else text + ONE_INSTANCE)
    np.savez(home / "request.npz", **model.tensors)
    raw.answer(repository / model.name / "1" / "model.onnx", home / "request.npz", home)


def _batching(model: Model, home: Path) -> None:
    """The same files once more; how they are batched is no reason to export them anew."""
    repository, batching = home / "repository", home / "batching"
    shutil.rmtree(batching, ignore_errors=True)
    shutil.copytree(repository, batching, copy_function=os.link)
    config = batching / model.name / "config.pbtxt"
    text = config.read_text()
    config.unlink()  # a link: what is written to it would change both
    config.write_text(text + DYNAMIC_BATCHING.format(model.preferred_batch_size))


def _export(model: Model, home: Path, repository: Path) -> None:
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
    # Few samples: what is measured here is time, and every batch size is tried on each.
    # The batcher may form whatever is tried by hand.
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
