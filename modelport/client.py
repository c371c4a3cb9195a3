"""Clients of the Open Inference Protocol, over HTTP and gRPC, with NumPy arrays in and out.

They are thin: ``tritonclient`` speaks the protocol. Any server of the protocol will do, such as
Triton or KServe.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from modelport.client_operations import (
    ClientOperations,
    ModelDescription,
    ModelStatus,
    Operation,
    Parameter,
)
from modelport.gateway.errors import ModelportError
from modelport.gateway.types import Array

T = TypeVar("T")


class Client:
    """A client of one server.

        with modelport.Client("http://127.0.0.1:8000") as client:
            outputs = client.infer("fraud", {"transactions": array})

    Connections are kept. Over HTTP a client belongs to the thread that made it; over gRPC threads
    may share one. Every method raises ``Unavailable`` if no server answers, and ``TimedOut`` if it
    takes too long.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        """Connect when the first request is made.

        Args:
            url: ``http://``, ``https://``, ``grpc://`` or ``grpcs://HOST:PORT``; without a scheme,
                HTTP.
            headers: of every request, such as ``{"authorization": "Bearer ..."}``.
            timeout_seconds: the longest wait for an answer.

        Raises:
            InvalidArgument: the URL is not one of these.
        """
        self._operations = operations = ClientOperations(url, headers, timeout_seconds, "")
        options: dict[str, Any] = {"ssl": operations.encrypted}
        if not operations.is_grpc:
            options |= dict.fromkeys(("connection_timeout", "network_timeout"), timeout_seconds)
        self._client = operations.module.InferenceServerClient(operations.target, **options)

    def live(self) -> bool:
        """Whether the server runs."""
        return self._run(self._operations.live())

    def ready(self, model: str = "", version: str | int = "") -> bool:
        """Whether the server can answer requests, or whether this model can."""
        return self._run(self._operations.ready(model, str(version)))

    def models(self) -> list[ModelStatus]:
        """List the versions of all models in the server's repositories, with their states."""
        return self._run(self._operations.models())

    def metadata(self, model: str, version: str | int = "") -> ModelDescription:
        """Return the model's versions, inputs and outputs.

        Raises:
            NotFound: the server has no such model or version.
        """
        return self._run(self._operations.metadata(model, str(version)))

    def config(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return the model's configuration, the content of ``config.pbtxt`` as JSON.

        Raises:
            NotFound: the server has no such model or version.
        """
        return self._run(self._operations.config(model, str(version)))

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
        version = str(version)
        return self._run(
            self._operations.infer(
                *(model, inputs, version, outputs, class_count, parameters, request_id)
            )
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, operation: Operation[T]) -> T:
        try:
            call = next(operation)
            while True:
                try:
                    answer = getattr(self._client, call.method)(*call.arguments, **call.options)
                except Exception as error:
                    call = operation.throw(_caused(self._operations.error(error), error))
                else:
                    call = operation.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result


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
    ) -> None:
        """Connect when the first request is made; arguments and errors are those of ``Client``."""
        self._operations = ClientOperations(url, headers, timeout_seconds, ".aio")
        self._client: Any = None

    async def live(self) -> bool:
        """Whether the server runs."""
        return await self._run(self._operations.live())

    async def ready(self, model: str = "", version: str | int = "") -> bool:
        """Whether the server can answer requests, or whether this model can."""
        return await self._run(self._operations.ready(model, str(version)))

    async def models(self) -> list[ModelStatus]:
        """List the versions of all models in the server's repositories, with their states."""
        return await self._run(self._operations.models())

    async def metadata(self, model: str, version: str | int = "") -> ModelDescription:
        """Return the model's versions, inputs and outputs; see ``Client.metadata``."""
        return await self._run(self._operations.metadata(model, str(version)))

    async def config(self, model: str, version: str | int = "") -> dict[str, Any]:
        """Return the model's configuration; see ``Client.config``."""
        return await self._run(self._operations.config(model, str(version)))

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
        version = str(version)
        return await self._run(
            self._operations.infer(
                *(model, inputs, version, outputs, class_count, parameters, request_id)
            )
        )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, operation: Operation[T]) -> T:
        if self._client is None:
            operations = self._operations
            options: dict[str, Any] = {"ssl": operations.encrypted}
            if not operations.is_grpc:
                options["conn_timeout"] = operations.timeout_seconds
            self._client = operations.module.InferenceServerClient(operations.target, **options)
        try:
            call = next(operation)
            while True:
                method: Callable[..., Awaitable[Any]] = getattr(self._client, call.method)
                try:
                    answer = await method(*call.arguments, **call.options)
                except Exception as error:
                    call = operation.throw(_caused(self._operations.error(error), error))
                else:
                    call = operation.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result


def _caused(error: ModelportError, cause: Exception) -> ModelportError:
    """``error`` as if raised from ``cause``."""
    error.__cause__ = None if cause is error else cause
    return error
