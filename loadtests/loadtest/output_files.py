"""Output files of a run: JSON, HTML, JUnit, raw samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from modelport.loadtests import marked_block
from modelport.loadtests.checks import Check, worst
from modelport.loadtests.load.percentiles import curve, histogram
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import Summary, first_bytes, latencies
from modelport.loadtests.report import html, junit
from modelport.loadtests.system.hardware import hardware

FORMAT = "modelport-loadtest/1"


def document(
    run: LoadRun,
    summary: Summary,
    checks: Sequence[Check],
    command: str,
    machine: Mapping[str, str],
) -> dict[str, Any]:
    """The document of ``--json-report``: curves are [quantile, milliseconds]."""
    return {
        "format": FORMAT,
        "command": command,
        "began_at": run.began_at,
        "complete": run.complete,
        "target": asdict(replace(run.target, credentials=None)) | {"url": run.target.url},
        "load": asdict(run.load),
        "summary": asdict(summary),
        "curve": curve(histogram(latencies(run.samples))),
        "first_byte_curve": curve(histogram(first_bytes(run.samples))),
        "client": {
            "cpu_seconds": run.client_cpu_seconds,
            "cpu_share": run.client_cpu_share,
            "saturated": run.saturated,
        },
        "checks": [asdict(check) for check in checks],
        "status": worst(checks),
        "hardware": dict(machine),
    }


def write_all(
    run: LoadRun,
    summary: Summary,
    checks: Sequence[Check],
    command: str,
    *,
    json_file: Path | None = None,
    html_file: Path | None = None,
    junit_file: Path | None = None,
    samples_file: Path | None = None,
) -> tuple[list[Path], str]:
    """Write every requested file, the largest last, so that a full disk may take the others.

    Returns:
        The written files, and the first error; empty: there was none.
    """
    machine = hardware()

    def write_json(path: Path) -> None:
        found = document(run, summary, checks, command, machine)
        marked_block.write(path, json.dumps(found, indent=1) + "\n")

    def write_junit(path: Path) -> None:
        told = {**machine, "target": run.target.url, "command": command}
        junit.write(path, "modelport loadtest", checks, properties=told, began_at=run.began_at)

    def write_html(path: Path) -> None:
        html.write_run(run, path, checks=checks, hardware=machine, command=command)

    def write_samples(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, run.samples)

    written: list[Path] = []
    problem = ""
    for path, write in (
        (junit_file, write_junit),
        (json_file, write_json),
        (html_file, write_html),
        (samples_file, write_samples),
    ):
        if path is None:
            continue
        try:
            write(path)
            written.append(path)
        except OSError as error:
            problem = problem or f"'{path}' cannot be written: {error.strerror}"
    return written, problem
