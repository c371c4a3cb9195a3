"""In an overload a front refuses what it has not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from modelport.gateway.access.operations import Operation
from modelport.gateway.protocols.grpc_method import Method
from modelport.gateway.protocols.http_message import HttpRequest, HttpResponse
from modelport.gateway.protocols.oip.grpc_request import RawRequest, model_of
from modelport.gateway.server.grpc.connection import GrpcListener
from modelport.gateway.server.grpc.service import Service
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.types import Deadline

BUSY = "/v2/models/busy/infer"
REFUSED = b'{"error":"Exceeds maximum queue size"}'
SERVICE, NAME = "inference.GRPCInferenceService", "ModelInfer"


#: The overloaded models that the listeners know.
overloaded: set[str] = set()


class Busy:
    """A handler with a path that is overloaded. ``seen``: the requests that it got."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def refuses(self, raw_path: bytes) -> bool:
        return raw_path == BUSY.encode()

    def __call__(self, request: HttpRequest) -> HttpResponse:
        self.seen.append(f"{request.method} {request.path}")
        return HttpResponse(204)


@pytest.fixture
def overload() -> Iterator[None]:
    overloaded.add("busy")
    yield
    overloaded.clear()


@contextlib.asynccontextmanager
async def connected(
    app: Busy,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listener = HttpListener(
        app, bind("127.0.0.1", 0, "--http-port"), overloaded=overloaded, refuses=app.refuses
    )
    await listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.close()
        await listener.drain(Deadline.after(2))


def request(path: str, body: bytes = b"", method: str = "POST", length: int = -1) -> bytes:
    stated = len(body) if length < 0 else length
    head = f"{method} {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {stated}\r\n\r\n"
    return head.encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
    return head, await reader.readexactly(int(length or 0))


async def test_a_request_is_refused_and_the_connection_stays_open(overload: None) -> None:
    app = Busy()
    async with connected(app) as (reader, writer):
        for _ in range(2):
            writer.write(request(BUSY, b"{}"))
            head, body = await answer(reader)
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1\r\n" in head
            assert b"connection" not in head
            assert body == REFUSED
        writer.write(request("/other", b"{}"))
        assert (await answer(reader))[0].startswith(b"HTTP/1.1 204 ")
    assert app.seen == ["POST /other"]


async def test_only_a_post_to_what_is_overloaded_is_refused(overload: None) -> None:
    app = Busy()
    async with connected(app) as (reader, writer):
        writer.write(request(BUSY, method="GET"))
        assert (await answer(reader))[0].startswith(b"HTTP/1.1 204 ")
    assert app.seen == [f"GET {BUSY}"]


async def test_requests_in_a_pipeline_are_answered_in_order(overload: None) -> None:
    app = Busy()
    async with connected(app) as (reader, writer):
        writer.write(request(BUSY, b"{}") + request("/other") + request(BUSY, b"{}"))
        statuses = [(await answer(reader))[0][9:12] for _ in range(3)]
    assert statuses[:2] == [b"503", b"204"]
    assert len(app.seen) + statuses.count(b"503") == 3


async def test_a_body_that_is_still_to_come_is_not_waited_for(overload: None) -> None:
    app = Busy()
    async with connected(app) as (reader, writer):
        writer.write(request(BUSY, b"{", length=1_000_000))
        head, body = await answer(reader)
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"\r\nconnection: close\r\n" in head
        assert body == REFUSED
        assert await reader.read() == b""
    assert app.seen == []


async def test_without_an_overload_nobody_is_asked() -> None:
    app = Busy()
    async with connected(app) as (reader, writer):
        writer.write(request(BUSY, b"{}"))
        assert (await answer(reader))[0].startswith(b"HTTP/1.1 204 ")
    assert app.seen == [f"POST {BUSY}"]


@pytest.mark.parametrize("name", ["busy", "idle"])
async def test_a_call_for_what_is_overloaded_is_refused_unread(name: str, overload: None) -> None:
    async def infer(message: object, deadline: Deadline) -> object:
        return pb.ModelInferResponse(id="read")

    def refuses(content: bytes | memoryview) -> bool:
        return model_of(content) == ("busy", 7)

    method = Method(RawRequest, pb.ModelInferResponse, infer, Operation.INFER, refuses=refuses)
    service = Service({SERVICE: {NAME: method}}, 2**20, overloaded)
    listener = GrpcListener(service, bind("127.0.0.1", 0, "--grpc-port"))
    await listener.start()
    try:
        message = pb.ModelInferRequest(model_name=name, model_version="7")
        async with grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/{NAME}")
            for _ in range(2):
                if name == "idle":
                    reply = pb.ModelInferResponse.FromString(
                        await call(message.SerializeToString(), timeout=60)
                    )
                    assert reply.id == "read"
                    continue
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(message.SerializeToString(), timeout=60)
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                assert caught.value.details() == "Exceeds maximum queue size"
    finally:
        await listener.drain(Deadline.after(2))


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (pb.ModelInferRequest(model_name="m"), ("m", 0)),
        (pb.ModelInferRequest(model_name="m", model_version="3", id="x"), ("m", 3)),
        (pb.ModelInferRequest(model_name="m" * 300), ("m" * 300, 0)),
        (pb.ModelInferRequest(model_name="m", model_version="newest"), ("", 0)),
        (pb.ModelInferRequest(id="x"), ("", 0)),
        (pb.ModelInferRequest(), ("", 0)),
    ],
)
def test_the_model_of_a_message_is_known_before_it_is_decoded(
    message: pb.ModelInferRequest, found: tuple[str, int]
) -> None:
    assert model_of(message.SerializeToString()) == found


@pytest.mark.parametrize(
    "content", [b"\n", b"\n\xff", b"\n\xff\xff\xff\xff\xff\xff", b"\n\x01\xff"]
)
def test_bytes_that_are_no_message_name_no_model(content: bytes) -> None:
    assert model_of(content) == ("", 0)
