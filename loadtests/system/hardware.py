"""Description of the machine, and the versions of the libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

DISTRIBUTIONS = (
    "modelport",
    "onnxruntime",
    "torch",
    "tensorflow",
    "ai-edge-litert",
    "openvino",
    "locust",
)
GIB = 1 << 30


def hardware(more: Iterable[tuple[str, str]] = ()) -> dict[str, str]:
    """cpu, cores, memory_gib, os, python, the version of each runtime; and ``more``."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "cpu": _cpu(),
        "cores": str(cores),
        "memory_gib": f"{psutil.virtual_memory().total / GIB:.1f}",
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in DISTRIBUTIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | dict(more)


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
