"""What a run leaves in files: JSON, HTML, JUnit, raw samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from loadtests.compare.hardware import hardware
from loadtests.report import blocks, html, junit
from loadtests.report.checks import Check, worst
from loadtests.samples import Run
from loadtests.summary import Summary, curve, first_bytes, histogram, latencies

FORMAT = "modelport-loadtest/1"


def document(
    run: Run, summary: Summary, checks: Sequence[Check], command: str, machine: Mapping[str, str]
) -> dict[str, Any]:
    """``--json``: latencies in milliseconds, curves as [quantile, milliseconds]."""
    return {
        "format": FORMAT,
        "command": command,
        "began_at": run.began_at,
        "complete": run.complete,
        "target": asdict(run.target) | {"url": run.target.url},
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
    run: Run,
    summary: Summary,
    checks: Sequence[Check],
    command: str,
    *,
    json_file: Path | None = None,
    html_file: Path | None = None,
    junit_file: Path | None = None,
    samples_file: Path | None = None,
) -> list[Path]:
    """Every file that was asked for.

    Raises:
        OSError: one cannot be written.
    """
    machine = hardware()
    if samples_file is not None:
        with samples_file.open("wb") as file:
            np.save(file, run.samples)
    if json_file is not None:
        found = document(run, summary, checks, command, machine)
        blocks.write(json_file, json.dumps(found, indent=1) + "\n")
    if junit_file is not None:
        properties = {**machine, "target": run.target.url, "command": command}
        junit.write(
            junit_file, "modelport loadtest", checks, properties=properties, began_at=run.began_at
        )
    if html_file is not None:
        html.write_run(run, html_file, checks=checks, hardware=machine, command=command)
    return [path for path in (samples_file, json_file, junit_file, html_file) if path is not None]
