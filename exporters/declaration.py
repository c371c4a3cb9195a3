"""Tensors as the command line declares them: ``--input image:FP32[3,224,224]``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from exporters.errors import UsageError
from gateway.types import Axis, Datatype, TensorSpec

#: Longest axis of an input whose length nothing bounds.
DEFAULT_LONGEST = 128

_INPUT = re.compile(
    r"(?P<name>[^:\[\]=]+):(?P<datatype>[A-Z0-9]+)\[(?P<dims>[^\]]*)\]"
    r"(?:=(?P<low>-?[\d.e+-]*?)\.\.(?P<high>-?[\d.e+-]*|[A-Za-z_]\w*))?"
)
_AXIS = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:=(?P<low>\d+)\.\.(?P<high>\d+))?")


def parse_tensors(
    texts: Sequence[str], flag: str = "--input"
) -> tuple[list[TensorSpec], dict[str, Axis]]:
    """The values of a flag, as ``parse_tensor``; bounds of an axis may stand at any of them."""
    specs: list[TensorSpec] = []
    axes: dict[str, Axis] = {}
    for text in texts:
        parsed, named = parse_tensor(text, flag)
        specs.append(parsed)
        axes.update({n: axis for n, axis in named.items() if n not in axes or "=" in text})
    return specs, axes


def parse_tensor(text: str, flag: str = "--input") -> tuple[TensorSpec, dict[str, Axis]]:
    """One value: ``NAME:DATATYPE[DIM,...]``, and ``=LOW..HIGH`` for the range of what it holds.

    Dims exclude the batch dimension. A dim is a size, or the name of a dynamic axis, which may have
    bounds: ``tokens:INT64[sequence=1..64]=0..511``. Without dims it is one scalar per batch
    element, which travels as ``[1]``.

    Raises:
        UsageError: the text has another form.
    """
    match = _INPUT.fullmatch(text.strip())
    try:
        if match is None:
            raise ValueError("it has another form")
        datatype = Datatype(match["datatype"])
        axes: dict[str, Axis] = {}
        dims = [_dim(dim.strip(), axes) for dim in match["dims"].split(",") if dim.strip()]
        low, high = _bound(match["low"]), _bound(match["high"])
    except ValueError as error:
        raise UsageError(
            f"{flag} '{text}': {error}; write NAME:DATATYPE[DIMS], such as "
            "'image:FP32[3,224,224]' or 'tokens:INT64[sequence=1..64]=0..511'"
        ) from error
    name = match["name"].strip()
    if not dims:
        return TensorSpec(name, datatype, (1,), low, high, reshape=()), axes  # type: ignore[arg-type]
    return TensorSpec(name, datatype, tuple(dims), low, high), axes  # type: ignore[arg-type]


def _dim(text: str, axes: dict[str, Axis]) -> int | str:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    match = _AXIS.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is neither a size nor the name of an axis")
    low, high = int(match["low"] or 1), int(match["high"] or DEFAULT_LONGEST)
    if not 0 < low <= high:
        raise ValueError(f"the bounds of axis '{match['name']}' are empty")
    axes[match["name"]] = Axis(match["name"], low, high)
    return match["name"]


def _bound(text: str | None) -> float | str | None:
    if not text:
        return None
    if text[0].isalpha() or text[0] == "_":
        return text
    return float(text) if any(c in text for c in ".e") else int(text)
