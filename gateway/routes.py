"""``modelport.toml``: which models other servers run, and how those are reached or started.

    [models.fraud]
    backend = "triton"                          # triton (any Open Inference Protocol server),
                                                # tfserving, torchserve
    endpoints = ["10.0.0.5:8001", "10.0.0.6:8001"]
    protocol = "grpc"                           # or "http"
    timeout_seconds = 30

    [models.vit]
    backend = "torchserve"
    managed = true                              # no endpoints: the gateway starts it

    [servers.torchserve]                        # how, where the program is not on PATH
    command = ["/opt/torchserve/bin/torchserve"]

The same in YAML is accepted. Endpoints come from this file only, never from a request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Protocol(StrEnum):
    GRPC = "grpc"
    HTTP = "http"


@dataclass(frozen=True, slots=True)
class Route:
    """A table ``[models.<name>]``.

    Attributes:
        backend: ``triton``, ``tfserving`` or ``torchserve``.
        endpoints: ``host:port``, or ``[v6]:port``; empty only where ``managed``.
        protocol: how the server is asked to infer.
        tls: whether connections are encrypted (server certificates are verified).
        management: ``host:port`` of TorchServe's management API, if there is one.
        model: the model's name there; empty: the same as here.
        version: its version there; empty: the one asked for here.
        label: TensorFlow Serving's version label, instead of a version; empty: none.
        timeout_seconds: the longest a request may take there.
        connect_timeout_seconds: the longest a connection may take to come up.
        config: a ``config.pbtxt`` for a model that the repository does not hold; None: the server's
            metadata tells inputs and outputs.
        managed: the gateway starts the server, one process for each version of the model.
    """

    backend: str
    endpoints: tuple[str, ...] = ()
    protocol: Protocol = Protocol.GRPC
    tls: bool = False
    management: str = ""
    model: str = ""
    version: str = ""
    label: str = ""
    timeout_seconds: float = 60.0
    connect_timeout_seconds: float = 5.0
    config: Path | None = None
    managed: bool = False


@dataclass(frozen=True, slots=True)
class Program:
    """A table ``[servers.<backend>]``: how the gateway starts such a server.

    Attributes:
        command: the program and its first arguments; empty: its usual name, looked up on PATH.
        environment: variables for it, besides the gateway's own.
        arguments: more of them, behind those that the gateway generates.
        start_timeout_seconds: the longest it may take until it is ready.
    """

    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    start_timeout_seconds: float = 120.0


@dataclass(frozen=True, slots=True)
class Routes:
    """The whole file, parsed. ``models`` and ``servers`` go by the names in it."""

    models: Mapping[str, Route] = field(default_factory=dict)
    servers: Mapping[str, Program] = field(default_factory=dict)
