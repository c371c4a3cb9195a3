"""Requests whose answers disagreed, kept for a person to see.

An example is a request of the Open Inference Protocol as ``modelport infer`` sends it, together
with the baseline's outputs, which makes it a recorded request of ``modelport gate --data``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from modelport.gateway.rollout.traffic.answer_comparison import numbers
from modelport.gateway.types import Datatype, InferRequest, Tensor

#: Most elements of a tensor, and bytes of its texts, in an example.
MAX_ELEMENTS = 65_536
MAX_TEXT_BYTES = 262_144


def example(
    request: InferRequest,
    stage: int,
    baseline: Sequence[Tensor],
    candidate: Sequence[Tensor] | None,
) -> dict[str, Any]:
    """Describe a request, and the outputs of both sides, as JSON values.

    Tensors that are too large, or texts that are not UTF-8, have no ``data``.
    """
    document: dict[str, Any] = {
        "inputs": [_tensor(each) for each in request.inputs],
        "outputs": [_tensor(each) for each in baseline],
        "candidate_outputs": None if candidate is None else [_tensor(each) for each in candidate],
        "stage": stage,
    }
    if request.id:
        document["id"] = request.id
    if request.parameters:
        document["parameters"] = dict(request.parameters)
    return document


def _tensor(tensor: Tensor) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": tensor.name,
        "datatype": tensor.datatype.value,
        "shape": list(tensor.data.shape),
    }
    data = _data(tensor)
    if data is not None:
        entry["data"] = data
    return entry


def _data(tensor: Tensor) -> list[Any] | None:
    if tensor.data.size > MAX_ELEMENTS:
        return None
    if tensor.datatype is Datatype.BYTES:
        items = tensor.data.reshape(-1).tolist()
        if sum(map(len, items)) > MAX_TEXT_BYTES:
            return None
        try:
            return [item.decode() for item in items]
        except UnicodeDecodeError:
            return None
    values = numbers(tensor).reshape(-1)
    if values.dtype.kind == "f" and not np.all(np.isfinite(values)):
        # JSON has no such numbers.
        return [each if np.isfinite(each) else _WORDS[str(each)] for each in values.tolist()]
    return list(values.tolist())


_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
