"""Request signatures of models, from the server or from ``config.pbtxt``."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2, service_pb2

from modelport.gateway.errors import plain_reason
from modelport.gateway.repository import untrusted_files
from modelport.gateway.upstream import connection_errors, tls_errors
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import authentication

#: Longest part of an error response that is read.
MOST_SAID = 4096
METADATA_SECONDS = 10.0
MODEL_CONFIG = "/inference.GRPCInferenceService/ModelConfig"
#: Prefixes of the exports' entries in ``parameters``.
RANGE, AXIS, AXES, MASK = "range.", "axis.", "axes.", "mask."
#: TensorFlow's names of the Open Inference Protocol's datatypes.
TENSORFLOW = {
    "DT_FLOAT": "FP32",
    "DT_DOUBLE": "FP64",
    "DT_HALF": "FP16",
    "DT_STRING": "BYTES",
    "DT_BOOL": "BOOL",
} | {f"DT_{kind}{bits}": f"{kind}{bits}" for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)}


class SignatureUnknown(RuntimeError):
    """The server has no metadata for the model; the message says what to do instead."""


@dataclass(frozen=True)
class InputTensor:
    """An input without the batch dimension.

    A dim that is a string is an axis. ``reshape`` is the model's own shape if it differs.
    """

    name: str
    datatype: str
    dims: tuple[int | str, ...]
    reshape: tuple[int, ...] | None = None
    #: Range of the values; an end may be an axis.
    low: float | None = None
    high: float | str | None = None
    #: Whether values at padding are undefined, so that requests have none.
    is_mask: bool = False


@dataclass(frozen=True)
class OutputTensor:
    """An output without the batch dimension; -1 is an open dim."""

    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class RequestSignature:
    """The inputs and outputs of a model, as its clients see them."""

    inputs: tuple[InputTensor, ...]
    outputs: Mapping[str, OutputTensor]
    #: 0: no batch dimension.
    max_batch_size: int
    #: Shortest and longest size by axis; None: unbounded.
    axes: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    @property
    def model_shapes(self) -> dict[str, tuple[int, ...]]:
        """The model's own shape behind the batch, of inputs whose shape differs from the wire's."""
        return {spec.name: spec.reshape for spec in self.inputs if spec.reshape is not None}


def read_file(path: Path) -> RequestSignature:
    """Read the signature in a ``config.pbtxt``.

    Raises:
        SignatureUnknown: the file is missing or invalid.
    """
    config = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(
            untrusted_files.read_text(path, untrusted_files.MAX_CONFIG_BYTES),
            config,
            allow_unknown_field=True,
        )
    except (OSError, ValueError, text_format.ParseError) as error:
        raise SignatureUnknown(
            f"{path}: {plain_reason(error)}; give a model's config.pbtxt"
        ) from error
    return of_config(config)


def ask(target: LoadTestTarget) -> RequestSignature:
    """Ask the server for the signature, in its own way.

    Raises:
        SignatureUnknown: it has no metadata, or cannot be reached.
    """
    if target.protocol.is_grpc:
        return _ask_grpc(target)
    scheme, model = "https" if target.tls else "http", quote(target.model, safe="")
    tls, base = authentication.context(target), f"{scheme}://{target.address}"
    version = f"/versions/{quote(target.version, safe='')}" if target.version else ""
    tried = []
    for path, read in (
        (f"/v2/models/{model}{version}/config", _of_config_json),
        (f"/v2/models/{model}{version}", _of_metadata),
        (f"/v1/models/{model}{version}/metadata", _of_tensorflow),
    ):
        try:
            request = urllib.request.Request(base + path)
            for name, value in authentication.headers(target).items():
                request.add_unredirected_header(name, value)  # no other server gets it
            with urllib.request.urlopen(request, timeout=METADATA_SECONDS, context=tls) as reply:
                return read(json.load(reply))
        except urllib.error.HTTPError as error:
            said = error.read(MOST_SAID).decode(errors="replace")
            if error.code == HTTPStatus.UNAUTHORIZED:
                raise SignatureUnknown(_refused(target, _message(said))) from error
            tried.append(f"{path}: status {error.code}, {_message(said)}")
        except (ValueError, KeyError, TypeError, json_format.ParseError) as error:
            tried.append(f"{path}: {error}")
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            known = tls_errors.explain(reason, base) if isinstance(reason, OSError) else None
            said = known or unreachable(target, connection_errors.reason(error))
            raise SignatureUnknown(said) from error
    raise SignatureUnknown(_untold(target, tried[0]))


def _message(said: str) -> str:
    """The error in the JSON that a server sent; else its first line, unless it is a page."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(said)["error"])
    line = said.strip().partition("\n")[0][:200]
    return "no message" if line.startswith(("<", "{")) else line or "no message"


def _of_status(error: grpc.RpcError) -> str:
    """Return why gRPC made no connection; its own words list addresses and its files."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it does not respond in time"
    refused = "connection refused" in str(error.details()).lower()
    return "connection refused" if refused else "no connection can be made"


def unreachable(target: LoadTestTarget, reason: str) -> str:
    return (
        f"{target.address} cannot describe model '{target.model}' ({reason}); "
        "is the server running there, and is this the right port?"
    )


def _refused(target: LoadTestTarget, said: str) -> str:
    return (
        f"{target.address} refuses the request for model '{target.model}' ({said}); give a valid "
        "key or token with --token-file"
    )


def _untold(target: LoadTestTarget, said: str) -> str:
    return (
        f"{target.address} has no metadata for model '{target.model}' ({said}); "
        "give --model-config with the model's config.pbtxt, or --data with requests"
    )


def _ask_grpc(target: LoadTestTarget) -> RequestSignature:
    request = service_pb2.ModelConfigRequest(name=target.model, version=target.version)
    with _channel(target) as channel:
        call = channel.unary_unary(
            MODEL_CONFIG,
            request_serializer=service_pb2.ModelConfigRequest.SerializeToString,
            response_deserializer=service_pb2.ModelConfigResponse.FromString,
        )
        try:
            metadata = tuple(authentication.headers(target).items())
            return of_config(call(request, timeout=METADATA_SECONDS, metadata=metadata).config)
        except grpc.RpcError as error:
            if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise SignatureUnknown(unreachable(target, _of_status(error))) from error
            said = str(error.details())
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise SignatureUnknown(_refused(target, said)) from error
            raise SignatureUnknown(_untold(target, said)) from error


def _channel(target: LoadTestTarget) -> grpc.Channel:
    if not target.tls:
        return grpc.insecure_channel(target.address)
    return grpc.secure_channel(target.address, authentication.grpc_credentials(target))


def _of_config_json(document: Any) -> RequestSignature:
    config = model_config_pb2.ModelConfig()
    json_format.ParseDict(document, config, ignore_unknown_fields=True)
    if not config.input:
        raise ValueError("a configuration without inputs")
    return of_config(config)


def of_config(config: Any) -> RequestSignature:
    """Convert Triton's ``ModelConfig``, with the ranges that the exports write into
    ``parameters``."""
    told = {key: value.string_value for key, value in config.parameters.items()}
    axes = {
        key.removeprefix(AXIS): _axis(value) for key, value in told.items() if key.startswith(AXIS)
    }

    def datatype(spec: Any) -> str:
        word = str(model_config_pb2.DataType.Name(spec.data_type)).removeprefix("TYPE_")
        return {"STRING": "BYTES"}.get(word, word)

    def one(spec: Any) -> InputTensor:
        dims = _named(spec.name, list(spec.dims), told.get(AXES + spec.name, ""), axes)
        low, high = _range(told.get(RANGE + spec.name, ""))
        shape = tuple(spec.reshape.shape) if spec.HasField("reshape") else None
        is_mask = MASK + spec.name in told
        return InputTensor(spec.name, datatype(spec), dims, shape, low, high, is_mask)

    inputs = tuple(one(spec) for spec in config.input)
    outputs = {spec.name: OutputTensor(datatype(spec), tuple(spec.dims)) for spec in config.output}
    return RequestSignature(inputs, outputs, config.max_batch_size, axes)


def _named(
    name: str, dims: list[int], names: str, axes: dict[str, tuple[int, int | None]]
) -> tuple[int | str, ...]:
    """Name every -1 by its axis; one without a name is an axis of its own."""
    given = [part.strip() for part in names.split(",") if part.strip()]
    found: list[int | str] = []
    for number, dim in enumerate(dims):
        if dim != -1:
            found.append(dim)
            continue
        found.append(given.pop(0) if given else f"{name}_dim{number}")
        axes.setdefault(str(found[-1]), (1, None))
    return tuple(found)


def _axis(text: str) -> tuple[int, int | None]:
    low, _, high = text.partition("..")
    return int(low or 1), int(high) if high else None


def _range(text: str) -> tuple[float | None, float | str | None]:
    low, _, high = text.partition("..")
    end: float | str | None = None
    if high:
        try:
            end = float(high)
        except ValueError:
            end = high  # an axis
    return (float(low) if low else None), end


def _of_metadata(document: Any) -> RequestSignature:
    """The signature of servers without a configuration: shapes with the batch, or -1."""
    shapes = {spec["name"]: [int(dim) for dim in spec["shape"]] for spec in document["inputs"]}
    batched = all(shape[:1] == [-1] for shape in shapes.values())
    axes: dict[str, tuple[int, int | None]] = {}
    inputs = []
    for spec in document["inputs"]:
        dims = _named(spec["name"], shapes[spec["name"]][int(batched) :], "", axes)
        inputs.append(InputTensor(spec["name"], spec["datatype"], dims))
    outputs = {
        spec["name"]: OutputTensor(spec["datatype"], tuple(map(int, spec["shape"]))[int(batched) :])
        for spec in document.get("outputs", ())
    }
    return RequestSignature(tuple(inputs), outputs, int(batched), axes)


def _of_tensorflow(document: Any) -> RequestSignature:
    definition = document["metadata"]["signature_def"]["signature_def"]["serving_default"]
    axes: dict[str, tuple[int, int | None]] = {}

    def dims(spec: Any) -> list[int]:
        return [int(dim["size"]) for dim in spec["tensor_shape"].get("dim", ())][1:]

    inputs = tuple(
        InputTensor(name, TENSORFLOW[spec["dtype"]], _named(name, dims(spec), "", axes))
        for name, spec in sorted(definition["inputs"].items())
    )
    outputs = {
        name: OutputTensor(TENSORFLOW[spec["dtype"]], tuple(dims(spec)))
        for name, spec in definition["outputs"].items()
    }
    return RequestSignature(inputs, outputs, 1, axes)
