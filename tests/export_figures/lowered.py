"""Lowered SavedModels and TensorFlow Lite files beside those of the Keras ports and litert-torch.

All run in one process on one thread, in rounds: in each, every file answers the same request until
a while has passed, in an order that changes. Time is the process's CPU time, which is the latency
of one thread on an idle machine. A round's ratio is that of the medians; the figure is the median
of all rounds' ratios, with its quartiles.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from modelport.exporters import api
from modelport.exporters.demo_models import train
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Source
from modelport.exporters.requests.random_inputs import draw, name_axes
from modelport.exporters.sources import SourceRequest, reader_selection
from modelport.gateway.types import Array
from modelport.loadtests.system import environments

HEAD = "| model | format | against | batch | latency | quartiles | at most | size | at most |"
ROUNDS, ROUND_SECONDS = 60, 0.02
#: Bounds of latency and size against each.
PORT, STATIC = "Keras port", "litert-torch, static"
BOUNDS: Mapping[str, tuple[float, float | None]] = {PORT: (1.1, 1.05), STATIC: (1.15, None)}
BATCHES = (1, 8)
LENGTH = 64  # of fraud's sequences

LITERT_TORCH = ("torch==2.13.0", "litert-torch==0.10.0")
CONVERT = """
import sys, torch, litert_torch
program = torch.export.load(sys.argv[1])
litert_torch.convert(program.module(), tuple(torch.load(sys.argv[2]))).export(sys.argv[3])
"""

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class TimedArtifact:
    """An artifact and how to run it on one thread."""

    path: Path
    open: Callable[[Path, Mapping[str, Array]], Run]

    @property
    def size(self) -> int:
        if self.path.is_file():
            return self.path.stat().st_size
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def saved_model(path: Path, inputs: Mapping[str, Array]) -> Run:
    """The signature of a SavedModel with ``inputs``, by name."""
    from modelport.exporters.runtime.tensorflow_runtime import tf

    model = tf.saved_model.load(str(path))
    function = model.signatures["serving_default"]
    given = {name: tf.constant(value) for name, value in inputs.items()}
    return lambda: (model, function(**given))


def tflite(path: Path, inputs: Mapping[str, Array]) -> Run:
    """A TensorFlow Lite file with ``inputs``: by name, or in their order if it has other names."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path), num_threads=1)
    interpreter.allocate_tensors()
    runner = interpreter.get_signature_runner()
    details = runner.get_input_details()
    names = list(details)
    if set(names) != set(inputs):
        inputs = dict(zip(sorted(names), inputs.values(), strict=True))
    # litert-torch narrows integers to 32 bits.
    inputs = {name: value.astype(details[name]["dtype"]) for name, value in inputs.items()}
    return lambda: (interpreter, runner(**inputs))


OPENERS = {"savedmodel": saved_model, "tflite": tflite}


def _sources(name: str, work: Path) -> tuple[Source, Source]:
    """The demo's model, and its Keras port with the same weights."""
    checkpoint = Path("checkpoints") / f"{name}.pt"
    if not checkpoint.exists():
        {"fraud": train.train_fraud, "vit": train.train_vit}[name](checkpoint)
    port = work / f"{name}.keras"
    api.convert(checkpoint, port, model=name)
    return (
        reader_selection.load(SourceRequest(checkpoint, model=name)),
        reader_selection.load(SourceRequest(port)),
    )


def _inputs(source: Source, batch: int) -> dict[str, Array]:
    signature = name_axes(source.signature)
    lengths = dict.fromkeys(signature.axes, LENGTH)
    return draw(signature, batch, lengths, np.random.default_rng(0), masks=source.spec.masks)


def _static(source: Source, inputs: Mapping[str, Array], work: Path) -> TimedArtifact:
    """The file that litert-torch makes of the module, for the sizes of ``inputs`` alone."""
    import torch

    from modelport.exporters.sources.torch_eager import inference_mode

    python = environments.venv("litert-torch", *LITERT_TORCH) / "python"
    tensors = tuple(torch.from_numpy(inputs[spec.name]) for spec in source.signature.inputs)
    program, examples, path = work / "static.pt2", work / "static.inputs", work / "static.tflite"
    with inference_mode(source.model):
        torch.export.save(torch.export.export(source.model, tensors, strict=False), program)
    torch.save(list(tensors), examples)
    command = [str(python), "-c", CONVERT, str(program), str(examples), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"litert-torch: {done.stderr.strip().splitlines()[-1]}")
    return TimedArtifact(path, tflite)


def ratios(ours: Run, theirs: Run, rounds: int = ROUNDS) -> list[float]:
    """Latency of ``ours`` by that of ``theirs``, for each round."""
    for run in (ours, theirs) * 3:
        run()
    found = []
    for number in range(rounds):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        taken = {run: _median_seconds(run) for run in order}
        found.append(taken[ours] / taken[theirs])
    return found


def _median_seconds(run: Run) -> float:
    times: list[float] = []
    while sum(times) < ROUND_SECONDS or len(times) < 3:
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return statistics.median(times)


def _check_equal(name: str, ours: TimedArtifact, theirs: TimedArtifact, inputs: Any) -> None:
    """Refuse to compare the speed of files with different answers."""
    answers = [
        next(iter(each.open(each.path, inputs)()[1].values()))  # type: ignore[index]
        for each in (ours, theirs)
    ]
    if not np.allclose(*(np.asarray(x) for x in answers), rtol=1e-3, atol=1e-4):
        raise RuntimeError(f"{name}: '{ours.path}' and '{theirs.path}' give different answers")


def _row(name: str, row: str, against: str, batch: int, pair: Any, source: Source) -> str:
    ours, theirs = pair
    inputs = _inputs(source, batch)
    _check_equal(name, ours, theirs, inputs)
    found = ratios(ours.open(ours.path, inputs), theirs.open(theirs.path, inputs))
    low, middle, high = statistics.quantiles(found, n=4)
    most, largest = BOUNDS[against]
    cells = (
        name,
        row,
        against,
        str(batch),
        f"{middle:.2f}x",
        f"{low:.2f} to {high:.2f}",
        f"{most}x",
        f"{ours.size / theirs.size:.3f}x",
        "-" if largest is None else f"{largest}x",
    )
    return f"| {' | '.join(cells)} |"


def rows(work: Path) -> Iterator[str]:
    """Compare each model in each format, and yield the lines of the table."""
    from modelport.exporters.runtime.tensorflow_runtime import tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    yield HEAD
    yield "|" + "---|" * HEAD.count(" | ") + "---|"
    for name in ("fraud", "vit"):
        lowered, port = _sources(name, work)
        for format_name, opener in OPENERS.items():
            made = []
            for kind, source in (("lowered", lowered), ("port", port)):
                path = work / f"{name}-{kind}.{format_name}"
                find_format(format_name).export(source, path, ExportTarget())
                made.append(TimedArtifact(path, opener))
            for batch in BATCHES:
                yield _row(name, format_name, PORT, batch, made, lowered)
            if format_name == "tflite":
                for batch in BATCHES:
                    static = _static(lowered, _inputs(lowered, batch), work)
                    yield _row(name, format_name, STATIC, batch, (made[0], static), lowered)
