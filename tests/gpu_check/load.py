"""Requests of ``make gpu-check``: answers that are compared, latencies, and a loop by hand."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from modelport import AsyncClient
from modelport.gateway.errors import ModelportError
from modelport.gateway.types import Array
from tests.gpu_check.subjects import GpuSubject

CONCURRENCY = 16


class Requests:
    """Requests for one model with the answers of the CPU."""

    def __init__(self, subject: GpuSubject, sizes: Mapping[int, int]) -> None:
        """``sizes``: rows of a request → number of such requests."""
        self.tolerance, self.worst = subject.tolerance, 0.0
        self.asked: list[tuple[dict[str, Array], dict[str, Array]]] = []
        for rows, count in sizes.items():
            for number in range(count):
                drawn = subject.rows(rows, 1000 * rows + number)
                self.asked.append((subject.on_the_wire(drawn), subject.source.reference(drawn)))

    def check(self, number: int, answer: Mapping[str, Array]) -> None:
        """Compare an answer; raise ``AssertionError`` where it is outside the tolerance."""
        for name, expected in self.asked[number][1].items():
            given = answer[name].reshape(expected.shape)
            ratio = float(np.max(self.tolerance.ratio(expected, given)))
            self.worst = max(self.worst, ratio)
            error = float(np.max(np.abs(given - expected)))
            assert ratio <= 1, f"'{name}' differs by {error:.2e}, tolerance {self.tolerance}"

    async def expect(self, url: str, model: str) -> None:
        """Expect the answers of ``model`` in place of those of the module."""
        async with AsyncClient(url) as client:
            self.asked = [(inputs, await client.infer(model, inputs)) for inputs, _ in self.asked]


async def each(url: str, model: str, requests: Requests) -> None:
    """Send the requests one after the other."""
    async with AsyncClient(url) as client:
        for number, (inputs, _) in enumerate(requests.asked):
            requests.check(number, await client.infer(model, inputs))


async def many(
    url: str, model: str, requests: Requests, seconds: float, concurrency: int = CONCURRENCY
) -> dict[str, float]:
    """Send requests from ``concurrency`` clients at once; requests per second and p99."""
    taken: list[float] = []
    end = time.perf_counter() + seconds

    async def one(client: AsyncClient, number: int) -> None:
        while (began := time.perf_counter()) < end or not taken:
            number = (number + 1) % len(requests.asked)
            answer = await client.infer(model, requests.asked[number][0])
            taken.append(time.perf_counter() - began)
            requests.check(number, answer)

    async with AsyncClient(url) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(concurrency)))
        return _figures(taken, time.perf_counter() - began)


async def abandoned(url: str, model: str, requests: Requests, times: int) -> int:
    """Cut requests off at growing delays, most of them in flight; the number cut off."""
    inputs, cut = requests.asked[0][0], 0
    for number in range(times):
        async with AsyncClient(url) as client:
            await client.metadata(model)
            waiting = asyncio.create_task(client.infer(model, inputs))
            await asyncio.wait((waiting,), timeout=0.001 * number)
            cut += waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
    return cut


async def until_killed(url: str, model: str, requests: Requests, kill: Any) -> int:
    """Call ``kill`` while requests are in flight; the number of them that failed at once."""

    async def one(client: AsyncClient) -> int:
        while True:
            try:
                await client.infer(model, requests.asked[0][0])
            except ModelportError:
                return 1

    async with AsyncClient(url, timeout_seconds=20) as client:
        waiting = [asyncio.create_task(one(client)) for _ in range(CONCURRENCY)]
        await asyncio.sleep(0.5)
        kill()
        return sum(await asyncio.gather(*waiting))


def by_hand(subject: GpuSubject, device: str, rows: int, seconds: float) -> dict[str, float]:
    """The eager module in a loop on the device, from NumPy to NumPy."""
    module = copy.deepcopy(subject.source.model).to(device)
    inputs = [torch.from_numpy(array) for array in subject.rows(rows, 0).values()]
    taken: list[float] = []
    with torch.inference_mode():
        for _ in range(5):
            module(*(each.to(device) for each in inputs)).cpu()
        began = time.perf_counter()
        while (start := time.perf_counter()) < began + seconds or not taken:
            module(*(each.to(device) for each in inputs)).cpu().numpy()
            taken.append(time.perf_counter() - start)
    return _figures(taken, time.perf_counter() - began, rows)


def _figures(taken: list[float], seconds: float, rows: int = 1) -> dict[str, float]:
    p99 = float(np.quantile(taken, 0.99))
    return {"rows_per_second": len(taken) * rows / seconds, "p99_ms": 1000 * p99}
