"""A thread of lower priority that does one piece of work after the other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from modelport.gateway.runtime.background_thread import BackgroundThread
from modelport.gateway.runtime.thread_scheduling import BACKGROUND_NICE
from tests.polling import WAIT_SECONDS


@pytest.fixture
def thread() -> Iterator[BackgroundThread]:
    made = BackgroundThread("test")
    yield made
    made.close()


def test_work_is_done_in_order_at_a_lower_priority(thread: BackgroundThread) -> None:
    done, priorities, ended = list[int](), set[int](), threading.Event()
    for number in range(5):
        thread.do(lambda number=number: done.append(number))  # type: ignore[misc]
    thread.do(lambda: priorities.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    thread.do(ended.set)
    assert ended.wait(WAIT_SECONDS)
    assert (done, priorities) == ([0, 1, 2, 3, 4], {BACKGROUND_NICE})


def test_closing_waits_for_work_in_progress(thread: BackgroundThread) -> None:
    begun, finish, done = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        begun.set()
        assert finish.wait(WAIT_SECONDS)
        done.append("finished")

    thread.do(work)
    assert begun.wait(WAIT_SECONDS)
    closing = threading.Thread(target=thread.close)
    closing.start()
    assert not done
    finish.set()
    closing.join(WAIT_SECONDS)
    assert done == ["finished"]


def test_a_thread_that_never_worked_closes_at_once(thread: BackgroundThread) -> None:
    thread.close()
