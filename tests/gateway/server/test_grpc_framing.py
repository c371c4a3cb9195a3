"""gRPC's length-prefixed messages and time-outs, by themselves."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelport.gateway.server.grpc import framing
from modelport.gateway.server.grpc.framing import (
    Compressed,
    Frames,
    MalformedFrame,
    MessageTooLarge,
)
from modelport.gateway.wire import deadline_headers


def only(frames: Frames, body: bytes, limit: int) -> bytes:
    content = frames.only(body)
    return content.plain(limit) if isinstance(content, Compressed) else bytes(content)


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 50), min_size=1))
def test_messages_are_found_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    wire_bytes = b"".join(framing.frame(message) for message in messages)
    frames, found = Frames(b"identity", 2**20), []
    step = 0
    while wire_bytes:
        cut = cuts[step % len(cuts)]
        step += 1
        frames.buffer += wire_bytes[:cut]
        wire_bytes = wire_bytes[cut:]
        while (content := frames.take()) is not None:
            found.append(content)
    assert found == messages
    assert len(frames) == 0


GZIP = zlib.compressobj(wbits=31)
PACKED = GZIP.compress(b"a" * 100) + GZIP.flush()


@pytest.mark.parametrize(
    ("encoding", "body", "error"),
    [
        (b"identity", b"", MalformedFrame),
        (b"identity", b"\0\0\0\0", MalformedFrame),
        (b"identity", b"\0\0\0\0\2a", MalformedFrame),
        (b"identity", b"\0\0\0\0\1ab", MalformedFrame),
        (b"identity", b"\1\0\0\0\1a", MalformedFrame),
        (b"gzip", b"\2\0\0\0\1a", MalformedFrame),
        (b"gzip", b"\1\0\0\0\1a", MalformedFrame),
        (b"gzip", b"\1" + struct.pack(">I", len(PACKED) - 1) + PACKED[:-1], MalformedFrame),
        (b"gzip", b"\1" + struct.pack(">I", len(PACKED) + 1) + PACKED + b"a", MalformedFrame),
        (b"identity", b"\0\0\1\0\0" + b"a" * 2**16, MessageTooLarge),
    ],
)
def test_a_body_that_is_not_one_message_is_refused(
    encoding: bytes, body: bytes, error: type[Exception]
) -> None:
    with pytest.raises(error):
        only(Frames(encoding, 1000), body, 1000)


def test_a_message_is_measured_after_it_is_decompressed() -> None:
    body = b"\1" + struct.pack(">I", len(PACKED)) + PACKED
    assert only(Frames(b"gzip", 1000), body, 100) == b"a" * 100
    with pytest.raises(MessageTooLarge):
        only(Frames(b"gzip", 1000), body, 99)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (b"1S", 1),
        (b"100m", 0.1),
        (b"2H", 7200),
        (b"1M", 60),
        (b"99999999u", 99.999999),
        (b"5n", 5e-9),
    ],
)
def test_a_timeout_is_digits_and_a_unit(value: bytes, seconds: float) -> None:
    assert deadline_headers.grpc_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"1s", b"-1S", b"123456789S", b"1.5S", b"\xff"])
def test_an_invalid_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="eight digits"):
        deadline_headers.grpc_seconds(value)
