"""Tests of KServe's own clients over v1 and v2, REST and gRPC.

KServe's tests of them use mocks; these use a gateway. ``KSERVE_REST`` and
``KSERVE_GRPC`` are its addresses. It has the models ``x2``, explained by ``x10``, and ``x10``.
"""

import asyncio
import json
import os

import httpx
import numpy as np
import pytest
from cloudevents.conversion import to_binary, to_structured
from cloudevents.http import CloudEvent, from_http
from kserve import InferInput, InferRequest
from kserve.inference_client import (
    InferenceGRPCClient,
    InferenceRESTClient,
    RESTConfig,
)

URL = "http://" + os.environ["KSERVE_REST"]
ROWS = {"instances": [[1, 2, 3, 4], [0, 0, 0, 1]]}
DATA = np.array([[1, 2, 3, 4]], np.float32)


def rest(protocol, ask):
    async def main():
        async with InferenceRESTClient(RESTConfig(protocol=protocol, timeout=20)) as client:
            return await ask(client)

    return asyncio.run(main())


def grpc(ask):
    async def main():
        client = InferenceGRPCClient(os.environ["KSERVE_GRPC"], timeout=20)
        try:
            return await ask(client)
        finally:
            await client.close()

    return asyncio.run(main())


def request(binary):
    tensor = InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(DATA, binary_data=binary)
    return InferRequest("x2", [tensor])


def values(response):
    return [output.as_numpy().tolist() for output in response.outputs]


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_the_server_is_live(protocol):
    assert rest(protocol, lambda client: client.is_server_live(URL)) is True


def test_the_server_is_ready():
    assert rest("v2", lambda client: client.is_server_ready(URL)) is True


@pytest.mark.parametrize("protocol", ["v1", "v2"])
def test_a_model_is_ready(protocol):
    assert rest(protocol, lambda client: client.is_model_ready(URL, "x2")) is True


def test_an_unknown_model_is_an_error_of_v1():
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        rest("v1", lambda client: client.is_model_ready(URL, "nope"))


def test_an_unknown_model_is_not_ready_for_v2():
    assert rest("v2", lambda client: client.is_model_ready(URL, "nope")) is False


def test_instances_are_predicted():
    found = rest("v1", lambda client: client.infer(URL, ROWS, model_name="x2"))
    assert found == {"predictions": [[2, 4, 6, 8], [0, 0, 0, 2]]}


def test_instances_are_explained():
    found = rest("v1", lambda client: client.explain(URL, "x2", ROWS))
    assert found == {"explanations": [[10, 20, 30, 40], [0, 0, 0, 10]]}


def test_an_error_is_raised_with_the_servers_words():
    with pytest.raises(httpx.HTTPStatusError, match="Missing 'inputs' or 'instances' key"):
        rest("v1", lambda client: client.infer(URL, {"rows": []}, model_name="x2"))


@pytest.mark.parametrize("binary", [False, True])
def test_tensors_are_inferred(binary):
    found = rest("v2", lambda client: client.infer(URL, request(binary), model_name="x2"))
    assert values(found) == [[[2, 4, 6, 8]]]


def test_the_server_and_its_models_are_ready_over_grpc():
    assert grpc(lambda client: client.is_server_live()) is True
    assert grpc(lambda client: client.is_server_ready()) is True
    assert grpc(lambda client: client.is_model_ready("x2")) is True


def test_tensors_are_inferred_over_grpc():
    assert values(grpc(lambda client: client.infer(request(True)))) == [[[2, 4, 6, 8]]]


def test_models_are_listed():
    assert httpx.get(f"{URL}/v2/models").json() == {"models": ["x10", "x2"]}
    assert httpx.get(f"{URL}/v1/models").json() == {"models": ["x10", "x2"]}


@pytest.mark.parametrize("to_http", [to_binary, to_structured])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_an_event_of_the_sdk_is_answered_by_an_event(to_http, as_bytes):
    attributes = {"type": "com.example.sampletype1", "source": "https://example.com/producer"}
    data = json.dumps(ROWS).encode() if as_bytes else ROWS
    headers, body = to_http(CloudEvent(attributes, data))
    if to_http is to_binary:
        headers["content-type"] = "application/json"
    answer = httpx.post(f"{URL}/v1/models/x2:predict", headers=headers, content=body)
    assert answer.status_code == 200
    event = from_http(dict(answer.headers), answer.content)
    assert event["source"] == "io.kserve.inference.x2"
    assert event["type"] == "io.kserve.inference.response"
    assert event.get_data() == {"predictions": [[2, 4, 6, 8], [0, 0, 0, 2]]}
