"""HTTP bodies within the limits of the flags, of the model and of the memory budget."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import AsyncIterator

import pytest
from fastapi import Request

from modelport.gateway.errors import InvalidArgument, MemoryExhausted
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.asgi import scope_of
from modelport.gateway.runtime.request_memory import CURRENT, Lease, RequestMemory
from modelport.gateway.wire import inflation
from tests.gateway.server.handlers import ArrivingBody, WholeBody, request_of

LIMIT = 64 * 1024 * 1024


async def in_parts(body: bytes, count: int) -> AsyncIterator[bytes]:
    size = -(-len(body) // count) or 1
    for at in range(0, len(body), size):
        yield body[at : at + size]


async def read(body: bytes, parts: int = 1, bound: int | None = None, **headers: str) -> bytes:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    sent = WholeBody(body) if parts == 1 else ArrivingBody(in_parts(body, parts))
    return await request_body.read(request_of("POST", "/", fields, sent), LIMIT, bound=bound)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_000])
async def test_a_compressed_body_is_what_it_was(coding: str, size: int) -> None:
    plain = os.urandom(size)
    sent = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)
    assert await read(sent, parts=7, content_encoding=coding) == plain


async def test_a_body_that_is_no_complete_stream_is_refused() -> None:
    sent = gzip.compress(os.urandom(1_000_000))
    for damaged in (sent[:-1], sent + b"x", b"x" + sent, sent[:500_000]):
        with pytest.raises(InvalidArgument, match="complete gzip stream"):
            await read(damaged, content_encoding="gzip")


@pytest.mark.parametrize("period", [1, 1000, 20_000])
async def test_the_inflated_size_alone_decides_whatever_the_body_holds(period: int) -> None:
    """The ratio to what was sent was bounded, too: a sparse tensor was refused for its zeros."""
    plain = (os.urandom(period) * (LIMIT // period + 1))[:LIMIT]
    for coding, compress in (("gzip", gzip.compress), ("deflate", zlib.compress)):
        assert await read(compress(plain, 1), content_encoding=coding) == plain
        with pytest.raises(InvalidArgument, match="--http-max-input-size"):
            await read(compress(plain + b"0", 1), content_encoding=coding)


async def test_a_bomb_is_inflated_no_further_than_the_limit() -> None:
    bomb = gzip.compress(b"0" * (8 * LIMIT), 1)
    lease = Lease(RequestMemory(1 << 40).connection())
    token = CURRENT.set(lease)
    try:
        with pytest.raises(InvalidArgument, match="--http-max-input-size"):
            await read(bomb, content_encoding="gzip")
    finally:
        CURRENT.reset(token)
    assert lease.size <= LIMIT


async def test_a_signature_bounds_what_zeros_inflate_to() -> None:
    zeros = b"0.0," * 8_000_000
    sent = gzip.compress(zeros)
    assert await read(sent, bound=32_000_000, content_encoding="gzip") == zeros
    with pytest.raises(InvalidArgument, match="no valid request of its kind is"):
        await read(sent, bound=31_999_999, content_encoding="gzip")


async def test_a_body_past_the_models_bound_is_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match="larger than 1000 bytes"):
        await read(b"x" * 10, parts=2, bound=1000, content_length="1001")
    with pytest.raises(InvalidArgument, match="larger than 1000 bytes"):
        await read(b"x" * 1001, bound=1000)
    with pytest.raises(InvalidArgument, match="--http-max-input-size"):
        await read(b"x" * 10, parts=2, content_length=str(LIMIT + 1))


async def test_what_is_inflated_counts_in_the_budget() -> None:
    lease = Lease(RequestMemory(2_000_000).connection())
    token = CURRENT.set(lease)
    try:
        with pytest.raises(MemoryExhausted):
            await read(gzip.compress(b"0" * 5_000_000), content_encoding="gzip")
    finally:
        CURRENT.reset(token)


def test_to_inflate_takes_time_in_proportion() -> None:
    """The rest of the input was once copied for every part: a thousand times 64 MB."""
    plain = os.urandom(4_000_000)
    assert inflation.inflate(zlib.compress(plain, 0), b"deflate", LIMIT) == plain


async def test_no_option_raises_the_limit_of_a_request_without_tensors() -> None:
    request = request_of("POST", "/", [], WholeBody(b"x" * (request_body.CONTROL_BYTES + 1)))
    with pytest.raises(InvalidArgument, match="larger than 262144 bytes, but no") as refused:
        await request_body.read_control(Request(scope_of(request, "/")))
    assert "--http-max-input-size" not in str(refused.value)
