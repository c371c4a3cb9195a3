"""A rollout seen by the clients of every dialect: who answers, and what the reply says of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio

from modelport.gateway.rollout.plan import ROUTE_KEY, AssignmentKind
from modelport.gateway.rollout.traffic.request_routing import HEADER
from modelport.gateway.types import Datatype, Tensor
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import grpc_service_pb2 as oip_pb2
from modelport.gateway.wire.proto import serving_pb2
from modelport.gateway.wire.proto import torchserve_inference_pb2 as torchserve_pb2
from tests.gateway.rollout.gateway import RolloutGateway, repository, serving

X = [[1.0, 2.0, 3.0, 4.0]]
OIP = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": X}]}


class RolloutReply(NamedTuple):
    """A reply: the first value of the output, and the version in its body and its headers."""

    first: float
    in_body: str = ""
    in_headers: str = ""


Ask = Callable[[RolloutGateway, str, str], Awaitable[RolloutReply]]


async def _post(gateway: RolloutGateway, path: str, body: Any, key: str) -> tuple[Any, str]:
    headers = {ROUTE_KEY: key} if key else {}
    reply = await gateway.http.post(path, json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json(), reply.headers.get(HEADER.decode(), "")


async def _call(
    gateway: RolloutGateway, method: str, message: Any, reply: Any, key: str
) -> tuple[Any, str]:
    call = gateway.channel.unary_unary(method, type(message).SerializeToString, reply.FromString)(
        message, metadata=((ROUTE_KEY, key),) if key else ()
    )
    answer = await call
    trailers = dict(await call.trailing_metadata())
    return answer, str(trailers.get(HEADER.decode(), ""))


async def oip_http(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    path = f"/v2/models/m{version and '/versions/' + version}/infer"
    body, said = await _post(gateway, path, OIP, key)
    assert body["model_name"] == "m"
    return RolloutReply(body["outputs"][0]["data"][0], body["model_version"], said)


async def oip_generate(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    path = f"/v2/models/m{version and '/versions/' + version}/generate"
    body, said = await _post(gateway, path, {"x": X[0]}, key)
    return RolloutReply(body["y"][0], body["model_version"], said)


def _oip_message(version: str = "") -> Any:
    message = oip_pb2.ModelInferRequest(model_name="m", model_version=version)
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    message.raw_input_contents.append(np.array(X, "<f4").tobytes())
    return message


async def oip_grpc(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    method = "/inference.GRPCInferenceService/ModelInfer"
    answer, said = await _call(
        gateway, method, _oip_message(version), oip_pb2.ModelInferResponse, key
    )
    [content] = answer.raw_output_contents
    return RolloutReply(float(np.frombuffer(content, "<f4")[0]), answer.model_version, said)


async def oip_stream(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    call = gateway.channel.stream_stream(
        "/inference.GRPCInferenceService/ModelStreamInfer",
        oip_pb2.ModelInferRequest.SerializeToString,
        oip_pb2.ModelStreamInferResponse.FromString,
    )(metadata=((ROUTE_KEY, key),) if key else ())
    await call.write(_oip_message(version))
    answer = (await call.read()).infer_response
    await call.done_writing()
    [content] = answer.raw_output_contents
    return RolloutReply(float(np.frombuffer(content, "<f4")[0]), answer.model_version)


async def tfserving_http(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    if version and not version.isdigit():
        version = f"/labels/{version}"
    elif version:
        version = f"/versions/{version}"
    body, said = await _post(gateway, f"/v1/models/m{version}:predict", {"instances": X}, key)
    return RolloutReply(body["predictions"][0][0], "", said)


async def tfserving_grpc(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    message = serving_pb2.PredictRequest()
    message.model_spec.name = "m"
    if version.isdigit():
        message.model_spec.version.value = int(version)
    else:
        message.model_spec.version_label = version
    tensor = Tensor("x", Datatype.FP32, np.array(X, np.float32))
    message.inputs["x"].CopyFrom(tensor_proto.encode(tensor))
    method = "/tensorflow.serving.PredictionService/Predict"
    answer, said = await _call(gateway, method, message, serving_pb2.PredictResponse, key)
    first = tensor_proto.decode("y", answer.outputs["y"]).data[0, 0]
    return RolloutReply(float(first), str(answer.model_spec.version.value), said)


async def torchserve_http(
    gateway: RolloutGateway, version: str = "", key: str = ""
) -> RolloutReply:
    path = f"/predictions/m{version and '/' + version}"
    body, said = await _post(gateway, path, {"instances": X}, key)
    return RolloutReply(body["predictions"][0][0], "", said)


async def torchserve_grpc(
    gateway: RolloutGateway, version: str = "", key: str = ""
) -> RolloutReply:
    message = torchserve_pb2.PredictionsRequest(model_name="m", model_version=version)
    message.input["data"] = json.dumps({"instances": X}).encode()
    method = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    answer, said = await _call(gateway, method, message, torchserve_pb2.PredictionResponse, key)
    return RolloutReply(json.loads(answer.prediction)["predictions"][0][0], "", said)


async def torchserve_stream(
    gateway: RolloutGateway, version: str = "", key: str = ""
) -> RolloutReply:
    message = torchserve_pb2.PredictionsRequest(model_name="m", model_version=version)
    message.input["data"] = json.dumps({"instances": X}).encode()
    call = gateway.channel.unary_stream(
        "/org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions",
        torchserve_pb2.PredictionsRequest.SerializeToString,
        torchserve_pb2.PredictionResponse.FromString,
    )(message, metadata=((ROUTE_KEY, key),) if key else ())
    answer = await call.read()
    trailers = dict(await call.trailing_metadata())
    said = str(trailers.get(HEADER.decode(), ""))
    return RolloutReply(json.loads(answer.prediction)["predictions"][0][0], "", said)


async def sagemaker(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    body, said = await _post(gateway, "/invocations", {"instances": X}, key)
    return RolloutReply(body["predictions"][0][0], "", said)


async def vertex(gateway: RolloutGateway, version: str = "", key: str = "") -> RolloutReply:
    body, said = await _post(gateway, "/vertex", {"instances": X}, key)
    return RolloutReply(body["predictions"][0][0], "", said)


#: Dialects that name versions, and those that also know labels.
LABELLED = [tfserving_http, tfserving_grpc, torchserve_http, torchserve_grpc, torchserve_stream]
VERSIONED = [oip_http, oip_generate, oip_grpc, oip_stream, *LABELLED]
ALL = [*VERSIONED, sagemaker, vertex]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RolloutGateway]:
    async with serving(repository(tmp_path_factory.mktemp("repository"))) as found:
        yield found


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("ask", ALL)
async def test_without_a_rollout_nothing_is_said_of_it(gateway: RolloutGateway, ask: Ask) -> None:
    gateway.server.rollouts.remove("m")
    told = await ask(gateway, "", "a key")
    assert (told.first, told.in_headers) == (2.0, "")
    assert told.in_body in ("1", "")


@pytest.mark.parametrize("ask", ALL)
async def test_the_reply_says_which_version_answered(gateway: RolloutGateway, ask: Ask) -> None:
    for share, version in ((1.0, 2), (0.0, 1)):
        gateway.apply(share)
        told = await ask(gateway, "", "")
        assert told.first == version + 1
        assert told.in_body in (str(version), "")
        assert told.in_headers in (str(version), "")
        assert told.in_body or told.in_headers


@pytest.mark.parametrize("ask", VERSIONED)
async def test_a_version_that_is_named_by_number_answers(gateway: RolloutGateway, ask: Ask) -> None:
    gateway.apply(1.0)
    assert (await ask(gateway, "1", ""))[:2] in ((2.0, "1"), (2.0, ""))
    gateway.apply(0.0)
    assert (await ask(gateway, "2", ""))[:2] in ((3.0, "2"), (3.0, ""))


@pytest.mark.parametrize("ask", LABELLED)
async def test_the_baselines_label_is_diverted_and_no_other(
    gateway: RolloutGateway, ask: Ask
) -> None:
    gateway.apply(1.0, label="stable")
    told = await ask(gateway, "stable", "")
    assert (told.first, told.in_headers) == (3.0, "2")
    assert told.in_body in ("2", "")
    assert (await ask(gateway, "other", "")).first == 2.0


@pytest.mark.parametrize("ask", ALL)
async def test_a_route_key_stays_on_its_side(gateway: RolloutGateway, ask: Ask) -> None:
    gateway.apply(0.5, assignment=AssignmentKind.HEADER)
    sides = {key: (await ask(gateway, "", key)).first for key in "abcdefgh"}
    assert set(sides.values()) == {2.0, 3.0}
    for key, first in sides.items():
        assert (await ask(gateway, "", key)).first == first
    gateway.apply(0.9)
    for key, first in sides.items():
        assert first == 2.0 or (await ask(gateway, "", key)).first == 3.0
    gateway.apply(0.0, assignment=AssignmentKind.REQUEST)


async def test_an_error_says_which_version_it_comes_from(gateway: RolloutGateway) -> None:
    gateway.apply(0.0)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": X[0][:3]}]}
    reply = await gateway.http.post("/v2/models/m/infer", json=body)
    assert (reply.status_code, reply.headers[HEADER.decode()]) == (400, "1")
    message = _oip_message()
    message.inputs[0].shape[1] = 3
    message.raw_input_contents[0] = message.raw_input_contents[0][:12]
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await _call(
            gateway, "/inference.GRPCInferenceService/ModelInfer", message,
            oip_pb2.ModelInferResponse, "",
        )  # fmt: skip
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(failed.value.trailing_metadata())[HEADER.decode()] == "1"


async def test_a_parameter_is_the_key_over_http_and_grpc_alike(gateway: RolloutGateway) -> None:
    gateway.apply(0.5, assignment=AssignmentKind.PARAMETER, parameter="customer")
    sides = set()
    for customer in range(8):
        body = {**OIP, "parameters": {"customer": customer}}
        reply, _ = await _post(gateway, "/v2/models/m/infer", body, "")
        message = _oip_message()
        message.parameters["customer"].int64_param = customer
        method = "/inference.GRPCInferenceService/ModelInfer"
        answer, _ = await _call(gateway, method, message, oip_pb2.ModelInferResponse, "")
        assert answer.model_version == reply["model_version"]
        sides.add(answer.model_version)
    assert sides == {"1", "2"}
    gateway.apply(0.0, assignment=AssignmentKind.REQUEST, parameter="")
