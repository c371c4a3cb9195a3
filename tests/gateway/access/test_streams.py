"""Streams of requests: every message is a request of its own to ``--access``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from modelport.gateway.access.context import AccessContext, AccessRecord
from modelport.gateway.access.policy import AccessPolicy, PrincipalRights
from modelport.gateway.access.principal import UNKNOWN_CONNECTION, Principal
from tests.gateway.access.gateway import KEYS, AccessGateway, channel, serving
from tests.gateway.access.test_every_method import CALLS, INFERENCE_SERVICE, OIP

METHODS = (f"{OIP}/ModelStreamInfer", f"{INFERENCE_SERVICE}/StreamPredictions2")
INFER = '[[rules]]\nprincipals = ["ci"]\noperations = ["infer"]\nmodels = ["mine"]\n'
OTHERS = '[[rules]]\nprincipals = ["ci"]\noperations = ["metadata"]\n'


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[AccessGateway]:
    async with serving(tmp_path, INFER, "ci") as running:
        yield running


async def replies_until_the_end(
    gateway: AccessGateway, folder: Path, method: str, change: Callable[[Path], object]
) -> grpc.StatusCode:
    """The status of a stream whose files ``change`` changes after its first answer."""
    content = CALLS[method].message("mine").SerializeToString()
    async with channel(gateway) as connected:
        call = connected.stream_stream(f"/{method}")(metadata=tuple(gateway.headers("ci").items()))
        for _ in range(2):
            await call.write(content)
            assert await call.read() is not grpc.aio.EOF
        change(folder / "access")
        await gateway.server.watcher.poll()
        await call.write(content)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        return ended.value.code()


@pytest.mark.parametrize("method", METHODS)
async def test_a_key_that_is_revoked_ends_open_streams_at_their_next_request(
    gateway: AccessGateway, tmp_path: Path, method: str
) -> None:
    def revoke(folder: Path) -> None:
        (folder / "keys.toml").write_text("")

    found = await replies_until_the_end(gateway, tmp_path, method, revoke)
    assert found is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", METHODS)
async def test_new_rules_hold_for_the_next_request_of_an_open_stream(
    gateway: AccessGateway, tmp_path: Path, method: str
) -> None:
    def forbid(folder: Path) -> None:
        (folder / "access.toml").write_text(OTHERS + KEYS)

    found = await replies_until_the_end(gateway, tmp_path, method, forbid)
    assert found is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("method", METHODS)
async def test_every_refused_request_of_a_stream_is_in_the_audit_log(
    tmp_path: Path, method: str
) -> None:
    content = CALLS[method].message("yours").SerializeToString()
    audit = tmp_path / "audit"
    async with (
        serving(tmp_path, INFER, "ci", audit_log=audit) as gateway,
        channel(gateway) as connected,
    ):
        call = connected.stream_stream(f"/{method}")(metadata=tuple(gateway.headers("ci").items()))
        for _ in range(3):
            await call.write(content)
            await call.read()
        await call.done_writing()
    rows: list[Any] = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(row["outcome"], row["model"]) for row in rows] == [("refused", "yours")] * 3


def test_fields_of_the_last_request_of_a_stream_replace_earlier_ones() -> None:
    record = AccessRecord((), UNKNOWN_CONNECTION, None)
    context = AccessContext(PrincipalRights(AccessPolicy(()), Principal("ci")), record)
    for left in (b"2", b"1", b"0"):
        context.add_fields((b"ratelimit", left))
    context.add_fields((b"retry-after", b"1"))
    assert list(record.response_headers) == [(b"ratelimit", b"0"), (b"retry-after", b"1")]
