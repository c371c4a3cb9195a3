"""Shared parts of the commands: option types, checks of output files, and signals."""

from __future__ import annotations

import math
import re
import signal
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from modelport.gateway.errors import UsageError
from modelport.gateway.runtime import child_process

UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
TIME = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|m|h)?")

seed_option = click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of random inputs.",
)


class DurationParam(click.ParamType[float]):
    """A duration: ``90``, ``90s``, ``300ms``, ``1.5h``."""

    name = "duration"

    def __init__(self, least: float = 0.0) -> None:
        self._least = least

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):  # a default
            return value
        found = TIME.fullmatch(str(value).strip())
        seconds = float(found[1]) * UNITS[found[2] or ""] if found else -1.0
        if not self._least <= seconds < math.inf:
            least = f" of at least {self._least:g}s" if self._least else ""
            self.fail(f"'{value}' is not a duration{least}, such as 90s, 5m or 1h", param, ctx)
        return seconds


class PositiveParam(click.ParamType[float]):
    """A finite number above 0."""

    name = "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 < number < math.inf:
            self.fail(f"'{value}' is not a number above 0", param, ctx)
        return number


def check_writable(paths: Iterable[Path | None]) -> None:
    """Check before measuring that files can be written; missing folders are made.

    Anything but a plain file, such as ``/dev/stdout`` or a pipe, is left alone.

    Raises:
        UsageError: a file cannot be written.
    """
    seen: set[Path] = set()
    for path in filter(None, paths):
        try:
            if path.is_dir():
                raise IsADirectoryError(0, "it is a folder; name a file")
            if path.exists() and not path.is_file():
                continue
            if path.absolute() in seen:
                raise FileExistsError(0, "two reports would be written there")
            seen.add(path.absolute())
            path.absolute().parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path.absolute().parent):
                pass
        except OSError as error:
            raise UsageError(f"'{path}' cannot be written: {error.strerror}") from error


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn signals into exceptions, so that every ``finally`` runs and servers are stopped.

    SIGINT is handled even if a shell started the process with SIGINT ignored.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, child_process.interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
