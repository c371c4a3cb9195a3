"""Protocols of the users: preparation, sending and decoding of requests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.users.answer_checker import Read
from modelport.loadtests.users.client import DialectClient

Prepare = Callable[[LoadTestTarget, Payloads, int], Any]
Connect = Callable[[LoadTestTarget, float], DialectClient]


@dataclass(frozen=True)
class Dialect:
    """A protocol; ``prepare`` makes the argument of ``DialectClient.ask`` once for each payload."""

    prepare: Prepare
    connect: Connect
    read: Read


#: Imported on demand: grpcio's gevent must be set up first, and HTTP needs none of it.
MODULES = {
    LoadTestProtocol.OIP_HTTP: "oip_http:JSON",
    LoadTestProtocol.OIP_HTTP2: "oip_http:JSON_HTTP2",
    LoadTestProtocol.OIP_HTTP_BINARY: "oip_http:BINARY",
    LoadTestProtocol.OIP_GRPC: "oip_grpc:DIALECT",
    LoadTestProtocol.TFSERVING_HTTP: "tfserving:REST",
    LoadTestProtocol.TFSERVING_GRPC: "tfserving:GRPC",
    LoadTestProtocol.TORCHSERVE_HTTP: "torchserve:REST",
    LoadTestProtocol.TORCHSERVE_GRPC: "torchserve:GRPC",
    LoadTestProtocol.TRITON_HTTP: "triton:HTTP",
    LoadTestProtocol.TRITON_GRPC: "triton:GRPC",
}


def dialect(protocol: LoadTestProtocol) -> Dialect:
    module, _, name = MODULES[protocol].partition(":")
    found: Dialect = getattr(importlib.import_module(f"modelport.loadtests.users.{module}"), name)
    return found
