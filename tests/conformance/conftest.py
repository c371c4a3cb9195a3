"""One real gateway for the whole folder, and every client of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.conformance import decoupled, repository, torchserve
from tests.conformance.clients import CALLERS, CONTROLS, ControlCaller, InferCaller
from tests.server import Gateway, serving
from tests.upstream import mirrored

#: ``grpc`` or ``http``: the suites ask a gateway that routes every model to a second one.
VIA = os.environ.get("MODELPORT_VIA", "")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = repository.build(tmp_path_factory.mktemp("conformance") / "models")
    if VIA:
        with mirrored(tmp_path_factory.mktemp("via"), root, VIA, own=True) as front:
            yield front
    else:
        with serving(root) as served:
            yield served


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """The same models, and some of pictures, for TorchServe's dialect."""
    with torchserve.serving_all(tmp_path_factory.mktemp("torchserve") / "models") as gateway:
        yield gateway


@pytest.fixture(scope="session")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Models that give any number of responses."""
    with serving(decoupled.build(tmp_path_factory.mktemp("decoupled") / "models")) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose models TorchServe's management API may change."""
    with torchserve.serving_on_request(tmp_path_factory.mktemp("explicit") / "models") as gateway:
        yield gateway


@pytest.fixture(scope="session")
def runner() -> Iterator[asyncio.Runner]:
    """The one event loop of every asyncio client: grpc.aio wants no second one."""
    with asyncio.Runner() as created:
        yield created


class Callers:
    """Every way of calling, opened when first asked for."""

    def __init__(self, gateway: Gateway, runner: asyncio.Runner) -> None:
        self._gateway, self._runner = gateway, runner
        self._opened: dict[str, InferCaller] = {}

    def __getitem__(self, name: str) -> InferCaller:
        if name not in self._opened:
            self._opened[name] = CALLERS[name](self._gateway, self._runner)
        return self._opened[name]

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()


@pytest.fixture(scope="session")
def callers(gateway: Gateway, runner: asyncio.Runner) -> Iterator[Callers]:
    made = Callers(gateway, runner)
    yield made
    made.close()


@pytest.fixture(params=list(CALLERS))
def caller(request: pytest.FixtureRequest, callers: Callers) -> InferCaller:
    """Every way of calling."""
    return callers[request.param]


@pytest.fixture(params=[name for name in CALLERS if name.startswith("http")])
def http_caller(request: pytest.FixtureRequest, callers: Callers) -> InferCaller:
    """Every way over HTTP, where JSON and bytes are a choice."""
    return callers[request.param]


@pytest.fixture(params=[name for name in CALLERS if not name.endswith("stream")])
def unary_caller(request: pytest.FixtureRequest, callers: Callers) -> InferCaller:
    """Every way but streams, which have no compression and whose errors have no status."""
    return callers[request.param]


@pytest.fixture(params=CONTROLS)
def control(
    request: pytest.FixtureRequest, callers: Callers, runner: asyncio.Runner
) -> ControlCaller:
    """Every client's calls that are no inference."""
    return ControlCaller(callers[request.param], runner)
