"""A proxy that breaks in the ways in which servers and networks break, and mends again.

Faults of the connection are a TCP proxy's; faults of the answer, a shim's that forwards calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import aiohttp
import aiohttp.web
import grpc

#: What a gRPC client sends before its first call is shorter, a request over HTTP longer.
GREETING_BYTES = 85
SLOW_SECONDS = 0.4
CHUNK_BYTES = 2**16
INFERENCES = ("ModelInfer", "Predict", "Predictions")


class ProxyFault(Enum):
    NONE = "none"
    HANG_AT_CONNECT = "hang at connect"
    HANG_AFTER_GREETING = "hang after greeting"
    HALF_OPEN = "half-open"
    RESET_MID_BODY = "reset mid-body"
    SLOW = "slow"
    HANG_AT_INFERENCE = "hang at inference"
    INTERNAL = "flaky: 500, INTERNAL"
    UNAVAILABLE = "flaky: 503, UNAVAILABLE"
    EXHAUSTED = "flaky: 429, RESOURCE_EXHAUSTED"


#: Faults of an answer: HTTP's and gRPC's status, and of how many inferences one fails.
STATUSES = {
    ProxyFault.HANG_AT_INFERENCE: (0, "", 1),
    ProxyFault.INTERNAL: (500, "INTERNAL", 2),
    ProxyFault.UNAVAILABLE: (503, "UNAVAILABLE", 1),
    ProxyFault.EXHAUSTED: (429, "RESOURCE_EXHAUSTED", 1),
}


class ProxyLink:
    """One connection through the proxy."""

    def __init__(
        self, proxy: ChaosProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.proxy, self.reader, self.writer = proxy, reader, writer
        self.sent = 0
        #: The peer is gone for good, whatever becomes of the proxy.
        self.dead = False

    async def run(self) -> None:
        proxy = self.proxy
        if proxy.fault is ProxyFault.HANG_AT_CONNECT:
            await proxy.mended.wait()
        if proxy.fault is ProxyFault.HALF_OPEN:
            self.dead = True
        host, _, port = proxy.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        ways = (self._forth(writer), self._back(reader))
        tasks = [asyncio.ensure_future(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            writer.close()

    async def _forth(self, writer: asyncio.StreamWriter) -> None:
        while data := await self.reader.read(CHUNK_BYTES):
            self.sent += len(data)
            if self.dead:
                await asyncio.Event().wait()
            writer.write(data)

    async def _back(self, reader: asyncio.StreamReader) -> None:
        proxy = self.proxy
        while data := await reader.read(CHUNK_BYTES):
            greeting = self.sent <= GREETING_BYTES
            if self.dead:
                await asyncio.Event().wait()
            if proxy.fault is ProxyFault.HANG_AFTER_GREETING and not greeting:
                await proxy.mended.wait()
            if proxy.fault is ProxyFault.RESET_MID_BODY and not greeting:
                self.writer.write(data[: len(data) // 2])
                await self.writer.drain()
                self.reset()
                return
            if proxy.fault is ProxyFault.SLOW and not greeting:
                asyncio.get_running_loop().call_later(SLOW_SECONDS, self._write, data)
            else:
                self._write(data)

    def _write(self, data: bytes) -> None:
        if not self.writer.is_closing():
            self.writer.write(data)

    def reset(self) -> None:
        """Close with RST."""
        found: socket.socket = self.writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class ChaosProxy:
    """In front of ``target``, ``host:port``."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault = ProxyFault.NONE
        self.mended = asyncio.Event()
        self._links: dict[asyncio.Task[Any], ProxyLink] = {}

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        link = self._links[task] = ProxyLink(self, reader, writer)
        try:
            await link.run()
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            del self._links[task]
            writer.close()

    def set(self, fault: ProxyFault) -> None:
        """Break or, with ``NONE``, mend."""
        self.fault = fault
        if fault is ProxyFault.NONE:
            self.mended.set()
            return
        self.mended.clear()
        for link in list(self._links.values()):
            if fault is ProxyFault.HANG_AT_CONNECT:
                link.reset()
            link.dead = link.dead or fault is ProxyFault.HALF_OPEN

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in list(self._links):
                task.cancel()


class Shim:
    """Forwards every call to ``target``, but the inferences that a fault of the answer fails."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.fault = ProxyFault.NONE
        self._inferences = 0

    def _fails(self) -> tuple[int, str] | None:
        http_status, grpc_status, every = STATUSES.get(self.fault, (0, "", 0))
        self._inferences += 1
        return None if not every or self._inferences % every else (http_status, grpc_status)

    @contextlib.asynccontextmanager
    async def grpc(self) -> AsyncIterator[str]:
        shim, hung = self, asyncio.Event()
        channel = grpc.aio.insecure_channel(self.target)

        class ShimHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
            def service(self, details: Any) -> Any:
                inference = details.method.rsplit("/", 1)[1] in INFERENCES

                async def answer(message: bytes, context: Any) -> bytes:
                    fails = shim._fails() if inference else None
                    if fails is not None and not fails[1]:
                        await hung.wait()
                    if fails is not None:
                        await context.abort(grpc.StatusCode[fails[1]], "chaos")
                    try:
                        reply: bytes = await channel.unary_unary(details.method)(message)
                    except grpc.aio.AioRpcError as error:
                        await context.abort(error.code(), error.details())
                    return reply

                return grpc.unary_unary_rpc_method_handler(answer)

        server = grpc.aio.server()
        server.add_generic_rpc_handlers((ShimHandler(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            hung.set()
            await server.stop(None)
            await channel.close()

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[str]:
        hung = asyncio.Event()
        async with aiohttp.ClientSession() as session:

            async def answer(request: aiohttp.web.Request) -> aiohttp.web.Response:
                body = await request.read()
                fails = self._fails() if request.method == "POST" else None
                if fails is not None and not fails[0]:
                    await hung.wait()
                if fails is not None:
                    return aiohttp.web.json_response({"error": "chaos"}, status=fails[0])
                url = f"http://{self.target}{request.path_qs}"
                headers = {k: v for k, v in request.headers.items() if k != "Host"}
                async with session.request(
                    request.method, url, data=body, headers=headers
                ) as reply:
                    kept = {
                        k: v for k, v in reply.headers.items() if k.lower() != "transfer-encoding"
                    }
                    return aiohttp.web.Response(
                        status=reply.status, headers=kept, body=await reply.read()
                    )

            application = aiohttp.web.Application(client_max_size=2**24)
            application.router.add_route("*", "/{path:.*}", answer)
            runner = aiohttp.web.AppRunner(application, shutdown_timeout=0.1)
            await runner.setup()
            await aiohttp.web.TCPSite(runner, "127.0.0.1", 0).start()
            try:
                yield f"127.0.0.1:{runner.addresses[0][1]}"
            finally:
                hung.set()
                await runner.cleanup()
