"""Requests with the same head on one connection: what was decided for one holds for the next.

Only as long as it would be decided again: each test changes what decides between two requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

from modelport.gateway.access import api_key_file
from modelport.gateway.access.access import Access
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from tests.gateway.access.gateway import KEYS, AccessGateway, serving

RULE = '[[rules]]\nprincipals = ["ci"]\noperations = ["infer"]\nmodels = ["mine"]\n'
QUOTA = '[[quotas]]\nprincipals = ["ci"]\nrequests_per_second = 0.001\n'
BODY = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
#: A head repeats from the second request on, and what was decided for it from the third.
REPEATS = 4


class RawConnection:
    """One connection, whose requests have the same head byte for byte."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str, model: str
    ) -> None:
        self._reader, self._writer = reader, writer
        lines = [
            f"POST /v2/models/{model}/infer HTTP/1.1",
            "host: localhost",
            f"x-api-key: {key}",
            f"content-length: {len(BODY)}",
        ]
        self._request = "\r\n".join([*lines, "", ""]).encode() + BODY

    async def ask(self) -> tuple[int, bytes]:
        """Send the request once more; return the status and the head of its response."""
        self._writer.write(self._request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
        await self._reader.readexactly(int(fields[b"content-length"]))
        return int(head.split(b" ", 2)[1]), head

    async def statuses(self, count: int = REPEATS) -> list[int]:
        return [(await self.ask())[0] for _ in range(count)]


@contextlib.asynccontextmanager
async def connected(
    gateway: AccessGateway, caller: str = "ci", model: str = "mine"
) -> AsyncIterator[RawConnection]:
    host, port = gateway.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield RawConnection(reader, writer, gateway.keys[caller], model)
    finally:
        writer.close()


@contextlib.asynccontextmanager
async def served(folder: Path, rules: str = RULE) -> AsyncIterator[AccessGateway]:
    """A gateway that serves OIP first, as it does by default."""
    serves = serving(folder, rules, "ci", versions=2, vertex_ai=None, prometheus_path="")
    async with serves as gateway:
        yield gateway


async def test_a_repeated_credential_is_checked_once(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway, connected(gateway) as connection:
        assert await connection.statuses() == [200] * REPEATS
        once = Access.authenticate
        with patch.object(Access, "authenticate", autospec=True, side_effect=once) as found:
            gateway.server.watcher.reloaded[0]()  # forgets what is kept
            assert await connection.statuses() == [200] * REPEATS
        assert found.call_count == 1


async def test_a_repeated_key_is_refused_once_it_is_revoked(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway, connected(gateway) as connection:
        assert await connection.statuses() == [200] * REPEATS
        with api_key_file.locked(tmp_path / "access" / "keys.toml") as replace:
            replace([])
        await gateway.server.watcher.poll()
        assert await connection.statuses() == [401] * REPEATS


async def test_a_repeated_request_follows_the_rules(tmp_path: Path) -> None:
    path = tmp_path / "access" / "access.toml"
    async with served(tmp_path) as gateway, connected(gateway) as connection:
        assert await connection.statuses() == [200] * REPEATS
        for rules, status in (
            (RULE.replace('"infer"', '"metadata"'), 403),
            (RULE, 200),
            (RULE.replace('"mine"', '"yours"'), 404),
            (RULE, 200),
        ):
            path.write_text(rules + KEYS)
            await gateway.server.watcher.poll()
            assert await connection.statuses() == [status] * REPEATS


async def test_a_repeated_request_uses_up_a_new_quota(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway, connected(gateway) as connection:
        assert await connection.statuses() == [200] * REPEATS
        (tmp_path / "access" / "access.toml").write_text(RULE + QUOTA + KEYS)
        await gateway.server.watcher.poll()
        status, head = await connection.ask()
        assert (status, b"ratelimit-policy: " in head.lower()) == (200, True)
        assert await connection.statuses() == [429] * REPEATS


async def test_a_repeated_request_stays_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        for caller, model, status in (("wrong", "mine", 401), ("ci", "yours", 404)):
            async with connected(gateway, caller, model) as connection:
                assert await connection.statuses() == [status] * REPEATS


async def test_a_repeated_request_takes_part_in_a_rollout_that_begins(tmp_path: Path) -> None:
    sides = RolloutSide("mine", 2), RolloutSide("mine", 1)
    plan = RolloutPlan("0" * 32, "mine", *sides, default_version=2)
    async with served(tmp_path) as gateway, connected(gateway) as connection:
        assert await connection.statuses() == [200] * REPEATS
        gateway.server.rollouts.apply(
            {
                "model": "mine", "plan": plan.to_json(), "stage": 0, "kind": "canary",
                "share": 1.0, "revision": 1,
            }
        )  # fmt: skip
        _, head = await connection.ask()
        assert b"modelport-model-version: 1" in head.lower()
