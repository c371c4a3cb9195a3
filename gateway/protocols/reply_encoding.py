"""Encoding of replies: a large one is written in a thread, when there is memory for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.types import Deadline, Tensor
from modelport.gateway.wire.json_writer import PIECE

Reply = TypeVar("Reply")

#: What a value takes while it is written: a number as text, in its piece and in the whole.
JSON_BYTES = 32
#: A value of a repeated field, and of the list that fills it.
PROTOBUF_BYTES = 48


def is_large(outputs: Sequence[Tensor]) -> bool:
    """Whether to write ``outputs`` takes more than a millisecond."""
    return any(tensor.data.size > PIECE for tensor in outputs)


async def encode(
    write: Callable[[], Reply],
    outputs: Sequence[Tensor],
    deadline: Deadline,
    value_bytes: int = JSON_BYTES,
) -> Reply:
    """The reply that ``write`` makes of ``outputs``, each of whose values takes ``value_bytes``.

    Raises:
        MemoryExhausted: requests hold too much for so large a reply.
        TimedOut: the deadline has passed.
    """
    if not is_large(outputs):
        return write()
    with request_memory.reserved(value_bytes * sum(tensor.data.size for tensor in outputs)):
        return await offload.run(write, deadline)
