"""A check that a model's answers depend on their own requests only.

The runtimes' modules find state in the artifact and reset it; this check runs the model, and finds
state of any other kind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from modelport.gateway.backends.embedded import warmup
from modelport.gateway.errors import ModelportError
from modelport.gateway.types import (
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)

#: A difference counts if it shows in ``ENOUGH`` of ``TRIES`` comparisons, because a rounding error
#: may change a decision once.
TRIES, ENOUGH = 3, 2
#: The relative error of the outputs, above that of any order of additions.
TOLERANCES = {Datatype.FP16: 1e-2, Datatype.BF16: 5e-2, Datatype.FP32: 1e-3, Datatype.FP64: 1e-6}

Run = Callable[[InferRequest], InferResponse]


def differing_output(run: Run, model_name: str, signature: ModelSignature) -> str:
    """The name of an output that differs between equal requests with another between them.

    Empty if there is none, or if the model refuses the synthetic requests.
    """
    if not warmup.is_worth_warming(signature, 1):
        return ""
    deadline = time.monotonic() + warmup.WARMUP_BUDGET_SECONDS
    same = list(warmup.samples(signature, 1))
    other = list(_varied(same, signature.inputs))
    found: list[str] = []
    try:
        first = run(InferRequest(model_name, same))
        for number in range(1, TRIES + 1):
            for _ in range(number):  # a state may be the same after each other request
                with contextlib.suppress(ModelportError):
                    run(InferRequest(model_name, other))
                if time.monotonic() > deadline:
                    return ""
            found += _differing(first, run(InferRequest(model_name, same)))[:1]
            if not found:
                return ""
    except ModelportError:
        return ""
    return found[0] if len(found) >= ENOUGH else ""


def _varied(tensors: Iterable[Tensor], specs: Iterable[TensorSpec]) -> Iterator[Tensor]:
    """``tensors`` with other values, within the bounds of ``specs``."""
    random = np.random.default_rng(0)
    by_name = {spec.name: spec for spec in specs}
    for tensor in tensors:
        spec, data = by_name[tensor.name], tensor.data
        if isinstance(spec.maximum, str):  # the size of an axis
            yield tensor
            continue
        if spec.datatype is Datatype.BYTES:
            varied = np.full(data.shape, b"a", dtype=object)
        elif spec.datatype is Datatype.BF16:  # 0.5 to 2
            varied = random.integers(0x3F00, 0x4000, data.shape, np.uint16)
        elif data.dtype.kind == "f":
            varied = random.standard_normal(data.shape).astype(data.dtype)
        else:  # integers may be indices, so that only the smallest are safe
            varied = data + random.integers(0, 2, data.shape).astype(data.dtype)
        if data.dtype.kind in "iuf" and (spec.minimum is not None or spec.maximum is not None):
            varied = np.clip(varied, spec.minimum, spec.maximum).astype(data.dtype)
        yield Tensor(tensor.name, tensor.datatype, varied)


def _differing(first: InferResponse, second: InferResponse) -> list[str]:
    pairs = zip(first.outputs, second.outputs, strict=True)
    return [a.name for a, b in pairs if not _alike(a, b)]


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.data.shape != b.data.shape:
        return False
    tolerance = TOLERANCES.get(a.datatype)
    if tolerance is None:
        return bool(np.array_equal(a.data, b.data))
    left, right = (_numbers(tensor) for tensor in (a, b))
    scale = np.max(np.abs(left), initial=0, where=np.isfinite(left))
    return np.allclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


def _numbers(tensor: Tensor) -> Array:
    data = tensor.data
    if tensor.datatype is Datatype.BF16:
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float64)
