"""When the framework behind the HTTP port is built."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.protocols import http_entry
from gateway.protocols.http_entry import HttpEntry


class Cold:
    """Nothing is hot."""

    def serve(self, scope: Any, receive: Any, send: Any) -> None:
        return None

    def refuses(self, raw_path: bytes) -> bool:
        return False


class Clock:
    """The processor time that the process has used, a step more at each look."""

    def __init__(self, *steps: float) -> None:
        self.used, self.looks, self._steps = 0.0, 0, list(steps)

    def process_time(self) -> float:
        self.looks += 1
        self.used += self._steps.pop(0) if self._steps else 0.0
        return self.used


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(http_entry, "IDLE_SECONDS", 0.01)
    return []


def entry(built: list[str]) -> HttpEntry:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        built.append("asked")

    def build() -> Any:
        built.append("built")
        return application

    return HttpEntry(Cold(), build)


def test_it_is_built_when_the_process_has_little_to_do(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1.0, 0.01, 0.002, 0.0005)
    monkeypatch.setattr(http_entry, "time", clock)
    asyncio.run(entry(built).complete_when_idle())
    assert (built, clock.looks) == (["built"], 4), "more than 1 ms of 10 is a lot to do"


def test_a_request_that_needs_it_does_not_wait_for_that_and_it_is_built_once(
    built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> None:
        late = entry(built)
        monkeypatch.setattr(http_entry, "time", Clock(*[1.0] * 1000))
        idle = asyncio.ensure_future(late.complete_when_idle())
        await late({"type": "http", "raw_path": b"/docs"}, None, None)  # type: ignore[arg-type, typeddict-item]
        await idle

    asyncio.run(ask())
    assert built == ["built", "asked"]
