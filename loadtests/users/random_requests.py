"""Seeded random requests within a model's declared ranges and axes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from modelport.loadtests.load.payloads import DTYPES, Array, BadPayload, Payloads
from modelport.loadtests.users.signature import InputTensor, RequestSignature

#: Number of requests in one run, sent in turn.
DEFAULT_COUNT = 32
#: Defaults of the exports' own generator for a model without ranges.
DEFAULT_LONGEST, DEFAULT_LARGEST = 64, 127
THREE_SIGMA = 3.0


def draw(
    signature: RequestSignature, batch_size: int, seed: int, count: int = DEFAULT_COUNT
) -> Payloads:
    """Generate ``count`` requests within the declared ranges and axes, as the exports do.

    Raises:
        BadPayload: the batch is larger than the model's, or an input cannot be drawn.
    """
    limit = signature.max_batch_size
    if batch_size > max(limit, 1) and limit != 1:
        raise BadPayload(
            f"--batch-size {batch_size}: the model accepts {limit or 'no batches, 1'} at most"
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
        reshape=signature.model_shapes,
        batch_size=batch_size if limit else 0,
    )


def _values(
    spec: InputTensor,
    leading: tuple[int, ...],
    sizes: Mapping[str, int],
    generator: np.random.Generator,
) -> Array:
    if spec.datatype not in DTYPES or spec.datatype == "BYTES":
        raise BadPayload(
            f"input '{spec.name}' is {spec.datatype}, which cannot be generated; "
            "give requests with --data"
        )
    dtype = DTYPES[spec.datatype]
    shape = leading + tuple(sizes[d] if isinstance(d, str) else d for d in spec.dims)
    high = sizes.get(spec.high) if isinstance(spec.high, str) else spec.high
    if spec.is_mask:  # every position holds data: 1, or the number of positions
        return np.full(shape, high if isinstance(spec.high, str) else 1, dtype)
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
