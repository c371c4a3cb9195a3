"""The generate extension as a client speaks it: flat values by name, and server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from modelport.client_models import ClientRequest, ModelDescription
from modelport.gateway.errors import Internal
from modelport.gateway.types import Array, Datatype
from modelport.gateway.wire import json_tensors

#: Longest event that is collected.
MAX_EVENT_BYTES = 1 << 30
_DATA = b"data:"


class ByteStream(Protocol):
    """The content of a response."""

    async def readany(self) -> bytes:
        """The bytes that have arrived; none at the end."""


def document(request: ClientRequest) -> dict[str, Any]:
    """The JSON of a request.

    Raises:
        InvalidArgument: an input is FP16 or BF16, which JSON does not carry.
    """
    members: dict[str, Any] = {
        tensor.name: json_tensors.encode(tensor).ravel().tolist() for tensor in request.inputs
    }
    if request.id:
        members["id"] = request.id
    if request.parameters:
        members["parameters"] = dict(request.parameters)
    return members


def outputs(
    answer: dict[str, Any], request: ClientRequest, known: ModelDescription
) -> dict[str, tuple[Datatype, Array]]:
    """The outputs in a response, in the model's order and as it declares them."""
    found: dict[str, tuple[Datatype, Array]] = {}
    for name, datatype, declared in known.outputs:
        if name not in answer or (request.outputs and name not in request.outputs):
            continue
        values = answer[name] if isinstance(answer[name], list) else [answer[name]]
        shape, left = list(declared), len(values)
        for size in declared:
            left //= max(size, 1)
        for index in reversed(range(len(shape))):  # the last open dimension takes all
            if shape[index] == -1:
                shape[index], left = left, 1
        found[name] = datatype, json_tensors.decode(name, datatype, tuple(shape), values)
    return found


async def events(content: ByteStream) -> AsyncGenerator[bytes, None]:
    """The data of each event; comments and other fields of server-sent events are left out."""
    buffer = bytearray()
    searched = 0
    while piece := await content.readany():
        buffer += piece
        while (end := buffer.find(b"\n\n", max(0, searched - 1))) >= 0:
            lines = bytes(buffer[:end]).splitlines()
            del buffer[: end + 2]
            searched = 0
            data = [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]
            if data:
                yield b"\n".join(data)
        searched = len(buffer)
        if searched > MAX_EVENT_BYTES:
            raise Internal("the server sends an event without an end")
    if buffer.strip():
        raise Internal("the server's stream ends within an event")
