"""Profiles: what samples are counted as, and the tables made of them."""

from __future__ import annotations

from benchmarks import cpu_sampling, profile
from benchmarks.cpu_sampling import LOOP, OTHER_PACKAGE, THREADS, Profile

SCRIPT = """
   7  ffffffff811e9476 copy_user_generic ([kernel.kallsyms])
   7      7f546e0fa8ed _PyEval_EvalFrameDefault (/usr/lib/x86_64-linux-gnu/libpython3.11.so.1.0)
   7      7f546e0fa8ee [unknown] (/venv/lib/python3.11/site-packages/uvloop/loop.cpython-311.so)
   9      7f00aa000000 MlasGemm(void*, int) (/site-packages/onnxruntime/capi/state.cpython-311.so)
   9      7f00aa000001 std::function<void (int)>::operator()(int) const (/usr/bin/python3.11)
   9      7f00aa000002 memcpy (/usr/lib/x86_64-linux-gnu/libc.so.6)
   9      7f00aa000003 somebody (/opt/else.so)
perf says something else
"""
SPY = """\
thread (7): "MainThread";main (gateway/server/app.py:1);data (gateway/server/grpc/connection.py:2) 3
thread (7): "MainThread";infer (gateway/inference/s.py:1);put (gateway/inference/batching/q.py:2) 2
thread (7): "MainThread";main (gateway/server/app.py:1);run (uvloop/loop.pyx:1) 4
thread (9): "fraud-1_0";_run (gateway/backends/embedded/embedded_backend.py:1) 50
"""


def test_samples_are_counted_by_thread_and_library() -> None:
    assert cpu_sampling.library_samples(SCRIPT) == {
        (7, "kernel"): 1,
        (7, "Python's interpreter"): 1,
        (7, "uvloop, asyncio, httptools"): 1,
        (9, "ONNX Runtime"): 1,
        (9, "Python's interpreter"): 1,
        (9, "C library: copies, locks, malloc"): 1,
        (9, "other libraries"): 1,
    }


def test_the_innermost_frame_of_the_gateway_says_whose_time_it_is() -> None:
    assert cpu_sampling.package_samples(SPY) == {
        "HTTP and gRPC on the socket (server, wire)": 3,
        "batching": 2,
        OTHER_PACKAGE: 4,
    }


def test_the_table_has_the_largest_first_and_what_is_not_there_empty() -> None:
    found = Profile(
        10,
        {LOOP: {"kernel": 40.0, "Python's interpreter": 60.0}, THREADS: {"ONNX Runtime": 1900.0}},
        {"batching": 7.0},
        2.0,
    )
    hand = Profile(10, {LOOP: {"ONNX Runtime": 1800.0}}, {}, 0.0)
    libraries, packages = profile.report(found, hand).split("\n\n")
    assert libraries.splitlines()[2:] == [
        "| ONNX Runtime |  | 1,900 | 1,800 |",
        "| Python's interpreter | 60 |  |  |",
        "| kernel | 40 |  |  |",
        "| **together** | **100** | **1,900** | **1,800** |",
    ]
    assert packages.splitlines()[-1] == "| batching | 7 |"
