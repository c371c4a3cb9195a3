"""Triton's classification extension: the top k classes of an output instead of its values.

Each class is the BYTES ``value:index`` or ``value:index:label``, the value with six decimals, as in
``extension_classification.md`` of triton-inference-server/server.
"""

from __future__ import annotations

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload
from modelport.gateway.types import Array, Datatype, Tensor

#: Outputs with more elements are classified in a thread.
LARGE = 16_384
#: Triton's limit.
MAX_ELEMENTS = 1_000_000
#: Classes formatted between two checkpoints.
PIECE = 1024


def classify(tensor: Tensor, count: int, labels: tuple[str, ...], batched: bool) -> Tensor:
    """Format the ``count`` largest values of ``tensor`` per batch element, largest first.

    Raises:
        InvalidArgument: the output is not numeric, or too large.
    """
    if tensor.datatype in (Datatype.BYTES, Datatype.BF16, Datatype.BOOL):
        raise InvalidArgument(
            "class result not available for output due to unsupported type "
            f"'{tensor.datatype}': '{tensor.name}' must hold numbers"
        )
    if tensor.data.size > MAX_ELEMENTS:
        raise InvalidArgument(
            f"classification output tensor too large: '{tensor.name}' has {tensor.data.size} "
            f"elements, at most {MAX_ELEMENTS} are classified"
        )
    rows = tensor.data.reshape(tensor.data.shape[0] if batched else 1, -1)
    count = min(count, rows.shape[1])
    texts = np.empty((len(rows), count), dtype=object)
    form = "{:f}:{}{}" if rows.dtype.kind == "f" else "{}:{}{}"
    for number, row in enumerate(rows):
        top = largest(row, count)
        for start in range(0, count, PIECE):
            indices = top[start : start + PIECE]
            values = row[indices].tolist()
            for rank, (value, index) in enumerate(zip(values, indices.tolist(), strict=True)):
                label = f":{labels[index]}" if index < len(labels) else ""
                texts[number, start + rank] = form.format(value, index, label).encode()
            offload.checkpoint()
    return Tensor(tensor.name, Datatype.BYTES, texts if batched else texts[0])


def largest(values: Array, count: int) -> Array:
    """The indices of the ``count`` largest of ``values``, the largest first.

    Of equal values the lower index comes first, and NaN comes last. Only the largest are sorted.
    """
    # Descending order in the same datatype: ~ reverses the order of integers, signed or not.
    keys = -values if values.dtype.kind == "f" else ~values
    if count < len(keys):
        last = np.partition(keys, count - 1)[count - 1] if count else keys[0]
        if last != last:
            before, ties = np.flatnonzero(keys == keys), np.flatnonzero(keys != keys)
        else:
            before, ties = np.flatnonzero(keys < last), np.flatnonzero(keys == last)
        candidates = np.concatenate([before, ties])[:count]
    else:
        candidates = np.arange(len(keys))
    chosen: Array = candidates[np.argsort(keys[candidates], kind="stable")]
    return chosen
