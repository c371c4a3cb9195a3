"""Every protocol: how its requests are prepared, sent and read."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelport.loadtests.payloads import Payloads
from modelport.loadtests.target import Protocol, Target
from modelport.loadtests.users.answers import Read
from modelport.loadtests.users.client import Client

Prepare = Callable[[Target, Payloads, int], Any]
Connect = Callable[[Target, float], Client]


@dataclass(frozen=True)
class Dialect:
    """``prepare`` makes what ``Client.ask`` takes, once for each payload."""

    prepare: Prepare
    connect: Connect
    read: Read


#: Imported when asked for: grpcio's gevent must be set up first, and HTTP needs none of it.
MODULES = {
    Protocol.OIP_HTTP: "oip_http:JSON",
    Protocol.OIP_HTTP_BINARY: "oip_http:BINARY",
    Protocol.OIP_GRPC: "oip_grpc:DIALECT",
    Protocol.TFSERVING_HTTP: "tfserving:REST",
    Protocol.TFSERVING_GRPC: "tfserving:GRPC",
    Protocol.TORCHSERVE_HTTP: "torchserve:REST",
    Protocol.TORCHSERVE_GRPC: "torchserve:GRPC",
    Protocol.TRITON_HTTP: "triton:HTTP",
    Protocol.TRITON_GRPC: "triton:GRPC",
}


def dialect(protocol: Protocol) -> Dialect:
    module, _, name = MODULES[protocol].partition(":")
    found: Dialect = getattr(importlib.import_module(f"modelport.loadtests.users.{module}"), name)
    return found
