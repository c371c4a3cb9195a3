"""A file of requests and the answers they must get: perf_analyzer's ``--input-data``.

    {"data":            [{"tokens": {"content": [7, 99], "shape": [1, 2]}, ...}, ...],
     "validation_data": [{"probability": {"content": [0.03], "shape": [1, 1]}}, ...],
     "modelport":       {"inputs": {"tokens": "INT64", ...}, "outputs": {"probability": "FP32"},
                         "reshape": {"seq_lens": []}, "atol": 5e-06, "rtol": 1e-05}}

An entry is one request, shapes are those of the wire with the batch first; ``content`` is flat, or
``{"b64": ...}`` with the little-endian bytes. ``reshape`` has the dims behind the batch that the
model itself takes, where they differ. ``modelport sample`` writes it; perf_analyzer passes over the
last key.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}


class BadCases(ValueError):
    """The file is no such file; the message names it."""


@dataclass(frozen=True)
class Case:
    """One request: arrays by name in the wire's shapes, and the answer it must get."""

    inputs: Mapping[str, Array]
    expected: Mapping[str, Array]


@dataclass(frozen=True)
class Cases:
    """An answer is right where ``|error| <= atol + rtol * |expected|``."""

    cases: tuple[Case, ...]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    atol: float
    rtol: float
    reshape: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def wrong(self, case: Case, answer: Mapping[str, Array]) -> str | None:
        """What is wrong with an answer to ``case``; None: nothing."""
        for name, expected in case.expected.items():
            got = answer.get(name)
            if got is None:
                return f"output '{name}' is missing"
            if got.shape != expected.shape:
                return f"output '{name}' has shape {list(got.shape)}, not {list(expected.shape)}"
            error = np.abs(got.astype(np.float64) - expected.astype(np.float64))
            if not (error <= self.atol + self.rtol * np.abs(expected.astype(np.float64))).all():
                return f"output '{name}' is off by {float(np.nanmax(error, initial=0.0)):.3g}"
        return None


def read(path: Path) -> Cases:
    """The cases in ``path``.

    Raises:
        BadCases: it cannot be read, or lacks what a case needs.
    """
    try:
        document = json.loads(path.read_text())
        ours = document["modelport"]
        asked, answered = document["data"], document["validation_data"]
        if not asked or len(asked) != len(answered):
            raise ValueError("'data' and 'validation_data' must be lists of one length, not empty")
        found = tuple(
            Case(_arrays(inputs, ours["inputs"]), _arrays(outputs, ours["outputs"]))
            for inputs, outputs in zip(asked, answered, strict=True)
        )
        return Cases(
            found,
            inputs=ours["inputs"],
            outputs=ours["outputs"],
            atol=float(ours["atol"]),
            rtol=float(ours["rtol"]),
            reshape={name: tuple(dims) for name, dims in ours.get("reshape", {}).items()},
        )
    except OSError as error:
        raise BadCases(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise BadCases(
            f"{path} is no file of requests ({error}); 'modelport sample' writes one"
        ) from error


def _arrays(entry: Mapping[str, Any], datatypes: Mapping[str, str]) -> dict[str, Array]:
    return {name: _array(entry[name], DTYPES[word]) for name, word in datatypes.items()}


def _array(tensor: Mapping[str, Any], dtype: np.dtype[Any]) -> Array:
    content = tensor["content"]
    if isinstance(content, Mapping):
        flat = np.frombuffer(base64.b64decode(content["b64"], validate=True), dtype)
    else:
        flat = np.array(content, dtype)
    return flat.reshape(tensor["shape"])


def write(path: Path, cases: Cases) -> None:
    """``cases`` as a file that ``read`` reads back bit for bit."""
    document = {
        "data": [_entry(case.inputs) for case in cases.cases],
        "validation_data": [_entry(case.expected) for case in cases.cases],
        "modelport": {
            "inputs": dict(cases.inputs),
            "outputs": dict(cases.outputs),
            "reshape": {name: list(dims) for name, dims in cases.reshape.items()},
            "atol": cases.atol,
            "rtol": cases.rtol,
        },
    }
    path.write_text(json.dumps(document))


def _entry(arrays: Mapping[str, Array]) -> dict[str, Any]:
    return {
        name: {"content": _content(array), "shape": list(array.shape)}
        for name, array in arrays.items()
    }


def _content(array: Array) -> Sequence[Any] | dict[str, str]:
    """Floats as bytes: no digit is lost, and what is not finite has no JSON."""
    if array.dtype.kind != "f":
        return list(array.ravel().tolist())
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return {"b64": base64.b64encode(little.tobytes()).decode()}
