"""The gateway's settings: frozen, parsed once at the edge (``gateway.cli``), in Triton's words."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gateway.routes import Routes

if TYPE_CHECKING:
    from gateway.repository.signing import PublicKey


class ModelControlMode(StrEnum):
    """``none``: load all at start. ``poll``: follow the repository. ``explicit``: on request."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


class LogFormat(StrEnum):
    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Settings:
    model_repositories: tuple[Path, ...]
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    load_models: tuple[str, ...] = ()
    repository_poll_seconds: float = 15.0
    require_manifest: bool = False
    #: Where there are any, only versions signed with one of them are served.
    require_signature: tuple[PublicKey, ...] = ()
    #: Which models other servers run.
    routes: Routes = field(default_factory=Routes)
    strict_readiness: bool = True
    exit_on_error: bool = False
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    http_max_input_bytes: int = 64 * 1024 * 1024
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    exit_timeout_seconds: float = 30.0
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0


def usable_cores() -> int:
    """Cores this process may really use: its CPU affinity, capped by a cgroup v2 CPU quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return max(1, cores)
