"""Two endpoints of which one breaks, for every kind of route and every fault: ``make chaos``.

The kinds are those of ``gateway.repository.routes_file``: a new backend or protocol is in the
matrix by itself. The upstream is a gateway, which speaks every dialect that a route does. A backend
is loaded here, as a gateway loads it, with two endpoints; clients ask it in a closed loop before a
fault, during it and after it. Exits with 1 where a cell misses what must hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from modelport.gateway.backend_registry import find_loader
from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import ModelportError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.routes_file import (
    BACKENDS,
    ModelRoute,
    OutlierDetection,
    UpstreamProtocol,
)
from modelport.gateway.types import Datatype, Deadline, InferRequest, Tensor, finished
from tests.faults.chaos_proxy import STATUSES, ChaosProxy, ProxyFault, Shim
from tests.faults.probes import ChangingRepository
from tests.server import Gateway, serving

MODEL = "m"
ROW = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
SIGNATURE = (
    "max_batch_size: 8 input { name: 'x' data_type: TYPE_FP32 dims: 4 } "
    "output { name: 'y' data_type: TYPE_FP32 dims: 4 }"
)
KINDS = [(backend, protocol) for backend in BACKENDS for protocol in UpstreamProtocol]
FAULTS = [fault for fault in ProxyFault if fault is not ProxyFault.NONE]
#: What must hold.
FAILED_SHARE, EJECTED_SECONDS, EJECTED_REQUESTS, BACK_SECONDS, SLOWER = 0.005, 3.0, 5, 5.0, 1.5
#: How long a client waits for an answer.
CLIENT_SECONDS = 4.0
#: Between an answer and the next request: the endpoints, not the clients' core, are to be measured.
THINK_SECONDS = 0.005


@dataclass
class ChaosPlan:
    """The load, and the length of a fault as a number of requests or a time."""

    clients: int = 8
    healthy_seconds: float = 1.5
    broken_seconds: float = 8.0
    outlier_detection: OutlierDetection = field(default_factory=OutlierDetection)
    connect_seconds: float = 5.0
    client_seconds: float = CLIENT_SECONDS


@dataclass
class ChaosCell:
    """One kind under one fault."""

    kind: str
    fault: ProxyFault
    requests: int = 0
    failed: int = 0
    #: Until the broken endpoint was ejected; inf: it was not.
    ejected_seconds: float = float("inf")
    #: Requests that had failed by then.
    failed_before: int = 0
    back_seconds: float = float("inf")
    healthy_p99: float = 0.0
    broken_p99: float = 0.0

    def missed(self, timed: bool = True) -> list[str]:
        """List the expectations that failed; ``timed`` includes those on times."""
        ejected = self.ejected_seconds <= EJECTED_SECONDS or (
            self.ejected_seconds < float("inf")
            and (not timed or self.failed_before <= EJECTED_REQUESTS)
        )
        holds = {
            f"<= {FAILED_SHARE:.1%} fail": self.failed <= max(1, FAILED_SHARE * self.requests),
            "ejected": ejected,
            "back": self.back_seconds <= (BACK_SECONDS if timed else 1e9),
        }
        return [name for name, held in holds.items() if not held]


@contextlib.contextmanager
def upstream() -> Iterator[Gateway]:
    """A gateway with the model, to which every route leads."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        repository = ChangingRepository(Path(folder))
        repository.slow(0.0, MODEL)
        with serving(repository.root) as gateway:
            yield gateway


class Clients:
    """A closed loop of them: when each request ended, how long it took, and whether it was good."""

    def __init__(self, backend: Any, plan: ChaosPlan) -> None:
        self._backend, self._plan = backend, plan
        self.outcomes: list[tuple[float, float, bool]] = []

    async def ask(self) -> None:
        request = InferRequest(MODEL, [Tensor("x", Datatype.FP32, ROW)])
        began, good = time.monotonic(), False
        try:
            deadline = Deadline.after(self._plan.client_seconds)
            response = await finished(self._backend(request, deadline))
            good = bool((response.outputs[0].data == ROW).all())
        except ModelportError:
            pass
        now = time.monotonic()
        self.outcomes.append((now, now - began, good))

    async def _drive(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(THINK_SECONDS)

    @contextlib.asynccontextmanager
    async def asking(self) -> Any:
        tasks = [asyncio.ensure_future(self._drive()) for _ in range(self._plan.clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def p99(outcomes: list[tuple[float, float, bool]]) -> float:
    took = sorted(seconds for _, seconds, _ in outcomes)
    return took[int(len(took) * 0.99)] if took else 0.0


async def _until(condition: Any, seconds: float) -> float:
    """Wait for ``condition`` and return the seconds it took; infinity after ``seconds``."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            return float("inf")
        await asyncio.sleep(0.005)
    return time.monotonic() - began


async def run(
    gateway: Gateway, backend: str, protocol: UpstreamProtocol, fault: ProxyFault, plan: ChaosPlan
) -> ChaosCell:
    """One cell of the matrix."""
    target = gateway.grpc if protocol is UpstreamProtocol.GRPC else gateway.http
    async with contextlib.AsyncExitStack() as stack:
        shim = Shim(target)
        behind = target
        if fault in STATUSES:
            behind = await stack.enter_async_context(
                shim.grpc() if protocol is UpstreamProtocol.GRPC else shim.http()
            )
        proxies = [ChaosProxy(behind), ChaosProxy(target)]
        addresses = [await stack.enter_async_context(proxy.listening()) for proxy in proxies]
        loaded = await _load(backend, protocol, addresses, plan)
        try:
            cell = ChaosCell(f"{backend}, {protocol}", fault)
            return await _measure(loaded, proxies[0], shim, cell, plan)
        finally:
            await asyncio.to_thread(loaded.unload)


async def _load(
    backend: str, protocol: UpstreamProtocol, addresses: list[str], plan: ChaosPlan
) -> Any:
    def unused(*_: Any) -> Any:
        raise AssertionError

    loop = asyncio.get_running_loop()
    host = Host(loop, unused, unused, unused, unused)
    route = ModelRoute(
        backend,
        tuple(addresses),
        protocol,
        model=MODEL,
        connect_timeout_seconds=plan.connect_seconds,
        outlier_detection=plan.outlier_detection,
    )
    config = configuration.parse(SIGNATURE)
    artifact = Artifact(MODEL, 1, Path(), config, 1, route, host)
    return await asyncio.to_thread(find_loader(backend), artifact)


async def _measure(
    loaded: Any, proxy: ChaosProxy, shim: Shim, cell: ChaosCell, plan: ChaosPlan
) -> ChaosCell:
    broken, clients = loaded._pool.endpoints[0], Clients(loaded, plan)
    async with clients.asking():
        await asyncio.sleep(plan.healthy_seconds)
        healthy = len(clients.outcomes)
        (shim if cell.fault in STATUSES else proxy).fault = ProxyFault.NONE
        if cell.fault in STATUSES:
            shim.fault = cell.fault
        else:
            proxy.set(cell.fault)
        began = time.monotonic()
        cell.ejected_seconds = await _until(lambda: broken.ejected, plan.broken_seconds)
        cell.failed_before = sum(not good for *_, good in clients.outcomes[healthy:])
        await asyncio.sleep(max(0.0, began + plan.broken_seconds - time.monotonic()))
        during = clients.outcomes[healthy:]
        shim.fault = ProxyFault.NONE
        proxy.set(ProxyFault.NONE)
        cell.back_seconds = await _until(
            lambda: not broken.ejected and not broken.trial and broken.latency_seconds, 10.0
        )
        await asyncio.sleep(plan.healthy_seconds / 3)
    after = clients.outcomes[healthy:]
    cell.requests, cell.failed = len(after), sum(not good for *_, good in after)
    cell.healthy_p99, cell.broken_p99 = p99(clients.outcomes[:healthy]), p99(during)
    return cell


def table(cells: list[ChaosCell]) -> Table:
    found = Table(*("route", "fault", "requests", "failed", "ejected after", "back after",
                    "p99", ""))  # fmt: skip
    for cell in cells:
        missed = cell.missed()
        slower = cell.broken_p99 / cell.healthy_p99 if cell.healthy_p99 else 0.0
        found.add_row(
            cell.kind, cell.fault.value, str(cell.requests), str(cell.failed),
            f"{cell.ejected_seconds:.2f} s", f"{cell.back_seconds:.2f} s",
            f"{slower:.2f} x of {cell.healthy_p99 * 1e3:.0f} ms",
            "misses " + ", ".join(missed) if missed else "holds",
        )  # fmt: skip
    return found


async def _main() -> list[ChaosCell]:
    with upstream() as gateway:
        cells = []
        for backend, protocol in KINDS:
            for fault in FAULTS:
                cells.append(await run(gateway, backend, protocol, fault, ChaosPlan()))
                cell = cells[-1]
                print(f"{cell.kind}: {fault.value}: {cell.missed() or 'holds'}", flush=True)
    return cells


if __name__ == "__main__":
    cells = asyncio.run(_main())
    Console(width=140).print(table(cells))
    sys.exit(any(cell.missed() for cell in cells))
