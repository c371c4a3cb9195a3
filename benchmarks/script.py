"""Shared parts of the benchmark scripts: argument types, cores, and clean termination."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from modelport.loadtests.system.environments import Missing
from modelport.loadtests.system.processes import ServerFailed


def count(text: str) -> int:
    """Parse a whole number above 0, for ``argparse``."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def positive(text: str) -> float:
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def core(text: str) -> int:
    """Parse the number of a core that this process may use."""
    number, cores = int(text), sorted(os.sched_getaffinity(0))
    if number not in cores:
        raise argparse.ArgumentTypeError(f"there is no core {number}; there are {cores}")
    return number


def pinned(core: int | None) -> None:
    """Pin the calling process and its children to one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def only(core: int | None) -> tuple[int, ...]:
    """The argument ``cores`` for one core; None: all."""
    return () if core is None else (core,)


def run(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and exit with its status.

    Servers are in sessions of their own, so every signal must leave through every ``finally``.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # a shell may have it ignored
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        sys.exit(main())
    except (Missing, ServerFailed) as error:
        sys.exit(str(error))
