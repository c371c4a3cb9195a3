"""Encoding of responses; a large one is encoded in a thread, within the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.types import Deadline, Tensor
from modelport.gateway.wire import json_writer

Encoded = TypeVar("Encoded")

#: Memory for a value in JSON: its text, in a piece and in the whole.
JSON_BYTES = 32
#: Memory for a value in a repeated field, and in the list that fills it.
PROTOBUF_BYTES = 48


def is_large(outputs: Sequence[Tensor]) -> bool:
    """Whether encoding ``outputs`` takes more than a millisecond."""
    return any(json_writer.is_large(tensor.data) for tensor in outputs)


async def encode(
    write: Callable[[], Encoded],
    outputs: Sequence[Tensor],
    deadline: Deadline,
    value_bytes: int = JSON_BYTES,
) -> Encoded:
    """Call ``write``, in a thread if ``outputs`` are large; each value takes ``value_bytes``.

    Raises:
        MemoryExhausted: The memory budget does not allow so large a response.
        TimedOut: The deadline has passed.
    """
    if not is_large(outputs):
        return write()
    with request_memory.rendering(value_bytes * sum(tensor.data.size for tensor in outputs)):
        return await offload.run(write, deadline)
