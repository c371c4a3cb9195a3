"""Composition of all dialects into one HTTP application and one table of gRPC methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Unsupported
from modelport.gateway.extensions import ExtensionTable
from modelport.gateway.protocols.cross_site_protection import Origins
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.grpc_method import Methods, Rows
from modelport.gateway.protocols.grpc_reflection import GrpcReflection
from modelport.gateway.protocols.http import (
    KEPT_TARGET,
    ROUTES,
    HttpApplication,
    HttpDialect,
)
from modelport.gateway.protocols.http_message import Handler
from modelport.gateway.protocols.oip.grpc import OipGrpc
from modelport.gateway.protocols.oip.http import OipHttp
from modelport.gateway.protocols.oip.http_generate import GenerateHttp
from modelport.gateway.protocols.oip.http_shared_memory import SharedMemoryHttp
from modelport.gateway.protocols.sagemaker import SageMakerHttp
from modelport.gateway.protocols.texts.cohere import CohereHttp
from modelport.gateway.protocols.texts.openai import OpenAiHttp
from modelport.gateway.protocols.texts.tei import TeiHttp
from modelport.gateway.protocols.tfserving.grpc import TfServingGrpc
from modelport.gateway.protocols.tfserving.http import TfServingHttp
from modelport.gateway.protocols.torchserve.grpc import TorchServeGrpc
from modelport.gateway.protocols.torchserve.http import TorchServeHttp
from modelport.gateway.protocols.vertex import VertexApplication
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry.request_record import GRPC, RouteNames


class DialectDescriptor(NamedTuple):
    """A dialect.

    Attributes:
        http: makes its routes on the HTTP port.
        grpc: makes its gRPC methods.
        enabled: whether the dialect is served with these settings; an extension is served where
            ``--dialect`` names it.
    """

    name: str
    http: Callable[[DialectHost], Sequence[HttpDialect]] = lambda host: ()
    grpc: Callable[[DialectHost], Methods] = lambda host: {}
    enabled: Callable[[Settings], bool] = lambda settings: True


_BUILTIN = (
    DialectDescriptor(
        "oip",
        lambda host: (OipHttp(host), SharedMemoryHttp(host), GenerateHttp(host)),
        lambda host: OipGrpc(host).methods(),
    ),
    DialectDescriptor(
        "tfserving",
        lambda host: [TfServingHttp(host)],
        lambda host: TfServingGrpc(host).methods(),
    ),
    DialectDescriptor(
        "torchserve",
        lambda host: [TorchServeHttp(host)],
        lambda host: TorchServeGrpc(host).methods(),
    ),
    DialectDescriptor("openai", lambda host: [OpenAiHttp(host)]),
    DialectDescriptor("tei", lambda host: [TeiHttp(host)]),
    DialectDescriptor("cohere", lambda host: [CohereHttp(host)]),
    DialectDescriptor(
        "sagemaker",
        lambda host: [SageMakerHttp(host)],
        enabled=lambda settings: settings.allow_sagemaker,
    ),
)
#: In the order in which they are asked for a path.
DIALECTS: ExtensionTable[DialectDescriptor] = ExtensionTable(
    "modelport.dialects", DialectDescriptor, {each.name: each for each in _BUILTIN}
)


class Dialects:
    """``http`` is the handler of the HTTP port, ``grpc`` the table of gRPC methods.

    ``application`` has the routes of the HTTP port, without those that Vertex AI chooses.
    """

    def __init__(self, host: DialectHost) -> None:
        settings = host.settings
        served = [each for each in _BUILTIN if each.enabled(settings)]
        if settings.sagemaker_models:  # its ``/models`` are not TorchServe's
            served.sort(key=lambda each: each.name == "torchserve")
        served += [find(name) for name in settings.dialects if name not in DIALECTS.builtin]
        self._names = {dialect: each.name for each in served for dialect in each.http(host)}
        http = [*self._names]
        self.grpc: dict[str, Rows] = {}
        self._services: dict[str, str] = {}
        for each in served:
            for name, methods in each.grpc(host).items():
                self.grpc.setdefault(name, methods)  # no extension replaces what is built in
                self._services.setdefault(name, each.name)
        self.grpc |= GrpcReflection(self.grpc).methods()
        self._vertex_routes: Sequence[bytes] = ()
        origins = Origins(settings.http_address, settings.allowed_hosts)
        self.application = HttpApplication(http, origins, host.splits, settings.http_headers)
        self.http: Handler = self.application
        if settings.vertex_ai is not None:
            self.http = VertexApplication(self.application, host, settings.vertex_ai)
            self._vertex_routes = [each.encode() for each in settings.vertex_ai[:2]]

        self._kept_names = lru_cache(ROUTES)(self._describe)

    def describe(self, protocol: str, method: str, path: bytes) -> RouteNames:
        """Name the route of a request."""
        kept = len(path) <= KEPT_TARGET
        return (self._kept_names if kept else self._describe)(protocol, method, path)

    def _describe(self, protocol: str, method: str, path: bytes) -> RouteNames:
        if protocol == GRPC:
            service, _, name = path.decode("latin-1")[1:].partition("/")
            found = self.grpc.get(service, {}).get(name)
            infers = found is not None and found.operation is Operation.INFER
            route = f"{service}/{name}" if found else ""
            return RouteNames(self._services.get(service, ""), route, infers)
        if path in self._vertex_routes:
            return RouteNames("vertex", path.decode("latin-1"), method == "POST")
        dialect, row = self.application.row(method, path)
        if row is None:
            return RouteNames(self._names[dialect])
        return RouteNames(self._names[dialect], row.path, row.operation is Operation.INFER)


def find(name: str) -> DialectDescriptor:
    """The dialect called ``name``.

    Raises:
        Unsupported: there is none, or it cannot be used.
    """
    descriptor = DIALECTS.get(name)
    if descriptor is None:
        known = ", ".join(DIALECTS.names())
        raise Unsupported(f"there is no dialect '{name}'; this gateway has: {known}")
    return descriptor
