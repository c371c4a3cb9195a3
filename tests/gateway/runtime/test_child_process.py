"""Child processes: what starts them, ends them, and what they leave behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from modelport.gateway.runtime.child_process import ChildProcess
from tests.polling import eventually

#: Starts a child as the argument says, prints its id, and waits.
PARENT = """
import signal, sys
from modelport.gateway.runtime.child_process import ChildProcess
child = ChildProcess(["sleep", "60"], parent_death=eval(sys.argv[1]))
print(child.pid, flush=True)
input()
"""
#: Ignores SIGTERM, and starts another that does.
STUBBORN = "trap '' TERM; sleep 60 & echo $!; echo out >&2; wait"


@pytest.mark.parametrize(
    ("told", "outlives"), [("signal.SIGKILL", False), ("signal.SIGTERM", False), ("None", True)]
)
def test_a_child_ends_with_its_parent_unless_it_notices_by_itself(
    told: str, outlives: bool
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, told], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    if outlives:
        assert child.is_running()
        child.kill()
    eventually(
        lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "it is gone"
    )


def test_a_child_that_ignores_the_request_is_killed_with_its_group(tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = ChildProcess(["sh", "-c", STUBBORN], log=log)
    eventually(lambda: log.read_text().endswith("out\n"), "both outputs are in the log")
    grandchild = psutil.Process(int(log.read_text().split()[0]))
    assert child.stop(0.05)
    assert child.returncode == -signal.SIGKILL
    eventually(
        lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE,
        "its own child is gone",
    )
    assert not child.stop(0.05), "it has ended before"


def test_a_child_that_ends_when_asked_is_not_killed() -> None:
    child = ChildProcess(["sleep", "60"])
    assert not child.stop(30.0)
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("withheld", [True, False], ids=["as it is", "known-bad"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_while_a_child_starts_is_one_signal_to_the_parent(
    number: signal.Signals, withheld: bool
) -> None:
    """The child gets it after its fork, when it still has the parent's handlers."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, str(int(number)), str(int(withheld))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("1" if withheld else "2")  # known-bad: the child's, too


#: A process of its own: a signal that comes too early would end the tests.
SIGNALLED = """
import asyncio, os, signal, sys
from modelport.gateway.runtime import child_process
number, withheld = signal.Signals(int(sys.argv[1])), sys.argv[2] == "1"
made, told = child_process._setup, []

def setup(*arguments):
    begin = made(*arguments)

    def before():
        if not withheld:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
        begin()

    return before

child_process._setup = setup

async def parent():
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(number, told.append, "a signal")
    child = child_process.ChildProcess(["sh", "-c", f"kill -{int(number)} $$"])
    while child.poll() is None:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), number)  # the parent's own, blocked no longer
    while len(told) < 1 + (not withheld):
        await asyncio.sleep(0.01)
    assert child.returncode == -number, "the program in the child has its own signals"
    loop.remove_signal_handler(number)

asyncio.run(parent())
print(len(told), end="")
"""
