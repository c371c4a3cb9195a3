"""Tests of the scheduling of threads."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest

from modelport.gateway.runtime import thread_scheduling
from modelport.gateway.runtime.thread_scheduling import (
    BACKGROUND_NICE,
    SLICE_NS,
    lower_priority,
    prefer_requests,
)

#: The number of the system call sched_getattr(2).
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
pytestmark = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in SCHED_GETATTR,
    reason="the system call's number is unknown",
)


def slice_ns() -> int:
    """The slice of this thread; 0 on a kernel before 6.12, which does not tell."""
    attributes = ctypes.create_string_buffer(thread_scheduling._ATTRIBUTES.size)
    number, size = SCHED_GETATTR[platform.machine()], len(attributes)
    assert ctypes.CDLL(None).syscall(number, 0, attributes, size, 0) == 0
    return int(thread_scheduling._ATTRIBUTES.unpack(attributes.raw)[5])


def nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_threads_of_requests_have_short_slices_and_those_in_the_background_a_low_priority() -> None:
    found: dict[str, tuple[int, int]] = {}

    def background() -> None:
        lower_priority()
        found["background"] = slice_ns(), nice()

    def run(name: str) -> None:
        found[name] = slice_ns(), nice()

    def serve() -> None:
        thread_scheduling._set_slice(0)  # an earlier test may have served in this process
        run("default")
        prefer_requests()
        run("loop")
        for thread in (
            threading.Thread(target=run, args=("instance",)),
            threading.Thread(target=background),
        ):
            thread.start()
            thread.join()

    serving = threading.Thread(target=serve)
    serving.start()
    serving.join()
    slice_by_default, nice_by_default = found.pop("default")
    short = SLICE_NS if slice_by_default else 0
    assert short <= slice_by_default
    assert found == {
        "loop": (short, nice_by_default),
        "instance": (short, nice_by_default),
        "background": (slice_by_default, BACKGROUND_NICE),
    }
