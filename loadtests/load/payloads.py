"""Payloads of load tests: requests and their expected answers, in memory and as files.

A payload file is the ``--input-data`` JSON of perf_analyzer, whose "data" has an entry for each
row, in shapes without the batch, with an additional key, which perf_analyzer ignores::

    "modelport": {"inputs": {"tokens": "INT64"}, "outputs": {"probability": "FP32"},
                  "answers": [{"probability": {"content": [0.03], "shape": [1]}}],
                  "batch_size": 1, "reshape": {"seq_lens": []}, "atol": 5e-6, "rtol": 1e-5}

``answers``: the expected answers; "validation_data" would be compared bit by bit.
``batch_size``: rows of a request; 0: the model does not batch, and an entry is a request.
Without that key the datatypes come from the model's signature, and the expected answers from
"validation_data".

Recorded requests may also be an Open Inference Protocol request (its "outputs" with data are
expected), one such per line, an ``.npz`` of rows by the tensors' names, or a folder of
``modelport serve --record``.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from modelport.gateway.errors import UsageError
from modelport.gateway.recording import record_reader, recorded_calls
from modelport.gateway.repository import untrusted_files

if TYPE_CHECKING:
    from modelport.loadtests.users.signature import RequestSignature

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

#: Name of the true labels in an ``.npz``.
LABELS = "labels"
#: Size of the arrays in an ``.npz``, which compression makes small.
MOST_ARRAY_BYTES = 1 << 33
#: Size of a file of requests; larger inputs belong into an ``.npz``.
MOST_BYTES = 1 << 30
#: Batches of other sizes and other kernels differ in the last bits.
ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE = 1e-4, 1e-3
DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(np.object_),
} | {
    f"{word}{bits}": np.dtype(f"<{kind}{bits // 8}")
    for word, kind in (("INT", "i"), ("UINT", "u"))
    for bits in (8, 16, 32, 64)
}


#: Exceptions from unreadable or truncated files.
UNREADABLE = (
    OSError, ValueError, EOFError, ArithmeticError, MemoryError, RecursionError, zipfile.BadZipFile,
    struct.error,
)  # fmt: skip


class BadPayload(ValueError):
    """A payload file is unreadable, or no requests can be generated for the model."""


@dataclass(frozen=True)
class Payloads:
    """Requests in the wire's shapes, batch dimension first."""

    requests: tuple[Tensors, ...]
    #: Datatypes of the inputs, by name.
    datatypes: Mapping[str, str]
    #: Expected answer of each request; None: the target's own first answer.
    expected: tuple[Tensors, ...] | None = None
    #: The model's own shape behind the batch, of inputs whose shape differs from the wire's.
    reshape: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    absolute_tolerance: float = ABSOLUTE_TOLERANCE
    relative_tolerance: float = RELATIVE_TOLERANCE
    output_datatypes: Mapping[str, str] = field(default_factory=dict)
    #: Rows of each request if the model is known to batch; 0: it is not.
    batch_size: int = 0
    #: True labels of each request's rows, if they are known.
    labels: tuple[Array, ...] | None = None


def write(payloads: Payloads, path: Path) -> None:
    """Write a payload file."""
    size = payloads.batch_size
    every = (*payloads.requests, *(payloads.expected or ()))
    if any(array.shape[:1] != (size,) for one in every for array in one.values()):
        size = 0  # entries are whole requests
    ours: dict[str, Any] = {
        "inputs": dict(payloads.datatypes),
        "outputs": dict(payloads.output_datatypes),
        "batch_size": size,
        "reshape": {name: list(shape) for name, shape in payloads.reshape.items()},
        "atol": payloads.absolute_tolerance,
        "rtol": payloads.relative_tolerance,
    }
    if payloads.expected is not None:
        ours["answers"] = _entries(payloads.expected, size)
        if not payloads.output_datatypes:
            first = payloads.expected[0]
            ours["outputs"] = {name: _word(array) for name, array in first.items()}
    path.write_text(json.dumps({"data": _entries(payloads.requests, size), "modelport": ours}))


def _entries(requests: Sequence[Tensors], batch_size: int) -> list[dict[str, Any]]:
    if batch_size:
        requests = [
            {name: np.asarray(array[row]) for name, array in one.items()}
            for one in requests
            for row in range(batch_size)
        ]
    return [
        {
            name: {"content": _content(array), "shape": list(array.shape)}
            for name, array in one.items()
        }
        for one in requests
    ]


def _content(array: Array) -> Any:
    if array.dtype.kind == "f":
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return {"b64": base64.b64encode(little.tobytes()).decode()}
    return [v.decode() if isinstance(v, bytes) else v for v in array.ravel().tolist()]


def _word(array: Array) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    return next(word for word, dtype in DTYPES.items() if dtype == array.dtype.newbyteorder("<"))


def read(path: Path, signature: RequestSignature | None = None, batch_size: int = 1) -> Payloads:
    """Read the requests in a file of any of these forms.

    Args:
        signature: needed if the file has no datatypes or no names.
        batch_size: rows in a request, of an ``.npz`` and of perf_analyzer's own files.

    Raises:
        BadPayload: the file cannot be read, or does not fit the model.
    """
    try:
        if record_reader.is_records(path):
            return _read_records(path, signature)
        if path.suffix == ".npz":
            return _read_npz(path, signature, batch_size)
        text = untrusted_files.read_text(path, MOST_BYTES)
        if path.suffix == ".jsonl":
            documents = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            document = json.loads(text)
            documents = document if isinstance(document, list) else [document]
        if len(documents) == 1 and isinstance(documents[0], dict) and "data" in documents[0]:
            return _read_perf_analyzer(documents[0], signature, batch_size)
        return _read_oip(documents, signature)
    except UsageError as error:
        raise BadPayload(str(error)) from error
    except BadPayload as error:
        raise BadPayload(f"{path}: {error}") from error
    except (*UNREADABLE, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _no_requests(path, error) from error


def _no_requests(path: Path, error: Exception) -> BadPayload:
    said = f"no {error}" if isinstance(error, KeyError) else str(error)
    said = (said or type(error).__name__).splitlines()[0][:200]
    return BadPayload(
        f"{path}: not requests ({said}); give an .npz of rows by input name, Open Inference "
        "Protocol requests as .json or .jsonl, or perf_analyzer's --input-data JSON"
    )


def needs_signature(path: Path) -> bool:
    """Whether the file at ``path`` lacks the signature of its tensors.

    Raises:
        BadPayload: it cannot be read.
    """
    if path.suffix == ".npz" or record_reader.is_records(path):
        return True
    if path.suffix == ".jsonl":
        return False
    try:
        document = json.loads(untrusted_files.read_text(path, MOST_BYTES))
    except UNREADABLE as error:
        raise _no_requests(path, error) from error
    return isinstance(document, dict) and "data" in document and "modelport" not in document


def _read_perf_analyzer(
    document: Any, signature: RequestSignature | None, batch_size: int
) -> Payloads:
    ours = document.get("modelport")
    if ours is not None:
        inputs, outputs, size = (ours[key] for key in ("inputs", "outputs", "batch_size"))
        reshape = {name: tuple(shape) for name, shape in ours["reshape"].items()}
        dims: Mapping[str, Sequence[int]] = {}
        answers = ours.get("answers")
    elif signature is not None:
        inputs = {spec.name: spec.datatype for spec in signature.inputs}
        outputs = {name: output.datatype for name, output in signature.outputs.items()}
        size = batch_size if signature.max_batch_size else 0
        reshape = signature.model_shapes
        dims = {
            spec.name: [-1 if isinstance(dim, str) else dim for dim in spec.dims]
            for spec in signature.inputs
        } | {name: output.dims for name, output in signature.outputs.items()}
        ours, answers = {}, document.get("validation_data")
    else:
        raise BadPayload("it has no datatypes, and the server states none")
    requests = _requests(document["data"], inputs, dims, size)
    expected = _requests(answers, outputs, dims, size) if answers else None
    if expected is not None and len(expected) != len(requests):
        raise BadPayload("the numbers of answers and requests differ")
    return Payloads(
        _some(requests),
        inputs,
        expected,
        reshape,
        _tolerance(ours.get("atol", ABSOLUTE_TOLERANCE)),
        _tolerance(ours.get("rtol", RELATIVE_TOLERANCE)),
        outputs,
        size,
    )


def _tolerance(value: Any) -> float:
    """Within NaN or infinity any answer would be right."""
    if not 0 <= float(value) < math.inf:
        raise BadPayload(f"{value!r} is not a tolerance")
    return float(value)


def _requests(
    entries: Any, datatypes: Mapping[str, str], dims: Mapping[str, Sequence[int]], batch_size: int
) -> tuple[Tensors, ...]:
    """Requests from perf_analyzer's entries, which may be nested in lists of streams."""
    steps = [step for one in entries for step in (one if isinstance(one, list) else [one])]
    rows = []
    for step in steps:
        if unknown := [name for name in step if name not in datatypes]:
            raise BadPayload(f"the model has no '{unknown[0]}'; it has {', '.join(datatypes)}")
        rows.append({n: _tensor(entry, datatypes[n], dims.get(n)) for n, entry in step.items()})
    if not batch_size:
        return tuple(rows)
    if 0 < len(rows) < batch_size:
        raise BadPayload(f"{len(rows)} entries do not make a batch of {batch_size}")
    groups = [rows[at : at + batch_size] for at in range(0, len(rows), batch_size)]
    return tuple(
        {name: np.stack([row[name] for row in group]) for name in group[0]}
        for group in groups
        if len(group) == batch_size
    )


def _tensor(entry: Any, datatype: str, dims: Sequence[int] | None) -> Array:
    """Read a tensor.

    Args:
        dims: its shape if the entry has none; one dim may be -1.
    """
    content = entry["content"] if isinstance(entry, dict) and "content" in entry else entry
    if datatype not in DTYPES:
        raise BadPayload(f"it holds no tensor of datatype {datatype}")
    if isinstance(content, dict):
        data = base64.b64decode(content["b64"], validate=True)
        flat = _lengths(data) if datatype == "BYTES" else np.frombuffer(data, DTYPES[datatype])
    elif datatype == "BYTES":
        flat = _strings(content)
    else:
        flat = np.array(content, DTYPES[datatype]).ravel()
    shape = entry.get("shape", dims) if isinstance(entry, dict) else dims
    return flat.reshape(shape if shape is not None else [len(flat)])


def _lengths(data: bytes) -> Array:
    """Decode BYTES as sent by Triton: four bytes of length, little endian, before each."""
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    return np.array([*found, None], np.object_)[:-1]


def _strings(values: Sequence[str]) -> Array:
    made = np.empty(len(values), np.object_)
    made[:] = [value.encode() for value in values]
    return made


def _read_oip(documents: Sequence[Any], signature: RequestSignature | None) -> Payloads:
    requests, expected = [], []
    datatypes: dict[str, str] = {}
    for document in documents:
        datatypes |= {one["name"]: one["datatype"] for one in document["inputs"]}
        requests.append(_oip_tensors(document["inputs"]))
        answers = [one for one in document.get("outputs", ()) if "data" in one]
        if answers:
            expected.append(_oip_tensors(answers))
    if expected and len(expected) != len(requests):
        raise BadPayload("some requests have outputs with data, and some have none")
    shapes = signature.model_shapes if signature else {}
    return Payloads(_some(tuple(requests)), datatypes, tuple(expected) or None, shapes)


def _oip_tensors(entries: Sequence[Any]) -> dict[str, Array]:
    found = {}
    for one in entries:
        flat = np.array(one["data"], np.object_ if one["datatype"] == "BYTES" else None).ravel()
        if one["datatype"] == "BYTES":
            found[one["name"]] = _strings(flat.tolist()).reshape(one["shape"])
        else:
            found[one["name"]] = flat.astype(DTYPES[one["datatype"]]).reshape(one["shape"])
    return found


def _read_records(path: Path, signature: RequestSignature | None) -> Payloads:
    names = None if signature is None else [spec.name for spec in signature.inputs]
    requests, expected, datatypes = recorded_calls.requests(path, names)
    if other := set(datatypes.values()) - DTYPES.keys():
        raise BadPayload(f"it holds a tensor of datatype {min(other)}")
    shapes = signature.model_shapes if signature else {}
    return Payloads(tuple(requests), datatypes, tuple(expected) or None, shapes)


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an ``.npz``.

    Raises:
        BadPayload: they are too large; damage raises any of ``UNREADABLE``.
    """
    # NumPy leaves a damaged file open if it opened the file itself.
    with untrusted_files.open_file(path) as opened:
        with zipfile.ZipFile(opened) as archive:
            needed = sum(member.file_size for member in archive.infolist())
        if needed > MOST_ARRAY_BYTES:
            raise BadPayload(f"its arrays have {needed} bytes, more than {MOST_ARRAY_BYTES}")
        opened.seek(0)
        file = np.load(opened, allow_pickle=False)
        return {name: file[name] for name in file.files}


def _read_npz(path: Path, signature: RequestSignature | None, batch_size: int) -> Payloads:
    arrays = read_arrays(path)
    if signature is None:
        raise BadPayload("needs the model's signature; give --model-config with its config.pbtxt")
    wanted = [spec.name for spec in signature.inputs]
    if missing := [name for name in wanted if name not in arrays]:
        raise BadPayload(f"has no '{missing[0]}', an input of the model; it has {sorted(arrays)}")
    outputs = [name for name in signature.outputs if name in arrays]
    labels = [LABELS] if LABELS in arrays and LABELS not in (*wanted, *outputs) else []
    counts = {name: len(arrays[name]) for name in (*wanted, *outputs, *labels)}
    rows = counts[wanted[0]]
    if len(set(counts.values())) > 1:
        raise BadPayload(f"has different numbers of rows: {counts}")
    if rows < batch_size:
        raise BadPayload(f"{rows} rows do not make a batch of {batch_size}")
    for spec in signature.inputs:  # rows may have the shape that the model itself takes
        fixed = [dim for dim in spec.dims if not isinstance(dim, str)]
        if len(fixed) == len(spec.dims) and arrays[spec.name].shape[1:] == spec.reshape:
            arrays[spec.name] = arrays[spec.name].reshape(rows, *fixed)
    known = {spec.name: spec.datatype for spec in signature.inputs}
    starts = range(0, rows - batch_size + 1, batch_size)

    def cut(names: Sequence[str]) -> tuple[Tensors, ...]:
        return tuple(
            {name: _typed(arrays[name][at : at + batch_size], known.get(name)) for name in names}
            for at in starts
        )

    return Payloads(
        _some(cut(wanted)),
        known,
        cut(outputs) if outputs else None,
        signature.model_shapes,
        batch_size=batch_size if signature.max_batch_size else 0,
        labels=tuple(one[LABELS] for one in cut(labels)) if labels else None,
    )


def _typed(array: Array, datatype: str | None) -> Array:
    if datatype is None or array.dtype == DTYPES[datatype]:
        return array
    if datatype == "BYTES":
        return _strings([str(v) for v in array.ravel().tolist()]).reshape(array.shape)
    made = array.astype(DTYPES[datatype])
    if not np.array_equal(made, array):
        raise BadPayload(f"{array.dtype} values do not fit {datatype}")
    return made


def _some(requests: tuple[Tensors, ...]) -> tuple[Tensors, ...]:
    if not requests:
        raise BadPayload("it holds no requests")
    return requests
