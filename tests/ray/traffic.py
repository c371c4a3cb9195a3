"""Clients that ask on and on, and a ledger of every request: what came back, and when.

The clients are Triton's, unmodified. Each request carries values of its own, and its answer must be
those: a lost, a wrong and another client's answer are all failures.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

TIMEOUT_SECONDS = 30.0
WIDTH = 4


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """``sent_at`` is monotonic; ``error`` is empty where the answer was right."""

    client: str
    sent_at: float
    seconds: float
    error: str


@dataclass(slots=True)
class Ledger:
    """Threads append."""

    entries: list[LedgerEntry] = field(default_factory=list)

    def lost(self, client: str = "") -> list[LedgerEntry]:
        return [e for e in self.entries if e.error and e.client.startswith(client)]

    def p99_ms(self, since: float, until: float) -> float:
        """The p99 latency of requests sent in the interval; NaN if there are none."""
        seconds = [e.seconds for e in self.entries if since <= e.sent_at < until]
        return float(np.percentile(seconds, 99) * 1000) if seconds else float("nan")


Ask = Callable[[np.ndarray[Any, Any]], Any]


def over_grpc(address: str, model: str, output: str) -> tuple[Ask, Callable[[], None]]:
    client = triton_grpc.InferenceServerClient(address)

    def ask(values: np.ndarray[Any, Any]) -> Any:
        tensor = triton_grpc.InferInput("x", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values)
        return client.infer(model, [tensor], client_timeout=TIMEOUT_SECONDS).as_numpy(output)

    return ask, client.close


def over_http(address: str, model: str, output: str, binary: bool = True) -> Any:
    client = triton_http.InferenceServerClient(
        address, connection_timeout=TIMEOUT_SECONDS, network_timeout=TIMEOUT_SECONDS
    )

    def ask(values: np.ndarray[Any, Any]) -> Any:
        tensor = triton_http.InferInput("x", list(values.shape), "FP32")
        tensor.set_data_from_numpy(values, binary_data=binary)
        wanted = triton_http.InferRequestedOutput(output, binary_data=binary)
        return client.infer(model, [tensor], outputs=[wanted]).as_numpy(output)

    return ask, client.close


@dataclass(frozen=True, slots=True)
class RayClient:
    """``connect`` makes what asks, in the thread that uses it, and what closes it."""

    name: str
    connect: Callable[[], Any]


@contextlib.contextmanager
def load(clients: Sequence[RayClient], ledger: Ledger, requests: int = 0) -> Iterator[None]:
    """Every client in a thread, asking until the block ends, or ``requests`` times."""
    stop = threading.Event()
    numbers = itertools.count()

    def work(client: RayClient) -> None:
        ask, close = client.connect()
        done = 0
        while not stop.is_set() and not (requests and done >= requests):
            values = np.full((1, WIDTH), next(numbers), np.float32)
            began, error = time.monotonic(), ""
            try:
                answer = ask(values)
                if answer is None or answer.tobytes() != values.tobytes():
                    error = f"wrong answer {answer}"
            except Exception as problem:  # whatever a client raises is a request lost
                error = f"{type(problem).__name__}: {problem}"[:300]
                stop.wait(0.05)  # nobody hammers a server that is down
            ledger.entries.append(LedgerEntry(client.name, began, time.monotonic() - began, error))
            done += 1
        with contextlib.suppress(Exception):  # a connection that is broken already
            close()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        yield
        if requests:
            for thread in threads:
                thread.join()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
