"""A server that answers what no server should: refused with a public reason, and nothing breaks.

The fake describes every model as ``x FP32 [-1,4] -> y FP32 [-1,4]``; what it does to a request is
the model's name.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from tests.faults.probes import ask, live
from tests.polling import eventually
from tests.server import Gateway
from tests.upstream import fronting, table

ROW = np.ones(4, np.float32).tobytes()
TENSOR = {"name": "y", "datatype": "FP32", "shape": [1, 4]}
MAX_REPLY_BYTES = 1_000_000
#: A model is refused within its timeout and a little.
TIMEOUT_SECONDS = 1.0


def reply(raw: bytes = ROW, **changes: Any) -> tuple[bytes, bytes]:
    """The JSON and the bytes behind it."""
    output = {**TENSOR, "parameters": {"binary_data_size": len(raw)}, **changes}
    return json.dumps({"model_name": "m", "model_version": "1", "outputs": [output]}).encode(), raw


def twice() -> tuple[bytes, bytes]:
    document, _ = reply()
    outputs = json.loads(document)["outputs"]
    return json.dumps({"outputs": outputs * 2}).encode(), ROW * 2


#: model → its answer over HTTP: JSON and bytes.
HTTP_ANSWERS: dict[str, Callable[[], tuple[bytes, bytes]]] = {
    "good": reply,
    "garbage": lambda: (b"\x00\xff garbage", b""),
    "no_object": lambda: (b"[1]", b""),
    "no_outputs": lambda: (b"{}", b""),
    "empty": lambda: (b"", b""),
    "deep": lambda: (b"[" * 100_000, b""),
    "wrong_name": lambda: reply(name="z"),
    "no_name": lambda: reply(name=["y"]),
    "wrong_datatype": lambda: reply(datatype="FP64"),
    "unknown_datatype": lambda: reply(datatype="FP4"),
    "wrong_shape": lambda: reply(shape=[1, 2, 2]),
    "wrong_batch": lambda: reply(ROW * 2, shape=[2, 4]),
    "negative_shape": lambda: reply(shape=[1, -4]),
    "huge_shape": lambda: reply(shape=[1, 2**62]),
    "text_shape": lambda: reply(shape=["1", "4"]),
    "short": lambda: reply(ROW[:-1]),
    "long": lambda: reply(ROW + b"x"),
    "left_over": lambda: (reply()[0], ROW + b"left over"),
    "lying_size": lambda: reply(parameters={"binary_data_size": 10**18}),
    "bad_size": lambda: reply(parameters={"binary_data_size": -1}),
    "bad_parameters": lambda: reply(parameters=7),
    "json_text": lambda: reply(b"", parameters={}, data=["a", "b", "c", "d"]),
    "json_short": lambda: reply(b"", parameters={}, data=[1, 2, 3]),
    "twice": twice,
    "none": lambda: (b'{"outputs": []}', b""),
}
#: model → raw bytes on the connection, in pieces a tenth of a second apart; then it is closed.
HTTP_RAW: dict[str, list[bytes]] = {
    "not_http": [b"SSH-2.0-OpenSSH\r\n"],
    "bad_chunks": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
    "closes": [],
    "cut_off": [b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nxxx"],
    "huge": [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n", b"x" * 100],
    "endless": [b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 2**20] * 50],
    "trickling": [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", *[b"x"] * 50],
    "header_flood": [b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 100_000],
    "redirect": [b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"],
    "gzip": [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b"],
    "page_500": [b"HTTP/1.1 500 X\r\nContent-Length: 6\r\n\r\n<html>"],
    "page_502": [b"HTTP/1.1 502 X\r\nContent-Length: 6\r\n\r\n<html>"],
    "bad_length": [
        b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: -5\r\nContent-Length: 2\r\n\r\n{}"
    ],
    "long_length": [
        b"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: 500\r\nContent-Length: 2\r\n\r\n{}"
    ],
}
METADATA = {
    "name": "m",
    "versions": ["1"],
    "platform": "fake",
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
}
CONFIG = {
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}],
}


class Hostile(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None: ...

    def _json(self, status: int, document: bytes, raw: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Inference-Header-Content-Length", str(len(document)))
        self.send_header("Content-Length", str(len(document) + len(raw)))
        self.end_headers()
        self.wfile.write(document + raw)

    def do_GET(self) -> None:
        if self.path == "/v2":
            self._json(200, b'{"extensions": ["binary_tensor_data"]}')
        elif self.path.endswith("/config"):
            self._json(200, json.dumps(CONFIG).encode())
        else:
            self._json(200, json.dumps(METADATA).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        model = self.path.split("/")[3]
        if model in HTTP_ANSWERS:
            self._json(200, *HTTP_ANSWERS[model]())
            return
        self.close_connection = True
        try:
            for piece in HTTP_RAW[model]:
                self.connection.sendall(piece)
                if model == "trickling":
                    time.sleep(0.1)
        except OSError:
            pass  # the gateway has had enough


@contextlib.contextmanager
def listening(handler: type[Hostile]) -> Iterator[str]:
    class HostileHttpServer(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # every model connects at once

        def handle_error(self, *_: Any) -> None: ...

    with HostileHttpServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def hostile_http() -> Iterator[str]:
    with listening(Hostile) as address:
        yield address


def message(raw: list[bytes] | None = None, **changes: Any) -> bytes:
    answer = pb.ModelInferResponse(model_name="m", model_version="1")
    answer.outputs.add(**{**TENSOR, **changes})
    answer.raw_output_contents.extend([ROW] if raw is None else raw)
    return answer.SerializeToString()


def typed() -> bytes:
    answer = pb.ModelInferResponse()
    answer.outputs.add(**TENSOR).contents.fp32_contents.extend([1, 2, 3])
    return answer.SerializeToString()


GRPC_ANSWERS: dict[str, Callable[[], bytes]] = {
    "good": message,
    "garbage": lambda: b"\xff\xff\xff",
    "empty": lambda: b"",
    "wrong_name": lambda: message(name="z"),
    "wrong_datatype": lambda: message(datatype="INT32"),
    "unknown_datatype": lambda: message(datatype="FP4"),
    "wrong_shape": lambda: message(shape=[4]),
    "wrong_batch": lambda: message([ROW * 2], shape=[2, 4]),
    "negative_shape": lambda: message(shape=[1, -4]),
    "huge_shape": lambda: message(shape=[1, 2**62]),
    "short": lambda: message([ROW[:-1]]),
    "long": lambda: message([ROW + b"x"]),
    "too_many": lambda: message([ROW, ROW]),
    "none": lambda: message([]),
    "typed_short": typed,
    "huge": lambda: message([bytes(10 * MAX_REPLY_BYTES)]),
}


@pytest.fixture(scope="module")
def hostile_grpc() -> Iterator[str]:
    def handle(call: Any) -> Any:
        method = call.method.rpartition("/")[2]

        def answer(content: bytes, _: Any) -> bytes:
            if method == "ModelInfer":
                return GRPC_ANSWERS[pb.ModelInferRequest.FromString(content).model_name]()
            if method == "ModelReady":
                return bytes(pb.ModelReadyResponse(ready=True).SerializeToString())
            if method == "ModelConfig":
                config = json_format.ParseDict({"config": CONFIG}, pb.ModelConfigResponse())
                return bytes(config.SerializeToString())
            return bytes(pb.ModelMetadataResponse(**METADATA).SerializeToString())

        return grpc.unary_unary_rpc_method_handler(answer)

    class HostileGrpcHandler(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            return handle(call)

    options = [("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(4), handlers=[HostileGrpcHandler()], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


HTTP_MODELS = sorted({*HTTP_ANSWERS, *HTTP_RAW} - {"good"})
GRPC_MODELS = sorted({*GRPC_ANSWERS} - {"good"})


@pytest.fixture(scope="module")
def front(
    hostile_http: str, hostile_grpc: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    tables = [
        table(
            f"{protocol}_{model}", [address], protocol=protocol, model=model,
            timeout_seconds=TIMEOUT_SECONDS, max_reply_bytes=MAX_REPLY_BYTES,
        )
        for protocol, address, models in (
            ("http", hostile_http, HTTP_MODELS), ("grpc", hostile_grpc, GRPC_MODELS)
        )
        for model in ["good", *models]
    ]  # fmt: skip
    with fronting(tmp_path_factory.mktemp("front"), *tables) as gateway:
        ready = f"http://{gateway.http}/v2/health/ready"  # a load that met a full backlog is late
        eventually(lambda: httpx.get(ready).status_code == 200, "ready")
        yield gateway


@pytest.mark.parametrize(
    "model", [f"http_{m}" for m in HTTP_MODELS] + [f"grpc_{m}" for m in GRPC_MODELS]
)
def test_what_no_server_should_answer_is_refused_with_a_public_reason(
    front: Gateway, model: str
) -> None:
    seen = len(front.logs)
    answered = ask(front, model, timeout=10.0)
    assert answered.status_code in (500, 503), answered.text
    said = answered.json()["error"]
    assert said.startswith(f"the server that runs '{model}' ") or said in (
        "Request timeout expired",
        "HTTP status 500",
    ), said
    assert "127.0.0.1" not in said
    assert "Error" not in said
    uncaught = [entry for entry in front.logs[seen:] if "exception" in entry]
    assert uncaught == []
    assert live(front)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_check_sees_a_good_answer(front: Gateway, protocol: str) -> None:
    answered = ask(front, f"{protocol}_good")
    assert answered.json()["outputs"][0]["data"] == [1, 1, 1, 1]


def test_a_bad_replica_is_left_out_beside_a_good_one(hostile_http: str, tmp_path: Path) -> None:
    class Good(Hostile):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._json(200, *reply())

    with listening(Good) as good:
        routes = table("m", [hostile_http, good], protocol="http", model="short")
        with fronting(tmp_path / "front", routes) as front:
            assert [ask(front).status_code for _ in range(20)] == [200] * 20
            front.wait_for("an endpoint is ejected", endpoint=hostile_http)


def test_a_server_without_binary_tensors_is_asked_in_json(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class HostileWithoutBinary(Hostile):
        def do_GET(self) -> None:
            if self.path == "/v2":
                self._json(200, b'{"name": "plain", "extensions": []}')
            elif self.path.endswith("/config"):
                self._json(404, b'{"error": "no"}')
            else:
                super().do_GET()

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            output = {**TENSOR, "data": [[1.5, float("nan"), float("inf"), -0.0]]}
            body = json.dumps({"model_name": "m", "outputs": [output]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with (
        listening(HostileWithoutBinary) as address,
        fronting(tmp_path / "front", table("m", [address], protocol="http")) as front,
    ):
        body = (
            '{"id": "7", "parameters": {"priority": 3, "sequence_id": 9, "timeout": 5000000},'
            '"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4],'
            '"data": [NaN, 2.5, -Infinity, 4]}]}'
        )
        answered = httpx.post(f"http://{front.http}/v2/models/m/infer", content=body)
    assert '"data":[1.5,NaN,Infinity,-0.0]' in answered.text
    (request,) = asked
    assert request["id"] == "7"
    assert request["parameters"] == {"priority": 3, "sequence_id": 9, "timeout": 5_000_000}
    assert str(request["inputs"][0]["data"]) == "[nan, 2.5, -inf, 4.0]"
    assert request["outputs"] == [{"name": "y"}]
