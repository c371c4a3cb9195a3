"""Verifiable facts about edge deployment and operational maturity, with sources.

These are neither measured under load nor opinions: sizes are those of files on this disk, and the
other facts are upstream's statements at the given address.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from modelport.gateway.backend_registry import BACKENDS

#: Formats of those backends that only the Python runtime opens.
NEEDS_PYTHON: Mapping[str, str] = {
    "pt2": "torch.export.load is a Python function (https://docs.pytorch.org/docs/stable/export.html)"
}
SERVERS: Mapping[str, str] = {
    "torchserve": "a server: a JVM and Python workers",
    "triton": "a server",
    "tfserving": "a server",
}


def runtime_bytes(backend: str) -> int | None:
    """Size of the native library for the backend's files on this disk; None: not installed."""
    descriptor = BACKENDS.all().get(backend)
    if descriptor is None or not descriptor.libraries:
        return None
    library = descriptor.libraries[0]
    try:
        files = importlib.metadata.distribution(library.distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    named = [f for f in files if any(fnmatch(f.name, pattern) for pattern in library.native)]
    paths = {Path(str(file.locate())).resolve() for file in named}  # links count once
    return sum(path.stat().st_size for path in paths if path.is_file()) or None


def why_not_on_the_edge(format_name: str, backend: str) -> str | None:
    """The reason that such a candidate needs more than a library; None if it does not."""
    return SERVERS.get(backend) or NEEDS_PYTHON.get(format_name)


@dataclass(frozen=True)
class Fact:
    """A property that operations teams ask for, and the servers that have it.

    Attributes:
        true_of: servers; ``modelport`` stands for every embedded backend.
        source: where to check this for all servers.
    """

    what: str
    true_of: tuple[str, ...]
    source: str


MATURITY = (
    Fact(
        "upstream accepts security fixes (its repository is not archived)",
        ("modelport", "triton", "tfserving"),
        "https://github.com/pytorch/serve is archived since August 2025",
    ),
    Fact(
        "released as 1.0 or later",
        ("triton", "tfserving"),
        "the version that each prints: TorchServe 0.12.0, modelport 0.1.0, Triton 2.x, TF Serving "
        "2.x",
    ),
    Fact(
        "an official container image on a public registry",
        ("torchserve", "triton", "tfserving"),
        "hub.docker.com/r/pytorch/torchserve, nvcr.io/nvidia/tritonserver, "
        "hub.docker.com/r/tensorflow/serving; of modelport there is a Dockerfile",
    ),
    Fact(
        "the Open Inference Protocol, over HTTP and gRPC",
        ("modelport", "triton"),
        "TorchServe's gRPC service has another package name and drops raw_input_contents; "
        "TF Serving has its own protocol",
    ),
    Fact(
        "Prometheus metrics",
        ("modelport", "torchserve", "triton", "tfserving"),
        "port 8002; metrics_mode=prometheus; port 8002; monitoring_config_file",
    ),
    Fact(
        "dynamic batching",
        ("modelport", "torchserve", "triton", "tfserving"),
        "dynamic_batching; batchSize; dynamic_batching; --enable_batching",
    ),
    Fact(
        "new versions are loaded while the old one serves",
        ("modelport", "torchserve", "triton", "tfserving"),
        "version_policy; the management API; version_policy; model_version_policy",
    ),
)
#: Formats that upstream advises users to leave; this counts as one missing fact.
DEPRECATED: Mapping[str, str] = {
    "torchscript": "PyTorch deprecates TorchScript: torch.jit.trace warns so since 2.9",
}


def maturity(format_name: str, backend: str) -> tuple[int, list[str]]:
    """The number of true facts, of ``len(MATURITY) + 1``, and the missing ones."""
    subject = backend if backend in SERVERS else "modelport"
    missing = [fact.what for fact in MATURITY if subject not in fact.true_of]
    if format_name in DEPRECATED:
        missing.append(f"a format that upstream maintains ({DEPRECATED[format_name]})")
    return len(MATURITY) + 1 - len(missing), missing
