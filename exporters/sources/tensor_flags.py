"""Tensor declarations on the command line: ``--input image:FP32[3,224,224]``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from modelport.gateway.errors import UsageError, suggestion
from modelport.gateway.types import NUMPY_DTYPES, Axis, Datatype, ModelSignature, TensorSpec

#: Longest size of a dynamic axis without declared bounds.
DEFAULT_LONGEST = 128
#: Runtimes index a dimension by 32 bits.
MAX_SIZE = 2**31 - 1

_INPUT = re.compile(
    r"(?P<name>[^:\[\]=]+):(?P<datatype>\w+)\[(?P<dims>[^\]]*)\]"
    r"(?:=(?P<low>-?[\d.e+-]*?)\.\.(?P<high>-?[\d.e+-]*|[A-Za-z_]\w*))?"
)
_AXIS = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:=(?P<low>\d+)\.\.(?P<high>\d+))?")


def parse_tensors(
    inputs: Sequence[str], outputs: Sequence[str] = ()
) -> tuple[list[TensorSpec], list[TensorSpec], dict[str, Axis]]:
    """Parse the values of ``--input`` and ``--output-tensor``, and the axes of all of them.

    A value is ``NAME:DATATYPE[DIM,...]``, and ``=LOW..HIGH`` for the range of its values. Dims
    exclude the batch dimension. A dim is a size, -1 for an open one, or the name of a dynamic axis,
    which may have bounds: ``tokens:INT64[sequence=1..64]=0..511``; any one of the tensors that have
    an axis may declare them. Without dims the tensor is one scalar per batch element, ``[1]`` on
    the wire.

    Raises:
        UsageError: a value has another form, a name occurs twice, two values give an axis different
            bounds, or a range ends at an axis that no tensor has.
    """
    axes = _Axes()
    sides = [
        [_tensor(_Value(flag, text), axes) for text in texts]
        for flag, texts in (("--input", inputs), ("--output-tensor", outputs))
    ]
    for flag, specs in zip(("--input", "--output-tensor"), sides, strict=True):
        names = [spec.name for spec in specs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"{flag} declares '{twice[0]}' twice; declare each tensor once")
    for spec in (*sides[0], *sides[1]):
        if isinstance(spec.maximum, str) and spec.maximum not in axes.written:
            raise UsageError(
                f"the range of '{spec.name}' ends at axis '{spec.maximum}', which no tensor has; "
                f"{suggestion(spec.maximum, axes.written) or 'name an axis of a tensor'}"
            )
    return sides[0], sides[1], axes.bounded()


class _Value(NamedTuple):
    """The value of a flag as it was written."""

    flag: str
    text: str

    def __str__(self) -> str:
        return f"{self.flag} '{self.text}'"


class _Axes:
    """The axes of all tensors of a model, with the value that declared each and its bounds."""

    def __init__(self) -> None:
        self.written: dict[str, tuple[_Value, Axis | None]] = {}

    def add(self, name: str, bounds: tuple[int, int] | None, value: _Value) -> None:
        axis = None if bounds is None else Axis(name, *bounds)
        other, known = self.written.setdefault(name, (value, axis))
        if known is None:
            self.written[name] = value, axis
        elif axis is not None and axis != known:
            raise UsageError(
                f"{other} and {value} give axis '{name}' different bounds, "
                f"{known.minimum}..{known.maximum} and {axis.minimum}..{axis.maximum}; "
                "write them once, or name two axes"
            )

    def bounded(self) -> dict[str, Axis]:
        """Every axis by name; axes without declared bounds get the default."""
        written = self.written.items()
        return {name: axis or Axis(name, 1, DEFAULT_LONGEST) for name, (_, axis) in written}


def lengths_chosen(signature: ModelSignature, inputs: Sequence[str]) -> str:
    """The remedy for lengths that ``inputs``, values of ``--input``, leave open; empty if none."""
    written = " ".join(inputs)
    chosen = {name: axis for name, axis in signature.axes.items() if f"{name}=" not in written}
    holders = [spec for spec in signature.inputs if not chosen.keys().isdisjoint(spec.dims)]
    if not holders:
        return ""
    name = next(dim for dim in holders[0].dims if dim in chosen)
    dims = [f"{d}=LOW..HIGH" if d in chosen else str(d) for d in holders[0].dims]
    tried = chosen[str(name)]
    return (
        f"nothing declares the lengths of '{name}', so that {tried.minimum} to {tried.maximum} are "
        "tried; declare those that the model accepts, such as --input "
        f"'{holders[0].name}:{holders[0].datatype}[{','.join(dims)}]'"
    )


def _tensor(value: _Value, axes: _Axes) -> TensorSpec:
    match = _INPUT.fullmatch(value.text.strip())
    try:
        if match is None:
            raise ValueError("it is not understood")
        name, datatype = match["name"].strip(), _datatype(match["datatype"])
        if not name.isprintable():
            raise ValueError(f"the name {name!r} is not printable")
        texts = [dim.strip() for dim in match["dims"].split(",") if dim.strip()]
        dims = tuple(_dim(dim, axes, value) for dim in texts)
        low, high = (_held(_bound(match[end]), datatype) for end in ("low", "high"))
        if isinstance(low, str):
            raise ValueError(f"a range begins with a number, not '{low}'")
        if low is not None and isinstance(high, int | float) and not low <= high:
            raise ValueError(f"the range {low}..{high} is empty")
    except ValueError as error:
        raise UsageError(
            f"{value}: {error}; write NAME:DATATYPE[DIMS], such as "
            "'image:FP32[3,224,224]' or 'tokens:INT64[sequence=1..64]=0..511'"
        ) from error
    if not dims:
        return TensorSpec(name, datatype, (1,), low, high, reshape=())
    return TensorSpec(name, datatype, dims, low, high)


def _datatype(text: str) -> Datatype:
    if text not in list(Datatype):
        raise ValueError(
            f"'{text}' is not a datatype; {suggestion(text, Datatype) or ', '.join(Datatype)}"
        )
    return Datatype(text)


def _dim(text: str, axes: _Axes, value: _Value) -> int | str:
    if text == "-1":
        return -1
    if text.isdecimal() and int(text) > 0:
        return _size(text)
    match = _AXIS.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is neither a size, -1, nor the name of an axis")
    bounds = None if match["low"] is None else (_size(match["low"]), _size(match["high"]))
    if bounds is not None and not (0 <= bounds[0] <= bounds[1] and bounds[1]):
        raise ValueError(f"the bounds of axis '{match['name']}' are empty")
    axes.add(match["name"], bounds, value)
    return match["name"]


def _size(text: str) -> int:
    if int(text) > MAX_SIZE:
        raise ValueError(f"'{text}' is larger than {MAX_SIZE}")
    return int(text)


def _bound(text: str | None) -> float | str | None:
    if not text:
        return None
    if text[0].isalpha() or text[0] == "_":
        return text
    return float(text) if any(c in text for c in ".e") else int(text)


def _held(bound: float | str | None, datatype: Datatype) -> float | str | None:
    """``bound`` as a value of ``datatype``; raise ``ValueError`` if it has no such value."""
    if bound is None or isinstance(bound, str) or datatype in (Datatype.BF16, Datatype.BYTES):
        return bound
    dtype = NUMPY_DTYPES[datatype]
    if dtype.kind == "f":
        least, most = float(np.finfo(dtype).min), float(np.finfo(dtype).max)
    elif dtype.kind == "b":
        least, most = 0, 1
    else:
        least, most = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    if not least <= bound <= most or (dtype.kind != "f" and bound % 1):
        raise ValueError(f"{bound} is not a value of {datatype}")
    return bound if dtype.kind == "f" else int(bound)
