"""Tests of this folder run in virtual time: no other process makes a request wait."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, type]:
    return {"virtual": VirtualLoop}


@pytest.fixture(autouse=True)
async def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    if isinstance(loop, VirtualLoop):  # that of an asynchronous test
        await asyncio.sleep(1)  # a real clock does not start at 0
        monkeypatch.setattr(time, "monotonic", loop.time)
