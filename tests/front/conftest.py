"""One Envoy for the folder; where Envoy cannot run, the reason instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.front.envoy import launch
from tests.front.launcher import Envoy, envoy


@pytest.fixture(scope="session", autouse=True)
def _envoy_runs_here() -> None:
    if problem := launch.problem():
        pytest.skip(problem)


@pytest.fixture(scope="session")
def probe(_envoy_runs_here: None) -> Iterator[Envoy]:
    with envoy() as running:
        yield running
