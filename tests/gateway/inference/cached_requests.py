"""A request to cache, and a cache to put it in."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from modelport.gateway.inference.cache import CachedInfer, ResponseCache
from modelport.gateway.types import Datatype, Deadline, InferRequest, InferResponse, Tensor

SIZE = 2**20


async def nothing(request: InferRequest, deadline: Deadline) -> InferResponse:
    return InferResponse("m", 1, [])


def keyed(kind: type[CachedInfer] = CachedInfer) -> CachedInfer:
    return kind(nothing, ResponseCache(SIZE), "m", 1)


def subject() -> InferRequest:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    b = np.arange(6, dtype=np.uint16)
    inputs = [Tensor("a", Datatype.FP32, a), Tensor("b", Datatype.BF16, b)]
    return InferRequest("m", inputs, ("y", "z"))


def copied(request: InferRequest) -> InferRequest:
    """Equal content in other memory, inputs in another order."""
    inputs = [Tensor(t.name, t.datatype, np.copy(t.data)) for t in reversed(request.inputs)]
    return replace(request, inputs=inputs, parameters=dict(request.parameters), id="another")
