"""Recording of every request's raw times: Locust's process writes them, its parent reads them.

Records are appended as they come and flushed a few times per second, so a process that is killed
leaves its measurements; ``state.json`` beside them has the load's start, the errors and the end.
"""

from __future__ import annotations

import datetime
import json
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from modelport.loadtests.load.samples import SAMPLE, Samples

STATE = "state.json"
#: Start of every message about a lack of room for the samples.
UNWRITTEN = "the samples cannot be written"
#: Exit status when the disk is full, as the state cannot be written then (EX_IOERR).
EXIT_UNWRITTEN = 74
#: Most different error messages per target; the rest are counted together.
MOST_MESSAGES = 50
OTHER_ERRORS = "other errors"
#: One element of ``SAMPLE``.
RECORD = struct.Struct("<ddddB")
assert RECORD.size == SAMPLE.itemsize


@dataclass
class RecorderState:
    """The state of one Locust process."""

    #: Start of the load, on the clock of ``perf_counter``; ``began_at`` is ISO 8601, UTC.
    began: float = 0.0
    began_at: str = ""
    #: For each target, counts by message.
    errors: list[dict[str, int]] = field(default_factory=list)
    #: CPU time of the process since the start.
    cpu_seconds: float = 0.0
    seconds: float = 0.0
    #: Whether all requests were sent and answered, or given up.
    finished: bool = False
    #: The reason that the load did not start, or ended early.
    failure: str = ""


class Recorder:
    """The recorder of one process; a request costs only a call of ``add``."""

    def __init__(self, folder: Path, targets: int) -> None:
        self._folder = folder
        self._buffers = [bytearray() for _ in range(targets)]
        self._files = [
            os.open(path(folder, n), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for n in range(targets)
        ]
        self._cpu_at_begin = 0.0
        self.state = RecorderState(errors=[{} for _ in range(targets)])
        self.began = 0.0

    def begin(self, moment: float) -> None:
        """Start recording at ``moment`` of ``perf_counter``; samples are relative to it."""
        self.began = self.state.began = moment
        now = datetime.datetime.now(datetime.UTC)
        self.state.began_at = now.isoformat(timespec="milliseconds")
        self._cpu_at_begin = time.process_time()

    def add(
        self,
        target: int,
        intended: float,
        sent: float,
        first_byte: float,
        done: float,
        outcome: int,
    ) -> None:
        """Record a request; all four times are on the clock of ``perf_counter``."""
        began = self.began
        self._buffers[target] += RECORD.pack(
            intended - began, sent - began, first_byte - began, done - began, outcome
        )

    def error(self, target: int, message: str) -> None:
        errors = self.state.errors[target]
        if message not in errors and len(errors) >= MOST_MESSAGES:
            message = OTHER_ERRORS
        errors[message] = errors.get(message, 0) + 1

    def flush(self) -> None:
        """Write the new records to disk.

        Raises:
            OSError: the disk is full, or gone.
        """
        for number, buffer in enumerate(self._buffers):
            while buffer:
                written = os.write(self._files[number], buffer)
                del buffer[:written]
        if self.began:
            self.state.cpu_seconds = time.process_time() - self._cpu_at_begin
            self.state.seconds = perf_counter() - self.began
        made = self._folder / f"{STATE}.new"
        made.write_text(json.dumps(asdict(self.state)))
        made.replace(self._folder / STATE)

    def close(self) -> None:
        for file in self._files:
            os.close(file)
        self._files = []


def path(folder: Path, target: int) -> Path:
    return folder / f"target-{target}.samples"


def read_state(folder: Path) -> RecorderState:
    """The last state that the process wrote, or an empty one."""
    try:
        found: Mapping[str, object] = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        return RecorderState()
    return RecorderState(**found)  # type: ignore[arg-type]  # asdict wrote it


def read(folder: Path, target: int, skip: int = 0) -> Samples:
    """Read the samples [requests] after the first ``skip``, in the order of their answers."""
    try:
        with path(folder, target).open("rb") as file:
            file.seek(skip * SAMPLE.itemsize)
            data = file.read()
    except FileNotFoundError:
        data = b""
    whole = len(data) - len(data) % SAMPLE.itemsize
    return np.frombuffer(data[:whole], SAMPLE)
