"""One architecture after another, each in a process of its own, to every format."""

from __future__ import annotations

import enum
import functools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from tests.sweep import comparison
from tests.sweep.catalogue import Architecture

FORMATS = ("onnx", "torchscript", "pt2", "savedmodel", "tflite")

#: Most processor time for one format of one architecture, which is the same on a busy machine; and
#: longest time, for one that waits for ever.
CPU_SECONDS, SECONDS = 420.0, 3600.0

#: The exit codes of ``modelport export`` that stand for a reason.
REASONS = range(2, 6)

OPTIONS = ("--samples", "64", "--quiet")


class ExportVerdict(enum.StrEnum):
    PUBLISHED = "published"  # proven by modelport, and right beside the original
    REFUSED = "refused"  # one line and exit code 2 to 5
    WRONG = "wrong"  # published, and not what the original computes
    CRASHED = "crashed"  # a traceback, another exit code, more than one line, or no end


@dataclass(frozen=True, slots=True)
class ExportOutcome:
    """The end of one export.

    Attributes:
        detail: the reason of a refusal, or what went wrong.
        seconds: elapsed time, the proof included.
        max_abs_error: of the artifact beside the original.
    """

    architecture: str
    format: str
    verdict: ExportVerdict
    detail: str = ""
    seconds: float = 0.0
    max_abs_error: float = 0.0


def run(
    exports: Iterable[tuple[Architecture, Sequence[str]]], jobs: int
) -> Iterator[ExportOutcome]:
    """Yield every outcome as it comes, architectures in parallel."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_all_formats, row, formats) for row, formats in exports]
        for done in as_completed(waiting):
            yield from done.result()


def _all_formats(architecture: Architecture, formats: Sequence[str]) -> list[ExportOutcome]:
    found: list[ExportOutcome] = []
    left = list(formats)
    while left:  # a process that ends takes one format with it, not all
        outcomes = _in_process(architecture, left)
        found += outcomes
        left = left[len(outcomes) :]
    return found


def _in_process(architecture: Architecture, formats: Sequence[str]) -> list[ExportOutcome]:
    """The outcomes of a process, up to the format that ended it."""
    work = functools.partial(_work, architecture, formats)
    found, ended = received(work, len(formats), CPU_SECONDS)
    if ended:
        name = formats[len(found)]
        found.append(_outcome(architecture, name, ExportVerdict.CRASHED, ended))
    return found


def received(
    work: Callable[[Connection], None], count: int, seconds: float
) -> tuple[list[Any], str]:
    """Run ``work`` in a process of its own; return the ``count`` objects that it sends.

    If the process ends before, or needs more processor time than ``seconds`` for one of them, the
    second result says so.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    found: list[Any] = []
    ended = ""
    try:
        while len(found) < count:
            _wait(ours, process.pid, seconds)
            found.append(ours.recv())
    except (EOFError, TimeoutError) as error:
        process.kill()
        process.join()
        ended = str(error) or f"the process ended with {process.exitcode}"
    process.join()
    return found, ended


def _wait(outcomes: Connection, pid: int | None, seconds: float) -> None:
    """Wait for the next outcome of a process.

    Raises:
        TimeoutError: it has used its time.
    """
    until, limit = time.monotonic() + SECONDS, _cpu_seconds(pid) + seconds
    while not outcomes.poll(1.0):
        if _cpu_seconds(pid) > limit or time.monotonic() > until:
            raise TimeoutError(f"no end after {seconds:.0f} s of processor time")


def _cpu_seconds(pid: int | None) -> float:
    """Processor time of a process, and of its children that have ended."""
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.NoSuchProcess:  # its last outcome is in the pipe
        return 0.0


def _outcome(
    architecture: Architecture, format_name: str, verdict: ExportVerdict, detail: str
) -> ExportOutcome:
    return ExportOutcome(architecture.name, format_name, verdict, detail)


def _work(architecture: Architecture, formats: Sequence[str], pipe: Connection) -> None:
    with tempfile.TemporaryDirectory(prefix="sweep-") as work:
        checkpoint, repository = Path(work, "checkpoint"), Path(work, "repository")
        checkpoint.mkdir()
        output = os.open(Path(work, "output"), os.O_RDWR | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        arguments = architecture.write(checkpoint)
        original = architecture.original(checkpoint)
        for name in formats:
            os.ftruncate(output, 0)
            os.lseek(output, 0, os.SEEK_SET)
            started = time.monotonic()
            try:
                status = _export([*arguments, "--format", name, "--repository", str(repository)])
                said = os.pread(output, 10_000, 0).decode(errors="replace")
                outcome = _judged(architecture, name, status, said)
                if outcome.verdict is ExportVerdict.PUBLISHED:
                    done = next(repository.iterdir()).rename(Path(work, f"done-{name}"))
                    found = comparison.published(done / "1", name, original)
                    verdict = ExportVerdict.WRONG if found.wrong else ExportVerdict.PUBLISHED
                    outcome = ExportOutcome(
                        architecture.name,
                        name,
                        verdict,
                        found.wrong,
                        max_abs_error=found.max_abs_error,
                    )
            except Exception:
                detail = traceback.format_exc(limit=-3)
                outcome = _outcome(architecture, name, ExportVerdict.CRASHED, detail)
            seconds = round(time.monotonic() - started, 1)
            pipe.send(ExportOutcome(**{**asdict(outcome), "seconds": seconds}))


def _export(arguments: Sequence[str]) -> int:
    """Run ``modelport export`` in this process; return its exit code."""
    from modelport.cli import modelport

    try:
        modelport(["export", *arguments, *OPTIONS], prog_name="modelport")
    except SystemExit as end:
        sys.stdout.flush()
        sys.stderr.flush()
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _judged(architecture: Architecture, name: str, status: int, said: str) -> ExportOutcome:
    if status == 0:
        return _outcome(architecture, name, ExportVerdict.PUBLISHED, "")
    lines = [line for line in said.splitlines() if line.strip()]
    refused = status in REASONS and len(lines) == 1 and "Traceback" not in said
    if refused:
        return _outcome(architecture, name, ExportVerdict.REFUSED, _plain(lines[0]))
    return _outcome(architecture, name, ExportVerdict.CRASHED, f"exit {status}: {said[-600:]}")


def _plain(line: str) -> str:
    """``line`` without the program's name and the folders of this machine."""
    line = line.removeprefix("modelport: error: ")
    return re.sub(r"/\S*/(sweep-[^/\s']+|site-packages)/", "", line)


def read(file: Path) -> dict[tuple[str, str], ExportOutcome]:
    """The outcomes in ``file``, a JSON object on each line; the last one of a pair counts."""
    found = {}
    if file.is_file():
        for line in file.read_text().splitlines():
            fields = json.loads(line)
            outcome = ExportOutcome(**{**fields, "verdict": ExportVerdict(fields["verdict"])})
            found[outcome.architecture, outcome.format] = outcome
    return found


def append(file: Path, outcome: ExportOutcome) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(outcome)) + "\n")
