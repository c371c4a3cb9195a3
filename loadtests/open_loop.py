"""Open-loop clients, unary gRPC and HTTP: requests leave when due, whatever came of others.

Latency counts from the *intended* moment of sending, so a client or server that falls behind
shows it. The same client for everything measured; what it costs itself is in every figure alike.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

MAX_MESSAGE_BYTES = 2**31 - 1
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]
CALL_SECONDS = 30.0
#: Below this the client spins instead of sleeping: a sleep wakes some 60 us late.
SPIN_SECONDS = 0.0002


_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Outcomes:
    """Seconds from the intended sending of every request until its answer."""

    answered: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    #: The same, each with when it was due, seconds after the first.
    due: list[tuple[float, float, bool]] = field(default_factory=list)

    def add(self, due: float, start: float, good: bool) -> None:
        took = time.perf_counter() - due
        (self.answered if good else self.failed).append(took)
        self.due.append((due - start, took, good))

    def quantile(self, share: float) -> float:
        return quantile(self.answered, share)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class Client:
    """One channel to one method; made once, used for every round."""

    def __init__(self, address: str, method: str, message: bytes) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call = self._channel.unary_unary(method)
        self._message = message

    def ask(self) -> bytes:
        """One answer."""
        reply: bytes = self._call(self._message, timeout=CALL_SECONDS, wait_for_ready=True)
        return reply

    def run(self, requests_per_second: float, seconds: float) -> Outcomes:
        """Send at an even rate, and wait for the answers to all of it."""
        outcomes, count = Outcomes(), max(1, int(requests_per_second * seconds))
        left = threading.Semaphore(0)

        def done(call: grpc.Future, due: float) -> None:
            outcomes.add(due, start, call.exception() is None)
            left.release()

        start = time.perf_counter() + 0.01
        for number in range(count):
            due = start + number / requests_per_second
            _wait_until(due)
            call = self._call.future(self._message, timeout=CALL_SECONDS)
            call.add_done_callback(lambda call, due=due: done(call, due))
        for _ in range(count):
            left.acquire()
        return outcomes

    def one_by_one(self, count: int) -> Outcomes:
        """Closed loop, one in flight."""
        outcomes = Outcomes()
        for _ in range(count):
            due = time.perf_counter()
            self.ask()
            outcomes.answered.append(time.perf_counter() - due)
        return outcomes

    def close(self) -> None:
        self._channel.close()


class HttpClient:
    """POSTs one body to one path, HTTP/1.1, on as many connections as it takes."""

    def __init__(self, address: str, path: str, body: bytes) -> None:
        self._host, _, self._port = address.partition(":")
        head = f"POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body

    def ask(self) -> bytes:
        """One answer, its status line first."""

        async def once() -> bytes:
            connection = await self._connect()
            try:
                return await self._exchange(connection)
            finally:
                connection[1].close()

        return asyncio.run(once())

    def run(self, requests_per_second: float, seconds: float) -> Outcomes:
        """As ``Client.run``."""
        return asyncio.run(self._run(requests_per_second, seconds))

    async def _run(self, rate: float, seconds: float) -> Outcomes:
        outcomes, count = Outcomes(), max(1, int(rate * seconds))
        idle: list[_Connection] = []
        start = time.perf_counter() + 0.05

        async def one(due: float) -> None:
            connection = None
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    connection = idle.pop() if idle else await self._connect()
                    reply = await self._exchange(connection)
            except (OSError, asyncio.IncompleteReadError):
                outcomes.add(due, start, False)
                if connection is not None:
                    connection[1].close()
            else:
                outcomes.add(due, start, reply.startswith(b"HTTP/1.1 200"))
                idle.append(connection)

        tasks = []
        for number in range(count):
            due = start + number / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            tasks.append(asyncio.ensure_future(one(due)))
        await asyncio.gather(*tasks)
        for _, writer in idle:
            writer.close()
        return outcomes

    def close(self) -> None:
        """Nothing stays open between rounds."""

    async def _connect(self) -> _Connection:
        return await asyncio.open_connection(self._host, int(self._port))

    async def _exchange(self, connection: _Connection) -> bytes:
        reader, writer = connection
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        return head + await reader.readexactly(length)


def _wait_until(due: float) -> None:
    while (left := due - time.perf_counter()) > 0:
        if left > SPIN_SECONDS:
            time.sleep(left - SPIN_SECONDS)
