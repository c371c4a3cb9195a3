"""Requests with the answers they must get, as a file: what load tests send and check.

The format is that of perf_analyzer's ``--input-data``, which passes over the last key:

    {"data":            [{"tokens": {"content": [7, 99], "shape": [1, 2]}, ...}, ...],
     "validation_data": [{"probability": {"content": [0.03], "shape": [1, 1]}}, ...],
     "modelport":       {"inputs": {"tokens": "INT64", ...}, "outputs": {"probability": "FP32"},
                         "reshape": {"seq_lens": []}, "atol": 5e-06, "rtol": 1e-05}}

An entry is one request. Shapes are the wire's, the batch first; ``content`` is flat, floats are
``{"b64": ...}``, their little-endian bytes. An answer is right if ``|error| <= atol + rtol *
|validation_data|``. ``reshape``: the dims behind the batch that the model itself takes, where they
are not the wire's; TensorFlow Serving is asked with those.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from exporters.errors import UsageError
from exporters.samples import draw, name_axes, sizes_of
from exporters.source import Reference
from exporters.spec import Sampler
from gateway.types import Array, ModelSignature, TensorSpec

#: Tells the requests done and all of them.
Progress = Callable[[int, int], None]


def requests(
    signature: ModelSignature, sample: Sampler | None, count: int, batch: int, seed: int
) -> Iterator[dict[str, Array]]:
    """``count`` seeded requests of ``batch`` rows, every dynamic axis at a size of its own.

    Arrays have the shapes that the model itself takes.

    Raises:
        UsageError: the model takes no such batch.
        Unsupported: an input's datatype cannot be drawn.
    """
    if batch > max(1, signature.max_batch_size):
        raise UsageError(
            f"--batch-size {batch} is above the model's max_batch_size {signature.max_batch_size}"
        )
    signature = name_axes(signature)
    rng = np.random.default_rng(seed)
    for _ in range(count):
        sizes = {
            name: int(rng.integers(axis.minimum, sizes_of(axis)[-1], endpoint=True))
            for name, axis in signature.axes.items()
        }
        yield (sample or draw)(signature, batch, sizes, rng)


def record(
    signature: ModelSignature,
    asked: Sequence[Mapping[str, Array]],
    reference: Reference,
    atol: float,
    rtol: float,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """The file's content: ``asked`` and what ``reference`` answers."""
    answers = []
    for number, inputs in enumerate(asked):
        outputs = reference(inputs)
        answers.append({s.name: _tensor(s, outputs[s.name]) for s in signature.outputs})
        progress(number + 1, len(asked))
    return {
        "data": [{s.name: _tensor(s, x[s.name]) for s in signature.inputs} for x in asked],
        "validation_data": answers,
        "modelport": {
            "inputs": {spec.name: spec.datatype.value for spec in signature.inputs},
            "outputs": {spec.name: spec.datatype.value for spec in signature.outputs},
            "reshape": {
                spec.name: list(spec.model_dims)
                for spec in (*signature.inputs, *signature.outputs)
                if spec.reshape is not None
            },
            "atol": atol,
            "rtol": rtol,
        },
    }


def _tensor(spec: TensorSpec, array: Array) -> dict[str, Any]:
    """``array`` in the wire's shape."""
    if spec.reshape is not None:
        array = array.reshape(len(array), *spec.wire_dims)
    content: Any = array.ravel().tolist()
    if array.dtype.kind == "f":  # no digit is lost, and what is not finite has no JSON
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        content = {"b64": base64.b64encode(little.tobytes()).decode()}
    return {"content": content, "shape": list(array.shape)}


def write(path: Path, document: Mapping[str, Any]) -> None:
    """``document`` at ``path``, complete or not at all.

    Raises:
        UsageError: it cannot be written there.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(json.dumps(document))
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be written: {error.strerror}") from error
