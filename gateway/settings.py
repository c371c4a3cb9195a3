"""Settings of the gateway and their defaults; ``gateway.cli.serve`` has an option for each."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from modelport.gateway.repository.routes_file import ModelRoute
    from modelport.gateway.repository.signing_keys import PublicKey
    from modelport.gateway.repository.storage.location import Location


#: Default memory budget for requests: 1/4 of the memory, and at least this much for a process.
MEMORY_SHARE = 4
MIN_REQUEST_MEMORY = 256 * 1024 * 1024


class ModelControlMode(StrEnum):
    """``none``: load all at start. ``poll``: follow the repository. ``explicit``: on request."""

    NONE = "none"
    POLL = "poll"
    EXPLICIT = "explicit"


class AspiredVersionPolicy(StrEnum):
    """Order of loading and unloading when versions change, by TensorFlow Serving's names."""

    AVAILABILITY_PRESERVING = "availability_preserving"
    RESOURCE_PRESERVING = "resource_preserving"


class LogFormat(StrEnum):
    """Formats of ``--log-format``."""

    DEFAULT = "default"
    ISO8601 = "ISO8601"
    JSON = "json"


class VertexAi(NamedTuple):
    """Vertex AI's routes, and the model for requests that name none; empty for the only one."""

    predict_route: str
    health_route: str
    default_model: str = ""


class TlsFiles(NamedTuple):
    """PEM files for TLS on the listeners.

    Attributes:
        client_ca: Authorities of client certificates; None: clients are not asked for one.
        client_required: Whether a client without a certificate is refused.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None
    client_required: bool = True


SAGEMAKER_TYPES = ("infer", "generate", "generate_stream")
#: Groups of the API that may be restricted.
GROUPS = (
    *("health", "metadata", "inference", "shared-memory", "model-config", "model-repository"),
    *("statistics", "trace", "logging"),
)


class Restriction(NamedTuple):
    """The header field, and its value, without which a group of the API is refused."""

    header: str
    value: str


class HeaderRules(NamedTuple):
    """Rules about the header fields of requests on one port.

    Attributes:
        restricted: by group of the API.
        forwarded: matches the names of those that models get as parameters; None: none.
    """

    restricted: Mapping[str, Restriction] = MappingProxyType({})
    forwarded: re.Pattern[str] | None = None


NO_HEADER_RULES = HeaderRules()


class AccessLogSettings(NamedTuple):
    """The access log.

    Attributes:
        target: a file, or ``-`` for standard output.
        sample: the share of requests that have a line; failures and slow requests always have one.
        slow_seconds: the duration from which a request is slow.
    """

    target: str
    sample: float = 1.0
    slow_seconds: float = 1.0


class RecordSettings(NamedTuple):
    """Recorded traffic.

    Attributes:
        target: a folder, or a location in object storage.
        sample: the share of inference requests that are recorded; ``model_samples``: of a model's.
        headers: names of header fields to record besides those that a request needs.
        redact, hashed: rules for the fields that are left out, or replaced by a hash with
            ``hash_key``.
        key: with which records are encrypted; empty: they are not.
        max_record_bytes: the content of a request that is recorded.
        rotate_bytes, rotate_seconds: the size and the age at which a file is complete.
        max_bytes: of all files in a folder; the oldest are deleted.
    """

    target: Path | Location
    sample: float = 0.1
    model_samples: Mapping[str, float] = MappingProxyType({})
    headers: tuple[str, ...] = ()
    redact: tuple[str, ...] = ()
    hashed: tuple[str, ...] = ()
    hash_key: bytes = b""
    key: bytes = b""
    max_record_bytes: int = 1 << 20
    rotate_bytes: int = 64 << 20
    rotate_seconds: float = 3600.0
    max_bytes: int = 10 << 30


class MetricsChoice(NamedTuple):
    """The published metrics of latencies, by Triton's names.

    Attributes:
        summary_quantiles: of the summaries.
    """

    counter_latencies: bool = True
    histogram_latencies: bool = True
    summary_latencies: bool = False
    summary_quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


class TraceMode(StrEnum):
    """The destination of traces: Triton's files, or a collector of OpenTelemetry."""

    TRITON = "triton"
    OPENTELEMETRY = "opentelemetry"


class TraceConfig(NamedTuple):
    """The settings of traces at the start, with Triton's defaults.

    Attributes:
        level: ``TIMESTAMPS``, ``TENSORS`` or both; empty: no traces.
        rate: one of this number of requests is traced; 0: only those with a client's context.
        limit: traces to collect (``count``); -1: no limit.
        file, log_frequency: of mode ``triton``: the traces of each file; 0: one file.
        url: of the collector; empty: as the environment says.
        resource, batching: attributes of the gateway, and numbers of ``BatchSpanProcessor``.
    """

    mode: TraceMode = TraceMode.TRITON
    level: tuple[str, ...] = ()
    rate: int = 1000
    limit: int = -1
    file: str = ""
    log_frequency: int = 0
    url: str = ""
    resource: tuple[tuple[str, str], ...] = ()
    batching: tuple[tuple[str, int], ...] = ()


class PythonModels(NamedTuple):
    """Limits of the workers of Python models.

    Attributes:
        max_seconds: the longest execution, and the longest wait for a response that an execution
            has left to a sender; None: no limit.
        max_memory_bytes: the resident memory of one worker; None: no limit.
        max_data_bytes: its RLIMIT_DATA; None: no limit.
        environments: the folder of environments of lock files; None: the user's cache folder.
        load_seconds: the longest load.
        most_bytes: the largest response.
        completes: ``auto_complete_config`` is called.
        backends: a folder for each Python-based backend; None: there are none.
    """

    max_seconds: float | None = 300.0
    max_memory_bytes: int | None = None
    max_data_bytes: int | None = None
    environments: Path | None = None
    load_seconds: float = 1200.0
    most_bytes: int = 2**40
    completes: bool = True
    backends: Path | None = None


class Settings(NamedTuple):
    """All settings of a gateway."""

    #: Folders, and locations in object storage. May be empty if ``routes`` name models.
    model_repositories: tuple[Path | Location, ...]
    model_control_mode: ModelControlMode = ModelControlMode.NONE
    load_models: tuple[str, ...] = ()
    repository_poll_seconds: float = 15.0
    #: ``configs/NAME.pbtxt`` of a model's folder replaces its ``config.pbtxt``; empty: none does.
    model_config_name: str = ""
    #: Folder for copies of models from object storage; None for the user's cache folder.
    repository_cache: Path | None = None
    #: Default of the model parameter ``aspired_version_policy``.
    aspired_version_policy: AspiredVersionPolicy = AspiredVersionPolicy.AVAILABILITY_PRESERVING
    #: Retries of a failed load. Loads waiting for an unavailable server retry indefinitely.
    model_load_retry_count: int = 0
    load_retry_interval_seconds: float = 1.0
    #: A load that takes longer fails.
    model_load_timeout_seconds: float = 1200.0
    require_manifest: bool = False
    #: If not empty, only versions signed with one of these keys are served.
    require_signature: tuple[PublicKey, ...] = ()
    #: Whether unsigned versions may use native code, and operators that access files.
    allow_native_code: bool = False
    #: Whether unsigned versions may be Python code.
    allow_python: bool = False
    python_models: PythonModels = PythonModels()
    #: Whether several repositories may have a model of the same name.
    model_namespacing: bool = False
    #: Whether each model needs a configuration with all its inputs and outputs.
    disable_auto_complete_config: bool = False
    #: Models on upstream servers, by name.
    routes: Mapping[str, ModelRoute] = MappingProxyType({})
    strict_readiness: bool = True
    exit_on_error: bool = False
    http_address: str = "127.0.0.1"
    http_port: int = 8000
    #: Host names whose web pages may change the served models; ``*`` for any.
    allowed_hosts: tuple[str, ...] = ()
    http_max_input_bytes: int = 64 * 1024 * 1024
    #: Memory budget for the requests of all processes; None for a quarter of the usable memory.
    max_request_memory_bytes: int | None = None
    #: Whether JSON answers have null for NaN and the infinities, in place of bare tokens.
    json_nan_as_null: bool = False
    #: SageMaker's ``/invocations``, and the model for requests that name none; empty for the only
    #: one.
    allow_sagemaker: bool = True
    #: Dialects of installed packages that are served besides.
    dialects: tuple[str, ...] = ()
    sagemaker_default_model: str = ""
    #: How its ``/invocations`` answers: one of ``SAGEMAKER_TYPES``.
    sagemaker_inference_type: str = "infer"
    #: Where it unpacks the models that it loads on request, as a multi-model endpoint; empty: it is
    #: none.
    sagemaker_models: str = ""
    #: None disables Vertex AI's routes.
    vertex_ai: VertexAi | None = None
    http_headers: HeaderRules = NO_HEADER_RULES
    grpc_headers: HeaderRules = NO_HEADER_RULES
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002
    #: Whether the metrics port also has the console, and the API of the HTTP port; None: unless
    #: everyone on the network could use it.
    allow_console: bool | None = None
    metrics: MetricsChoice = MetricsChoice()
    #: UNIX domain sockets besides the ports; in a worker, descriptors of the parent's.
    http_socket: Path | int | None = None
    grpc_socket: Path | int | None = None
    #: Permissions of the socket files.
    socket_mode: int = 0o660
    #: TLS on all three ports; None for clear text.
    tls: TlsFiles | None = None
    #: The rules of access, ``access.toml``; None: everyone may do everything.
    access: Path | None = None
    #: The file of the audit log, ``-`` for standard output; None for none.
    audit_log: str | None = None
    #: Size at which that file is renamed; None for never.
    audit_log_max_bytes: int | None = None
    #: One line for each request; None for none.
    access_log: AccessLogSettings | None = None
    #: Recorded traffic; None for none.
    record: RecordSettings | None = None
    traces: TraceConfig = TraceConfig()
    #: Whether other addresses than loopback are served without access and without mutual TLS.
    insecure: bool = False
    #: Path of the metrics on the HTTP port; empty for none.
    prometheus_path: str = ""
    #: The file with the secret that signs the calls of rollouts' webhooks.
    rollout_webhook_secret: Path | None = None
    exit_timeout_seconds: float = 30.0
    #: Number of processes that share the ports.
    workers: int = 1
    #: Upper bound of every request's deadline; None for none.
    max_request_timeout_seconds: float | None = None
    #: Size of the response cache; 0 disables it.
    cache_bytes: int = 0
    #: Counts of resources by name and device (None: every one), or of each what an instance needs
    #: most, for executions of all models; None: there is no rate limiter.
    rate_limits: Mapping[tuple[str, int | None], int] | None = None
    #: Whether clients on this machine may pass tensors in system shared memory.
    allow_client_shm: bool = False
    log_format: LogFormat = LogFormat.DEFAULT
    log_verbose: int = 0
    #: Models outside of a repository: their names, and their files or folders.
    models: tuple[tuple[str, Path], ...] = ()
    #: TensorFlow Serving's list of models, and how often it is read again; 0: never.
    model_config_file: Path | None = None
    model_config_poll_seconds: float = 0.0


def verifies_clients(tls: TlsFiles | None) -> bool:
    """Whether there are authorities of client certificates."""
    return tls is not None and tls.client_ca is not None


def requires_certificates(tls: TlsFiles | None) -> bool:
    """Whether every client needs a certificate (mutual TLS)."""
    return tls is not None and tls.client_ca is not None and tls.client_required


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``address``."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def request_memory_bytes(settings: Settings) -> int:
    """Return the memory budget for the requests of one process."""
    total = settings.max_request_memory_bytes
    if total is None:
        total = max(MIN_REQUEST_MEMORY * settings.workers, usable_memory_bytes() // MEMORY_SHARE)
    return total // settings.workers


def usable_memory_bytes() -> int:
    """Return the machine's memory, capped by the cgroup v2 limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return total


def usable_cores() -> int:
    """Count the usable cores: the CPU affinity, capped by the cgroup v2 CPU quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)
