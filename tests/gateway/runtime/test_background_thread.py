"""Tests of the priority of background threads."""

from __future__ import annotations

import ctypes
import os
import platform
import threading

import pytest

from modelport.gateway.runtime import background_thread
from modelport.gateway.runtime.background_thread import BACKGROUND_NICE, SLICE_NS, lower_priority

#: The number of the system call sched_getattr(2).
SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}


def slice_of_this_thread() -> int:
    """The slice of this thread in nanoseconds; 0 on a kernel that does not tell."""
    attributes = ctypes.create_string_buffer(background_thread._ATTRIBUTES.size)
    number, size = SCHED_GETATTR[platform.machine()], len(attributes)
    assert ctypes.CDLL(None).syscall(number, 0, attributes, size, 0) == 0
    return int(background_thread._ATTRIBUTES.unpack(attributes.raw)[5])


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in SCHED_GETATTR,
    reason="the system call's number is unknown",
)
def test_only_the_background_thread_itself_has_a_long_slice_and_a_low_priority() -> None:
    found: list[tuple[int, int]] = []

    def run() -> None:
        lower_priority()
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        found.append((slice_of_this_thread(), nice))

    before = slice_of_this_thread()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    [(slice_ns, nice)] = found
    assert nice == BACKGROUND_NICE
    if before:  # Linux 6.12 tells and takes it
        assert slice_ns == SLICE_NS > before
    assert slice_of_this_thread() == before
