"""Servers that lie: TensorFlow Serving's and TorchServe's protocols, spoken badly on purpose.

Whatever an upstream answers, a client gets an answer of the signature or one of our errors, and
it gets it in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp.web
import grpc
import numpy as np
import pytest

from modelport.gateway.backends.backend_host import Host
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.remote import tfserving, torchserve
from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    QueueFull,
    TimedOut,
    Unavailable,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.routes_file import ModelRoute, UpstreamProtocol
from modelport.gateway.types import Datatype, Deadline, InferRequest, InferResponse, Tensor
from modelport.gateway.upstream.outlier_detection import ServerError
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import model_config_pb2
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import tensorflow_pb2 as tf
from modelport.gateway.wire.proto import torchserve_inference_pb2 as ts

X = np.array([[1.5, -2.0]], np.float32)
SECONDS = 5.0
CONFIG = configuration.parse(
    "max_batch_size: 4 input { name: 'x' data_type: TYPE_FP32 dims: -1 } "
    "output { name: 'y' data_type: TYPE_FP32 dims: -1 }"
)


class Fake:
    """One server; ``infer`` is what it does with an inference, ``status`` what it says else."""

    def __init__(self) -> None:
        self.address = ""
        self.infer: Any = b""
        self.tell: Callable[[str], Any] = lambda what: b""
        self.held = asyncio.Event()


class Status(Exception):
    def __init__(self, code: str, said: str) -> None:
        super().__init__(said)
        self.code, self.said = code, said


@contextlib.asynccontextmanager
async def grpc_server(fake: Fake) -> AsyncIterator[Fake]:
    class FakeGrpcHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            method = details.method.rsplit("/", 1)[1]

            async def answer(message: bytes, context: Any) -> bytes:
                reply = (
                    fake.infer
                    if method in ("Predict", "Predictions", "ModelInfer")
                    else fake.tell(method)
                )
                if reply is None:
                    await fake.held.wait()
                if isinstance(reply, Status):
                    await context.abort(grpc.StatusCode[reply.code], reply.said)
                return bytes(reply)

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((FakeGrpcHandler(),))
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        fake.held.set()
        await server.stop(None)


@contextlib.asynccontextmanager
async def http_server(fake: Fake) -> AsyncIterator[Fake]:
    async def answer(request: aiohttp.web.Request) -> aiohttp.web.StreamResponse:
        await request.read()
        infers = request.method == "POST"
        reply = fake.infer if infers else fake.tell(request.path_qs)
        if reply is None:
            await fake.held.wait()
            return aiohttp.web.Response()
        if isinstance(reply, aiohttp.web.StreamResponse):
            return reply
        if isinstance(reply, tuple):
            status, document = reply
            body = document if isinstance(document, bytes) else json.dumps(document).encode()
            return aiohttp.web.Response(status=status, body=body)
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        return aiohttp.web.Response(body=body)

    application = aiohttp.web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = aiohttp.web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.address = "127.0.0.1:%d" % runner.addresses[0][1]  # noqa: UP031
    try:
        yield fake
    finally:
        fake.held.set()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def loaded(
    module: Any, fake: Fake, config: Any = CONFIG, whole: bool = False, **keys: Any
) -> AsyncIterator[Callable[..., Any]]:
    """A function that asks the backend in front of ``fake`` with ``X``.

    It returns the first output's data, or the ``whole`` response.
    """

    def unused(*_: Any) -> Any:
        raise AssertionError

    loop = asyncio.get_running_loop()
    host = Host(loop, unused, unused, unused, unused)
    route = ModelRoute(module.__name__.rsplit(".", 1)[1], (fake.address,), **keys)
    artifact = Artifact("m", 1, Path(), config, 1, route, host)
    backend = await asyncio.to_thread(module.load, artifact)

    async def ask(seconds: float = SECONDS, data: Any = X, name: str = "x") -> Any:
        datatype = Datatype.BYTES if data.dtype == object else Datatype.FP32
        request = InferRequest("m", [Tensor(name, datatype, data)])
        response: InferResponse = await backend(request, Deadline.after(seconds))
        return response if whole else response.outputs[0].data

    try:
        yield ask
    finally:
        await asyncio.to_thread(backend.unload)


async def refused(ask: Callable[..., Any], kind: type[ModelportError], said: str) -> None:
    with pytest.raises(kind) as caught:
        await ask()
    assert type(caught.value) is kind, repr(caught.value)
    assert said in str(caught.value)
    assert "127.0.0.1" not in str(caught.value)


# -- TensorFlow Serving --------------------------------------------------------------------------


def serving_tells(what: str) -> bytes:
    if what == "GetModelStatus":
        status = pb.GetModelStatusResponse()
        status.model_version_status.add(version=1, state=pb.ModelVersionStatus.AVAILABLE)
        return status.SerializeToString()
    described = pb.GetModelMetadataResponse()
    described.model_spec.version.value = 1
    signatures = pb.SignatureDefMap()
    signature = signatures.signature_def["serving_default"]
    for info in (signature.inputs["x"], signature.outputs["y"]):
        info.name, info.dtype = "t:0", tf.DT_FLOAT
        info.tensor_shape.dim.add(size=-1)
        info.tensor_shape.dim.add(size=-1)
    described.metadata["signature_def"].Pack(signatures)
    return described.SerializeToString()


def rest_tells(path: str) -> Any:
    if not path.endswith("/metadata"):
        return {"model_version_status": [{"version": "1", "state": "AVAILABLE"}]}
    info = {
        "dtype": "DT_FLOAT",
        "name": "t:0",
        "tensor_shape": {"dim": [{"size": "-1"}, {"size": "-1"}], "unknown_rank": False},
    }
    signature = {"inputs": {"x": info}, "outputs": {"y": info}, "method_name": "p", "new": 1}
    return {
        "model_spec": {"name": "m", "version": "1"},
        "metadata": {"signature_def": {"signature_def": {"serving_default": signature}}},
    }


def predicted(name: str = "y", version: int = 1, **changes: Any) -> bytes:
    reply = pb.PredictResponse()
    reply.model_spec.version.value = version
    tensor_proto.encode(Tensor(name, Datatype.FP32, X), reply.outputs[name])
    for key, value in changes.items():
        setattr(reply.outputs[name], key, value)
    return reply.SerializeToString()


def shaped(*sizes: int, **values: Any) -> bytes:
    reply = pb.PredictResponse()
    tensor = reply.outputs["y"]
    tensor.MergeFrom(tf.TensorProto(dtype=tf.DT_FLOAT, **values))
    for size in sizes:
        tensor.tensor_shape.dim.add(size=size)
    return reply.SerializeToString()


@contextlib.asynccontextmanager
async def tfserving_grpc(**keys: Any) -> AsyncIterator[tuple[Fake, Callable[..., Any]]]:
    fake = Fake()
    fake.tell = serving_tells
    async with grpc_server(fake), loaded(tfserving, fake, **keys) as ask:
        yield fake, ask


async def test_a_good_answer_of_predict_is_taken() -> None:
    async with tfserving_grpc() as (fake, ask):
        for good in (predicted(), shaped(1, 2, float_val=[1.5, -2.0])):
            fake.infer = good
            np.testing.assert_array_equal(await ask(), X)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (b"\xff\xff\xff", Internal, "invalid response"),
        (b"", Internal, "output 'y' is missing"),
        (predicted("z"), Internal, "output 'y' is missing"),
        (predicted(dtype=tf.DT_INT32), Internal, "output 'y' is not FP32"),
        (predicted(dtype=tf.DT_COMPLEX64), Internal, "output 'y' is not FP32"),
        (predicted(tensor_content=b"1234567"), Internal, "not match its shape"),
        (predicted(version=2), Internal, "another version"),
        (shaped(2, 2), Internal, "not have shape [1, -1]"),
        (shaped(1, 2, 1), Internal, "not have shape"),
        (shaped(1, -1), Internal, "not have shape"),
        (shaped(1, 2**62, float_val=[1.0]), Internal, "not match its shape"),
        (shaped(1, 2**40, float_val=[1.0]), Internal, "not match its shape"),
        (shaped(), Internal, "not have shape"),
        (Status("NOT_FOUND", "Servable not found for request: m"), Unavailable, "Servable not"),
        (Status("INVALID_ARGUMENT", "bad /srv/a/b.cc\nat x"), InvalidArgument, "bad b.cc"),
        (Status("FAILED_PRECONDITION", "Serving signature key"), Unavailable, "signature"),
        (Status("RESOURCE_EXHAUSTED", "full"), QueueFull, "maximum queue size"),
        (Status("DEADLINE_EXCEEDED", ""), TimedOut, "timeout expired"),
        (Status("UNAVAILABLE", "draining"), Unavailable, "draining"),
        (Status("INTERNAL", "boom"), ServerError, "boom"),
    ],
)
async def test_what_predict_answers_wrongly_is_our_error(
    reply: Any, kind: type[ModelportError], said: str
) -> None:
    async with tfserving_grpc() as (fake, ask):
        fake.infer = reply
        await refused(ask, kind, said)


async def test_an_answer_that_is_too_large_or_never_comes_ends_in_time() -> None:
    async with tfserving_grpc(max_reply_bytes=10_000) as (fake, ask):
        fake.infer = shaped(1, 10_000, tensor_content=bytes(40_000))
        await refused(ask, Internal, "max_reply_bytes")
        fake.infer = None
        with pytest.raises(TimedOut):
            await ask(0.05)


@contextlib.asynccontextmanager
async def tfserving_rest(**keys: Any) -> AsyncIterator[tuple[Fake, Callable[..., Any]]]:
    fake = Fake()
    fake.tell = rest_tells
    keys["protocol"] = UpstreamProtocol.HTTP
    async with http_server(fake), loaded(tfserving, fake, **keys) as ask:
        yield fake, ask


async def test_a_good_answer_of_rest_is_taken() -> None:
    async with tfserving_rest() as (fake, ask):
        fake.infer = {"outputs": [[1.5, -2]]}
        np.testing.assert_array_equal(await ask(), X)
        fake.infer = b'{"outputs": [[NaN, -Infinity]]}'
        np.testing.assert_array_equal(await ask(), [[np.nan, -np.inf]])
        fake.infer = {"outputs": [[]]}
        assert (await ask()).shape == (1, 0)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        (b"{", Internal, "its JSON"),
        (b"[]", Internal, "its JSON"),
        (b"[" * 100_000, Internal, "its JSON"),
        ({"predictions": [[1.0]]}, Internal, "not have shape"),
        ({"outputs": {"z": [[1.0]]}}, Internal, "not have shape"),
        ({"outputs": [1.0, 2.0]}, Internal, "not have shape"),
        ({"outputs": [[1.0], [2.0]]}, Internal, "not have shape"),
        ({"outputs": [[[1.0]]]}, Internal, "not have shape"),
        ({"outputs": [[1.0, [2.0]]]}, Internal, "not match its shape"),
        ({"outputs": [[1.0, None]]}, Internal, "not match its shape"),
        ({"outputs": [["1.0"]]}, Internal, "not match its shape"),
        ({"outputs": [[True]]}, Internal, "not match its shape"),
        ((404, {"error": "Servable not found for request: m"}), Unavailable, "Servable not found"),
        ((400, {"error": "bad /srv/a/b.cc"}), InvalidArgument, "bad b.cc"),
        ((429, {"error": "full"}), QueueFull, "maximum queue size"),
        ((504, {"error": "late"}), TimedOut, "timeout expired"),
        ((503, {"error": "draining"}), Unavailable, "draining"),
        ((500, b"<html>"), ServerError, "500"),
        ((302, b""), Internal, "redirect"),
    ],
)
async def test_what_rest_answers_wrongly_is_our_error(
    reply: Any, kind: type[ModelportError], said: str
) -> None:
    async with tfserving_rest() as (fake, ask):
        fake.infer = reply
        await refused(ask, kind, said)


async def test_rest_that_is_too_large_or_never_comes_ends_in_time() -> None:
    async with tfserving_rest(max_reply_bytes=10_000) as (fake, ask):
        fake.infer = {"outputs": [[0.5] * 10_000]}
        await refused(ask, Internal, "max_reply_bytes")
        fake.infer = None
        with pytest.raises(TimedOut):
            await ask(0.05)


@pytest.mark.parametrize(
    ("tell", "kind", "said"),
    [
        (lambda path: (404, {"error": "Could not find any versions"}), Unavailable, "Could not"),
        (lambda path: {"model_version_status": []}, Unavailable, "not ready"),
        (
            lambda path: {"model_version_status": [{"version": "1", "state": "LOADING"}]},
            Unavailable,
            "LOADING",
        ),
        (lambda path: {"model_version_status": [{"version": "x"}]}, ModelportError, "JSON"),
        (lambda path: b"nonsense", ModelportError, "JSON"),
    ],
)
async def test_a_model_that_is_not_available_does_not_load(
    tell: Callable[[str], Any], kind: type[ModelportError], said: str
) -> None:
    fake = Fake()
    fake.tell = tell
    async with http_server(fake):
        with pytest.raises(kind, match=said):
            async with loaded(tfserving, fake, protocol=UpstreamProtocol.HTTP):
                pass


async def test_versions_are_those_available_and_an_unknown_model_is_not_found() -> None:
    fake = Fake()
    rows = [("1", "END"), ("12", "AVAILABLE"), ("3", "AVAILABLE"), ("13", "LOADING")]
    status = {"model_version_status": [{"version": v, "state": s} for v, s in rows]}
    fake.tell = lambda path: status
    async with http_server(fake):
        route = ModelRoute("tfserving", (fake.address,), UpstreamProtocol.HTTP)
        assert (await tfserving.versions(route, "m")).numbers == [3, 12]
        fake.tell = lambda path: (404, {"error": "Could not find any versions of model m"})
        with pytest.raises(NotFound):
            await tfserving.versions(route, "m")
        fake.tell = lambda path: rest_tells("/metadata") if "labels" in path else (404, {})
        labelled = ModelRoute("tfserving", (fake.address,), UpstreamProtocol.HTTP, label="stable")
        assert (await tfserving.versions(labelled, "m")).numbers == [1]
    with pytest.raises(Unavailable):
        await tfserving.versions(route, "m")


# -- TorchServe ----------------------------------------------------------------------------------


def row(**changes: Any) -> bytes:
    """An answer of our handler, as bytes."""
    output = {"name": "y", "datatype": "FP32", "shape": [1, 2]}
    output["parameters"] = {"binary_data_size": 8}
    head = {"model_name": "m", "model_version": "1", "outputs": [{**output, **changes}]}
    return json.dumps(head).encode() + X.tobytes()


def sent(body: bytes, **headers: str) -> aiohttp.web.Response:
    length = str(body.rindex(b"}") + 1)
    return aiohttp.web.Response(
        body=body, headers={"Inference-Header-Content-Length": length, **headers}
    )


BAD_ROWS: list[tuple[Any, type[ModelportError], str]] = [
    (row(name="z"), Internal, "an output unknown to the model"),
    (row(datatype="INT32"), Internal, "output 'y' is not FP32"),
    (row(shape=[2, 1]), Internal, "not have shape"),
    (row(shape=[1, 3]), Internal, "not match its shape"),
    (row(shape=[1, 2**62]), Internal, "not match its shape"),
    (row()[:-1], Internal, "invalid response"),
    (row() + b"x", Internal, "bytes follow"),
    (b'{"outputs": 1}', Internal, "invalid response"),
]


@contextlib.asynccontextmanager
async def torchserve_http(
    config: Any = CONFIG, **keys: Any
) -> AsyncIterator[tuple[Fake, Callable[..., Any]]]:
    fake = Fake()
    fake.tell = lambda path: {}
    keys["protocol"] = UpstreamProtocol.HTTP
    async with http_server(fake), loaded(torchserve, fake, config, **keys) as ask:
        yield fake, ask


@contextlib.asynccontextmanager
async def torchserve_grpc(**keys: Any) -> AsyncIterator[tuple[Fake, Callable[..., Any]]]:
    fake = Fake()
    async with grpc_server(fake), loaded(torchserve, fake, **keys) as ask:
        yield fake, ask


def prediction(body: bytes) -> bytes:
    return ts.PredictionResponse(prediction=body).SerializeToString()


async def test_a_good_row_is_taken_over_both() -> None:
    async with torchserve_http() as (fake, ask):
        fake.infer = sent(row())
        np.testing.assert_array_equal(await ask(), X)
    async with torchserve_grpc() as (fake, ask):
        fake.infer = prediction(row())
        np.testing.assert_array_equal(await ask(), X)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        *[(sent(body), kind, said) for body, kind, said in BAD_ROWS],
        (b"nonsense", Internal, "invalid response"),
        ((400, {"error": "input 'x' must be FP64"}), InvalidArgument, "input 'x' must be FP64"),
        ((500, {"error": "the model failed: nan"}), ServerError, "the model failed: nan"),
        ((404, {"code": 404, "type": "ModelNotFoundException", "message": "Model not found: m"}),
         Unavailable, "Model not found: m"),
        ((404, {"code": 404, "type": "ModelVersionNotFoundException",
                "message": "Model version: 1 does not exist for model: m"}),
         Unavailable, "Model version: 1 does not exist"),
        ((503, {"code": 503, "type": "ServiceUnavailableException",
                "message": 'Model "m" has no worker to serve inference request.'}),
         Unavailable, "has no worker"),
        ((500, {"code": 500, "type": "InternalServerException", "message": "Worker died."}),
         Unavailable, "Worker died"),
        ((400, {"code": 400, "type": "InvalidKeyException",
                "message": "Token Authorization failed. Token either incorrect"}),
         Unavailable, "requires a token"),
        ((408, {"code": 408, "type": "RequestTimeoutException", "message": "late"}),
         TimedOut, "timeout expired"),
        ((413, b""), InvalidArgument, "max_request_size is too small"),
        ((302, b""), Internal, "redirect"),
    ],
)  # fmt: skip
async def test_what_torchserve_answers_wrongly_is_our_error(
    reply: Any, kind: type[ModelportError], said: str
) -> None:
    async with torchserve_http() as (fake, ask):
        fake.infer = reply
        await refused(ask, kind, said)


@pytest.mark.parametrize(
    ("reply", "kind", "said"),
    [
        *[(prediction(body), kind, said) for body, kind, said in BAD_ROWS],
        (b"\xff", Internal, "not a valid message"),
        (prediction(b"nonsense"), Internal, "does not start with JSON"),
        (prediction(b"[" * 200_000), Internal, "does not start with JSON"),
        (prediction(b'{"error": "input \'x\' is given twice"}'), InvalidArgument, "given twice"),
        (prediction(b'{"error": "the model failed: nan"}'), ServerError, "the model failed: nan"),
        (Status("INTERNAL", "Model not found: m\norg.pytorch.X"), Unavailable, "not found: m"),
        (Status("INTERNAL", "Worker died.\norg.pytorch.X"), Unavailable, "Worker died."),
        (Status("INTERNAL", 'Model "m" has no worker to serve inference request'),
         Unavailable, "has no worker"),
        (Status("RESOURCE_EXHAUSTED", ""), QueueFull, "maximum queue size"),
    ],
)  # fmt: skip
async def test_what_torchserves_grpc_answers_wrongly_is_our_error(
    reply: Any, kind: type[ModelportError], said: str
) -> None:
    async with torchserve_grpc() as (fake, ask):
        fake.infer = reply
        await refused(ask, kind, said)


async def test_torchserve_that_never_answers_ends_in_time_on_both() -> None:
    for opened in (torchserve_http(), torchserve_grpc()):
        async with opened as (fake, ask):
            fake.infer = None
            with pytest.raises(TimedOut):
                await ask(0.05)


async def test_a_model_that_nobody_describes_takes_and_gives_bytes() -> None:
    async with torchserve_http(model_config_pb2.ModelConfig()) as (fake, ask):
        for body in (b"\0\xffany", b"", b'{"error": "a document"}'):
            fake.infer = (200, body)
            answered = await ask(data=np.array([b"row"], object), name="data")
            assert answered.tolist() == [body]


async def test_versions_come_from_the_management_api_in_torchserves_spelling() -> None:
    def described(version: str, status: str = "READY") -> dict[str, Any]:
        return {"modelName": "m", "modelVersion": version, "workers": [{"status": status}]}

    fake = Fake()
    rows = [described("2.0"), described("1.0"), described("3", "DIED"), described("beta")]
    asked = []

    def tell(path: str) -> Any:
        asked.append(path)
        return rows if path.endswith("/all") else rows[:1]

    fake.tell = tell
    async with http_server(fake):
        route = ModelRoute(
            "torchserve", (fake.address,), UpstreamProtocol.HTTP, management=fake.address
        )
        assert (await torchserve.versions(route, "m")).numbers == [1, 2]
        async with loaded(
            torchserve, fake, protocol=UpstreamProtocol.HTTP, management=fake.address
        ) as ask:
            fake.infer = sent(row())
            np.testing.assert_array_equal(await ask(), X)
        assert "/predictions/m/1.0" in asked
        fake.tell = lambda path: (404, {"code": 404, "message": "Model not found: m"})
        with pytest.raises(NotFound):
            await torchserve.versions(route, "m")
    with pytest.raises(Unavailable):
        await torchserve.versions(route, "m")
