"""Padding declared in ``config.pbtxt``: the axis and the value with which inputs may be padded.

padding.sequence = "0"             every input that has the axis, with 0
padding.sequence = "ids=1,mask=0"  a value for each of them
"""

from __future__ import annotations

import math

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import NUMPY_DTYPES, Datatype, TensorSpec

Padding = float | tuple[tuple[str, float], ...]


def to_text(padding: Padding) -> str:
    if isinstance(padding, tuple):
        return ",".join(f"{name}={_text(value)}" for name, value in padding)
    return _text(padding)


def _text(value: float) -> str:
    """All digits of ``value``, because token ids may be large."""
    return repr(value).removesuffix(".0")


def parse(key: str, text: str, axis: str, inputs: tuple[TensorSpec, ...]) -> Padding:
    """Parse the value that the parameter ``key`` declares for ``axis``.

    Raises:
        InvalidArgument: no input has the axis, or the value is invalid for one of them.
    """
    having = {spec.name: spec for spec in inputs if axis in spec.dims}
    if not having:
        raise InvalidArgument(
            f"parameter '{key}': no input has an axis '{axis}'; name it in 'axes.<input>'"
        )
    padding: Padding
    if "=" not in text:
        padding = _number(key, text)
        values = dict.fromkeys(having, padding)
    else:
        pairs = (part.rpartition("=") for part in text.split(","))
        padding = tuple((name.strip(), _number(key, value)) for name, _, value in pairs)
        values = dict(padding)
        if sorted(name for name, _ in padding) != sorted(having):
            names = ",".join(f"{name}=<value>" for name in having)
            raise InvalidArgument(f"parameter '{key}' must be a number, or '{names}'")
    for name, value in values.items():
        _check(key, having[name], value)
    return padding


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidArgument(f"parameter '{key}': '{text.strip()}' is not a number") from None


def _check(key: str, spec: TensorSpec, value: float) -> None:
    """Raise unless ``value`` is valid for the input."""
    dtype = NUMPY_DTYPES[spec.datatype]
    low, high = spec.minimum, spec.maximum
    allowed = (low is None or value >= low) and (not isinstance(high, float | int) or value <= high)
    if dtype.kind in "iu" and spec.datatype is not Datatype.BF16:
        info = np.iinfo(dtype)
        allowed = allowed and value.is_integer() and info.min <= value <= info.max
    if dtype.kind in "bO":
        allowed = value == 0  # false, and empty
    if not allowed or math.isnan(value):
        raise InvalidArgument(
            f"parameter '{key}': {value:g} is not a valid value of input '{spec.name}'"
        )
