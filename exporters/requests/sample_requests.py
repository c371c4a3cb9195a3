"""Sample requests with their expected answers, as a file that load tests send and check.

The format is that of perf_analyzer's ``--input-data``, which ignores the last key:

    {"data":            [{"tokens": {"content": [7, 99], "shape": [2]}, ...}, ...],
     "modelport":       {"inputs": {"tokens": "INT64", ...}, "outputs": {"probability": "FP32"},
                         "answers": [{"probability": {"content": [0.03], "shape": [1]}}, ...],
                         "batch_size": 1, "reshape": {"seq_lens": []}, "atol": 5e-06,
                         "rtol": 1e-05}}

An entry is one row, and ``batch_size`` rows are a request; 0: the model does not batch, and an
entry is a request. Shapes are the wire's, without the batch; ``content`` is flat, floats are
``{"b64": ...}``, their little-endian bytes. An answer is right if ``|error| <= atol + rtol *
|answers|``; in perf_analyzer's own "validation_data" it would have to be the same bit by bit.
``reshape``: the dims behind the batch that the model itself takes, where they are not the wire's;
TensorFlow Serving is asked with those.

A published version carries such a file of its checkpoint's answers, ``samples.json``. Its
certificate names it under "samples", so that a signature covers it; serving does not read it.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelport.exporters.loaded_model import Reference
from modelport.exporters.model_spec import Sampler
from modelport.exporters.requests.random_inputs import name_axes, sizes_of
from modelport.gateway.errors import ModelportError, UsageError, first_line
from modelport.gateway.repository import manifest, signing, signing_keys, untrusted_files
from modelport.gateway.types import Array, ModelSignature, TensorSpec

#: Called with the requests done and the total.
Progress = Callable[[int, int], None]

FILENAME = signing.SAMPLES
#: Most requests and bytes of a version's own file.
MOST_REQUESTS, MOST_BYTES = 128, 4 * 1024 * 1024
#: Below fp32 the tolerance is the largest proven error times this margin.
MARGIN = 1.5


def requests(
    signature: ModelSignature, sample: Sampler, count: int, batch: int, seed: int
) -> Iterator[dict[str, Array]]:
    """Generate ``count`` seeded requests of ``batch`` rows; dynamic axes have varying sizes.

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
        yield sample(signature, batch, sizes, rng)


def record(
    signature: ModelSignature,
    asked: Sequence[Mapping[str, Array]],
    reference: Reference,
    atol: float,
    rtol: float,
    progress: Progress = lambda done, total: None,
) -> dict[str, Any]:
    """Build the file's content: the requests ``asked`` and the answers of ``reference``."""
    data: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for number, inputs in enumerate(asked):
        rows, found = _answered(signature, inputs, reference)
        data += rows
        answers += found
        progress(number + 1, len(asked))
    size = len(next(iter(asked[0].values()))) if signature.max_batch_size else 0
    return _document(signature, data, answers, size, atol, rtol)


def record_version(
    version: Path,
    signature: ModelSignature,
    sample: Sampler,
    reference: Reference,
    tolerance: tuple[float, float],
    *,
    count: int = MOST_REQUESTS,
    seed: int = 0,
    most_bytes: int = MOST_BYTES,
) -> dict[str, Any] | None:
    """Write ``samples.json`` of ``version``: as many single rows as fit ``most_bytes``.

    Returns:
        The certificate's "samples". None if a single request is larger; then nothing is written.
    """
    data: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    left = most_bytes
    for inputs in requests(signature, sample, min(count, MOST_REQUESTS), 1, seed):
        rows, found = _answered(signature, inputs, reference)
        left -= len(json.dumps([rows, found]))
        if left < 0:
            break
        data += rows
        answers += found
    if not data:
        return None
    size = 1 if signature.max_batch_size else 0
    path = version / FILENAME
    write(path, _document(signature, data, answers, size, *tolerance))
    return {"file": FILENAME, "sha256": manifest.sha256_of(path), "requests": len(data)}


def add(version: Path, samples: dict[str, Any], key: signing_keys.PrivateKey | None) -> None:
    """List ``samples.json`` of ``version`` in its certificate and its manifest.

    Args:
        key: signs the certificate; required for a signed version.
    """
    path = version / signing.CERTIFICATE
    certificate = json.loads(untrusted_files.read(path, untrusted_files.MAX_CERTIFICATE_BYTES))
    certificate |= {"samples": samples}
    write(path, certificate, indent=2)
    if key is not None:
        signing.sign(version, key)
    manifest.write(version)


def tolerance(atol: float, rtol: float, bound: bool, max_abs_error: float) -> tuple[float, float]:
    """The accepted error of a recorded answer.

    Args:
        bound: the artifact was proven by its decisions, not by ``atol`` and ``rtol``.
    """
    return (max(atol, MARGIN * max_abs_error) if bound else atol), rtol


def _answered(
    signature: ModelSignature, inputs: Mapping[str, Array], reference: Reference
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The entries of one request and of its answer."""
    batched = signature.max_batch_size > 0
    try:
        answer = reference(inputs)
    except ModelportError:
        raise
    except Exception as error:  # more samples of the proof would have met it
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in inputs.items())
        raise UsageError(
            f"the model itself fails at {shapes}: {first_line(error)}; declare only sizes and "
            "values that it accepts, with --input or in its ModelSpec"
        ) from error
    return (
        _entries(signature.inputs, inputs, batched),
        _entries(signature.outputs, answer, batched),
    )


def _document(
    signature: ModelSignature,
    data: list[dict[str, Any]],
    answers: list[dict[str, Any]],
    size: int,
    atol: float,
    rtol: float,
) -> dict[str, Any]:
    return {
        "data": data,
        "modelport": {
            "inputs": {spec.name: spec.datatype.value for spec in signature.inputs},
            "outputs": {spec.name: spec.datatype.value for spec in signature.outputs},
            "answers": answers,
            "batch_size": size,
            "reshape": {
                spec.name: list(spec.model_dims)
                for spec in (*signature.inputs, *signature.outputs)
                if spec.reshape is not None
            },
            "atol": atol,
            "rtol": rtol,
        },
    }


def _entries(
    specs: Sequence[TensorSpec], tensors: Mapping[str, Array], batched: bool
) -> list[dict[str, Any]]:
    """One entry per row of ``tensors`` in the wire's shapes; one in all if the model does not
    batch."""
    wire = on_the_wire(specs, tensors, batched)
    if not batched:
        return [{name: _tensor(array) for name, array in wire.items()}]
    rows = range(len(next(iter(wire.values()))))
    return [{name: _tensor(array[row]) for name, array in wire.items()} for row in rows]


def on_the_wire(
    specs: Sequence[TensorSpec], tensors: Mapping[str, Array], batched: bool
) -> dict[str, Array]:
    """``tensors`` in the wire's shapes."""
    wire = {spec.name: tensors[spec.name] for spec in specs}
    for spec in specs:
        if spec.reshape is not None:
            array = wire[spec.name]
            wire[spec.name] = array.reshape(*array.shape[: int(batched)], *spec.wire_dims)
    return wire


def _tensor(given: Array) -> dict[str, Any]:
    array = np.asarray(given)
    content: Any = array.ravel().tolist()
    if array.dtype == object:  # perf_analyzer reads texts
        content = [element.decode() for element in content]
    if array.dtype.kind == "f":  # base64 keeps every digit, and JSON has no NaN or infinity
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        content = {"b64": base64.b64encode(little.tobytes()).decode()}
    return {"content": content, "shape": list(array.shape)}


def write(path: Path, document: Mapping[str, Any], indent: int | None = None) -> None:
    """Write ``document`` to ``path`` atomically.

    A pipe or a device, such as ``/dev/stdout``, is written to in place.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_text(json.dumps(document, indent=indent))
        return
    try:
        part.write_text(json.dumps(document, indent=indent))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
