"""What the programs here share: arguments that can be, and an end that leaves nothing behind."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from modelport.loadtests.environments import Missing
from modelport.loadtests.processes import ServerFailed


def count(text: str) -> int:
    """A whole number above 0, as ``argparse`` wants its types."""
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
    """One of those that this process may run on."""
    number, cores = int(text), sorted(os.sched_getaffinity(0))
    if number not in cores:
        raise argparse.ArgumentTypeError(f"there is no core {number}; there are {cores}")
    return number


def run(main: Callable[[], int]) -> NoReturn:
    """``main``, then the end of the process with its status.

    Servers are in sessions of their own: whatever ends this process must leave through every
    ``finally``.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # a shell may have it ignored
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    try:
        sys.exit(main())
    except (Missing, ServerFailed) as error:
        sys.exit(str(error))
