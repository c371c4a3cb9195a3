"""``make soak``: Python models that fail in every way under load, and what others notice.

Each fault is a request to one model, again and again. Meanwhile two other models get requests at a
steady rate, by processes of their own: one in Python, and one in the gateway. Before each fault is
a calm time as long as the one before, so that what else the machine does harms both alike. A third
client asks the failing model for ordinary answers: none of these may fail.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask
from tests.gateway.backends.python.test_isolation import ENDS, ONE
from tests.server import Gateway, serving

#: Requests a second to each of the other models, and to the failing one besides its faults.
RATE, BESIDE_RATE = 100.0, 20.0
MAX_RATIO, MAX_BACK_SECONDS, MAX_HANG_SECONDS = 1.1, 1.0, 1.0
FLAGS = (
    "--allow-python", "--python-max-seconds", f"{MAX_HANG_SECONDS:g}", "--python-max-memory",
    str(200 << 20),
)  # fmt: skip
#: What the failing model does, and the status of that request.
FAULTS = {
    "crash (SIGSEGV)": (ENDS["segfault"][0], 503),
    "hang": (ENDS["hang"][0], 503),
    "leak": (ENDS["leak"][0], 503),
    "os._exit": (ENDS["os._exit"][0], 503),
    "SIGSTOP": (ENDS["stop"][0], 503),
    "fork": (ENDS["a child that lives on"][0], 503),
    "stdout flood": ("for _ in range(20000): print('x' * 100)\n" + ONE, 200),
}
VECTOR = """
input { name: "INPUT0" data_type: TYPE_FP32 dims: 4 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 4 }
"""
ECHO = "def compute(x):\n    return {'OUTPUT0': x}"
_BODY = b'{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[4],"data":[1,2,3,4]}]}'

#: Time of ``time.monotonic`` and latency of an answer, in seconds.
Latency = tuple[float, float]


@dataclass
class FaultOutcomes:
    """All trials of one fault. ``windows``: calm and disturbed times, from and until."""

    statuses: list[int] = field(default_factory=list)
    back_seconds: list[float] = field(default_factory=list)
    windows: tuple[list[tuple[float, float]], list[tuple[float, float]]] = field(
        default_factory=lambda: ([], [])
    )


def steady(port: int, model: str, stop: Any, found: Any) -> None:
    """Send requests at a steady rate, on one connection; put the latencies at the end."""
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(_BODY)}\r\n"
    message = head.encode() + b"\r\n" + _BODY
    latencies: list[Latency] = []
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        due = time.monotonic()
        while not stop.is_set():
            due += 1 / RATE
            time.sleep(max(0.0, due - time.monotonic()))
            began = time.monotonic()
            client.sendall(message)
            answer = client.recv(65536)
            latencies.append((began, time.monotonic() - began))
            if not answer.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"a request to {model} failed: {answer!r}")
    found.put((model, latencies))


class Bystander(threading.Thread):
    """Asks the failing model for ordinary answers. ``failed``: what it got in place of some."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__()
        self._gateway, self._ending = gateway, threading.Event()
        self.answered = 0
        self.failed: list[tuple[int, Any]] = []

    def run(self) -> None:
        while not self._ending.wait(1 / BESIDE_RATE):
            status, text = ask(self._gateway, ONE)
            if status == 200:
                self.answered += 1
            else:
                self.failed.append((status, text))

    def stop(self) -> None:
        self._ending.set()
        self.join()


def tried(gateway: Gateway, code: str, calm_seconds: float, outcomes: FaultOutcomes) -> float:
    """One calm time and one fault; the seconds until the model was back."""
    calm, disturbed = outcomes.windows
    began = time.monotonic()
    time.sleep(calm_seconds)
    fault = time.monotonic()
    calm.append((began, fault))
    status, _ = ask(gateway, code)
    failed = time.monotonic()
    outcomes.statuses.append(status)
    while ask(gateway, ONE)[0] != 200:
        pass
    back = time.monotonic()
    outcomes.back_seconds.append(back - failed)
    time.sleep(0.1)
    disturbed.append((fault, time.monotonic()))
    return time.monotonic() - fault


def p99(latencies: Sequence[Latency], windows: Sequence[tuple[float, float]]) -> float:
    """In milliseconds, of the requests that began within ``windows``."""
    within = [
        seconds for at, seconds in latencies if any(began <= at < end for began, end in windows)
    ]
    return statistics.quantiles(within, n=100)[98] * 1e3


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.python_isolation")
    parser.add_argument("--trials", type=int, default=50, help="of each fault")
    options = parser.parse_args(arguments)
    outcomes = {name: FaultOutcomes() for name in FAULTS}
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        python_models.coded(repository, "act")
        python_models.computed(repository, "python", ECHO, VECTOR)
        (repository / "embedded" / "1").mkdir(parents=True)
        (repository / "embedded" / "config.pbtxt").write_text(f'backend: "identity"\n{VECTOR}')
        with serving(repository, *FLAGS) as gateway:
            latencies, bystander = measured(gateway, options.trials, outcomes)
    wrong = bool(bystander.failed)
    print(f"| fault | trials | status | back: median, max s |{' p99 |' * len(latencies)}")
    print(f"{'|---' * (4 + len(latencies))}|")
    for name, (_, status) in FAULTS.items():
        found = outcomes[name]
        back = max(found.back_seconds)
        wrong |= set(found.statuses) != {status} or back > MAX_BACK_SECONDS
        columns = []
        for model, each in latencies.items():
            calm, disturbed = (p99(each, windows) for windows in found.windows)
            wrong |= disturbed > MAX_RATIO * calm
            columns.append(f"{model} {calm:.2f} -> {disturbed:.2f} ms ({disturbed / calm:.2f} x)")
        print(
            f"| {name} | {len(found.statuses)} | {sorted(set(found.statuses))} | "
            f"{statistics.median(found.back_seconds):.2f}, {back:.2f} | {' | '.join(columns)} |"
        )
    print(f"ordinary requests to the failing model: {bystander.answered} answered, "
          f"{len(bystander.failed)} failed {bystander.failed[:3] or ''}")  # fmt: skip
    return int(wrong)


def measured(
    gateway: Gateway, trials: int, outcomes: dict[str, FaultOutcomes]
) -> tuple[dict[str, list[Latency]], Bystander]:
    """Try every fault; the latencies of the other models meanwhile."""
    context = multiprocessing.get_context("spawn")
    stop, queue = context.Event(), context.Queue()
    clients = [
        context.Process(target=steady, args=(gateway.http_port, model, stop, queue), daemon=True)
        for model in ("python", "embedded")
    ]
    bystander = Bystander(gateway)
    for client in clients:
        client.start()
    bystander.start()
    try:
        calm_seconds = dict.fromkeys(FAULTS, 1.0)
        for _ in range(trials):
            for name, (code, _) in FAULTS.items():
                calm_seconds[name] = tried(gateway, code, calm_seconds[name], outcomes[name])
    finally:
        stop.set()
        bystander.stop()
    latencies = dict(queue.get(timeout=30) for _ in clients)
    return {model: latencies[model] for model in sorted(latencies)}, bystander


if __name__ == "__main__":
    sys.exit(main())
