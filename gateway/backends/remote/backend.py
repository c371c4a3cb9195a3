"""The backend of all remote servers, made from a ``RemoteClient`` and a pool of endpoints.

A server's own module implements the client. Description, negotiation, endpoints and deadlines are
handled here for all. Every response is checked against the negotiated signature.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

from modelport.gateway.backend_registry import RemoteVersions
from modelport.gateway.backends.base import ELSEWHERE, Artifact
from modelport.gateway.backends.remote.signature_negotiation import (
    Metadata,
    RemoteClient,
    RemoteResponse,
    StreamingClient,
    negotiate,
)
from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    Unsupported,
)
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute, UpstreamProtocol
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.telemetry import spans
from modelport.gateway.types import Deadline, InferRequest, InferResponse, ModelSignature
from modelport.gateway.upstream.outlier_detection import Endpoint, EndpointFailed, FailureKind
from modelport.gateway.upstream.pool import EndpointPool, on_loop, outcome
from modelport.gateway.upstream.retries import IDEMPOTENT, NOT_PROCESSED, STREAM_RETRIED
from modelport.gateway.wire import via_header

#: The version of a model whose server has no versions, or words instead of numbers.
UNVERSIONED = 1
#: The time a server has to describe a model, besides the time to connect.
DESCRIBE_SECONDS = 10.0


#: Marks a step of a sequence, which must not be repeated.
SEQUENCE = "sequence_id"

#: Makes the client for a model, by its name on the remote server. Without a configuration, the
#: client is only asked for versions.
Connect = Callable[[ModelRoute, str, ModelConfig | None], RemoteClient]


class RemoteServer(NamedTuple):
    """A kind of server: its clients over gRPC and HTTP."""

    grpc: Connect
    http: Connect

    def _connect(
        self, route: ModelRoute, model_name: str, config: ModelConfig | None
    ) -> RemoteClient:
        connect = self.grpc if route.protocol is UpstreamProtocol.GRPC else self.http
        return connect(route, route.model or model_name, config)

    def load(self, artifact: Artifact) -> RemoteBackend:
        """Describe the model on the server and negotiate its signature (blocking).

        Raises:
            Unavailable: no endpoint can be reached, or none has this version READY.
            InvalidArgument: the server's metadata contradicts the configuration, or the server can
                have no such version or signature.
            Unsupported: the protocol does not carry one of the datatypes.
            Internal: the server's description violates the protocol.
        """
        route, host = artifact.route, artifact.host
        if route is None or host is None:
            raise InvalidArgument(
                f"backend '{artifact.config.backend}' runs '{artifact.model_name}' on another "
                "server; add a route to that server to the --routes file"
            )
        return on_loop(host.loop, self._load(artifact, route, host.loop))

    async def _load(
        self, artifact: Artifact, route: ModelRoute, loop: asyncio.AbstractEventLoop
    ) -> RemoteBackend:
        server = self._connect(route, artifact.model_name, artifact.config)
        backend = RemoteBackend(artifact, route, loop, server)
        try:
            await backend.start()
        except BaseException:
            await backend.close()
            raise
        return backend

    async def versions(self, route: ModelRoute, model_name: str) -> RemoteVersions:
        """The READY versions on any endpoint, ascending; 1 if the model has no version numbers.

        Raises:
            Unavailable: no endpoint can be reached.
            NotFound: the endpoints have no such model.
        """
        server = self._connect(route, model_name, None)
        try:
            seconds = route.connect_timeout_seconds
            described = (_described(server, route, address) for address in route.endpoints)
            answers = await asyncio.gather(*(outcome(each, seconds) for each in described))
        finally:
            await server.close()
        found = [answer for answer in answers if not isinstance(answer, EndpointFailed)]
        if found:
            words = {route.version} if route.version else {w for m, _ in found for w in m.versions}
            numbers = sorted(int(w) for w in words if VERSION_NAME.match(w)) or [UNVERSIONED]
            return RemoteVersions(numbers, any(loading for _, loading in found))
        failures = [answer for answer in answers if isinstance(answer, EndpointFailed)]
        if all(error.failure is FailureKind.MISSING for error in failures):
            raise NotFound(f"the server has no model '{route.model or model_name}'")
        raise Unavailable(f"the server that runs '{model_name}' {failures[0]}")


async def _described(
    server: RemoteClient, route: ModelRoute, address: str
) -> tuple[Metadata, bool]:
    """The model's metadata, and whether the server is loading models."""
    limit = Deadline.after(route.connect_timeout_seconds)
    loading = False
    if not route.version:
        # First: a version that becomes READY between the two is in the metadata.
        with contextlib.suppress(EndpointFailed, ModelportError):  # not every server can tell
            loading = await server.loading(address, limit)
    return await server.metadata(address, route.version, limit), loading


class RemoteBackend:
    """An ``Infer`` over the endpoints of a route. Created, used and closed on the event loop."""

    config: ModelConfig
    execution = ELSEWHERE

    def __init__(
        self,
        artifact: Artifact,
        route: ModelRoute,
        loop: asyncio.AbstractEventLoop,
        server: RemoteClient,
    ) -> None:
        self._artifact = artifact
        self._route = route
        self._loop = loop
        self._server = server
        self._version = route.version
        self._pool = EndpointPool(
            artifact.model_name,
            route.endpoints,
            self._probe,
            timeout_seconds=route.timeout_seconds,
            connect_timeout_seconds=route.connect_timeout_seconds,
            outlier_detection=route.outlier_detection,
            reset=lambda endpoint: server.reset(endpoint.address),
        )

    @property
    def problem(self) -> str:
        return self._pool.problem

    @property
    def signatures(self) -> Mapping[str, ModelSignature]:
        return self._server.signatures

    @property
    def signature_defs(self) -> bytes:
        return self._server.signature_defs

    def endpoints(self) -> Iterator[tuple[str, bool]]:
        """``host:port`` of each endpoint, and whether it is ejected."""
        for endpoint in self._pool.endpoints:
            yield endpoint.address, endpoint.ejected

    async def _probe(self, endpoint: Endpoint) -> None:
        limit = Deadline.after(self._route.connect_timeout_seconds)
        await self._server.ready(endpoint.address, self._version, limit)

    async def start(self) -> None:
        """Describe the model, and start to watch its servers; raises as ``load``."""
        server, pool = self._server, self._pool
        limit = Deadline.after(self._route.connect_timeout_seconds + DESCRIBE_SECONDS)

        def metadata(endpoint: Endpoint, limit: Deadline) -> Awaitable[Metadata]:
            return server.metadata(endpoint.address, self._version, limit)

        if not self._version:
            known = (await pool.call(metadata, limit)).versions
            if any(VERSION_NAME.match(word) for word in known):
                self._version = str(self._artifact.version)
        await pool.start()
        told = await pool.call(metadata, limit)
        theirs = await pool.call(
            lambda e, limit: server.config(e.address, self._version, limit), limit
        )
        agreement = negotiate(self._artifact.config, told, theirs)
        if agreement.decoupled and not isinstance(server, StreamingClient):
            raise Unsupported(
                "the model is decoupled: it may return several responses to a request, which "
                'its protocol does not support; set protocol = "grpc" in its route'
            )
        await pool.call(lambda e, _: server.serve(e.address, self._version, agreement), limit)
        self.config = agreement.config

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        started = time.perf_counter_ns()
        request.timing.begun = True  # it waits at its server
        via_header.CURRENT.set(request.via)  # the task of a batch may belong to another request
        spans.UPSTREAM.set(request.span)

        async def attempt(endpoint: Endpoint, limit: Deadline) -> InferResponse:
            if request.span is None:
                return self._response(await self._server.infer(endpoint.address, request, limit))
            span = self._span(request, endpoint)
            spans.UPSTREAM.set(span)
            try:
                return self._response(await self._server.infer(endpoint.address, request, limit))
            finally:
                span.end()

        retried = NOT_PROCESSED if SEQUENCE in request.parameters else IDEMPOTENT
        response = await self._pool.call(attempt, deadline, retried)
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        return response

    async def stream(
        self, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        """Yield the responses of one endpoint; try another if it fails before the first.

        The route's timeout applies to each response, the deadline to all of them.
        """
        server = self._server
        assert isinstance(server, StreamingClient)  # checked at load
        request.timing.begun = True
        via_header.CURRENT.set(request.via)
        spans.UPSTREAM.set(request.span)
        answers: AsyncGenerator[RemoteResponse, None]

        async def first(endpoint: Endpoint, _: Deadline) -> tuple[Endpoint, RemoteResponse | None]:
            nonlocal answers
            if request.span is not None:
                spans.UPSTREAM.set(self._span(request, endpoint))
            answers = server.stream(endpoint.address, request, deadline)
            return endpoint, await anext(answers, None)

        async def following(_: Endpoint, __: Deadline) -> RemoteResponse | None:
            return await anext(answers, None)

        endpoint, answer = await self._pool.call(first, deadline, STREAM_RETRIED)
        async with aclosing(answers):
            while answer is not None:
                yield self._response(answer)
                answer = await self._pool.proceed(endpoint, following, deadline)

    def _span(self, request: InferRequest, endpoint: Endpoint) -> Any:
        """The span of an attempt at an endpoint, whose context the attempt carries."""
        span = request.span.child("attempt")
        if span is not request.span:
            host, _, port = endpoint.address.rpartition(":")
            span.client = True
            span.attributes |= {"server.address": host, "server.port": int(port)}
            if self._route.protocol is UpstreamProtocol.GRPC:
                span.attributes["rpc.system.name"] = "grpc"
            else:
                span.attributes["http.request.method"] = "POST"
        return span

    def _response(self, answer: RemoteResponse) -> InferResponse:
        name, version = self._artifact.model_name, self._artifact.version
        return InferResponse(
            name, version, answer.outputs, parameters=answer.parameters, final=answer.final
        )

    async def close(self) -> None:
        self._pool.close()
        await self._server.close()

    def unload(self) -> None:
        on_loop(self._loop, self.close())
