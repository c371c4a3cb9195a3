"""Expired work is never computed: every entry, with a backend that counts."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.grpc import service_pb2 as oip

from modelport.gateway.backends import fake
from modelport.gateway.errors import ModelportError, TimedOut
from modelport.gateway.models.control import LocalControl
from modelport.gateway.protocols.grpc_method import Methods
from modelport.gateway.protocols.http_message import Handler
from modelport.gateway.protocols.tfserving.grpc_request import TfServingRequest
from modelport.gateway.server import app
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.server.listeners import Listeners
from modelport.gateway.settings import Settings, VertexAi
from modelport.gateway.types import Deadline, InferRequest, InferResponse
from modelport.gateway.wire.deadline_headers import HTTP_TIMEOUT
from modelport.gateway.wire.proto import serving_pb2 as tfserving
from modelport.gateway.wire.proto import torchserve_inference_pb2 as torchserve
from tests import models
from tests.conformance import decoupled
from tests.gateway.server.handlers import HandlerTransport

ROW = [1.0, 2.0, 3.0, 4.0]
RAW = struct.pack("<4f", *ROW)
INPUTS = [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": ROW}]
EXPIRED = "Request timeout expired"
NAME = HTTP_TIMEOUT.decode()
#: entry → path, body and the status of a request whose time is over.
HTTP: Mapping[str, tuple[str, Any, int]] = {
    "OIP": ("/v2/models/m/infer", {"inputs": INPUTS}, 503),
    "OIP, a version": ("/v2/models/m/versions/1/infer", {"inputs": INPUTS}, 503),
    "generate": ("/v2/models/m/generate", {"x": ROW}, 503),
    "generate_stream": ("/v2/models/m/generate_stream", {"x": ROW}, 503),
    "generate_stream, decoupled": ("/v2/models/many/generate_stream", {"x": ROW}, 503),
    "TensorFlow Serving": ("/v1/models/m:predict", {"instances": [ROW]}, 504),
    "TorchServe": ("/predictions/m", {"inputs": INPUTS}, 503),
    "TorchServe, decoupled": ("/predictions/many", {"inputs": INPUTS}, 503),
    "SageMaker": ("/models/m/invoke", {"inputs": INPUTS}, 503),
    "Vertex AI": ("/vertex", {"inputs": INPUTS}, 503),
    "an ensemble": ("/v2/models/chain/infer", {"inputs": INPUTS}, 503),
}


@dataclass
class SocketlessGateway:
    """A gateway without sockets, and the models that its fake backends were asked for."""

    client: httpx.AsyncClient
    methods: Any
    asked: list[str]

    async def call(self, service: str, method: str, message: Any, deadline: Deadline) -> Any:
        """The reply, or the replies of a stream; raises as the handler does."""
        rows = self.methods[service]
        row = rows[method]
        if not row.reply_streams:
            return await row.handler(message, deadline)

        async def messages() -> AsyncIterator[Any]:
            yield message

        given = messages() if row.request_streams else message
        return [reply async for reply in row.handler(given, deadline)]


Gateways = Callable[..., Any]


def repository(root: Path) -> Path:
    models.fake(root, "m", "FP32", "4")
    models.fake(root, "slow", "FP32", "4", delay_seconds="60")
    decoupled.fake(root, "many", "FP32", "4", responses="3")
    (root / "chain" / "1").mkdir(parents=True)
    steps = " ".join(
        f'step {{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{a}" }} '
        f'output_map {{ key: "y" value: "{b}" }} }}'
        for model, a, b in (("slow", "x", "between"), ("m", "between", "y"))
    )
    text = models.config("chain", ["x FP32 4"], ["y FP32 4"], backend="")
    text = text.replace('backend: ""', 'platform: "ensemble"')
    (root / "chain" / "config.pbtxt").write_text(f"{text}\nensemble_scheduling {{ {steps} }}\n")
    return root


@pytest.fixture
def gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gateways:
    asked: list[str] = []
    call, stream = fake.FakeBackend.__call__, fake.FakeBackend.stream

    async def counted(
        self: fake.FakeBackend, request: InferRequest, deadline: Deadline
    ) -> InferResponse:
        asked.append(request.model_name)
        return await call(self, request, deadline)

    async def counted_stream(
        self: fake.FakeBackend, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[InferResponse, None]:
        asked.append(request.model_name)
        async for response in stream(self, request, deadline):
            yield response

    monkeypatch.setattr(fake.FakeBackend, "__call__", counted)
    monkeypatch.setattr(fake.FakeBackend, "stream", counted_stream)

    @asynccontextmanager
    async def serving(**settings: Any) -> AsyncIterator[SocketlessGateway]:
        async with socketless(repository(tmp_path), monkeypatch, **settings) as (_, http, methods):
            transport = HandlerTransport(http)
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                yield SocketlessGateway(client, methods, asked)

    return serving


@asynccontextmanager
async def socketless(
    root: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> AsyncIterator[tuple[GatewayServer, Handler, Methods]]:
    """A gateway without sockets, its handler of the HTTP port and its gRPC methods."""
    found: list[Any] = []

    def make_listeners(http: Any, methods: Any, *_: Any, **__: Any) -> Listeners:
        found[:] = [http, methods]
        return Unbound()

    vertex = VertexAi("/vertex", "/vertex-health", "m")
    chosen = Settings((root,), metrics_port=0, vertex_ai=vertex, **settings)
    monkeypatch.setattr(app, "Listeners", make_listeners)
    server = GatewayServer(chosen, LocalControl)  # a worker's: without a metrics port
    await server.manager.start()
    try:
        yield server, *found
    finally:
        await server.manager.stop()


class Unbound:
    """A ``Listeners`` that listens nowhere."""

    http_port = grpc_port = 0

    async def start(self) -> None: ...
    async def lame_duck(self, seconds: float) -> None: ...
    async def drain(self, deadline: Deadline) -> None: ...


def said(reply: httpx.Response) -> str:
    document = reply.json()
    return str(document.get("error") or document["message"])


async def slowly(body: bytes) -> AsyncIterator[bytes]:
    """A body whose end comes when the two milliseconds of its request are over."""
    yield body[:-1]
    await asyncio.sleep(0.005)
    yield body[-1:]


async def expired(gateway: SocketlessGateway, path: str, body: Any) -> httpx.Response:
    content = httpx.Request("POST", "http://gateway", json=body).content
    headers = {NAME: "2", "content-type": "application/json"}
    return await gateway.client.post(path, content=slowly(content), headers=headers)


async def test_what_expires_on_its_way_in_reaches_no_backend(gateways: Gateways) -> None:
    async with gateways() as gateway:
        for entry, (path, body, status) in HTTP.items():
            reply = await expired(gateway, path, body)
            assert (entry, reply.status_code) == (entry, status)
            assert EXPIRED in said(reply)
            if status == 503:
                assert reply.headers["retry-after"] == "1"
        assert gateway.asked == []


async def test_without_the_check_the_backends_are_asked(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known-bad variant: the tests of this file detect a gateway that ignores deadlines."""
    monkeypatch.setattr(Deadline, "expired", False)
    async with gateways() as gateway:
        for path, body, _ in HTTP.values():
            await expired(gateway, path, body)
        assert len(gateway.asked) >= len(HTTP)


async def test_decoding_a_huge_body_is_part_of_the_time(gateways: Gateways) -> None:
    rows = 100_000
    inputs = [{"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": ROW * rows}]
    async with gateways() as gateway:
        reply = await gateway.client.post(
            "/v2/models/m/infer", json={"inputs": inputs}, headers={NAME: "1"}
        )
        assert reply.status_code == 400  # too large a batch is told first
        body = {"inputs": INPUTS, "parameters": {"filling": "x" * 1_000_000}}
        reply = await gateway.client.post("/v2/models/m/infer", json=body, headers={NAME: "1"})
        assert (reply.status_code, said(reply)) == (503, EXPIRED)
        assert gateway.asked == []
        reply = await gateway.client.post("/v2/models/m/infer", json=body, headers={NAME: "60000"})
        assert reply.status_code == 200
        assert gateway.asked == ["m"]


def grpc_entries(name: str = "m") -> list[tuple[str, str, Any]]:
    def infer(model: str) -> Any:
        message = oip.ModelInferRequest(model_name=model, raw_input_contents=[RAW])
        message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        return message

    predict = tfserving.PredictRequest()
    predict.model_spec.name = name
    predict.inputs["x"].dtype = 1
    predict.inputs["x"].tensor_content = RAW
    for size in (1, 4):
        predict.inputs["x"].tensor_shape.dim.add(size=size)
    body = httpx.Request("POST", "http://gateway", json={"inputs": INPUTS}).content
    prediction = {
        model: torchserve.PredictionsRequest(model_name=model, input={"body": body})
        for model in (name, "many")
    }
    apis = "org.pytorch.serve.grpc.inference.InferenceAPIsService"
    return [
        ("inference.GRPCInferenceService", "ModelInfer", infer(name)),
        ("inference.GRPCInferenceService", "ModelStreamInfer", infer(name)),
        ("inference.GRPCInferenceService", "ModelStreamInfer", infer("many")),
        ("tensorflow.serving.PredictionService", "Predict", TfServingRequest(predict, 100)),
        (apis, "Predictions", prediction[name]),
        (apis, "StreamPredictions", prediction[name]),
        (apis, "StreamPredictions", prediction["many"]),
    ]


@pytest.mark.parametrize("known_bad", [False, True])
async def test_calls_that_come_too_late_reach_no_backend(
    gateways: Gateways, known_bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if known_bad:
        monkeypatch.setattr(Deadline, "expired", False)
    async with gateways() as gateway:
        for service, method, message in grpc_entries():
            await outcome(gateway.call(service, method, message, Deadline.after(0)))
        assert bool(gateway.asked) is known_bad
        if not known_bad:
            for service, method, message in grpc_entries():
                error = await outcome(gateway.call(service, method, message, Deadline.after(0)))
                assert (method, type(error)) == (method, TimedOut)
            for service, method, message in grpc_entries():  # they are good requests
                await gateway.call(service, method, message, Deadline.after(60))
            assert len(gateway.asked) == len(grpc_entries())


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except ModelportError as error:
        return error


async def test_a_step_of_an_ensemble_is_not_begun_when_the_time_is_over(
    gateways: Gateways,
) -> None:
    async with gateways() as gateway:
        reply = await gateway.client.post(
            "/v2/models/chain/infer", json={"inputs": INPUTS}, headers={NAME: "50"}
        )
        # The step's own limit may end it before the ensemble's does, and then the text names it.
        assert (reply.status_code, EXPIRED in said(reply)) == (503, True)
        assert gateway.asked == ["slow"]


async def test_the_configured_maximum_ends_requests_that_state_no_time(
    gateways: Gateways,
) -> None:
    async with gateways(max_request_timeout_seconds=0.1) as gateway:
        for path, body, status in HTTP.values():
            if "many" in path or path == "/vertex":
                continue  # the first is not slow, the second knows one model
            path = path.replace("/m/", "/slow/").replace("/m:", "/slow:")
            path = path.replace("predictions/m", "predictions/slow")
            reply = await gateway.client.post(path, json=body, headers={NAME: "60000"})
            assert (path, reply.status_code, EXPIRED in said(reply)) == (path, status, True)


async def test_the_earliest_of_all_deadlines_counts(gateways: Gateways) -> None:
    def body(timeout_microseconds: int) -> Any:
        return {"inputs": INPUTS, "parameters": {"timeout": timeout_microseconds}}

    async with gateways(max_request_timeout_seconds=60) as gateway:
        for stated, parameter in (("100", 60_000_000), ("60000", 100_000)):
            async with asyncio.timeout(30):
                reply = await gateway.client.post(
                    "/v2/models/slow/infer", json=body(parameter), headers={NAME: stated}
                )
            assert reply.status_code == 503


@pytest.mark.parametrize("wrong", ["", "0", "-1", "1.5", "1e3", "soon", "1 000", "9" * 19, "+5"])
async def test_a_malformed_header_is_refused_by_its_name(gateways: Gateways, wrong: str) -> None:
    async with gateways() as gateway:
        for path, body, _ in HTTP.values():
            reply = await gateway.client.post(path, json=body, headers={NAME: wrong})
            assert (path, reply.status_code) == (path, 400)
            assert NAME in said(reply)
        assert gateway.asked == []
