"""The operations of the Open Inference Protocol's clients, apart from how calls are made.

Each is a generator that yields calls of ``tritonclient`` and is sent their answers, so that one
text serves ``Client`` and ``AsyncClient``.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import ArrayLike

from modelport.gateway.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    TimedOut,
    Unavailable,
    Unsupported,
)
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype

T = TypeVar("T")
Parameter = bool | int | str
#: URL scheme → tritonclient's module, and whether the connection is encrypted.
_MODULES = {
    "http": ("tritonclient.http", False),
    "https": ("tritonclient.http", True),
    "grpc": ("tritonclient.grpc", False),
    "grpcs": ("tritonclient.grpc", True),
}
#: The error for an HTTP status or a gRPC status code; any other one is ``Internal``.
_ERRORS: Mapping[str, type[ModelportError]] = {
    "400": InvalidArgument,
    "INVALID_ARGUMENT": InvalidArgument,
    "404": NotFound,
    "NOT_FOUND": NotFound,
    "501": Unsupported,
    "UNIMPLEMENTED": Unsupported,
    "503": Unavailable,
    "UNAVAILABLE": Unavailable,
    "504": TimedOut,
    "DEADLINE_EXCEEDED": TimedOut,
    "CANCELLED": Cancelled,
}


class TensorDescription(NamedTuple):
    """An input or output of a model; -1 in ``shape`` is a dynamic size, the batch's included."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


class ModelDescription(NamedTuple):
    """A model as its server describes it."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorDescription, ...]
    outputs: tuple[TensorDescription, ...]


class ModelStatus(NamedTuple):
    """A version of a model in the server's index; ``state`` is ``READY`` if it answers.

    ``reason`` tells why it does not.
    """

    name: str
    version: str
    state: str
    reason: str


class TritonCall(NamedTuple):
    """A method of tritonclient's client, to be called or awaited."""

    method: str
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = {}


Operation = Generator[TritonCall, Any, T]


class ClientOperations:
    """The operations on one server; none of them waits or awaits."""

    def __init__(
        self, url: str, headers: Mapping[str, str] | None, timeout_seconds: float, module: str
    ) -> None:
        scheme, separator, rest = url.partition("://")
        if not separator:
            scheme, rest = "http", url
        if scheme not in _MODULES:
            raise InvalidArgument(
                f"'{scheme}://' is no protocol; use {', '.join(f'{s}://' for s in _MODULES)}"
            )
        try:
            target = urlsplit(f"//{rest}")
            complete = bool(target.hostname) and (target.port or scheme in ("http", "https"))
        except ValueError:
            complete = False
        if not complete:
            raise InvalidArgument(f"'{url}' is not {scheme}://HOST:PORT")
        if not timeout_seconds > 0:
            raise InvalidArgument(f"timeout_seconds must be more than 0, not {timeout_seconds}")
        name, self.encrypted = _MODULES[scheme]
        self.url, self.target = url, rest.rstrip("/")
        self.is_grpc = "grpc" in scheme
        self.timeout_seconds = timeout_seconds
        self.module: Any = importlib.import_module(name + module)
        self._options: dict[str, Any] = {"headers": dict(headers)} if headers else {}
        if self.is_grpc:
            self._options["client_timeout"] = timeout_seconds
        self._known: dict[tuple[str, str], ModelDescription] = {}

    def _call(self, method: str, *arguments: Any, **options: Any) -> TritonCall:
        if self.is_grpc and method.startswith("get_"):
            options["as_json"] = True
        return TritonCall(method, arguments, {**self._options, **options})

    def live(self) -> Operation[bool]:
        """Ask whether the server is live."""
        return bool((yield self._call("is_server_live")))

    def ready(self, model: str, version: str) -> Operation[bool]:
        """Ask whether the model is ready; without a model, whether the server is."""
        if not model:
            return bool((yield self._call("is_server_ready")))
        return bool((yield self._call("is_model_ready", model, version)))

    def models(self) -> Operation[list[ModelStatus]]:
        """List the models of the repository with their states."""
        answer = yield self._call("get_model_repository_index")
        rows = answer if isinstance(answer, list) else answer.get("models", [])
        fields = ModelStatus._fields
        return [ModelStatus(*(str(row.get(field, "")) for field in fields)) for row in rows]

    def config(self, model: str, version: str) -> Operation[dict[str, Any]]:
        """Get the configuration of a model."""
        answer: dict[str, Any] = yield self._call("get_model_config", model, version)
        found: dict[str, Any] = answer.get("config", answer)
        return found

    def metadata(self, model: str, version: str) -> Operation[ModelDescription]:
        """Get the versions, inputs and outputs of a model."""
        answer = yield self._call("get_model_metadata", model, version)
        inputs, outputs = (
            tuple(
                TensorDescription(
                    tensor["name"],
                    Datatype(tensor["datatype"]),
                    tuple(int(size) for size in tensor.get("shape", ())),
                )
                for tensor in answer.get(side, ())
            )
            for side in ("inputs", "outputs")
        )
        versions = tuple(answer.get("versions", ()))
        return ModelDescription(
            answer["name"], versions, answer.get("platform", ""), inputs, outputs
        )

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        version: str,
        outputs: Sequence[str],
        class_count: int,
        parameters: Mapping[str, Parameter] | None,
        request_id: str,
    ) -> Operation[dict[str, Array]]:
        """Send an inference request and return its outputs by name."""
        key = (model, version)
        if key not in self._known:
            self._known[key] = yield from self.metadata(model, version)
        known = self._known[key]
        tensors = [self._input(known, name, value) for name, value in inputs.items()]
        if class_count and not outputs:
            outputs = [tensor.name for tensor in known.outputs]
        wanted = [
            self.module.InferRequestedOutput(name, class_count=class_count) for name in outputs
        ]
        try:
            result = yield self._call(
                "infer",
                *(model, tensors, version),
                outputs=wanted or None,
                request_id=request_id,
                parameters=dict(parameters) if parameters else None,
            )
        except ModelportError:
            self._known.pop(key, None)  # the model may have been replaced by another one
            raise
        response = result.get_response()
        names = (
            [output.name for output in response.outputs]
            if self.is_grpc
            else [output["name"] for output in response.get("outputs", ())]
        )
        return {name: _plain(result.as_numpy(name)) for name in names}

    def _input(self, known: ModelDescription, name: str, value: ArrayLike) -> Any:
        tensors = {tensor.name: tensor for tensor in known.inputs}
        if name not in tensors:
            raise InvalidArgument(
                f"model '{known.name}' has no input '{name}'; its inputs are {', '.join(tensors)}"
            )
        datatype = tensors[name].datatype
        try:
            array = as_datatype(value, datatype)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"input '{name}' is not {datatype}: {error}") from error
        tensor = self.module.InferInput(name, list(array.shape), datatype.value)
        tensor.set_data_from_numpy(array)
        return tensor

    def error(self, error: Exception) -> ModelportError:
        """``error`` of tritonclient, or of the libraries under it, as one of ours."""
        if isinstance(error, ModelportError):
            return error
        if isinstance(error, self.module.InferenceServerException):
            status = str(error.status() or "400").removeprefix("StatusCode.")
            message = str(error.message())
            if status == "UNAVAILABLE" and "connect" in message:
                return self._unreachable(message)
            kind = _ERRORS.get(status, Internal)
            return TimedOut(message) if "timeout expired" in message.lower() else kind(message)
        if isinstance(error, TimeoutError):
            return TimedOut(f"{self.url} did not answer within {self.timeout_seconds:g} s")
        return self._unreachable(str(error) or type(error).__name__)

    def _unreachable(self, reason: str) -> Unavailable:
        return Unavailable(
            f"no server answers at {self.url} ({reason}); start one with 'modelport serve', or "
            "give the URL of another"
        )


def _plain(array: Array) -> Array:
    """``array`` in a type of NumPy's own: BF16 as ``float32``."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def as_datatype(value: ArrayLike, datatype: Datatype) -> Array:
    """``value`` as an array that tritonclient encodes as ``datatype``.

    Raises:
        TypeError, ValueError, OverflowError: a value does not fit.
    """
    if datatype is Datatype.BYTES:
        texts: Array = np.array(value, dtype=object)
        encoded = [item.encode() if isinstance(item, str) else item for item in texts.flat]
        texts.reshape(-1)[:] = encoded
        return texts
    if datatype is Datatype.BF16:
        bfloat16 = importlib.import_module("tritonclient.utils").triton_to_np_dtype(datatype.value)
        return np.ascontiguousarray(np.asarray(value, np.float32).astype(bfloat16))
    array, wanted = np.asarray(value), NUMPY_DTYPES[datatype]
    fitted = array.astype(wanted, casting="same_kind", copy=False)
    if wanted.kind in "iu" and array.dtype != wanted and not np.array_equal(fitted, array):
        raise ValueError("a value does not fit")
    return np.ascontiguousarray(fitted)
