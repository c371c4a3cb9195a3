"""The audit log: whole lines, none in the way of a request, none deleted."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelport.gateway.access import audit
from modelport.gateway.access.audit import AuditEvent, AuditLog
from modelport.gateway.errors import Unavailable
from modelport.gateway.telemetry import log_file
from tests.polling import eventually

EVENT = AuditEvent(
    "ci", "key:1a2b", "10.0.0.7", "control", "load", "fraud", "", "refused", reason="no"
)  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_is_a_line_without_what_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path))
    log.write(EVENT)
    log.close()
    [line] = lines(path)
    assert line.pop("time").endswith("Z")
    assert line == {
        "principal": "ci", "credential": "key:1a2b", "source": "10.0.0.7",
        "operation": "control", "action": "load", "model": "fraud", "outcome": "refused",
        "reason": "no",
    }  # fmt: skip


def test_names_of_clients_cannot_begin_a_line_and_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path))
    log.write(
        AuditEvent(
            "a\nb", "", "", "infer", "infer", "m" * 10_000, "", "refused", request_id='"}\n{"'
        )
    )
    log.close()
    [line] = lines(path)
    assert line["principal"] == "a\nb"
    assert line["request_id"] == '"}\n{"'
    assert len(line["model"]) == audit.MAX_TEXT


def test_a_file_that_another_program_has_renamed_is_opened_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path))
    log.write(EVENT)
    eventually(path.read_text, "the first line")
    path.rename(tmp_path / "audit.log.1")
    log.write(EVENT)
    log.close()
    assert len(lines(path)) == 1
    assert len(lines(tmp_path / "audit.log.1")) == 1


def test_a_file_of_the_largest_size_is_renamed_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    logs = [AuditLog(str(path), max_bytes=2000) for _ in range(2)]  # as two workers
    for number in range(200):
        logs[number % 2].write(EVENT)
    for log in logs:
        log.close()
    files = list(tmp_path.iterdir())
    assert len(files) > 5
    assert sum(len(lines(each)) for each in files) == 200
    assert all(log.dropped == 0 for log in logs)


def test_events_without_a_place_are_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.log"
    monkeypatch.setattr(log_file, "MAX_WAITING", 3)
    monkeypatch.setattr(AuditLog, "_run", lambda self: None)  # a disk that stands still
    log = AuditLog(str(path))
    for _ in range(10):
        log.write(EVENT)
    assert log.dropped == 7
    log._write_all()
    log.close()
    assert [line.get("dropped") for line in lines(path)] == [None, None, None, 7]


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"--audit-log '.*' cannot be written \(no such file"):
        AuditLog(str(tmp_path / "missing" / "audit.log"))


def test_a_disk_that_fails_drops_events_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "audit.log", os.write

    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = AuditLog(str(path))
    monkeypatch.setattr(os, "write", full)
    log.write(EVENT)
    eventually(lambda: log.dropped, "the disk is full")
    monkeypatch.setattr(os, "write", write)
    log.write(EVENT)
    log.close()
    assert sum(line.get("dropped", 0) for line in lines(path)) == log.dropped


def test_a_file_that_cannot_be_opened_anew_stays_in_use(tmp_path: Path) -> None:
    folder, moved = tmp_path / "logs", tmp_path / "moved"
    folder.mkdir()
    log = AuditLog(str(folder / "audit.log"))
    folder.rename(moved)  # as a folder in which this user may create no file
    for _ in range(3):
        log.write(EVENT)
    eventually(lambda: len(lines(moved / "audit.log")) == 3, "the old file has the events")
    folder.mkdir()
    log.write(EVENT)
    log.close()
    assert log.dropped == 0
    assert len(lines(folder / "audit.log")) == 1


def test_a_line_that_was_written_in_part_spoils_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "audit.log", os.write
    log = AuditLog(str(path))
    monkeypatch.setattr(os, "write", lambda descriptor, content: write(descriptor, content[:10]))
    log.write(EVENT)
    eventually(lambda: log.dropped, "the disk is full")
    monkeypatch.setattr(os, "write", write)
    log.write(EVENT)
    log.close()
    whole = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert sum(line.get("dropped", 0) for line in whole) == log.dropped
    assert [line["reason"] for line in whole if "reason" in line] == ["no"]


def test_a_pipe_without_a_reader_is_refused_at_the_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(Unavailable, match="no process reads this pipe"):
        AuditLog(str(pipe))


def test_a_standard_output_that_nobody_reads_delays_no_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    monkeypatch.setattr(log_file, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(fileno=lambda: writer))
    log = AuditLog(log_file.STANDARD_OUTPUT)
    for _ in range(1000):  # more than a pipe holds
        log.write(EVENT)
    log.close()
    assert log._waiting
    log._waiting.clear()
    os.read(reader, 2**16)
    log._thread.join()
    os.close(reader)
    os.close(writer)


def test_no_name_of_a_client_is_a_command_for_a_terminal(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    log = AuditLog(str(path))
    log.write(replace(EVENT, model="\x1b[2J\x9b2J\u202e"))
    log.close()
    assert path.read_bytes().decode().strip().isprintable()
    assert path.read_bytes().isascii()
