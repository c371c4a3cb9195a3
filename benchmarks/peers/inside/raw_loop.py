"""ONNX Runtime in a loop: raw_loop.py MODEL REQUEST.npz BATCH SECONDS RUNS [ANSWER.npz].

Runs for SECONDS, or RUNS times if that is not 0. Prints a line of JSON: rows per second and the
percentiles of a run's milliseconds.
"""

from __future__ import annotations

import json
import sys
import time

import numpy
from onnx_model import OnnxModel


def main(path: str, request: str, batch: int, seconds: float, runs: int) -> None:
    model = OnnxModel(path)
    with numpy.load(request) as arrays:
        one = dict(arrays)
    if len(sys.argv) > 6:
        numpy.savez(sys.argv[6], **model.run(one))
        return
    rows = {
        name: numpy.repeat(array.reshape(-1) if array.shape == (1, 1) else array, batch, axis=0)
        for name, array in one.items()
    }
    session, outputs = model.session, model.outputs
    session.run(outputs, rows)
    took: list[float] = []
    begin = now = time.perf_counter()
    while now - begin < seconds if not runs else len(took) < runs:
        session.run(outputs, rows)
        before, now = now, time.perf_counter()
        took.append(now - before)
    took.sort()
    p50, p99 = took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3
    rate = len(took) * batch / (now - begin)
    print(json.dumps({"rows_per_second": rate, "p50_ms": p50, "p99_ms": p99}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
