"""The bytes of every dialect, against readers that know none of ours."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import SHUT_RDWR, create_server, socket

import grpc
import numpy as np
import pytest
from hpack import Encoder
from tritonclient.grpc import service_pb2

from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2, torchserve_inference_pb2
from modelport.loadtests.load.locust_arguments import Plan
from modelport.loadtests.load.payloads import BadPayload, Payloads
from modelport.loadtests.load.samples import LoadProfile, Outcome
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.users import grpc_client, http2, oip, signature, tfserving, torchserve
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.grpc_client import GrpcClient
from modelport.loadtests.users.http import HttpClient
from modelport.loadtests.users.load_driver import Impossible, LoadDriver
from modelport.loadtests.users.proto.__main__ import HERE, ROOT
from modelport.loadtests.users.proto.__main__ import main as generate
from modelport.loadtests.users.protocol_table import dialect
from modelport.loadtests.users.sockets import Sockets
from tests.loadtests.oip_server import serving

PAYLOADS = Payloads(
    (
        {
            "x": np.float32([[1.5, -2.0]]),
            "n": np.int64([[3]]),
            "s": np.array([[b"a", "ü".encode()]], np.object_),
        },
    ),
    {"x": "FP32", "n": "INT64", "s": "BYTES"},
    reshape={"n": ()},
)


def target(protocol: LoadTestProtocol) -> LoadTestTarget:
    return LoadTestTarget(protocol, "h:1", "m/1", "7")


def body_of(request: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = request.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert int(headers["content-length"]) == len(body)
    return first, headers, body


def test_oip_json_and_binary_bodies_hold_the_same_tensors() -> None:
    first, _, text = body_of(
        dialect(LoadTestProtocol.OIP_HTTP).prepare(target(LoadTestProtocol.OIP_HTTP), PAYLOADS, 0)
    )
    assert first == "POST /v2/models/m%2F1/versions/7/infer HTTP/1.1"
    by_name = {one["name"]: one["data"] for one in json.loads(text)["inputs"]}
    assert by_name == {"x": [1.5, -2.0], "n": [3], "s": ["a", "ü"]}
    _, headers, binary = body_of(
        dialect(LoadTestProtocol.OIP_HTTP_BINARY).prepare(
            target(LoadTestProtocol.OIP_HTTP_BINARY), PAYLOADS, 0
        )
    )
    size = int(headers["inference-header-content-length"])
    sizes = [one["parameters"]["binary_data_size"] for one in json.loads(binary[:size])["inputs"]]
    assert sizes == [8, 8, 4 + 1 + 4 + 2]
    assert binary[size : size + 8] == np.float32([1.5, -2.0]).tobytes()


def test_an_oip_message_is_read_by_tritons_own_class() -> None:
    data = oip.message(target(LoadTestProtocol.OIP_GRPC), PAYLOADS, 0)
    request = service_pb2.ModelInferRequest.FromString(data)
    assert (request.model_name, request.model_version) == ("m/1", "7")
    assert [one.datatype for one in request.inputs] == ["FP32", "INT64", "BYTES"]
    assert request.raw_input_contents[1] == np.int64([3]).tobytes()


def test_typed_contents_of_an_answer_are_read_too() -> None:
    answer = service_pb2.ModelInferResponse()
    for name, word, field, values in (
        ("a", "FP32", "fp32_contents", [0.5]),
        ("b", "INT8", "int_contents", [-3]),
        ("c", "UINT16", "uint_contents", [9]),
        ("d", "BYTES", "bytes_contents", [b"z"]),
    ):
        output = answer.outputs.add(name=name, datatype=word, shape=[1])
        getattr(output.contents, field).extend(values)
    found = oip.read_message(answer.SerializeToString(), None)
    assert {name: array.tolist() for name, array in found.items()} == {
        "a": [0.5],
        "b": [-3],
        "c": [9],
        "d": [b"z"],
    }


def test_tensorflow_servings_messages_are_those_of_its_own_protos() -> None:
    data = tfserving.GRPC.prepare(target(LoadTestProtocol.TFSERVING_GRPC), PAYLOADS, 0)
    request = serving_pb2.PredictRequest.FromString(data)
    assert (request.model_spec.name, request.model_spec.version.value) == ("m/1", 7)
    x = tensor_proto.decode("x", request.inputs["x"])
    np.testing.assert_array_equal(x.data, PAYLOADS.requests[0]["x"])
    n = tensor_proto.decode("n", request.inputs["n"])
    assert n.data.shape == (1,)  # as the model takes it
    reply = serving_pb2.PredictResponse()
    reply.outputs["y"].CopyFrom(request.inputs["x"])
    reply.outputs["z"].dtype = 1
    reply.outputs["z"].tensor_shape.dim.add(size=3)
    reply.outputs["z"].float_val.append(0.5)  # one value stands for all
    found = tfserving.GRPC.read(reply.SerializeToString(), None)
    np.testing.assert_array_equal(found["y"], [[1.5, -2.0]])
    assert found["z"].tolist() == [0.5, 0.5, 0.5]


def test_tensorflow_servings_rest_has_columns_and_nameless_answers() -> None:
    first, _, body = body_of(
        tfserving.REST.prepare(target(LoadTestProtocol.TFSERVING_HTTP), PAYLOADS, 0)
    )
    assert first == "POST /v1/models/m%2F1/versions/7:predict HTTP/1.1"
    inputs = json.loads(body)["inputs"]
    assert inputs["n"] == [3]
    assert inputs["s"] == [[{"b64": "YQ=="}, {"b64": "w7w="}]]
    assert tfserving.REST.read(b'{"outputs": [[1.0], [2.0]]}', None)[""].tolist() == [[1.0], [2.0]]
    assert tfserving.REST.read(b'{"outputs": {"a": [{"b64": "YQ=="}]}}', None)["a"].tolist() == [
        b"a"
    ]


def test_torchserves_messages_are_those_of_its_own_protos() -> None:
    data = torchserve.GRPC.prepare(target(LoadTestProtocol.TORCHSERVE_GRPC), PAYLOADS, 0)
    request = torchserve_inference_pb2.PredictionsRequest.FromString(data)
    assert (request.model_name, request.model_version) == ("m/1", "7")
    body, _ = oip.binary_body(PAYLOADS, 0)
    assert request.input["body"] == body
    head = json.dumps(
        {
            "outputs": [
                {"name": "y", "datatype": "FP32", "shape": [1]}
                | {"parameters": {"binary_data_size": 4}}
            ]
        }
    ).encode()
    reply = torchserve_inference_pb2.PredictionResponse(prediction=head + np.float32(3).tobytes())
    assert torchserve.GRPC.read(reply.SerializeToString(), None)["y"].tolist() == [3.0]


def test_fp16_has_no_json() -> None:
    half = Payloads(({"x": np.float16([[1]])},), {"x": "FP16"})
    with pytest.raises(BadPayload, match="'x' is FP16, which JSON does not support"):
        oip.json_body(half, 0)


def test_the_messages_are_what_protoc_makes_of_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["proto", str(tmp_path)])
    assert generate() == 0
    for made in tmp_path.rglob("*.py*"):
        assert made.read_text() == (ROOT / made.relative_to(tmp_path)).read_text(), made
    assert sorted(path.name for path in HERE.glob("messages_pb2*"))


def test_the_http_client_tells_refusals_errors_and_time_outs_apart() -> None:
    statuses = iter([503, 429, 500, 200])

    def answer(number: int, x: list[float]) -> tuple[int, list[float]]:
        return next(statuses), x

    x = Payloads(({"x": np.float32([[1, 2, 3, 4]])},), {"x": "FP32"})
    with serving(answer) as server:
        where = LoadTestTarget(LoadTestProtocol.OIP_HTTP, server.address, "double")
        client = HttpClient(where, 5.0)
        request = dialect(LoadTestProtocol.OIP_HTTP).prepare(where, x, 0)
        for wanted in (Outcome.REFUSED, Outcome.REFUSED, Outcome.FAILED):
            with pytest.raises(Unanswered) as caught:
                client.ask(request)
            assert caught.value.outcome is wanted
        body, size = client.ask(request)
        assert oip.read_http(body, size)["y"].tolist() == [[1, 2, 3, 4]]
        assert client.sent < client.first_byte <= client.done
        client.close()
    with pytest.raises(Unanswered, match="cannot connect"):
        client.ask(request)


@pytest.mark.parametrize("lone", [False, True])
def test_an_answer_that_does_not_come_is_a_time_out(
    lone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sockets, "lone", lone)
    with create_server(("127.0.0.1", 0)) as silent:
        where = LoadTestTarget(
            LoadTestProtocol.OIP_HTTP, f"127.0.0.1:{silent.getsockname()[1]}", "m"
        )
        client = HttpClient(where, 0.1)
        with pytest.raises(Unanswered, match="no response within") as caught:
            client.ask(b"POST / HTTP/1.1\r\n\r\n")
        client.close()
    assert caught.value.outcome is Outcome.TIMED_OUT
    assert 0.1 <= client.done - client.sent < 5


def test_the_grpc_client_speaks_to_grpcios_own_server() -> None:
    """Another implementation of HTTP/2: large messages, both windows, errors, a late answer."""

    class EchoHandler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            def handle(request: bytes, context: grpc.ServicerContext) -> bytes:
                if request == b"full":
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue füll")
                if request == b"late":
                    late.wait(30)
                return request[::-1]

            return grpc.unary_unary_rpc_method_handler(handle)

    late = threading.Event()
    unlimited = [("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(2), [EchoHandler()], options=unlimited)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    target = LoadTestTarget(LoadTestProtocol.OIP_GRPC, f"127.0.0.1:{port}", "m")
    client = GrpcClient("/echo.Echo/Echo", target, 2.0)
    try:
        client.connect()
        for size in (1, 100, 70_000, 9_000_000):
            message = np.random.default_rng(size).bytes(size)
            for _ in range(3):
                assert client.ask(message) == (message[::-1], None)
                assert client.sent < client.first_byte <= client.done
        for message, outcome, said in (
            (b"full", Outcome.REFUSED, "RESOURCE_EXHAUSTED: queue füll"),
            (b"late", Outcome.TIMED_OUT, "within 2 s|DEADLINE_EXCEEDED"),
        ):
            with pytest.raises(Unanswered, match=said) as caught:
                client.ask(message)
            assert caught.value.outcome is outcome
        assert client.ask(b"ab") == (b"ba", None)
    finally:
        late.set()
        client.close()
        server.stop(None).wait()
    with pytest.raises(Unanswered, match="cannot connect"):
        client.ask(b"ab")


def test_an_unexpected_error_ends_the_run_before_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Locust logs what a listener raises, and goes on without a load, for ever."""

    def failing(_: LoadTestTarget) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(signature, "ask", failing)
    plan = Plan(((target(LoadTestProtocol.OIP_HTTP), 1),), LoadProfile())
    prepared = LoadDriver(plan, lambda: None, None)
    with pytest.raises(Impossible, match="unexpected KeyError: 'surprise'"):
        prepared.prepare()


NOISE = {
    "nothing": b"",
    "another protocol": b"SSH-2.0-OpenSSH\r\n" + bytes(200),
    "half an answer": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}",
    "a size that is none": b"HTTP/1.1 200 OK\r\ninference-header-content-length: x\r\n"
    b"content-length: 2\r\n\r\n{}",
    "an error": b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n",
    "short frames": http2.frame(http2.SETTINGS, 0, 0) + http2.frame(http2.WINDOW_UPDATE, 0, 0),
    "bad headers": http2.frame(http2.SETTINGS, 0, 0) + http2.frame(http2.HEADERS, 5, 1, b"\xff"),
    "a huge frame": b"\xff\xff\xff\x04\0" + bytes(4),
}


@pytest.mark.parametrize("protocol", [LoadTestProtocol.OIP_HTTP, LoadTestProtocol.OIP_GRPC])
@pytest.mark.parametrize("noise", NOISE)
def test_any_bytes_of_a_server_are_an_answer_or_a_failure_at_once(
    protocol: LoadTestProtocol, noise: str
) -> None:
    """The connection stays open: who waits for more waits until the time-out."""
    open_until = threading.Event()

    def serve(listener: socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(NOISE[noise])
            if noise in ("nothing", "half an answer"):
                return
            open_until.wait(60)

    with create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        where = LoadTestTarget(protocol, f"127.0.0.1:{listener.getsockname()[1]}", "m")
        client = dialect(protocol).connect(where, 20.0)
        with pytest.raises(Unanswered) as caught:
            client.ask(b"x" if protocol.is_grpc else b"POST / HTTP/1.1\r\n\r\n")
        assert caught.value.outcome is Outcome.FAILED
        assert str(caught.value)
        client.close()
        open_until.set()
    thread.join()


@pytest.mark.parametrize("protocol", [LoadTestProtocol.OIP_HTTP, LoadTestProtocol.OIP_GRPC])
def test_a_connection_that_the_server_closed_while_idle_is_no_failure(
    protocol: LoadTestProtocol,
) -> None:
    """Open loops leave connections idle for longer than many a server keeps them."""
    http = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    settings, end = http2.frame(http2.SETTINGS, 0, 0), http2.HEADERS
    status = http2.frame(end, 5, 1, Encoder().encode([(":status", "200"), ("grpc-status", "0")]))
    grpc_answer = http2.frame(http2.DATA, 0, 1, grpc_client.MESSAGE.pack(0, 2) + b"{}") + status
    connections, closed = 0, threading.Semaphore(0)

    def serve(listener: socket) -> None:
        nonlocal connections
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connections += 1
                if protocol.is_grpc:
                    connection.sendall(settings)
                    while http2.frame(http2.DATA, 1, 1, b"\0\0\0\0\1x") not in connection.recv(
                        4096
                    ):
                        pass
                    connection.sendall(grpc_answer)
                else:
                    connection.recv(4096)
                    connection.sendall(http)
            closed.release()

    with create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        where = LoadTestTarget(protocol, f"127.0.0.1:{listener.getsockname()[1]}", "m")
        client = dialect(protocol).connect(where, 5.0)
        request = b"x" if protocol.is_grpc else b"POST / HTTP/1.1\r\n\r\n"
        for _ in range(3):
            assert client.ask(request)[0] == b"{}"
            assert closed.acquire(timeout=30)
            client.done -= 60  # a minute ago
        client.close()
        listener.shutdown(SHUT_RDWR)
    thread.join()
    assert connections == 3
