"""One run: Locust in child processes, whose samples are read back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modelport.gateway.cli.server_credentials import TOKEN_VARIABLE
from modelport.gateway.runtime.child_process import ChildProcess
from modelport.loadtests.load import locust_arguments as plans
from modelport.loadtests.load import sample_recording
from modelport.loadtests.load.locust_arguments import Plan
from modelport.loadtests.load.sample_recording import RecorderState
from modelport.loadtests.load.samples import LoadProfile, LoadRun, Samples
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.system import temporary_folders

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
#: Polling interval for new samples.
POLL_SECONDS = 0.1
#: Time that Locust may take besides its load, to start and to end.
START_SECONDS, END_SECONDS = 60.0, 15.0
#: Time to end orderly before it is killed.
STOP_SECONDS = 5.0
#: ``LoadRun.failure`` after Ctrl-C.
INTERRUPTED = "interrupted"
#: Most connections for ``select``.
SELECT_USERS = 256


class NotMeasured(RuntimeError):
    """No request could be sent, or Locust failed; the message is one line with the remedy."""


class Unwritten(NotMeasured):
    """This machine cannot store the samples, for example because the disk is full."""


@dataclass(frozen=True)
class RunProgress:
    """Progress of a run; ``samples`` are those since the last call, warm-up included."""

    #: Time since the load's start; 0 before it.
    seconds: float
    samples: Samples


def measure(
    target: LoadTestTarget,
    load: LoadProfile,
    payloads: Path | None = None,
    *,
    core: int | None = None,
    processes: int = 1,
) -> LoadRun:
    """Put ``load`` on ``target`` and return the run. See ``measure_mix``."""
    data = () if payloads is None else (payloads,)
    (run,) = measure_mix([(target, 1)], load, data, core=core, processes=processes)
    return run


def measure_mix(
    targets: Sequence[tuple[LoadTestTarget, int]],
    load: LoadProfile,
    payloads: Sequence[Path] = (),
    *,
    config: Path | None = None,
    core: int | None = None,
    processes: int = 1,
    progress: Callable[[RunProgress], None] | None = None,
    keep_partial: bool = False,
) -> list[LoadRun]:
    """Load several targets at once, by weight; return one run for each.

    An open loop divides its rate among the targets, a closed loop its users; a single user asks one
    target after the other, there and back (A B B A).

    Args:
        payloads: files of requests (see ``payloads``); without them they are random, from the
            server's metadata, and the server's own first answers are the expected ones.
        config: the model's ``config.pbtxt``, for servers without metadata.
        core: pin the load generator to this core.
        processes: number of generator processes, which share the load.
        keep_partial: after an interruption or a failure, return the measurements so far, with
            ``LoadRun.complete`` false, instead of raising.

    Raises:
        NotMeasured: no request could be sent.
        Unwritten: the samples could not be stored.
        ValueError: ``load`` is invalid.
        KeyboardInterrupt: passed on; no process is left.
    """
    plans.check(load)
    plans.check_mix(load, len(targets))
    count = max(1, min(processes, load.users // len(targets)))
    with temporary_folders.folder("modelport-load-") as folder:
        parts = [
            Plan(
                tuple(targets),
                replace(load, users=_share(load.users, number, count)),
                tuple(path.resolve() for path in payloads),
                None if config is None else config.resolve(),
                folder / str(number),
                (number, count),
            )
            for number in range(count)
        ]
        failure = _watch(parts, core, progress, keep_partial)
        states = [sample_recording.read_state(part.samples_to) for part in parts if part.samples_to]
        if failure and not (keep_partial and any(state.began for state in states)):
            if failure == INTERRUPTED:
                raise KeyboardInterrupt
            kind = Unwritten if failure.startswith(sample_recording.UNWRITTEN) else NotMeasured
            raise kind(failure)
        return [
            _run(parts, states, number, replace(load), failure) for number in range(len(targets))
        ]


def _share(users: int, number: int, count: int) -> int:
    return users // count + (number < users % count)


def _watch(
    parts: Sequence[Plan],
    core: int | None,
    progress: Callable[[RunProgress], None] | None,
    keep_partial: bool,
) -> str:
    """Run all processes to their end; return the problem, or an empty string."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_locust(part, core)) for part in parts]
        try:
            said = _wait(parts, children, progress)
        except KeyboardInterrupt:
            if not keep_partial:
                raise
            for child in children:
                child.stop(STOP_SECONDS)  # orderly, so that its records are written
            return INTERRUPTED
        if said:
            return said
        for part, child in zip(parts, children, strict=True):
            assert part.samples_to is not None
            state = sample_recording.read_state(part.samples_to)
            if state.failure:
                return state.failure
            if not state.finished:
                return _last_words(part.samples_to, child.returncode)
    return ""


def _wait(
    parts: Sequence[Plan],
    children: Sequence[ChildProcess],
    progress: Callable[[RunProgress], None] | None,
) -> str:
    load = parts[0].load
    longest = load.warmup_seconds + load.duration_seconds + load.timeout_seconds + END_SECONDS
    # Every payload may be sent once before.
    give_up = time.monotonic() + START_SECONDS + load.timeout_seconds + longest
    seen = [[0] * len(part.targets) for part in parts]
    while running := [child for child in children if child.poll() is None]:
        if time.monotonic() > give_up:
            return "Locust did not end in time; is this machine overloaded?"
        if progress is not None:
            progress(_look(parts, seen))
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(POLL_SECONDS)
    if progress is not None:
        progress(_look(parts, seen))
    return ""


def _look(parts: Sequence[Plan], seen: list[list[int]]) -> RunProgress:
    """The new samples; ``seen`` is updated."""
    found, seconds = [], 0.0
    for part, counts in zip(parts, seen, strict=True):
        assert part.samples_to is not None
        for number in range(len(counts)):
            fresh = sample_recording.read(part.samples_to, number, counts[number])
            counts[number] += len(fresh)
            found.append(fresh)
        seconds = max(seconds, sample_recording.read_state(part.samples_to).seconds)
    return RunProgress(seconds, np.concatenate(found))


def _run(
    parts: Sequence[Plan],
    states: Sequence[RecorderState],
    number: int,
    load: LoadProfile,
    failure: str,
) -> LoadRun:
    """The samples of one target from all processes, on one clock."""
    begun = [state for state in states if state.began]
    first = min(state.began for state in begun)
    found = []
    errors: dict[str, int] = {}
    for part, state in zip(parts, states, strict=True):
        assert part.samples_to is not None
        if not state.began:
            continue
        samples = sample_recording.read(part.samples_to, number).copy()
        samples = samples[samples["intended"] >= load.counted_from_seconds]
        for name in ("intended", "sent", "first_byte", "done"):
            samples[name] += state.began - first
        found.append(samples)
        for message, count in state.errors[number].items():
            errors[message] = errors.get(message, 0) + count
    together = np.concatenate(found)
    shares = [state.cpu_seconds / state.seconds for state in begun if state.seconds]
    return LoadRun(
        parts[0].targets[number][0],
        load,
        together[np.argsort(together["intended"], kind="stable")],
        errors,
        sum(state.cpu_seconds for state in begun),
        max(shares, default=0.0),
        min(state.began_at for state in begun),
        complete=not failure,
        failure=failure,
    )


@contextlib.contextmanager
def _locust(part: Plan, core: int | None) -> Iterator[ChildProcess]:
    """Run one Locust process inside the block."""
    folder = part.samples_to
    assert folder is not None
    folder.mkdir(parents=True)
    arguments = ["--headless", "--only-summary", "--skip-log-setup", "--exit-code-on-error=0"]
    # Locust reads settings from the environment and from files of the current folder.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOCUST_")}
    if part.credentials is None:
        environment.pop(TOKEN_VARIABLE, None)
    if part.load.users <= SELECT_USERS:
        # libev's timers have millisecond resolution with epoll, and microseconds with select.
        environment["GEVENT_BACKEND"] = "select"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(LOCUSTFILE.parent.parent), *filter(None, [environment.get("PYTHONPATH")])]
    )
    child = ChildProcess(
        [sys.executable, "-m", "locust", f"-f={LOCUSTFILE}", *arguments, *part.arguments()],
        log=folder / "log",
        cores=() if core is None else (core,),
        parent_death=signal.SIGTERM,
        cwd=folder,
        env=environment,
    )
    try:
        yield child
    finally:
        child.stop(STOP_SECONDS)


def _last_words(folder: Path, status: int | None) -> str:
    if status == sample_recording.EXIT_UNWRITTEN:
        return f"{sample_recording.UNWRITTEN}: free space on the disk, or set TMPDIR"
    lines = (folder / "log").read_text(errors="replace").strip().splitlines()
    told = [line for line in lines if line.startswith("locust: error: ")]
    if told:
        return told[-1].removeprefix("locust: error: ")
    return f"Locust exited with {status}: {lines[-1] if lines else 'without output'}"[:500]
