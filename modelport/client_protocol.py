"""The Open Inference Protocol as a client speaks it, over HTTP and over gRPC.

``HttpTransport`` and ``GrpcTransport`` have the same methods: ``modelport.AsyncClient`` uses one of
them. Tensors travel as raw bytes, other answers are the protocol's JSON as dictionaries. Every
method raises ``ModelportError`` with the server's message, and ``EndpointFailed``, ``OSError`` or
``aiohttp.ClientError`` if there is no complete answer.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import quote

import aiohttp
from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from yarl import URL

from modelport import client_streams
from modelport.client_models import ClientRequest, ModelDescription
from modelport.gateway.errors import (
    Cancelled,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    PermissionDenied,
    TimedOut,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.types import NO_DEADLINE, Array, Datatype, Deadline
from modelport.gateway.upstream import grpc
from modelport.gateway.wire import json_tensors, json_text, raw_tensors, tensor_contents
from modelport.gateway.wire.http2.settings import STREAM_WINDOW_BYTES
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.raw_tensors import Buffer

HEADER_LENGTH = "Inference-Header-Content-Length"
_SERVICE = "/inference.GRPCInferenceService/"
#: A server may describe any number of models, each with a few keys.
_MAX_KEYS = 1 << 31
#: The error for an HTTP status or a gRPC status code; any other one is ``Internal``.
_ERRORS: Mapping[int | str, type[ModelportError]] = {
    400: InvalidArgument,
    "INVALID_ARGUMENT": InvalidArgument,
    401: Unauthenticated,
    "UNAUTHENTICATED": Unauthenticated,
    403: PermissionDenied,
    "PERMISSION_DENIED": PermissionDenied,
    429: Unavailable,
    "RESOURCE_EXHAUSTED": Unavailable,
    404: NotFound,
    "NOT_FOUND": NotFound,
    501: Unsupported,
    "UNIMPLEMENTED": Unsupported,
    503: Unavailable,
    "UNAVAILABLE": Unavailable,
    504: TimedOut,
    "DEADLINE_EXCEEDED": TimedOut,
    "CANCELLED": Cancelled,
}


def error_of(status: int | str, message: str) -> ModelportError:
    """The error for an HTTP status or the name of a gRPC status, with the server's message."""
    kind = _ERRORS.get(status, Internal)
    return TimedOut(message) if "timeout expired" in message.lower() else kind(message)


@contextmanager
def valid_answer() -> Iterator[None]:
    """Raise ``Internal`` if the answer that the block reads violates the protocol."""
    try:
        yield
    except (
        *(InvalidArgument, DecodeError, KeyError, IndexError),
        *(TypeError, ValueError, AttributeError),
    ) as error:
        reason = str(error).replace("the request JSON buffer", "its JSON")  # of gateway.wire
        raise Internal(f"the server's response violates the protocol: {reason}") from error


class HttpTransport:
    """The protocol over HTTP, with the binary tensor data extension."""

    def __init__(
        self,
        target: str,
        encrypted: bool,
        headers: Mapping[str, str],
        seconds: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._url = f"{'https' if encrypted else 'http'}://{target}/v2"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls or True),
            headers={"Accept-Encoding": "identity", **headers},
            timeout=aiohttp.ClientTimeout(total=seconds),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        #: Responses that are being read event by event.
        self._streams: set[aiohttp.ClientResponse] = set()

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Any = None
    ) -> tuple[int, Mapping[str, str], bytes]:
        url = URL(self._url + path, encoded=True)
        # Following a redirect would show keys and tensors to a server that nobody named.
        request = self._session.request(
            method, url, data=body, headers=headers, allow_redirects=False
        )
        async with request as response:
            return response.status, response.headers, await response.read()

    async def _document(self, method: str, path: str, document: Any = None) -> Any:
        body = None if document is None else json_text.dumps(document)
        status, _, answer = await self._ask(
            method, path, body, {"Content-Type": "application/json"}
        )
        return _parsed(status, answer) if answer or status != 200 else None

    async def live(self) -> bool:
        """Ask whether the server is live."""
        return (await self._ask("GET", "/health/live"))[0] == 200

    async def ready(self, model: str, version: str) -> bool:
        """Ask whether the model is ready; without a model, whether the server is."""
        path = f"{_path(model, version)}/ready" if model else "/health/ready"
        return (await self._ask("GET", path))[0] == 200

    async def index(self) -> list[dict[str, Any]]:
        """List the models of the repository with their states."""
        rows: list[dict[str, Any]] = await self._document("POST", "/repository/index", {})
        return rows

    async def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Get the versions, inputs and outputs of a model."""
        document: dict[str, Any] = await self._document("GET", _path(model, version))
        return document

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """Get the configuration of a model."""
        document: dict[str, Any] = await self._document("GET", f"{_path(model, version)}/config")
        return document

    async def load(self, model: str, config: str) -> None:
        """Load a model; ``config``, JSON, replaces its configuration unless it is empty."""
        document = {"parameters": {"config": config}} if config else {}
        await self._document("POST", f"/repository{_path(model)}/load", document)

    async def unload(self, model: str, dependents: bool) -> None:
        """Unload a model, and with ``dependents`` the models of an ensemble's steps."""
        document = {"parameters": {"unload_dependents": dependents}}
        await self._document("POST", f"/repository{_path(model)}/unload", document)

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Get the statistics of a model; without a model, of all."""
        path = f"{_path(model, version)}/stats" if model else "/models/stats"
        document: dict[str, Any] = await self._document("GET", path)
        with valid_answer():
            return list(document["model_stats"])

    async def stream(
        self, request: ClientRequest, known: ModelDescription
    ) -> AsyncGenerator[dict[str, tuple[Datatype, Array]], None]:
        """Send a request of the generate extension, and yield the outputs of each response."""
        url = URL(
            f"{self._url}{_path(request.model, request.version)}/generate_stream", encoded=True
        )
        open_ended = aiohttp.ClientTimeout(total=None)  # the caller limits the wait for each
        async with self._session.post(
            url,
            data=json_text.dumps(client_streams.document(request)),
            headers={"Content-Type": "application/json"},
            allow_redirects=False,
            timeout=open_ended,
        ) as response:
            if response.status != 200 and "event-stream" not in response.content_type:
                _parsed(response.status, await response.read())
            self._streams.add(response)
            try:
                async for event in client_streams.events(response.content):
                    answer = _parsed(200, event)
                    with valid_answer():
                        if set(answer) == {"error"}:
                            raise error_of(max(response.status, 500), str(answer["error"]))
                        yield client_streams.outputs(answer, request, known)
            finally:
                self._streams.discard(response)

    async def infer(self, request: ClientRequest) -> dict[str, tuple[Datatype, Array]]:
        """Send an inference request, and return the outputs by name."""
        head, blobs = _json_request(request)
        headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
        path = f"{_path(request.model, request.version)}/infer"
        status, fields, answer = await self._ask("POST", path, b"".join((head, *blobs)), headers)
        with valid_answer():
            length = int(fields.get(HEADER_LENGTH, len(answer)))
        document = _parsed(status, answer[:length])
        with valid_answer():
            return _json_outputs(document["outputs"], memoryview(answer)[length:])

    async def close(self) -> None:
        """Close the connections, those of streams that nobody reads any more, too."""
        for response in tuple(self._streams):
            response.close()
        await self._session.close()


def _path(model: str, version: str = "") -> str:
    path = f"/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _parsed(status: int, answer: bytes) -> Any:
    """The JSON of an answer; for a status other than 200 its error is raised."""
    if status == 200:
        with valid_answer():
            return json_text.loads(answer, _MAX_KEYS)
    if 300 <= status < 400:
        raise error_of(status, "the server redirects the request; give the other server's URL")
    try:
        message = str(json_text.loads(answer, _MAX_KEYS)["error"])
    except (InvalidArgument, KeyError, TypeError):
        message = answer.decode("utf-8", "replace").strip()
    is_page = message.startswith("<")
    if status >= 500 and is_page:
        message = (
            f"status {status} with a page, as of a proxy before the server; see that the server "
            "runs to which the proxy sends this URL"
        )
    elif is_page or (status == 404 and (message.lower() in ("", "not found") or message[0] == "{")):
        message = (
            "the server does not have this operation of the Open Inference Protocol; give the URL "
            "of a server's HTTP port, such as http://127.0.0.1:8000 of 'modelport serve'"
        )
    raise error_of(status, message or f"HTTP status {status}")


def _json_request(request: ClientRequest) -> tuple[bytes, list[Buffer]]:
    blobs = [raw_tensors.encode(tensor) for tensor in request.inputs]
    document: dict[str, Any] = {"id": request.id} if request.id else {}
    parameters: dict[str, Any] = dict(request.parameters or {})
    document["inputs"] = [
        {
            "name": tensor.name,
            "shape": tensor.data.shape,
            "datatype": tensor.datatype.value,
            "parameters": {"binary_data_size": len(blob)},
        }
        for tensor, blob in zip(request.inputs, blobs, strict=True)
    ]
    if request.outputs:
        form: dict[str, Any] = {"binary_data": True}
        if request.class_count:
            form["classification"] = request.class_count
        document["outputs"] = [{"name": name, "parameters": form} for name in request.outputs]
    else:
        parameters["binary_data_output"] = True
    if parameters:
        document["parameters"] = parameters
    return json_text.dumps(document), blobs


def _json_outputs(items: Any, blobs: memoryview) -> dict[str, tuple[Datatype, Array]]:
    found: dict[str, tuple[Datatype, Array]] = {}
    for item in items:
        name, datatype, shape = _announced(item["name"], item["datatype"], item["shape"])
        size = item.get("parameters", {}).get("binary_data_size")
        if size is None:
            array = json_tensors.decode(name, datatype, shape, item["data"])
        else:
            array = raw_tensors.decode(name, datatype, shape, blobs[:size])
            blobs = blobs[size:]
        found[name] = datatype, array
    return found


def _announced(name: str, datatype: str, shape: Any) -> tuple[str, Datatype, tuple[int, ...]]:
    return name, Datatype(datatype), raw_tensors.parse_shape(name, list(shape))


class GrpcTransport:
    """The protocol over gRPC."""

    def __init__(
        self,
        target: str,
        encrypted: bool,
        headers: Mapping[str, str],
        seconds: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        route = ModelRoute(
            *("triton", (target,)),
            tls=encrypted,
            connect_timeout_seconds=seconds,
            max_reply_bytes=grpc.MAX_MESSAGE_BYTES,
        )
        self._channel_of = target, route, tls
        self._channel = grpc.GrpcChannel(*self._channel_of)
        self._streams: grpc.GrpcChannel | None = None
        self._metadata = {name.lower(): value for name, value in headers.items()}
        self._seconds = seconds

    async def _ask(self, method: str, request: Message) -> Any:
        call = self._channel.method(_SERVICE + method, self._metadata)
        limit = Deadline.after(self._seconds)
        got = await grpc.exchange(call, request.SerializeToString(), limit)
        content = grpc.message_of(got, error_of)
        with valid_answer():
            return getattr(pb, f"{method}Response").FromString(content)

    async def live(self) -> bool:
        """Ask whether the server is live."""
        return bool((await self._ask("ServerLive", pb.ServerLiveRequest())).live)

    async def ready(self, model: str, version: str) -> bool:
        """Ask whether the model is ready; without a model, whether the server is."""
        if not model:
            return bool((await self._ask("ServerReady", pb.ServerReadyRequest())).ready)
        request = pb.ModelReadyRequest(name=model, version=version)
        return bool((await self._ask("ModelReady", request)).ready)

    async def index(self) -> list[dict[str, Any]]:
        """List the models of the repository with their states."""
        reply = await self._ask("RepositoryIndex", pb.RepositoryIndexRequest())
        return [_document(row) for row in reply.models]

    async def metadata(self, model: str, version: str) -> dict[str, Any]:
        """Get the versions, inputs and outputs of a model."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return _document(await self._ask("ModelMetadata", request))

    async def config(self, model: str, version: str) -> dict[str, Any]:
        """Get the configuration of a model."""
        request = pb.ModelConfigRequest(name=model, version=version)
        return _document((await self._ask("ModelConfig", request)).config)

    async def load(self, model: str, config: str) -> None:
        """Load a model; ``config``, JSON, replaces its configuration unless it is empty."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config:
            request.parameters["config"].string_param = config
        await self._ask("RepositoryModelLoad", request)

    async def unload(self, model: str, dependents: bool) -> None:
        """Unload a model, and with ``dependents`` the models of an ensemble's steps."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        request.parameters["unload_dependents"].bool_param = dependents
        await self._ask("RepositoryModelUnload", request)

    async def statistics(self, model: str, version: str) -> list[dict[str, Any]]:
        """Get the statistics of a model; without a model, of all."""
        reply = await self._ask(
            "ModelStatistics", pb.ModelStatisticsRequest(name=model, version=version)
        )
        return [_document(row) for row in reply.model_stats]

    async def stream(
        self, request: ClientRequest, known: ModelDescription
    ) -> AsyncGenerator[dict[str, tuple[Datatype, Array]], None]:
        """Send a request as a stream of one, and yield the outputs of each response."""
        if self._streams is None:
            # A window of its own size, so that a slow reader holds up the server.
            self._streams = grpc.GrpcChannel(*self._channel_of, window=STREAM_WINDOW_BYTES)
        call = self._streams.method(_SERVICE + "ModelStreamInfer", self._metadata)
        content = _message(request).SerializeToString()
        parse = pb.ModelStreamInferResponse.FromString
        replies = grpc.replies(call, content, parse, NO_DEADLINE, error_of, onward=False)
        async with aclosing(replies) as responses:
            async for reply in responses:
                if reply.error_message:
                    raise error_of("INVALID_ARGUMENT", reply.error_message)
                with valid_answer():
                    yield _message_outputs(reply.infer_response)

    async def infer(self, request: ClientRequest) -> dict[str, tuple[Datatype, Array]]:
        """Send an inference request, and return the outputs by name."""
        reply = await self._ask("ModelInfer", _message(request))
        with valid_answer():
            return _message_outputs(reply)

    async def close(self) -> None:
        """Close the connections."""
        await self._channel.close()
        if self._streams is not None:
            await self._streams.close()


def _message_outputs(reply: Any) -> dict[str, tuple[Datatype, Array]]:
    found: dict[str, tuple[Datatype, Array]] = {}
    for index, item in enumerate(reply.outputs):
        name, datatype, shape = _announced(item.name, item.datatype, item.shape)
        if reply.raw_output_contents:
            array = raw_tensors.decode(name, datatype, shape, reply.raw_output_contents[index])
        else:
            array = tensor_contents.decode(name, datatype, shape, item.contents)
        found[name] = datatype, array
    return found


def _document(message: Message) -> dict[str, Any]:
    document: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return document


def _message(request: ClientRequest) -> Any:
    message = pb.ModelInferRequest(
        model_name=request.model, model_version=request.version, id=request.id
    )
    for key, value in (request.parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
        setattr(message.parameters[key], kinds[type(value)], value)
    for tensor in request.inputs:
        shape, datatype = tensor.data.shape, tensor.datatype.value
        message.inputs.add(name=tensor.name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(bytes(raw_tensors.encode(tensor)))
    for name in request.outputs:
        output = message.outputs.add(name=name)
        if request.class_count:
            output.parameters["classification"].int64_param = request.class_count
    return message
