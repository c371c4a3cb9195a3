"""Benefit of ONNX Runtime's IO binding: io_binding.py MODEL REQUEST.npz [SECONDS].

Four ways to run the same request, in turns: with numpy arrays, by ONNX Runtime's class and by the
object it wraps (which the gateway calls); with outputs bound once and inputs at each request; and
with all bound once, which is correct only if every request is copied into the same place and every
answer out of it. Prints a line of JSON: microseconds, and the ratio to the gateway's way.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy
from onnx_model import OnnxModel

GATEWAY = "wrapped"
TURN_SECONDS = 0.05


def ways(model: OnnxModel, feed: dict[str, numpy.ndarray]) -> dict[str, Callable[[], object]]:
    session, outputs = model.session, model.outputs
    bound = session.io_binding()
    for name, array in zip(outputs, session.run(outputs, feed), strict=True):
        bound.bind_output(name, "cpu", 0, array.dtype, array.shape)

    def inputs() -> None:
        for name, array in feed.items():
            bound.bind_cpu_input(name, array)

    def each() -> None:
        inputs()
        session.run_with_iobinding(bound)

    inputs()
    return {
        GATEWAY: lambda: session._sess.run(outputs, feed, None),
        "class": lambda: session.run(outputs, feed),
        "inputs bound each time": each,
        "all bound once": lambda: session.run_with_iobinding(bound),
    }


def main(path: str, request: str, seconds: float) -> None:
    model = OnnxModel(path)
    with numpy.load(request) as arrays:
        feed = {n: a.reshape(-1) if a.shape == (1, 1) else a for n, a in arrays.items()}
    known = ways(model, feed)
    took: dict[str, list[float]] = {name: [] for name in known}
    begin = time.perf_counter()
    known[GATEWAY]()
    runs = max(1, round(TURN_SECONDS / (time.perf_counter() - begin)))
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        for name in [*known, *reversed(known)]:
            started = time.perf_counter()
            for _ in range(runs):
                known[name]()
            took[name].append((time.perf_counter() - started) / runs * 1e6)
    told = {}
    for name, times in took.items():
        ratios = [ours / theirs for ours, theirs in zip(times, took[GATEWAY], strict=True)]
        told[name] = [round(statistics.median(times), 1), round(statistics.median(ratios), 3)]
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if len(sys.argv) > 3 else 5.0)
