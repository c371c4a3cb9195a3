"""What is sent, and what must come back: drawn from the model's ranges, or recorded in a file.

A payload file is the ``--input-data`` JSON of perf_analyzer ("data", "validation_data") with one
key more, which perf_analyzer passes over::

    "modelport": {"inputs": {"tokens": "INT64"}, "outputs": {"probability": "FP32"},
                  "reshape": {"seq_lens": []}, "atol": 5e-6, "rtol": 1e-5}

Recorded requests may also be an Open Inference Protocol request ("outputs" with data are what must
come back), one such in every line, or an ``.npz`` of rows by the tensors' names.
"""

from __future__ import annotations

import base64
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loadtests.users.signature import Input, Signature, model_shapes

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

#: Drawn for one run; asked in turn.
DEFAULT_COUNT = 32
#: As the exports' own generator draws where a model declares no range.
DEFAULT_LONGEST, DEFAULT_LARGEST = 64, 127
THREE_SIGMA = 3.0
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


#: What a file that cannot be read, or was cut off, leads to.
UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile)


class BadPayload(ValueError):
    """A payload file is unreadable, or nothing can be drawn for the model; see the message."""


@dataclass(frozen=True)
class Payloads:
    """Requests, in the shapes of the wire, the batch first."""

    requests: tuple[Tensors, ...]
    #: Of the inputs, by name.
    datatypes: Mapping[str, str]
    #: What must come back to each; None: what the target itself answers first.
    expected: tuple[Tensors, ...] | None = None
    #: input → the shape after the batch that the model itself takes, where it is another.
    reshape: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    absolute_tolerance: float = ABSOLUTE_TOLERANCE
    relative_tolerance: float = RELATIVE_TOLERANCE
    output_datatypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Of the first request."""
        first = next(iter(self.requests[0].values()))
        return int(first.shape[0]) if first.ndim else 1


def draw(signature: Signature, batch_size: int, seed: int, count: int = DEFAULT_COUNT) -> Payloads:
    """``count`` requests from the declared ranges and axes, as the exports draw theirs.

    Raises:
        BadPayload: the batch is larger than the model's, or an input cannot be drawn.
    """
    limit = signature.max_batch_size
    if batch_size > max(limit, 1) and limit != 1:
        raise BadPayload(
            f"--batch-size {batch_size}: the model takes {limit or 'no batches, 1'} at most"
        )
    generator = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        sizes = {
            name: int(
                generator.integers(low, (low + DEFAULT_LONGEST) if high is None else high + 1)
            )
            for name, (low, high) in signature.axes.items()
        }
        leading = (batch_size,) if limit else ()
        requests.append(
            {spec.name: _values(spec, leading, sizes, generator) for spec in signature.inputs}
        )
    return Payloads(
        tuple(requests),
        {spec.name: spec.datatype for spec in signature.inputs},
        reshape=model_shapes(signature),
    )


def _values(
    spec: Input, leading: tuple[int, ...], sizes: Mapping[str, int], generator: np.random.Generator
) -> Array:
    if spec.datatype not in DTYPES or spec.datatype == "BYTES":
        raise BadPayload(
            f"input '{spec.name}' is {spec.datatype}, for which nothing can be drawn; "
            "give requests with --data"
        )
    dtype = DTYPES[spec.datatype]
    shape = leading + tuple(sizes[d] if isinstance(d, str) else d for d in spec.dims)
    high = sizes.get(spec.high) if isinstance(spec.high, str) else spec.high
    if dtype.kind == "b":
        return generator.integers(0, 2, shape).astype(dtype)
    if dtype.kind != "f":
        low = int(spec.low or 0)
        top = int(high) if high is not None else low + DEFAULT_LARGEST
        top = min(top, int(np.iinfo(dtype).max))
        return generator.integers(low, top, shape, endpoint=True).astype(dtype)
    if spec.low is None and high is None:
        return generator.standard_normal(shape).astype(dtype)
    low_end = spec.low if spec.low is not None else float(high or 0) - 2 * THREE_SIGMA
    return generator.uniform(
        low_end, low_end + 2 * THREE_SIGMA if high is None else high, shape
    ).astype(dtype)


# -- files ----------------------------------------------------------------------------------------


def write(payloads: Payloads, path: Path) -> None:
    """As a payload file."""
    ours: dict[str, Any] = {
        "inputs": dict(payloads.datatypes),
        "outputs": dict(payloads.output_datatypes),
        "reshape": {name: list(shape) for name, shape in payloads.reshape.items()},
        "atol": payloads.absolute_tolerance,
        "rtol": payloads.relative_tolerance,
    }
    document: dict[str, Any] = {"data": [_entry(one) for one in payloads.requests]}
    if payloads.expected is not None:
        document["validation_data"] = [_entry(one) for one in payloads.expected]
        if not payloads.output_datatypes:
            first = payloads.expected[0]
            ours["outputs"] = {name: _word(array) for name, array in first.items()}
    path.write_text(json.dumps(document | {"modelport": ours}))


def _entry(tensors: Tensors) -> dict[str, Any]:
    return {
        name: {"content": _content(array), "shape": list(array.shape)}
        for name, array in tensors.items()
    }


def _content(array: Array) -> Any:
    if array.dtype.kind == "f":
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return {"b64": base64.b64encode(little.tobytes()).decode()}
    return [v.decode() if isinstance(v, bytes) else v for v in array.ravel().tolist()]


def _word(array: Array) -> str:
    if array.dtype.kind in "OSU":
        return "BYTES"
    return next(word for word, dtype in DTYPES.items() if dtype == array.dtype.newbyteorder("<"))


def read(path: Path, signature: Signature | None = None, batch_size: int = 1) -> Payloads:
    """The requests in a file of any of the forms above.

    Args:
        signature: needed where the file does not say the datatypes; it may be needed for names.
        batch_size: rows in a request, of an ``.npz``.

    Raises:
        BadPayload: it cannot be read, or does not fit the model.
    """
    try:
        if path.suffix == ".npz":
            return _read_npz(path, signature, batch_size)
        text = path.read_text()
        documents = (
            [json.loads(line) for line in text.splitlines() if line.strip()]
            if (path.suffix == ".jsonl")
            else [json.loads(text)]
        )
        if len(documents) == 1 and isinstance(documents[0], dict) and "data" in documents[0]:
            return _read_perf_analyzer(documents[0], signature)
        return _read_oip(documents, signature)
    except BadPayload as error:
        raise BadPayload(f"{path}: {error}") from error
    except (*UNREADABLE, KeyError, TypeError, IndexError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise BadPayload(
            f"{path}: not requests ({said}); give an .npz of rows by input name, Open Inference "
            "Protocol requests as .json or .jsonl, or perf_analyzer's --input-data JSON"
        ) from error


def needs_signature(path: Path) -> bool:
    """Whether the file at ``path`` leaves open what the tensors are.

    Raises:
        BadPayload: it cannot be read.
    """
    if path.suffix == ".npz":
        return True
    if path.suffix == ".jsonl":
        return False
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadPayload(f"{path}: {error}") from error
    return isinstance(document, dict) and "data" in document and "modelport" not in document


def _read_perf_analyzer(document: Any, signature: Signature | None) -> Payloads:
    ours = document.get("modelport") or {}
    datatypes = ours.get("inputs") or (
        {spec.name: spec.datatype for spec in signature.inputs} if signature else None
    )
    if not datatypes:
        raise BadPayload("the datatypes are not in it, and the server does not tell them")
    validation = document.get("validation_data")
    outputs = ours.get("outputs") or {}
    expected = None
    if validation:
        if len(validation) != len(document["data"]):
            raise BadPayload("validation_data has another number of entries than data")
        expected = tuple(
            {name: _tensor(entry, outputs.get(name, "FP32")) for name, entry in one.items()}
            for one in validation
        )
    requests = tuple(
        {name: _tensor(entry, datatypes[name]) for name, entry in one.items()}
        for one in document["data"]
    )
    return Payloads(
        _some(requests),
        datatypes,
        expected,
        {name: tuple(shape) for name, shape in (ours.get("reshape") or {}).items()}
        or (model_shapes(signature) if signature else {}),
        float(ours.get("atol", ABSOLUTE_TOLERANCE)),
        float(ours.get("rtol", RELATIVE_TOLERANCE)),
        outputs,
    )


def _tensor(entry: Any, datatype: str) -> Array:
    content = entry["content"] if isinstance(entry, dict) and "content" in entry else entry
    dtype = DTYPES[datatype]
    if isinstance(content, dict):
        flat = np.frombuffer(base64.b64decode(content["b64"]), dtype)
    elif datatype == "BYTES":
        flat = _strings(content)
    else:
        flat = np.array(content, dtype).ravel()
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return flat.reshape(shape if shape is not None else [len(flat)])


def _strings(values: Sequence[str]) -> Array:
    made = np.empty(len(values), np.object_)
    made[:] = [value.encode() for value in values]
    return made


def _read_oip(documents: Sequence[Any], signature: Signature | None) -> Payloads:
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
    shapes = model_shapes(signature) if signature else {}
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


def _read_npz(path: Path, signature: Signature | None, batch_size: int) -> Payloads:
    # NumPy leaves open what it opened itself, where the file is damaged.
    with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if signature is None:
        raise BadPayload("needs the model's signature; give --config with its config.pbtxt")
    wanted = [spec.name for spec in signature.inputs]
    if missing := [name for name in wanted if name not in arrays]:
        raise BadPayload(f"has no '{missing[0]}', which the model takes; it has {sorted(arrays)}")
    outputs = [name for name in signature.outputs if name in arrays]
    counts = {name: len(arrays[name]) for name in (*wanted, *outputs)}
    rows = counts[wanted[0]]
    if len(set(counts.values())) > 1:
        raise BadPayload(f"has different numbers of rows: {counts}")
    if rows < batch_size:
        raise BadPayload(f"{rows} rows are no batch of {batch_size}")
    known = {spec.name: spec.datatype for spec in signature.inputs}
    starts = range(0, rows - batch_size + 1, batch_size)

    def cut(names: Sequence[str]) -> tuple[Tensors, ...]:
        return tuple(
            {name: _typed(arrays[name][at : at + batch_size], known.get(name)) for name in names}
            for at in starts
        )

    expected = cut(outputs) if outputs else None
    return Payloads(_some(cut(wanted)), known, expected, model_shapes(signature))


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
        raise BadPayload("no request in it")
    return requests
