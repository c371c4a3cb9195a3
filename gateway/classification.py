"""Triton's classification extension: the top k of an output in place of its values.

Each becomes the BYTES ``value:index`` or ``value:index:label``, as ``extension_classification.md``
of triton-inference-server/server has it, the value printed with six decimals.
"""

from __future__ import annotations

import numpy as np

from gateway.errors import InvalidArgument
from gateway.types import Datatype, Tensor


def classify(tensor: Tensor, count: int, labels: tuple[str, ...], batched: bool) -> Tensor:
    """The ``count`` largest values of ``tensor`` per batch element, largest first.

    Raises:
        InvalidArgument: the output is not numeric.
    """
    if tensor.datatype in (Datatype.BYTES, Datatype.BF16, Datatype.BOOL):
        raise InvalidArgument(
            f"output '{tensor.name}' is {tensor.datatype}; classification needs numbers"
        )
    rows = tensor.data.reshape(tensor.data.shape[0] if batched else 1, -1)
    count = min(count, rows.shape[1])
    # Descending without leaving the datatype (~ reverses the order of integers, signed or not);
    # stable, so that of equal values the lower index comes first.
    keys = -rows if rows.dtype.kind == "f" else ~rows
    top = np.argsort(keys, axis=1, kind="stable")[:, :count]
    texts = np.empty(top.shape, dtype=object)
    for row, indices in enumerate(top):
        for rank, index in enumerate(indices):
            value = rows[row, index]
            text = f"{value:f}" if rows.dtype.kind == "f" else str(value)
            label = f":{labels[index]}" if index < len(labels) else ""
            texts[row, rank] = f"{text}:{index}{label}".encode()
    return Tensor(tensor.name, Datatype.BYTES, texts if batched else texts[0])
