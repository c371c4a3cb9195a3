"""gRPC as ASGI: framing, compression, statuses, deadlines, streams."""

from __future__ import annotations

import queue
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.front.grpc import framing
from gateway.front.grpc.framing import Frames, MalformedFrame, MessageTooLarge
from tests.conformance import wire
from tests.front.launcher import Envoy

SECONDS = 20.0
LIMIT = 2**20


@pytest.fixture(scope="module")
def channel(probe: Envoy) -> Iterator[grpc.Channel]:
    with wire.channel(probe.grpc) as opened:
        yield opened


def call(channel: grpc.Channel, name: str, kind: str = "unary_unary", of: Any = BytesValue) -> Any:
    return getattr(channel, kind)(f"/probe.Probe/{name}", of.SerializeToString, of.FromString)


def refusal(channel: grpc.Channel, name: str, value: bytes = b"", **options: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, name)(BytesValue(value=value), timeout=SECONDS, **options)
    error: grpc.RpcError = caught.value
    return error


# -- one message ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, 70_000, 50_000_000])
def test_a_message_of_any_size_comes_back(channel: grpc.Channel, size: int) -> None:
    request = BytesValue(value=b"a" * size)
    assert call(channel, "Echo")(request, timeout=SECONDS) == request


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_compressed_message_is_taken(channel: grpc.Channel, coding: grpc.Compression) -> None:
    request = BytesValue(value=b"a" * 10_000)
    assert call(channel, "Echo")(request, timeout=SECONDS, compression=coding) == request
    talk = call(channel, "Talk", "stream_stream")
    replies = talk(iter([request] * 3), timeout=SECONDS, compression=coding)
    assert list(replies) == [request] * 3


def test_a_compressed_message_that_grows_beyond_the_limit_is_refused(channel: Any) -> None:
    assert len(call(channel, "Echo")(BytesValue(value=bytes(LIMIT - 100))).value) == LIMIT - 100
    error = refusal(channel, "Echo", bytes(20 * LIMIT), compression=grpc.Compression.Gzip)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_encoding_that_nobody_knows_is_unimplemented_and_those_known_are_named(
    probe: Envoy,
) -> None:
    headers = ("content-type: application/grpc", "te: trailers", "grpc-encoding: snappy")
    done = subprocess.run(
        [
            *("curl", "-s", "-D", "-", "--http2-prior-knowledge", "-X", "POST"),
            *(part for header in headers for part in ("-H", header)),
            f"http://{probe.grpc}/probe.Probe/Echo",
        ],
        capture_output=True,
        text=True,
    )
    assert "grpc-status: 12" in done.stdout
    assert "grpc-accept-encoding: identity,deflate,gzip" in done.stdout


@pytest.mark.parametrize("path", ["/probe.Probe/Nothing", "/Nobody/Echo", "/probe.Probe/"])
def test_a_method_that_is_not_there_is_unimplemented(channel: grpc.Channel, path: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(path, None, None)(b"", timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_what_is_no_grpc_is_told_so(probe: Envoy) -> None:
    reply = wire.send(probe.grpc, "POST", "/probe.Probe/Echo", b"{}")
    assert reply.status == 415
    assert "gRPC" in reply.json["error"]


def test_grpc_is_served_on_its_own_port_only(probe: Envoy) -> None:
    """Who opens the HTTP port to others has not opened the other."""
    with wire.channel(probe.http) as channel, pytest.raises(grpc.RpcError) as caught:
        call(channel, "Echo")(BytesValue(), timeout=SECONDS)
    assert caught.value.code() is not grpc.StatusCode.OK


@pytest.mark.parametrize(
    "message", ["plain", "100 %", "naïve ☃ \U0001f600", "two\nlines", "a" * 2000]
)
def test_an_errors_text_arrives_as_it_is(channel: grpc.Channel, message: str) -> None:
    error = refusal(channel, "Fail", message.encode())
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, message)


def test_bytes_that_are_no_message_are_an_invalid_argument(channel: grpc.Channel) -> None:
    echo = channel.unary_unary("/probe.Probe/Echo", None, None)
    with pytest.raises(grpc.RpcError) as caught:
        echo(b"\xff\xff", timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "the request is not a valid BytesValue message"


# -- streams --------------------------------------------------------------------------------------


def test_a_reply_may_be_many_messages(channel: grpc.Channel) -> None:
    count = call(channel, "Count", "unary_stream", Int64Value)
    replies = count(Int64Value(value=2000), timeout=SECONDS)
    assert [reply.value for reply in replies] == list(range(2000))


def test_both_sides_of_a_stream_interleave(channel: grpc.Channel) -> None:
    """Each message is sent only when the answer to the one before has come."""
    asked: queue.Queue[BytesValue | None] = queue.Queue()
    replies = call(channel, "Talk", "stream_stream")(iter(asked.get, None), timeout=SECONDS)
    for number in range(200):
        asked.put(BytesValue(value=b"%d" % number * 1000))
        assert next(replies).value == b"%d" % number * 1000
    asked.put(None)
    assert list(replies) == []


def test_a_stream_carries_large_messages(channel: grpc.Channel) -> None:
    sent = [BytesValue(value=bytes([n]) * 5_000_000) for n in range(8)]
    replies = call(channel, "Talk", "stream_stream")(iter(sent), timeout=SECONDS)
    assert all(reply == message for reply, message in zip(replies, sent, strict=True))


# -- deadlines and cancellation -------------------------------------------------------------------


def cancelled(probe: Envoy, name: str, times: int) -> bool:
    return probe.journal().count(f"{name} cancelled") == times


@pytest.mark.parametrize(
    ("method", "kind", "name"),
    [
        ("Wait", "unary_unary", "unary"),
        ("Count", "unary_stream", "stream"),
        ("Talk", "stream_stream", "talk"),
    ],
)
def test_a_call_that_is_cancelled_or_too_late_stops_its_handler_at_once(
    probe: Envoy, channel: grpc.Channel, method: str, kind: str, name: str
) -> None:
    of = Int64Value if method == "Count" else BytesValue
    start = call(channel, method, kind, of)
    more: queue.Queue[Any] = queue.Queue()
    more.put(BytesValue(value=b"wait"))
    argument: Any = iter(more.get, None) if kind == "stream_stream" else of()
    future = (start.future if kind == "unary_unary" else start)(argument, timeout=SECONDS)
    probe.wait_for(f"{name} waits")
    future.cancel()
    assert probe.wait_for(f"{name} cancelled") < 0.5
    argument = iter([BytesValue(value=b"wait")]) if kind == "stream_stream" else of()
    started = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        list(start(argument, timeout=0.3)) if kind != "unary_unary" else start(
            argument, timeout=0.3
        )
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    while not cancelled(probe, name, 2):
        assert time.monotonic() - started < 1.0
    more.put(None)


def test_a_deadline_that_the_handler_keeps_is_told_as_the_clients(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(channel, "Expire")(BytesValue(), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# -- framing --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 50), min_size=1))
def test_messages_are_found_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    wire_bytes = b"".join(framing.frame(message) for message in messages)
    frames, found = Frames(b"identity", 2**20, 2**20), []
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
        Frames(encoding, 1000, 100).only(body)


def test_a_message_is_measured_after_it_is_decompressed() -> None:
    body = b"\1" + struct.pack(">I", len(PACKED)) + PACKED
    assert Frames(b"gzip", 1000, 100).only(body) == b"a" * 100
    with pytest.raises(MessageTooLarge):
        Frames(b"gzip", 1000, 99).only(body)


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
    assert framing.timeout_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"S", b"1", b"1s", b"-1S", b"123456789S", b"1.5S", b"\xff"])
def test_what_is_no_timeout_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="eight digits"):
        framing.timeout_seconds(value)
