"""Unmodified ``tritonclient`` in all its ways of calling, behind one face: ask and get a result.

A test that takes the fixture ``caller`` runs over every way; it states what it wants in ``Ask``.
"""

from __future__ import annotations

import abc
import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

Array = NDArray[Any]
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Output:
    """A requested output. ``binary`` means something over HTTP only."""

    name: str
    binary: bool = True
    class_count: int = 0


@dataclass(frozen=True)
class Ask:
    """One inference. ``datatypes`` are told from the arrays."""

    model: str
    inputs: Sequence[tuple[str, Array]]
    outputs: Sequence[Output] | None = None
    version: str = ""
    request_id: str = ""
    parameters: Mapping[str, Any] | None = None
    timeout_microseconds: int | None = None
    priority: int = 0
    binary_input: bool = True
    request_compression: str | None = None
    response_compression: str | None = None


@dataclass(frozen=True)
class Result:
    model: str
    version: str
    id: str
    arrays: Mapping[str, Array]
    datatypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, result: Any) -> Result:
        """Convert the ``InferResult`` of either client."""
        response = result.get_response()
        if isinstance(response, dict):
            outputs = {o["name"]: o["datatype"] for o in response["outputs"]}
            names = response["model_name"], response["model_version"], response.get("id", "")
        else:
            outputs = {o.name: o.datatype for o in response.outputs}
            names = response.model_name, response.model_version, response.id
        arrays = {name: result.as_numpy(name) for name in outputs}
        return cls(*names, arrays, outputs)


def bits(array: Array) -> tuple[str, tuple[int, ...], object]:
    """Something that is equal for arrays that agree in type, shape and every bit."""
    if array.dtype == object:
        items = [item.encode() if isinstance(item, str) else item for item in array.reshape(-1)]
        return "BYTES", array.shape, items
    return str(array.dtype), array.shape, array.tobytes()


class InferCaller(abc.ABC):
    """One way of calling. ``streams``: errors come without a status."""

    transport: str
    streams = False

    @abc.abstractmethod
    def infer(self, ask: Ask) -> Result:
        """Raises ``InferenceServerException``, as the client does."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def refusal(self, ask: Ask) -> InferenceServerException:
        """The error that ``ask`` is answered with."""
        try:
            result = self.infer(ask)
        except InferenceServerException as error:
            return error
        raise AssertionError(f"answered {result}")


def _http_arguments(ask: Ask) -> dict[str, Any]:
    inputs = []
    for name, array in ask.inputs:
        tensor = tritonclient.http.InferInput(
            name, list(array.shape), np_to_triton_dtype(array.dtype)
        )
        inputs.append(tensor.set_data_from_numpy(array, binary_data=ask.binary_input))
    outputs = None
    if ask.outputs is not None:
        outputs = [
            tritonclient.http.InferRequestedOutput(o.name, o.binary, o.class_count)
            for o in ask.outputs
        ]
    return {
        **_arguments(ask, inputs, outputs),
        "request_compression_algorithm": ask.request_compression,
        "response_compression_algorithm": ask.response_compression,
    }


def _grpc_arguments(ask: Ask, stream: bool = False) -> dict[str, Any]:
    inputs = []
    for name, array in ask.inputs:
        tensor = tritonclient.grpc.InferInput(
            name, list(array.shape), np_to_triton_dtype(array.dtype)
        )
        inputs.append(tensor.set_data_from_numpy(array))
    outputs = None
    if ask.outputs is not None:
        outputs = [
            tritonclient.grpc.InferRequestedOutput(o.name, o.class_count) for o in ask.outputs
        ]
    arguments = _arguments(ask, inputs, outputs)
    if not stream:
        arguments["compression_algorithm"] = ask.request_compression
    return arguments


def _arguments(ask: Ask, inputs: list[Any], outputs: list[Any] | None) -> dict[str, Any]:
    return {
        "model_name": ask.model,
        "inputs": inputs,
        "outputs": outputs,
        "model_version": ask.version,
        "request_id": ask.request_id,
        "parameters": None if ask.parameters is None else dict(ask.parameters),
        "timeout": ask.timeout_microseconds,
        "priority": ask.priority,
    }


class Http(InferCaller):
    transport = "http"

    def __init__(self, gateway: Any, runner: asyncio.Runner) -> None:
        self.client = tritonclient.http.InferenceServerClient(gateway.http, concurrency=4)

    def infer(self, ask: Ask) -> Result:
        return Result.of(self.client.infer(**_http_arguments(ask)))

    def close(self) -> None:
        self.client.close()


class HttpAsync(Http):
    """``async_infer``: greenlets."""

    def infer(self, ask: Ask) -> Result:
        pending = self.client.async_infer(**_http_arguments(ask))
        return Result.of(pending.get_result(timeout=TIMEOUT_SECONDS))


class HttpAio(InferCaller):
    transport = "http"

    def __init__(self, gateway: Any, runner: asyncio.Runner) -> None:
        self._run = runner.run

        async def connect() -> Any:
            return tritonclient.http.aio.InferenceServerClient(gateway.http)

        self.client = self._run(connect())

    def infer(self, ask: Ask) -> Result:
        return Result.of(self._run(self.client.infer(**_http_arguments(ask))))

    def close(self) -> None:
        self._run(self.client.close())


class Grpc(InferCaller):
    transport = "grpc"

    def __init__(self, gateway: Any, runner: asyncio.Runner) -> None:
        self.client = tritonclient.grpc.InferenceServerClient(gateway.grpc)

    def infer(self, ask: Ask) -> Result:
        return Result.of(self.client.infer(**_grpc_arguments(ask)))

    def close(self) -> None:
        self.client.close()


class GrpcAsync(Grpc):
    """``async_infer``: a callback on a thread of grpc's."""

    def infer(self, ask: Ask) -> Result:
        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.async_infer(
            callback=lambda result, error: answers.put((result, error)), **_grpc_arguments(ask)
        )
        return _unwrap(answers)


class GrpcThreadStream(Grpc):
    """One stream for the life of the caller: an error does not end it."""

    streams = True

    def __init__(self, gateway: Any, runner: asyncio.Runner) -> None:
        super().__init__(gateway, runner)
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(callback=lambda result, error: self._answers.put((result, error)))

    def infer(self, ask: Ask) -> Result:
        self.client.async_stream_infer(**_grpc_arguments(ask, stream=True))
        return _unwrap(self._answers)

    def close(self) -> None:
        self.client.stop_stream()
        super().close()


class GrpcAio(InferCaller):
    transport = "grpc"

    def __init__(self, gateway: Any, runner: asyncio.Runner) -> None:
        self._run = runner.run

        async def connect() -> Any:
            return tritonclient.grpc.aio.InferenceServerClient(gateway.grpc)

        self.client = self._run(connect())

    def infer(self, ask: Ask) -> Result:
        return Result.of(self._run(self.client.infer(**_grpc_arguments(ask))))

    def close(self) -> None:
        self._run(self.client.close())


class GrpcAioStream(GrpcAio):
    """``stream_infer``: a stream for each request."""

    streams = True

    def infer(self, ask: Ask) -> Result:
        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield _grpc_arguments(ask, stream=True)

        async def first() -> tuple[Any, Any]:
            answers = self.client.stream_infer(requests(), stream_timeout=TIMEOUT_SECONDS)
            found = [answer async for answer in answers]
            assert len(found) == 1
            answer: tuple[Any, Any] = found[0]
            return answer

        result, error = self._run(first())
        if error is not None:
            raise error
        return Result.of(result)


def _unwrap(answers: queue.Queue[tuple[Any, Any]]) -> Result:
    result, error = answers.get(timeout=TIMEOUT_SECONDS)
    if error is not None:
        raise error
    return Result.of(result)


CALLERS: Mapping[str, Callable[[Any, asyncio.Runner], InferCaller]] = {
    "http": Http,
    "http-async": HttpAsync,
    "http-aio": HttpAio,
    "grpc": Grpc,
    "grpc-async": GrpcAsync,
    "grpc-stream": GrpcThreadStream,
    "grpc-aio": GrpcAio,
    "grpc-aio-stream": GrpcAioStream,
}


class ControlCaller:
    """Everything but ``infer``, of one of the four clients; gRPC's answers as JSON."""

    def __init__(self, caller: Any, runner: asyncio.Runner) -> None:
        self.transport: str = caller.transport
        self._caller = caller
        self._runner = runner

    def __call__(self, method: str, *arguments: Any, **options: Any) -> Any:
        if self.transport == "grpc" and method.startswith("get_"):
            options["as_json"] = True
        answer = getattr(self._caller.client, method)(*arguments, **options)
        return self._runner.run(answer) if asyncio.iscoroutine(answer) else answer

    def refusal(self, method: str, *arguments: Any, **options: Any) -> InferenceServerException:
        try:
            answer = self(method, *arguments, **options)
        except InferenceServerException as error:
            return error
        raise AssertionError(f"answered {answer}")

    def close(self) -> None:
        self._caller.close()


CONTROLS = ("http", "http-aio", "grpc", "grpc-aio")


def status(transport: str, http: int, grpc: str) -> str:
    """The status of an error as a client of ``transport`` prints it."""
    return str(http) if transport == "http" else f"StatusCode.{grpc}"


def integers(value: Any) -> Any:
    """``value`` with the strings that protobuf makes of 64-bit integers as integers again."""
    if isinstance(value, dict):
        return {key: integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [integers(item) for item in value]
    if isinstance(value, str) and value.lstrip("-").isdigit():
        return int(value)
    return value


def samples() -> dict[str, Array]:
    """An array of two rows for every datatype, with the values that are lost first."""
    import ml_dtypes

    arrays: dict[str, Array] = {"BOOL": np.array([True, False, True, True])}
    for width in (8, 16, 32, 64):
        for kind in ("int", "uint"):
            info = np.iinfo(f"{kind}{width}")
            arrays[f"{kind.upper()}{width}"] = np.array([info.min, info.max, 1, 100], info.dtype)
    for name, dtype in (("FP16", np.float16), ("FP32", np.float32), ("FP64", np.float64)):
        limits = np.finfo(dtype)
        arrays[name] = np.array([-0.0, limits.max, limits.smallest_subnormal, 0.1], dtype)
    arrays["BF16"] = np.array([-0.0, 3.0e38, 1.0e-40, 0.1], ml_dtypes.bfloat16)
    arrays["BYTES"] = np.array([b"", b"nul\0inside\0", "größe".encode(), b"x" * 300], object)
    return {name: array.reshape(2, 2) for name, array in arrays.items()}
