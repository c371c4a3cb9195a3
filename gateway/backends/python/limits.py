"""Limits of a worker: its state, its memory, and the time of its executions."""

from __future__ import annotations

from modelport.gateway.backends.python.requests import RunningBatch
from modelport.gateway.errors import Internal

#: An execution that nobody waits for any more may go on for this time.
ABANDONED_SECONDS = 10.0
#: Pauses before a restart: after an end during a request, which the next ones wait for, and after a
#: failed start.
_CRASH_SECONDS, _MAX_CRASH_SECONDS = 0.1, 0.5
_START_SECONDS, _MAX_START_SECONDS = 0.5, 30.0


def crash_pause(crashes: int) -> float:
    """Seconds until the restart after ``crashes`` ends in a row."""
    return min(_CRASH_SECONDS * max(0, crashes - 1), _MAX_CRASH_SECONDS)


def start_pause(failures: int) -> float:
    """Seconds until the next attempt after ``failures`` failed starts."""
    return float(min(_START_SECONDS * 2.0 ** min(failures - 1, 10), _MAX_START_SECONDS))


def process_violation(state: str, memory_bytes: int, max_memory_bytes: int | None) -> str:
    """The reason why a process has to end; empty: it keeps to its limits.

    Args:
        state: the letter of the process's state. A profiler or a debugger stops it, too ("t"), and
            lets it go on.
    """
    if state == "T":
        return "it is stopped (SIGSTOP)"
    if max_memory_bytes is not None and memory_bytes > max_memory_bytes:
        return (
            f"it uses {memory_bytes >> 20} MiB, the limit of --python-max-memory is "
            f"{max_memory_bytes >> 20} MiB"
        )
    return ""


def batch_violation(batch: RunningBatch, now: float, max_seconds: float | None) -> str:
    """The reason why the worker of ``batch`` has to end; empty: it keeps to its limits."""
    if max_seconds is not None and now - batch.started_at > max_seconds:
        return f"an execution exceeds {max_seconds:g} s, the limit of --python-max-seconds"
    abandoned = [member.abandoned_at for member in batch.members]
    if all(abandoned) and now - max(*abandoned, batch.started_at) > ABANDONED_SECONDS:
        return "an execution goes on that no client waits for"
    return ""


def unanswered(max_seconds: float) -> Internal:
    """The error of a request whose response has been left to a sender."""
    return Internal(
        f"the model has not ended its responses within {max_seconds:g} s, the limit of "
        "--python-max-seconds"
    )
