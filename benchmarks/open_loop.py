"""Open-loop clients for unary gRPC and HTTP: requests are sent when due, regardless of others.

Latency counts from the *intended* time of sending, so it includes the delay of a client or server
that falls behind. All measurements use the same client, so its own cost is the same in all figures.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import uvloop

MAX_MESSAGE_BYTES = 2**31 - 1
OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]
CALL_SECONDS = 30.0
#: Shorter waits spin instead of sleeping, as a sleep wakes about 60 us late.
SPIN_SECONDS = 0.0002


@dataclass
class Outcomes:
    """Seconds from the intended sending of each request to its answer."""

    answered: list[float] = field(default_factory=list)
    failed: list[float] = field(default_factory=list)
    #: The same, with the time each request was due, in seconds after the first.
    due: list[tuple[float, float, bool]] = field(default_factory=list)

    def add(self, due: float, start: float, good: bool) -> None:
        took = time.perf_counter() - due
        (self.answered if good else self.failed).append(took)
        self.due.append((due - start, took, good))

    def quantile(self, share: float) -> float:
        return quantile(self.answered, share)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``values`` lie; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


class OpenLoopClient:
    """One channel to one method, used for all rounds."""

    def __init__(self, address: str, method: str, message: bytes) -> None:
        self._channel = grpc.insecure_channel(address, OPTIONS)
        self._call = self._channel.unary_unary(method, None, None)
        self._message = message

    def ask(self) -> bytes:
        """Send one request."""
        reply: bytes = self._call(self._message, timeout=CALL_SECONDS, wait_for_ready=True)
        return reply

    def run(self, requests_per_second: float, seconds: float) -> Outcomes:
        """Send requests at an even rate, and wait for all answers."""
        outcomes, count = Outcomes(), max(1, int(requests_per_second * seconds))
        left = threading.Semaphore(0)

        def done(call: grpc.Future[bytes], due: float) -> None:
            outcomes.add(due, start, call.exception() is None)
            left.release()

        start = time.perf_counter() + 0.01
        for number in range(count):
            due = start + number / requests_per_second
            _wait_until(due)
            call = self._call.future(self._message, timeout=CALL_SECONDS)
            call.add_done_callback(functools.partial(done, due=due))
        for _ in range(count):
            left.acquire()
        return outcomes

    def one_by_one(self, count: int) -> Outcomes:
        """Run a closed loop with one request in flight."""
        outcomes = Outcomes()
        for _ in range(count):
            due = time.perf_counter()
            self.ask()
            outcomes.answered.append(time.perf_counter() - due)
        return outcomes

    def saturate(self, in_flight: int, seconds: float) -> float:
        """Run a closed loop; return answers per second."""
        until = time.perf_counter() + seconds

        def drive(_: int) -> int:
            count = 0
            while time.perf_counter() < until:
                self.ask()
                count += 1
            return count

        with ThreadPoolExecutor(in_flight) as threads:
            return sum(threads.map(drive, range(in_flight))) / seconds

    def close(self) -> None:
        self._channel.close()


class _Connection(asyncio.Protocol):
    """A connection with one request at a time; ``answered`` is called with its success."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.answered: Callable[[bool], None] | None = None
        self._reply = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._reply += data
        head, end, body = self._reply.partition(b"\r\n\r\n")
        if end and len(body) >= int(head.lower().partition(b"content-length:")[2].split(b"\r")[0]):
            self._reply = b""
            self._end(head.startswith(b"HTTP/1.1 200"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(False)

    def _end(self, good: bool) -> None:
        answered, self.answered = self.answered, None
        if answered is not None:
            answered(good)


class OpenLoopHttpClient:
    """POSTs one body to one path over HTTP/1.1, on as many connections as needed."""

    def __init__(self, address: str, path: str, body: bytes, headers: Sequence[str] = ()) -> None:
        self._host, _, self._port = address.partition(":")
        lines = [f"POST {path} HTTP/1.1", f"host: {address}", f"content-length: {len(body)}"]
        self._request = "\r\n".join((*lines, *headers, "", "")).encode() + body

    def ask(self) -> bool:
        """Send one request; return whether its answer was good."""
        return len(self.run(1.0, 1.0).answered) == 1

    def saturate(self, in_flight: int, seconds: float) -> float:
        """Saturate the server, as ``OpenLoopClient.saturate`` does."""
        return uvloop.run(self._saturate(in_flight, seconds))

    def run(self, requests_per_second: float, seconds: float) -> Outcomes:
        """Send at a rate, as ``OpenLoopClient.run`` does."""
        return uvloop.run(self._run(requests_per_second, seconds))

    def insist(self, in_flight: int, seconds: float) -> list[tuple[float, bool]]:
        """Run a closed loop that retries at once after a refusal.

        Returns:
            The time of each answer, in seconds from the first, and whether it was good.
        """
        return uvloop.run(self._insist(in_flight, seconds))

    async def _saturate(self, in_flight: int, seconds: float) -> float:
        return sum(good for _, good in await self._insist(in_flight, seconds)) / seconds

    async def _insist(self, in_flight: int, seconds: float) -> list[tuple[float, bool]]:
        loop = asyncio.get_running_loop()
        connections = [await self._connect() for _ in range(in_flight)]
        start, ended = time.perf_counter(), loop.create_future()
        answers: list[tuple[float, bool]] = []
        open_connections = in_flight

        def drive(connection: _Connection) -> None:
            def again(good: bool) -> None:
                nonlocal open_connections
                answers.append((time.perf_counter() - start, good))
                if answers[-1][0] < seconds and not connection.transport.is_closing():
                    drive(connection)
                    return
                connection.transport.close()
                open_connections -= 1
                if not open_connections:
                    ended.set_result(None)

            connection.answered = again
            connection.transport.write(self._request)

        for connection in connections:
            drive(connection)
        await ended
        return answers

    async def _run(self, rate: float, seconds: float) -> Outcomes:
        loop = asyncio.get_running_loop()
        outcomes, count = Outcomes(), max(1, int(rate * seconds))
        idle: list[_Connection] = []
        left, ended = count, loop.create_future()
        start = time.perf_counter() + 0.05

        def send(connection: _Connection, due: float) -> None:
            def answered(good: bool) -> None:
                nonlocal left
                outcomes.add(due, start, good)
                if not connection.transport.is_closing():
                    idle.append(connection)
                left -= 1
                if not left:
                    ended.set_result(None)

            connection.answered = answered
            connection.transport.write(self._request)

        async def connect(due: float) -> None:
            nonlocal left
            try:
                send(await self._connect(), due)
            except OSError:
                outcomes.add(due, start, False)
                left -= 1

        connecting = set()
        for number in range(count):
            due = start + number / rate
            if (early := due - time.perf_counter()) > 0:
                await asyncio.sleep(early)
            elif not number % 16:
                await asyncio.sleep(0)  # behind schedule: read answers nevertheless
            while idle and idle[-1].transport.is_closing():
                idle.pop()
            if idle:
                send(idle.pop(), due)
            else:
                connecting.add(asyncio.ensure_future(connect(due)))
        await asyncio.wait_for(ended, CALL_SECONDS)
        for connection in idle:
            connection.transport.close()
        return outcomes

    def close(self) -> None:
        """Do nothing: no connection stays open between rounds."""

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, int(self._port))
        return connection


def _wait_until(due: float) -> None:
    while (left := due - time.perf_counter()) > 0:
        if left > SPIN_SECONDS:
            time.sleep(left - SPIN_SECONDS)
