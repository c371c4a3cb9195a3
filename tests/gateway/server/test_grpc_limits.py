"""No limit of ``wire.http2.abuse_limits`` is reached by a client whose calls advance.

Recordings of real clients are replayed, frame by frame, each limit watched; the attackers that the
limits are for are in ``test_http2_attacks.py``.
"""

from __future__ import annotations

import asyncio
import queue
from typing import Any

import grpc
import pytest

from modelport.gateway.server import time_limits
from modelport.gateway.server.grpc.connection import GrpcConnection
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.listener import ServerState
from modelport.gateway.server.listening_socket import ConnectionLimit
from modelport.gateway.wire.http2 import abuse_limits
from modelport.gateway.wire.http2 import connection as core
from modelport.gateway.wire.http2.frames import (
    GOAWAY,
    PREFACE,
    ErrorCode,
)
from modelport.gateway.wire.http2.settings import MAX_STREAMS
from tests.gateway.server import recording
from tests.gateway.server.grpc_peer import MAX_MESSAGE, MethodProbe, Wire, listening
from tests.gateway.server.recording import SMALL, frames, recorded

CLIENTS = sorted(file.stem for file in recording.FOLDER.glob("*.z"))
STREAMS = ["aio_stream", "core_stream", "perf_analyzer_stream"]
#: Turns of the loop after each frame: the handlers' time.
TURNS = 3


class LoopClock:
    """A loop whose time passes as a test says."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.passed = loop, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._loop.time() + self.passed


class Peaks:
    """The most that was counted against each limit."""

    def __init__(self) -> None:
        self.idle_frames = self.quick_resets = self.streams = self.abandoned = 0

    def look(self, connection: GrpcConnection) -> None:
        self.idle_frames = max(self.idle_frames, connection.limits.idle_frames)
        self.quick_resets = max(self.quick_resets, connection.limits.quick_resets)
        self.streams = max(self.streams, len(connection.streams))
        self.abandoned = max(self.abandoned, len(connection._abandoned))


async def replay(content: bytes, seconds_per_frame: float = 0.0) -> tuple[Peaks, int | None]:
    """The peaks, and the code of the GOAWAY if there was one."""
    clock = LoopClock(asyncio.get_running_loop())
    wire, peaks = Wire(), Peaks()
    state, service = ServerState(ConnectionLimit()), Service(MethodProbe().methods(), MAX_MESSAGE)
    connection = GrpcConnection(state, service, clock)  # type: ignore[arg-type]
    connection.connection_made(wire)
    connection.data_received(PREFACE)
    for each in frames(content):
        connection.data_received(each)
        peaks.look(connection)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        clock.passed += seconds_per_frame
        if seconds_per_frame:
            connection.check(clock.time())
        if len(wire.written) > 2**20:
            wire.written[:] = b""
        if connection.closing:
            break
    ended = [f for f in frames(PREFACE + bytes(wire.written)) if f[3] == GOAWAY]
    connection.connection_lost(None)
    await asyncio.sleep(0)
    return peaks, int.from_bytes(ended[-1][13:17]) if ended else None


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_real_client_stays_far_from_every_limit(client: str) -> None:
    peaks, code = await replay(recorded(client))
    assert code in (None, 0)  # it may say itself that it goes
    assert peaks.idle_frames < abuse_limits.MAX_IDLE_FRAMES / 20
    assert peaks.quick_resets < abuse_limits.MAX_QUICK_RESETS / 20
    assert peaks.streams < MAX_STREAMS / 20
    assert peaks.abandoned < abuse_limits.MAX_ABANDONED / 20


@pytest.mark.parametrize("client", STREAMS)
async def test_a_limit_that_messages_do_not_pay_for_ends_a_real_client(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The known-bad variant: messages pay for nothing."""
    monkeypatch.setattr(abuse_limits.AbuseLimits, "advanced", lambda _, __=1: None)
    _, code = await replay(recorded(client))
    assert code == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("client", ["core_large", "core_stream"])
async def test_a_real_client_that_is_slow_reaches_no_limit_of_time(client: str) -> None:
    """A frame in nine seconds: half an hour for all."""
    content = recording.PREFACE + b"".join(list(frames(recorded(client)))[:200])
    slow = min(core.HEAD_SECONDS, time_limits.BODY_IDLE_SECONDS) - 1
    _, code = await replay(content, slow)
    assert code is None


def sync_stream(port: int, messages: int) -> None:
    asked: queue.Queue[bytes | None] = queue.Queue()
    asked.put(SMALL)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        talk = channel.stream_stream("/probe.Probe/Talk")
        number = 0
        for number, _ in enumerate(talk(iter(asked.get, None), timeout=60), 1):
            asked.put(SMALL if number < messages else None)
    assert number == messages


async def test_a_long_stream_of_a_real_client_is_answered_to_its_end() -> None:
    async with listening() as server:
        await asyncio.to_thread(sync_stream, server.port, 3000)


@pytest.mark.parametrize("advance", ["advanced", "completed", "time"])
def test_what_advances_pays_for_more_than_any_client_sends_beside_it(advance: str) -> None:
    now = 0.0
    counted = abuse_limits.AbuseLimits(lambda: now)
    for _ in range(10 * abuse_limits.MAX_IDLE_FRAMES):
        for _ in range(8):
            counted.idle_frame()
        if advance == "time":
            now += 0.05
        else:
            getattr(counted, advance)()
    assert counted.idle_frames < abuse_limits.MAX_IDLE_FRAMES
