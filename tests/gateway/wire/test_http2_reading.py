"""HTTP/2's reader: the same is read whether data comes in pieces, or straight into its place."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelport.gateway.wire.grpc_body import Body
from modelport.gateway.wire.http2 import frames as http2
from modelport.gateway.wire.http2.connection import Http2Connection
from modelport.gateway.wire.http2.frames import (
    DATA,
    END_STREAM,
    PADDED,
    ErrorCode,
    ProtocolError,
)
from modelport.gateway.wire.http2.header_blocks import FieldSection
from modelport.gateway.wire.http2.stream import Http2Stream

STREAMS = (1, 3, 5)


class Reading(Http2Connection[FieldSection, Http2Stream]):
    """Bodies by stream; of those that are ``dropped`` nothing is kept."""

    def __init__(self) -> None:
        super().__init__(cast(Any, SimpleNamespace(time=float)), lambda section: section)
        self.bodies: dict[int, Body] = {}
        self.dropped: set[int] = set()
        self.taken = 0
        self.placed = 0
        self.ended: list[int] = []
        self.frames: list[tuple[int, bytes]] = []
        self.error: ProtocolError | None = None

    def data_received(self, data: bytes) -> None:
        try:
            self.feed(data)
        except ProtocolError as error:
            self.terminate(error)

    def terminate(self, error: ProtocolError) -> None:
        self.error = error

    def place(self, stream: int) -> memoryview | None:
        return None if stream in self.dropped else self.bodies.setdefault(stream, Body()).place()

    def on_data(self, stream: int, part: memoryview, size: int, last: bool) -> None:
        self.taken += size
        if stream not in self.dropped:
            self.bodies.setdefault(stream, Body()).add(part)
        if last:
            self.ended.append(stream)

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.settings_received = True
        self.frames.append((kind, payload))
        if kind == http2.RST_STREAM:
            self.dropped.add(stream)
            self.bodies.pop(stream, None)

    def read(self, content: bytes, sizes: Callable[[], int]) -> None:
        """Read as a transport does, from a socket that has a few bytes each time."""
        at = 0
        while at < len(content) and self.error is None:
            buffer = self.get_buffer(-1)
            got = content[at : at + min(sizes(), len(buffer))]
            buffer[: len(got)] = got
            self.placed += len(got) if self._place is not None else 0
            self.buffer_updated(len(got))
            at += len(got)


def conversation(chosen: random.Random) -> tuple[bytes, int]:
    """Frames of messages on several streams, and the bytes of DATA's payloads."""
    frames, taken = [http2.settings()], 0
    waiting = {}
    for stream in STREAMS:
        size = chosen.choice((0, 10, 30_000, 300_000, 5_000_000))
        behind = chosen.randbytes(chosen.choice((0, 0, 7, 50_000)))  # of another message
        content = chosen.randbytes(size)
        waiting[stream] = b"\0" + size.to_bytes(4, "big") + content + behind
    while waiting:
        stream = chosen.choice([*waiting])
        size = chosen.choice((0, 1, 3, 16_384, 60_000, 1_000_000))
        part, rest = waiting[stream][:size], waiting[stream][size:]
        flags, padding = 0, b""
        if chosen.random() < 0.3:
            flags, padding = PADDED, bytes(chosen.randrange(256))
            part = bytes([len(padding)]) + part + padding
        waiting[stream] = rest
        if not rest:
            del waiting[stream]
            if chosen.random() < 0.5:
                flags |= END_STREAM
            else:  # an empty frame ends it
                frames.append(http2.frame(DATA, flags, stream, part))
                taken, flags, part = taken + len(part), END_STREAM, b""
        frames.append(http2.frame(DATA, flags, stream, part))
        taken += len(part)
        if chosen.random() < 0.2:
            frames.append(http2.frame(http2.PING, 0, 0, chosen.randbytes(8)))
        if chosen.random() < 0.02:
            frames.append(http2.reset(stream, ErrorCode.CANCEL))
    return b"".join(frames), taken


@pytest.mark.parametrize("seed", range(40))
def test_what_is_read_into_its_place_is_what_comes_in_one_piece(seed: int) -> None:
    chosen = random.Random(seed)
    content, taken = conversation(chosen)
    whole, pieces = Reading(), Reading()
    whole.data_received(content)
    most = chosen.choice((10, 5_000, 70_000, 10_000_000))
    pieces.read(content, lambda: chosen.randint(1, most) if most > 10 else 1_000)
    for reading in (whole, pieces):
        assert reading.error is None
        assert reading.taken == taken
        assert not reading.midway
    assert pieces.ended == whole.ended
    assert pieces.frames == whole.frames
    assert pieces.bodies.keys() == whole.bodies.keys()
    for stream, body in whole.bodies.items():
        assert pieces.bodies[stream].view() == body.view()


def test_a_large_message_is_read_into_its_place_and_nothing_else_is() -> None:
    reading, size = Reading(), 1_000_000
    message = b"\0" + size.to_bytes(4, "big") + random.Random(0).randbytes(size)
    content = http2.settings() + http2.frame(DATA, END_STREAM, 1, message)
    reading.read(content + http2.frame(http2.PING, 0, 0, b"pingpong"), lambda: 2**16)
    assert reading.placed > 0.8 * size
    assert reading.bodies[1].view() == message
    assert reading.frames[-1] == (http2.PING, b"pingpong")
    before = reading.bodies[1].view()
    reading.read(http2.frame(DATA, 0, 3, b"\0" + bytes(4) + b"?" * 100_000), lambda: 2**16)
    assert before == message  # what comes next is not written over it


def test_a_stream_that_is_given_up_within_a_frame_is_read_past() -> None:
    reading, size = Reading(), 1_000_000
    message = b"\0" + size.to_bytes(4, "big") + bytes(size)
    content = http2.settings() + http2.frame(DATA, 0, 1, message)
    reading.read(content[:500_000], lambda: 2**16)
    kept = reading.bodies.pop(1).view()
    copied = bytes(kept)
    reading.dropped.add(1)
    rest = http2.frame(http2.PING, 0, 0, b"pingpong")
    reading.read(content[500_000:].replace(b"\0", b"!") + rest, lambda: 2**16)
    assert reading.frames[-1] == (http2.PING, b"pingpong")
    assert kept == copied
