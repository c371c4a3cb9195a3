"""The wire itself, without a client in between: HTTP/1.1 and gRPC messages."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import h2.config
import h2.connection
import h2.events
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

Array = NDArray[Any]
HEADER_LENGTH = "Inference-Header-Content-Length"
TIMEOUT_SECONDS = 30.0
MAX_MESSAGE = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
#: What an error's text must never hold: places, code and machine of the server.
_HOST = re.compile(rf"(?<!\w){re.escape(socket.gethostname())}(?!\w)")
_PRIVATE = re.compile(
    r"/(?:work|tmp|usr|home|root|var|srv|opt|etc|proc)\b|site-packages|\.py\b|Traceback|"
    r"0x[0-9a-f]{6,}|<class|<.* object|\b\w+(?:Error|Exception)\b|NoneType|numpy|orjson|rapidjson|"
    r"google\.protobuf|starlette|pydantic|uvicorn"
)


@dataclass(frozen=True)
class WireReply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class KeptConnection:
    """One kept-alive HTTP connection, opened again when the server has closed it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._http = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> WireReply:
        """One exchange. ``path`` is sent as it is."""
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
        stated = {name.lower() for name, _ in pairs}
        self._http.putrequest(method, path, skip_host="host" in stated, skip_accept_encoding=True)
        for name, value in pairs:
            self._http.putheader(name, value)
        chunked = False
        if not isinstance(body, bytes):
            chunked = True
            self._http.putheader("Transfer-Encoding", "chunked")
        elif "content-length" not in stated:
            self._http.putheader("Content-Length", str(len(body)))
        # It may answer, and close, before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._http.endheaders(body, encode_chunked=chunked)
        response = self._http.getresponse()
        found = {name.lower(): value for name, value in response.getheaders()}
        return WireReply(response.status, found, response.read())

    def close(self) -> None:
        self._http.close()


class PriorKnowledge(KeptConnection):
    """HTTP/2 on the same port: ``h2`` checks what it receives more strictly than most clients."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_SECONDS)
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()

    def send(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    ) -> WireReply:
        pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
        pairs = [(name.lower(), value) for name, value in pairs]
        content = body if isinstance(body, bytes) else b"".join(body)
        stream = self._h2.get_next_available_stream_id()
        head = {":method": method, ":path": path, ":scheme": "http", ":authority": self.address}
        self._h2.send_headers(stream, [*head.items(), *pairs])
        status, found, data, sent, ended = 0, {}, b"", 0, False
        while not ended:
            while sent <= len(content):
                room = self._h2.local_flow_control_window(stream)
                part = content[sent : sent + min(room, self._h2.max_outbound_frame_size)]
                if not part and sent < len(content):
                    break
                sent += len(part)
                self._h2.send_data(stream, part, end_stream=sent == len(content))
                if sent == len(content):
                    sent += 1
            self._socket.sendall(self._h2.data_to_send())
            received = self._socket.recv(2**16)
            assert received, "the connection ended"
            for event in self._h2.receive_data(received):
                if isinstance(event, h2.events.ResponseReceived):
                    found = dict(event.headers)
                    status = int(found.pop(":status"))
                elif isinstance(event, h2.events.DataReceived):
                    data += event.data
                    size = event.flow_controlled_length
                    self._h2.acknowledge_received_data(size, stream)
                elif isinstance(event, h2.events.StreamEnded):
                    ended = True
                elif isinstance(event, h2.events.StreamReset):
                    sent = len(content) + 1  # it wants no more of the body
        return WireReply(status, found, data)

    def close(self) -> None:
        self._socket.close()


#: How a client may speak HTTP.
TRANSPORTS = {"http/1.1": KeptConnection, "h2c": PriorKnowledge}


def send(
    address: str,
    method: str,
    path: str,
    body: bytes | Iterable[bytes] = b"",
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
) -> WireReply:
    """One exchange on a connection of its own."""
    connection = KeptConnection(address)
    try:
        return connection.send(method, path, body, headers)
    finally:
        connection.close()


def send_bytes(
    address: str, data: bytes, timeout_seconds: float = TIMEOUT_SECONDS
) -> WireReply | None:
    """Whatever ``data`` is answered with; None if the server just closes the connection."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout_seconds) as stream:
        stream.sendall(data)
        try:
            response = http.client.HTTPResponse(stream)
            response.begin()
            headers = {name.lower(): value for name, value in response.getheaders()}
            return WireReply(response.status, headers, response.read())
        except (http.client.RemoteDisconnected, ConnectionResetError):
            return None


def infer_path(model: str, version: str = "") -> str:
    return f"/v2/models/{model}{f'/versions/{version}' if version else ''}/infer"


def json_input(
    name: str, datatype: str, shape: Sequence[Any], data: Any = None, **parameters: Any
) -> dict[str, Any]:
    """One member of ``inputs``; without ``data`` where that is None."""
    document: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(shape)}
    if data is not None:
        document["data"] = data
    if parameters:
        document["parameters"] = parameters
    return document


def json_body(*inputs: Any, **members: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **members}).encode()


def infer_json(
    address: str, model: str, *inputs: Any, version: str = "", **members: Any
) -> WireReply:
    return send(address, "POST", infer_path(model, version), json_body(*inputs, **members))


def infer_binary(
    address: str,
    model: str,
    inputs: Sequence[tuple[str, str, Sequence[Any], bytes]],
    version: str = "",
    headers: Mapping[str, str] | None = None,
    **members: Any,
) -> WireReply:
    """Inputs are (name, datatype, shape, bytes)."""
    header = json_body(
        *(json_input(n, d, s, binary_data_size=len(blob)) for n, d, s, blob in inputs), **members
    )
    body = header + b"".join(blob for *_, blob in inputs)
    return send(
        address,
        "POST",
        infer_path(model, version),
        body,
        {HEADER_LENGTH: str(len(header)), **(headers or {})},
    )


def binary_outputs(reply: WireReply) -> dict[str, tuple[str, list[int], bytes]]:
    """name → datatype, shape, bytes, of a reply whose outputs are all binary."""
    length = int(reply.headers.get(HEADER_LENGTH.lower(), len(reply.body)))
    document, rest = json.loads(reply.body[:length]), reply.body[length:]
    outputs = {}
    for output in document["outputs"]:
        size = output["parameters"]["binary_data_size"]
        outputs[output["name"]] = (output["datatype"], output["shape"], rest[:size])
        rest = rest[size:]
    assert not rest, f"{len(rest)} bytes behind the last output"
    return outputs


def pack(items: Iterable[bytes]) -> bytes:
    """The elements of a BYTES tensor on the wire."""
    return b"".join(struct.pack("<I", len(item)) + item for item in items)


def unpack(data: bytes) -> list[bytes]:
    items, offset = [], 0
    while offset < len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        items.append(data[offset + 4 : offset + 4 + length])
        offset += 4 + length
    return items


@contextlib.contextmanager
def channel(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, MAX_MESSAGE) as opened:
        yield opened


@contextlib.contextmanager
def stub(address: str) -> Iterator[Any]:
    with channel(address) as opened:
        yield service_pb2_grpc.GRPCInferenceServiceStub(opened)


def message(
    model: str,
    *inputs: tuple[str, str, Sequence[int]],
    raw: Sequence[bytes] = (),
    version: str = "",
    outputs: Sequence[str] = (),
    request_id: str = "",
) -> Any:
    """A ``ModelInferRequest``; inputs are (name, datatype, shape)."""
    request = pb.ModelInferRequest(model_name=model, model_version=version, id=request_id)
    for name, datatype, shape in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.extend(raw)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def good_body() -> bytes:
    return json_body(json_input("x", "FP32", [1, 4], [1, 2, 3, 4]))


def good_message() -> Any:
    values = np.array([1, 2, 3, 4], np.float32).tobytes()
    return message("x2", ("x", "FP32", [1, 4]), raw=[values])


def assert_serves(connection: KeptConnection) -> None:
    """The next good request is answered, and rightly."""
    reply = connection.send("POST", "/v2/models/x2/infer", good_body())
    assert (reply.status, reply.json["outputs"][0]["data"]) == (200, [2.0, 4.0, 6.0, 8.0])


def assert_serves_grpc(stub: Any) -> None:
    reply = stub.ModelInfer(good_message(), timeout=TIMEOUT_SECONDS)
    assert list(np.frombuffer(reply.raw_output_contents[0], np.float32)) == [2, 4, 6, 8]


def private(text: str | None, sent: str = "") -> list[str]:
    """List internal details of the server in ``text`` that the client did not send itself."""
    text = text or ""
    found = [*_PRIVATE.findall(text), *_HOST.findall(text)]
    return [match for match in found if match not in sent]


def assert_public(text: str | None, sent: str = "") -> None:
    found = private(text, sent)
    assert not found, f"{found} in {(text or '')[:500]!r}"


def assert_error(reply: WireReply | None, status: int, sent: str = "") -> str:
    """The reply is ``{"error": text}`` with ``status`` and nothing private; returns the text.

    Or TorchServe's form of it, whose type is a class name of TorchServe's.
    """
    assert reply is not None, "the connection was closed without an answer"
    assert reply.status == status, (reply.status, reply.body[:500])
    document = reply.json
    if "code" in document:
        assert document.pop("code") == status, document
        assert document.pop("type").endswith("Exception"), document
        document = {"error": document.pop("message"), **document}
    assert list(document) == ["error"], document
    assert isinstance(document["error"], str)
    assert document["error"]
    assert reply.headers["content-type"] == "application/json"
    assert_public(document["error"], sent)
    text: str = document["error"]
    return text
