"""The gateway's settings: frozen, parsed once at the edge (``serve_cli``), in Triton's words."""

from __future__ import annotations

import math
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from modelport.gateway.repository.routes import Routes

if TYPE_CHECKING:
    from modelport.gateway.repository.signing import PublicKey
    from modelport.gateway.repository.storage.location import Location


#: By default requests may hold this part of the memory, and never less than this in a process.
MEMORY_SHARE = 4
MIN_REQUEST_MEMORY = 256 * 1024 * 1024


class ModelControlMode(StrEnum):
    """``none``: load all at start. ``poll``: follow the repository. ``explicit``: on request."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


class AspiredVersionPolicy(StrEnum):
    """Which goes first when versions change, in TensorFlow Serving's words (``policy.py``)."""

    AVAILABILITY_PRESERVING = "availability_preserving"
    RESOURCE_PRESERVING = "resource_preserving"


class LogFormat(StrEnum):
    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "json"


class VertexAi(NamedTuple):
    """Vertex AI's routes, and the model of those who name none; empty: the only one."""

    predict_route: str
    health_route: str
    default_model: str = ""


class Settings(NamedTuple):
    #: Folders, and locations in object storage. May be empty where ``routes`` name models.
    model_repositories: tuple[Path | Location, ...]
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    load_models: tuple[str, ...] = ()
    repository_poll_seconds: float = 15.0
    #: Where copies are kept of what is served from object storage; None: the user's cache folder.
    repository_cache: Path | None = None
    #: Unless a model's parameter ``aspired_version_policy`` says otherwise.
    aspired_version_policy: AspiredVersionPolicy = AspiredVersionPolicy.AVAILABILITY_PRESERVING
    #: How often a load that fails is tried again, besides what is tried until it is available.
    model_load_retry_count: int = 0
    load_retry_interval_seconds: float = 1.0
    #: A load that takes longer has failed.
    model_load_timeout_seconds: float = 1200.0
    require_manifest: bool = False
    #: Where there are any, only versions signed with one of them are served.
    require_signature: tuple[PublicKey, ...] = ()
    #: Unsigned versions may run native code, and operators that reach files.
    allow_native_code: bool = False
    #: Which models other servers run.
    routes: Routes = Routes()
    strict_readiness: bool = True
    exit_on_error: bool = False
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    #: Names of this gateway whose web pages may change what is served; ``*``: any.
    allowed_hosts: tuple[str, ...] = ()
    http_max_input_bytes: int = 64 * 1024 * 1024
    #: What the requests of all processes may hold together; None: a quarter of the usable memory.
    max_request_memory_bytes: int | None = None
    #: SageMaker's ``/invocations``, and the model of those who name none; empty: the only one.
    allow_sagemaker: bool = True
    sagemaker_default_model: str = ""
    #: None: Vertex AI's routes are not there.
    vertex_ai: VertexAi | None = None
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    #: Where the HTTP port has the metrics too; empty: nowhere.
    prometheus_path: str = ""
    exit_timeout_seconds: float = 30.0
    #: Processes that share the ports.
    workers: int = 1
    #: No request takes longer, whatever its own deadline; None: as long as it says.
    max_request_timeout_seconds: float | None = None
    #: The response cache's size; 0: there is none.
    cache_bytes: int = 0
    #: Clients on this machine may pass tensors in system shared memory.
    allow_client_shm: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    #: Models outside a repository, each a file or a folder.
    models: tuple[Path, ...] = ()


def request_memory_bytes(settings: Settings) -> int:
    """The part of one process of what requests may hold."""
    total = settings.max_request_memory_bytes
    if total is None:
        total = max(MIN_REQUEST_MEMORY * settings.workers, usable_memory_bytes() // MEMORY_SHARE)
    return total // settings.workers


def usable_memory_bytes() -> int:
    """The machine's memory, capped by a cgroup v2 limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return total


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
