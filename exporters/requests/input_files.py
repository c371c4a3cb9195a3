"""Recorded inputs in files: arrays in ``.npz``, requests as ``.jsonl`` or of ``modelport sample``.

Every tensor is checked against the signature.
"""

from __future__ import annotations

import base64
import json
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from modelport.exporters.requests.random_inputs import MOST_OF_MEMORY, model_dims, physical_memory
from modelport.gateway.errors import UsageError, first_line
from modelport.gateway.recording import recorded_calls
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.repository.manifest import sha256_of
from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, TensorSpec

#: Size of a file of requests; larger inputs belong into an ``.npz``.
MOST_BYTES = 1 << 30
#: Kinds of numbers in JSON that are values of a datatype, by its kind.
_ACCEPTED = {"f": "iuf", "i": "iu", "u": "iu", "b": "b"}


def read_arrays(path: Path, flag: str = "") -> dict[str, Array]:
    """All arrays of an ``.npz`` file; nothing in it is executed.

    Raises:
        UsageError: it cannot be read, or does not fit into memory; the message names ``flag``.
    """
    flag += " " if flag else ""
    try:
        if not zip_guard.is_zip(path):
            raise ValueError("it is not a zip archive")
        zip_guard.check(path)
        with zipfile.ZipFile(path) as archive:
            needed = sum(member.file_size for member in archive.infolist())
        if needed > MOST_OF_MEMORY * physical_memory():
            raise ValueError(f"its arrays take {needed / 1e9:.1f} GB, too much of this machine's")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if other := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"'{other[0]}' in it is no array")
        return arrays
    except Exception as error:  # a damaged file can raise almost anything
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise UsageError(
            f"{flag}'{path}' is not a readable .npz file: {reason}; write one with numpy.savez"
        ) from error


def choose(
    arrays: Mapping[str, Array], signature: ModelSignature, where: str, batched: bool = True
) -> dict[str, Array]:
    """The signature's inputs among ``arrays``, in the model's shapes.

    Args:
        where: the file, for messages.
        batched: the first dimension of each array is rows.

    Raises:
        UsageError: one is missing, or has the wrong shape or datatype.
    """
    inputs = {}
    for spec in signature.inputs:
        if spec.name not in arrays:
            raise UsageError(
                f"{where} has no input '{spec.name}'; it has {', '.join(arrays) or 'none'}"
            )
        inputs[spec.name] = _fit(spec, arrays[spec.name], f"{where}: '{spec.name}'", batched)
    return inputs


def _fit(spec: TensorSpec, array: Array, where: str, batched: bool) -> Array:
    if array.dtype != NUMPY_DTYPES[spec.datatype]:
        raise UsageError(f"{where} is {array.dtype}, the signature says {spec.datatype}")
    dims = [d if isinstance(d, int) else -1 for d in model_dims(spec)]
    rows, sizes = array.shape[:batched], array.shape[batched:]
    if spec.reshape is not None and sizes == spec.wire_dims:
        array = array.reshape((*rows, *dims))
        sizes = array.shape[batched:]
    fits = len(rows) == batched and len(sizes) == len(dims)
    if not fits or any(d not in (-1, n) for d, n in zip(dims, sizes, strict=True)):
        declared = f"[N, *{dims}]" if batched else f"{dims}"
        raise UsageError(f"{where} is {list(array.shape)}, the signature says {declared}")
    return array


def digest(path: Path) -> str:
    """The SHA-256 of a file, or of all files of recorded traffic."""
    return recorded_calls.digest(path) if path.is_dir() else sha256_of(path)


def recorded(
    path: Path, signature: ModelSignature, flag: str, most: int = recorded_calls.MOST_CALLS
) -> list[dict[str, Array]]:
    """The inputs of requests that ``modelport serve --record`` has written, in the model's shapes.

    Raises:
        UsageError: there are none, or one does not fit the signature.
    """
    names = [spec.name for spec in signature.inputs]
    calls = recorded_calls.sample(path, names, most)
    return [
        choose(
            recorded_calls.values(call.inputs), signature, f"{flag} '{path}'",
            signature.max_batch_size > 0,
        )
        for call in calls
    ]  # fmt: skip


def read_requests(path: Path, signature: ModelSignature, flag: str) -> Iterator[dict[str, Array]]:
    """The inputs of each request in a file of requests, in the model's shapes.

    ``.jsonl`` has a request of the Open Inference Protocol on each line, ``.json`` one alone, or
    the entries that ``modelport sample`` writes, which become requests of one row.

    Raises:
        UsageError: the file cannot be read, or a request does not fit the signature.
    """
    batched = signature.max_batch_size > 0
    try:
        text = untrusted_files.read_text(path, MOST_BYTES)
        lines = text.splitlines() if path.suffix == ".jsonl" else [text]
        documents = [json.loads(line) for line in lines if line.strip()]
        entries = [entry for document in documents for entry in _tensors(document, signature)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise _no_requests(path, flag, getattr(error, "strerror", None) or error) from error
    except (RecursionError, MemoryError) as error:
        raise _no_requests(path, flag, "it is nested too deeply, or too large") from error
    for number, (arrays, rows) in enumerate(entries, start=1):
        where = f"{flag} '{path}', request {number}"
        if rows or not batched:
            yield choose(arrays, signature, where, batched)
        else:
            chosen = choose(arrays, signature, where, batched=False)
            yield {name: array[None] for name, array in chosen.items()}


def _no_requests(path: Path, flag: str, reason: object) -> UsageError:
    said = " ".join(str(reason).split())[:200]
    return UsageError(
        f"{flag} '{path}' is not a file of requests ({said}); give an .npz of rows by input name, "
        "Open Inference Protocol requests as .json or .jsonl, or a file of 'modelport sample'"
    )


def _tensors(document: Any, signature: ModelSignature) -> Iterator[tuple[dict[str, Array], bool]]:
    """The tensors of each request in ``document``, and whether their first dimension is rows."""
    known = {spec.name: spec for spec in signature.inputs}
    if "data" in document:
        for entry in document["data"]:
            yield (
                {
                    name: _array(tensor["content"], tensor["shape"], known[name])
                    for name, tensor in entry.items()
                    if name in known
                },
                False,
            )
        return
    yield (
        {
            tensor["name"]: _typed(tensor, known[tensor["name"]])
            for tensor in document["inputs"]
            if tensor["name"] in known
        },
        True,
    )


def _typed(tensor: Mapping[str, Any], spec: TensorSpec) -> Array:
    if tensor["datatype"] != spec.datatype:
        raise ValueError(
            f"'{spec.name}' is {tensor['datatype']}, the signature says {spec.datatype}"
        )
    return _array(tensor["data"], tensor["shape"], spec)


def _array(content: Any, shape: Sequence[int], spec: TensorSpec) -> Array:
    """The tensor whose flat or nested values are ``content``, or bytes in base64."""
    dtype = np.dtype(NUMPY_DTYPES[spec.datatype])
    if isinstance(content, dict):
        flat = np.frombuffer(
            base64.b64decode(content["b64"], validate=True), dtype.newbyteorder("<")
        ).astype(dtype)
    else:
        found = np.array(content).ravel()
        if found.size and found.dtype.kind not in _ACCEPTED[dtype.kind]:
            raise ValueError(
                f"'{spec.name}' holds {found.dtype}, the signature says {spec.datatype}"
            )
        flat = found.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(flat, found):
            raise ValueError(f"'{spec.name}' has values beyond {spec.datatype}")
    if any(type(size) is not int or size < 0 for size in shape) or math.prod(shape) != flat.size:
        raise ValueError(f"'{spec.name}' has {flat.size} values, but its shape needs {shape}")
    return flat.reshape(shape)
