"""The tests that a wrong lowering must not pass, and ``make mutations``, which tries all."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.exporters.lowering.mutations import WrongLowering, wrong_lowerings
from tests.exporters.lowering.oracle import DynamicRun, OperatorCall, eager_difference
from tests.exporters.lowering.own_calls import STATIC_DIMS, TESTED_ELSEWHERE
from tests.exporters.lowering.programs import PROGRAMS
from tests.exporters.lowering.test_operators import NAMES, calls

#: Changes that change nothing that can be observed, each with its reason.
EQUIVALENT: dict[str, str] = {}

#: A wrong lowering that takes longer, or more memory, is refused by that.
MOST_SECONDS, MOST_BYTES = 120, 16 << 30

REFUSED, PASSED, ENDED = "refused", "passed", "ended the process"


def is_refused(wrong: WrongLowering, patch: pytest.MonkeyPatch) -> bool:
    """Whether a test of operators or programs fails with ``wrong`` in place."""
    names = [name for name in wrong.affected() if name not in TESTED_ELSEWHERE and name in NAMES]
    affected = set(wrong.affected())
    wrong.apply(patch)
    programs = [program for program in PROGRAMS if program.operators & affected]
    return (
        any(_differs(eager_difference, call) for name in names for call in calls(name))
        or any(_differs(type(program).differences, program) for program in programs)
        or any(_differs(_traced_differences, name) for name in names)
    )


def _traced_differences(name: str) -> Sequence[str]:
    found: list[OperatorCall] = calls(name)
    return [
        message
        for symbolic in (0, 1, 9)
        for message in DynamicRun(found, STATIC_DIMS.get(name, {}), symbolic).differences()
    ]


def _differs(compare: Callable[[Any], object], subject: object) -> bool:
    try:
        return bool(compare(subject))
    except Exception:  # TensorFlow refuses what the wrong lowering asks of it
        return True


def outcomes() -> Iterator[tuple[WrongLowering, str]]:
    """Try all wrong lowerings in processes that they may end."""
    waiting = list(enumerate(wrong_lowerings()))
    while waiting:
        command = [sys.executable, "-m", __spec__.name, str(waiting[0][0])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                yield waiting.pop(0)[1], line.strip()
        if waiting and worker.returncode:
            yield waiting.pop(0)[1], ENDED


def _work(first: int) -> None:
    """Write the outcome of each wrong lowering from ``first`` on."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for number, wrong in enumerate(wrong_lowerings()):
        if number >= first:
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            with pytest.MonkeyPatch.context() as patch:
                print(REFUSED if is_refused(wrong, patch) else PASSED, flush=True)


def main() -> int:
    """Try all wrong lowerings; return 1 if one passes that is not listed as equivalent."""
    counts = dict.fromkeys((REFUSED, PASSED, ENDED), 0)
    missed = []
    for wrong, outcome in outcomes():
        counts[outcome] += 1
        if outcome != REFUSED:
            print(f"{outcome}: {wrong}", flush=True)
        if outcome == PASSED and repr(wrong) not in EQUIVALENT:
            missed.append(wrong)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"{len(missed)} are neither refused nor listed as equivalent")
    return bool(missed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(int(sys.argv[1]))
    else:
        raise SystemExit(main())
