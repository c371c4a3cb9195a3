"""Clients of the Open Inference Protocol, over HTTP and gRPC, with NumPy arrays in and out.

Any server of the protocol will do, such as Triton or KServe.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Awaitable, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
from numpy.typing import ArrayLike

from modelport.client_loop import LoopThread
from modelport.client_models import (
    ClientRequest,
    ModelDescription,
    ModelStatistics,
    ModelStatus,
    Parameter,
    counted,
    described,
    encoded,
    plain,
)
from modelport.client_protocol import GrpcTransport, HttpTransport, valid_answer
from modelport.gateway.errors import InvalidArgument, ModelportError, TimedOut, Unavailable
from modelport.gateway.types import Array, Tensor
from modelport.gateway.upstream import connection_errors, tls_errors
from modelport.gateway.upstream.outlier_detection import EndpointFailed

T = TypeVar("T")
#: URL scheme → the transport, and whether the connection is encrypted.
_TRANSPORTS: Mapping[str, tuple[type[HttpTransport | GrpcTransport], bool]] = {
    "http": (HttpTransport, False),
    "https": (HttpTransport, True),
    "grpc": (GrpcTransport, False),
    "grpcs": (GrpcTransport, True),
}
#: Names and values of header fields (RFC 9110, 5.1 and 5.5).
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t -~\x80-\U0010ffff]*")


class AsyncClient:
    """``Client`` for asyncio: the same methods, to be awaited.

        async with modelport.AsyncClient("grpc://127.0.0.1:8001") as client:
            outputs = await client.infer("fraud", {"transactions": array})

    It belongs to the event loop on which the first method is awaited. Any number of requests may be
    under way.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
        token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect when the first request is made; arguments and errors are those of ``Client``."""
        scheme, separator, rest = url.partition("://")
        if not separator:
            scheme, rest = "http", url
        if scheme not in _TRANSPORTS:
            raise InvalidArgument(
                f"'{scheme}://' is not a protocol; use {', '.join(f'{s}://' for s in _TRANSPORTS)}"
            )
        try:
            target = urlsplit(f"//{rest}")
            complete = bool(target.hostname) and (target.port or scheme in ("http", "https"))
        except ValueError:
            complete = False
        if complete and target.username is not None:
            raise InvalidArgument(
                f"the URL of {scheme}://{target.hostname} has a user name; give the credential "
                "as token or headers"
            )
        if not complete:
            raise InvalidArgument(f"'{url}' is not {scheme}://HOST:PORT")
        if not timeout_seconds > 0:
            raise InvalidArgument(f"timeout_seconds must be more than 0, not {timeout_seconds}")
        self._url, self._scheme, self._target = url, scheme, rest.rstrip("/")
        self._headers = dict(headers or {})
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        for name, value in self._headers.items():
            if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
                raise InvalidArgument(  # without the value, which may be secret
                    f"the header {name!a} is not one of HTTP; remove its line breaks and "
                    "control characters"
                )
        if tls is not None and not _TRANSPORTS[scheme][1]:
            raise InvalidArgument(f"'{url}' is clear text; with tls, use https:// or grpcs://")
        self._tls = tls
        self._seconds = timeout_seconds
        #: Made on the event loop.
        self._connected: HttpTransport | GrpcTransport | None = None
        #: Models that were asked for, by name and version.
        self._known: dict[tuple[str, str], ModelDescription] = {}

    async def live(self) -> bool:
        """Whether the server runs."""
        return await self._answer(self._transport.live())

    async def ready(self, model: str = "", version: str | int = "") -> bool:
        """Whether the server can answer requests, or whether this model can."""
        return await self._answer(self._transport.ready(model, str(version)))

    async def models(self) -> list[ModelStatus]:
        """List the versions of all models in the server's repositories, with their states."""
        rows = await self._answer(self._transport.index())
        fields = ModelStatus._fields
        with valid_answer():
            return [ModelStatus(*(str(row.get(field, "")) for field in fields)) for row in rows]

    async def metadata(self, model: str, version: str | int = "") -> ModelDescription:
        """Return the model's versions, inputs and outputs; see ``Client.metadata``."""
        document = await self._answer(self._transport.metadata(model, str(version)))
        with valid_answer():
            return described(document)

    async def config(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return the model's configuration; see ``Client.config``."""
        return await self._answer(self._transport.config(model, str(version)))

    async def load(self, model: str, *, config: str = "") -> None:
        """Load or reload the model; see ``Client.load``."""
        await self._answer(self._transport.load(model, config))

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload the model; see ``Client.unload``."""
        await self._answer(self._transport.unload(model, dependents))

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        class_count: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
    ) -> dict[str, Array]:
        """Send one request, and return the outputs by name; see ``Client.infer``."""
        known, tensors = await self._encoded(model, str(version), inputs)
        if class_count and not outputs:
            outputs = [tensor.name for tensor in known.outputs]
        request = ClientRequest(
            *(model, str(version), tensors), outputs, class_count, parameters, request_id
        )
        with self._forgetting(request):
            found = await self._answer(self._transport.infer(request))
        return {name: plain(*answer) for name, answer in found.items()}

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[dict[str, Array], None]:
        """Send one request, and yield its responses as they arrive; see ``Client.stream``."""
        known, tensors = await self._encoded(model, str(version), inputs)
        request = ClientRequest(*(model, str(version), tensors), outputs, 0, parameters, request_id)
        async with aclosing(self._transport.stream(request, known)) as responses:
            while True:
                with self._forgetting(request):
                    found = await self._answer(anext(responses, None))
                if found is None:
                    return
                yield {name: plain(*answer) for name, answer in found.items()}

    async def statistics(self, model: str = "", version: str | int = "") -> list[ModelStatistics]:
        """Return the counts and times of requests by model version; see ``Client.statistics``."""
        rows = await self._answer(self._transport.statistics(model, str(version)))
        with valid_answer():
            return [counted(row) for row in rows]

    async def _encoded(
        self, model: str, version: str, inputs: Mapping[str, ArrayLike]
    ) -> tuple[ModelDescription, list[Tensor]]:
        """The model's description, asked for once, and ``inputs`` as it declares them."""
        key = (model, version)
        if key not in self._known:
            self._known[key] = await self.metadata(*key)
        known = self._known[key]
        return known, [encoded(known, name, value) for name, value in inputs.items()]

    @contextmanager
    def _forgetting(self, request: ClientRequest) -> Iterator[None]:
        """Ask for the model's description again after an error: it may have been replaced."""
        try:
            yield
        except ModelportError:
            self._known.pop((request.model, request.version), None)
            raise

    async def close(self) -> None:
        """Close the connections."""
        if self._connected is not None:
            await self._connected.close()
            self._connected = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def _transport(self) -> HttpTransport | GrpcTransport:
        if self._connected is None:
            kind, encrypted = _TRANSPORTS[self._scheme]
            options = self._headers, self._seconds, self._tls
            self._connected = kind(self._target, encrypted, *options)
        return self._connected

    async def _answer(self, answer: Awaitable[T]) -> T:
        """Await ``answer``, and translate the errors of connections."""
        try:
            async with asyncio.timeout(self._seconds):
                return await answer
        except TimeoutError as error:
            said = f"{self._url} did not respond within {self._seconds:g} s"
            raise TimedOut(said) from error
        except (aiohttp.ClientError, EndpointFailed, OSError) as error:
            reason = connection_errors.reason(error)
            if isinstance(error, EndpointFailed):
                reason = error.args[0]
            raise Unavailable(
                tls_errors.explain(error, self._url)
                or f"no server responds at {self._url} ({reason}); start one with "
                "'modelport serve', or give another URL"
            ) from error


class Client:
    """A client of one server.

        with modelport.Client("http://127.0.0.1:8000") as client:
            outputs = client.infer("fraud", {"transactions": array})

    Connections are kept, and threads may share a client. Every method raises ``Unavailable`` if no
    server answers, and ``TimedOut`` if it takes too long.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
        token: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Connect when the first request is made.

        Args:
            url: ``http://``, ``https://``, ``grpc://`` or ``grpcs://HOST:PORT``; without a scheme,
                HTTP.
            headers: of every request, such as ``{"authorization": "Bearer ..."}``.
            timeout_seconds: the longest wait for an answer.
            token: an API key or a JSON Web Token, sent as ``authorization: Bearer``.
            tls: the authorities to trust, and a client certificate; default: the system's
                authorities.

        Raises:
            InvalidArgument: the URL is not one of these, or a header is not one of HTTP.
        """
        self._client = AsyncClient(
            url, headers=headers, timeout_seconds=timeout_seconds, token=token, tls=tls
        )
        self._loop = LoopThread(self._client)

    def live(self) -> bool:
        """Whether the server runs."""
        return self._loop.run(self._client.live())

    def ready(self, model: str = "", version: str | int = "") -> bool:
        """Whether the server can answer requests, or whether this model can."""
        return self._loop.run(self._client.ready(model, version))

    def models(self) -> list[ModelStatus]:
        """List the versions of all models in the server's repositories, with their states."""
        return self._loop.run(self._client.models())

    def metadata(self, model: str, version: str | int = "") -> ModelDescription:
        """Return the model's versions, inputs and outputs.

        Raises:
            NotFound: the server has no such model or version.
        """
        return self._loop.run(self._client.metadata(model, version))

    def config(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return the model's configuration, the content of ``config.pbtxt`` as JSON.

        Raises:
            NotFound: the server has no such model or version.
        """
        return self._loop.run(self._client.config(model, version))

    def load(self, model: str, *, config: str = "") -> None:
        """Load or reload the model, on a server that lets its clients control the models.

        Args:
            model: its name in the server's repository.
            config: JSON that replaces the repository's configuration; empty: that one.

        Raises:
            NotFound: the server's repository has no such model.
            InvalidArgument: the model does not load; the message tells why.
        """
        self._loop.run(self._client.load(model, config=config))

    def unload(self, model: str, *, dependents: bool = False) -> None:
        """Unload the model after its requests in flight.

        Args:
            model: its name on the server.
            dependents: unload the models of an ensemble's steps, too.
        """
        self._loop.run(self._client.unload(model, dependents=dependents))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        class_count: int = 0,
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
    ) -> dict[str, Array]:
        """Send one request, and return the outputs by name.

        Values are converted to the datatype that the model declares, which the client asks for
        before the first request to a model. BYTES are ``bytes`` or ``str``, and come back as an
        object array of ``bytes``; BF16 comes back as ``float32``.

        Args:
            model: its name on the server.
            inputs: arrays or nested lists, the batch dimension included.
            version: the number; empty for the default version.
            outputs: names of the outputs wanted; none: all.
            class_count: ask for this number of classes of each output, best first, as
                ``value:index[:label]``, in place of its values.
            parameters: of the request.
            request_id: the ``id``, for the server's logs.

        Raises:
            InvalidArgument: an input does not fit the model.
            NotFound: the server has no such model or version.
        """
        request = self._client.infer(
            *(model, inputs),
            version=version,
            outputs=outputs,
            class_count=class_count,
            parameters=parameters,
            request_id=request_id,
        )
        return self._loop.run(request)

    def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        version: str | int = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        request_id: str = "",
    ) -> Generator[dict[str, Array], None, None]:
        """Send one request, and yield each response of the model as it arrives.

        A decoupled model gives any number of responses. ``timeout_seconds`` limits the wait for
        each. Leaving the loop, or closing the generator, cancels the request.

        Over gRPC this is ``ModelStreamInfer``. Over HTTP it is the generate extension
        (``generate_stream``), whose tensors have no shapes: the last dimension that the model
        leaves open takes all elements, the others are 1; FP16 and BF16 need gRPC.

        The arguments are those of ``infer``.

        Raises:
            InvalidArgument: an input does not fit the model.
            NotFound: the server has no such model or version.
        """
        responses = self._client.stream(
            *(model, inputs),
            version=version,
            outputs=outputs,
            parameters=parameters,
            request_id=request_id,
        )
        try:
            while (found := self._loop.run(_next(responses))) is not None:
                yield found
        finally:
            with suppress(InvalidArgument):  # the client is closed, and the connection with it
                self._loop.run(responses.aclose())

    def statistics(self, model: str = "", version: str | int = "") -> list[ModelStatistics]:
        """Return the counts and times of the requests to each model version since it was loaded.

        Args:
            model: its name; empty: all models.
            version: the number; empty: all versions.

        Raises:
            NotFound: the server has no such model or version.
        """
        return self._loop.run(self._client.statistics(model, version))

    def close(self) -> None:
        """Close the connections."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(responses: AsyncGenerator[T, None]) -> T | None:
    return await anext(responses, None)
