"""Differences between what is published and what an export would publish, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from modelport.gateway.repository import config
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import TensorSpec

#: So many hexadecimal digits tell two files apart.
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
NAMED = 5  # how many differences a message lists before it only counts


def contract(found: ModelConfig) -> dict[str, Any]:
    """What a client relies on, and what the gateway loads by."""
    signature = config.signature(found)
    tensors = [("input", spec) for spec in signature.inputs]
    tensors += [("output", spec) for spec in signature.outputs]
    axes = {
        f"axis '{axis.name}'": f"{axis.minimum}..{'' if axis.maximum is None else axis.maximum}"
        for axis in signature.axes.values()
    }
    return {
        "platform": found.platform,
        "file": found.default_model_filename,
        "max_batch_size": signature.max_batch_size,
        **{f"{kind} '{spec.name}'": _tensor(spec) for kind, spec in tensors},
        "inputs in order": [spec.name for spec in signature.inputs],
        "outputs in order": [spec.name for spec in signature.outputs],
        **axes,
        "padding": {axis.name: axis.padding for axis in signature.axes.values()},
    }


def _tensor(spec: TensorSpec) -> str:
    dims = ",".join(map(str, spec.dims))
    text = f"{spec.datatype}[{dims}]"
    if spec.minimum is not None or spec.maximum is not None:
        low, high = ("" if bound is None else bound for bound in (spec.minimum, spec.maximum))
        text += f"={low}..{high}"
    if spec.reshape is not None:
        text += f" reshape {list(spec.reshape)}"
    return f"{text} optional" if spec.optional else text


def image_parameters(found: ModelConfig) -> dict[str, str]:
    """What the configuration says of pictures."""
    parameters = found.parameters.items()
    return {key: value.string_value for key, value in parameters if key.startswith("image.")}


def between(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Where the two differ, field by field; empty where they do not."""
    found = list(_differences(there, here, ""))
    rest = len(found) - NAMED
    listed = ", ".join(found[:NAMED])
    return f"{listed} and {rest} more" if rest > 0 else listed


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in dict.fromkeys((*there, *here)):
        old, new = there.get(key), here.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif _plain(old) != _plain(new):
            yield f"{prefix}{key} is {_plain(old)} there and {_plain(new)} here"


def _plain(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_plain, value))}]"
    return _DIGEST.sub(r"\1…", str(value))
