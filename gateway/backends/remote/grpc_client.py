"""The connections of a ``RemoteClient`` over gRPC: channels to each endpoint of its route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import Deadline
from modelport.gateway.upstream.grpc import GrpcChannel, GrpcMethod, unary
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES
from modelport.gateway.wire.raw_tensors import Buffer


class RemoteGrpcClient:
    """The part of a ``RemoteClient`` that has the channels.

    Args:
        methods: the unary methods, ``/package.Service/Method``, and how a reply is parsed, such as
            by a message class's ``FromString``.
    """

    def __init__(self, route: ModelRoute, methods: Mapping[str, Callable[..., Any]]) -> None:
        self._route = route
        self._channels = {address: GrpcChannel(address, route) for address in route.endpoints}
        self._calls = {
            (address, path): (channel.method(path), reply)
            for address, channel in self._channels.items()
            for path, reply in methods.items()
        }
        self._streams: dict[str, GrpcMethod] = {}

    def _ask(
        self, address: str, path: str, message: bytes | Sequence[Buffer], limit: Deadline
    ) -> Coroutine[Any, Any, Any]:
        """The parsed reply to ``message``; raises as ``upstream.grpc.unary``."""
        call, reply = self._calls[address, path]
        return unary(call, message, reply, limit)

    def _open_streams(self, path: str) -> None:
        """Prepare ``_streams``, the method at ``path`` by address, for ``replies``."""
        for address in self._route.endpoints:
            channel = GrpcChannel(address, self._route, window=STREAM_WINDOW_BYTES)
            self._streams[address] = channel.method(path)

    def reset(self, address: str) -> None:
        self._channels[address].reset()
        if address in self._streams:
            self._streams[address].channel.reset()

    async def close(self) -> None:
        await asyncio.gather(
            *(channel.close() for channel in self._channels.values()),
            *(method.channel.close() for method in self._streams.values()),
        )
