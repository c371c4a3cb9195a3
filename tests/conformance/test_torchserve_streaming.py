"""Decoupled models in TorchServe's dialect: parts of one body, and ``StreamPredictions``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from modelport.gateway.protocols.torchserve.grpc import INFERENCE_SERVICE
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from tests.conformance import wire
from tests.conformance.clients import TIMEOUT_SECONDS
from tests.conformance.decoupled import BROKEN
from tests.conformance.test_decoupled import VALUES, statistics
from tests.polling import PROMPT_SECONDS, eventually
from tests.server import Gateway

BODY = {"data": [VALUES]}
ANSWER = {"predictions": [VALUES]}


@pytest.fixture(scope="module")
def client(streaming: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{streaming.http}/predictions", timeout=30) as opened:
        yield opened


def parts(client: httpx.Client, model: str, **headers: str) -> Iterator[bytes]:
    with client.stream("POST", f"/{model}", json=BODY, headers=headers) as reply:
        assert reply.status_code == 200
        assert "chunked" in reply.headers["transfer-encoding"]
        assert reply.headers["x-request-id"]
        yield from reply.iter_raw()


def messages(stub: Any, model: str, body: bytes | None = None, **options: float) -> Any:
    content = json.dumps(BODY).encode() if body is None else body
    message = inference.PredictionsRequest(model_name=model, input={"data": content})
    return stub(message, timeout=options.get("timeout", TIMEOUT_SECONDS))


@pytest.fixture(scope="module")
def stub(streaming: Gateway) -> Iterator[Any]:
    with wire.channel(streaming.grpc) as channel:
        yield channel.unary_stream(
            f"/{INFERENCE_SERVICE}/StreamPredictions",
            request_serializer=inference.PredictionsRequest.SerializeToString,
            response_deserializer=inference.PredictionResponse.FromString,
        )


def test_every_response_is_a_part_of_the_body(client: httpx.Client) -> None:
    assert [json.loads(part) for part in parts(client, "repeat/1")] == [ANSWER] * 3


def test_bytes_come_as_they_are(client: httpx.Client) -> None:
    with client.stream("POST", "/talker", content=b"\x00hello") as reply:
        assert reply.read() == b"\x00hello" * 3


def test_the_first_part_does_not_wait_for_the_last(client: httpx.Client) -> None:
    with contextlib.closing(parts(client, "trickle")) as answers:
        assert next(answers)


def test_a_stream_of_nothing_has_an_empty_body(client: httpx.Client) -> None:
    assert list(parts(client, "silent")) == []


def test_a_model_that_answers_once_is_no_stream(client: httpx.Client) -> None:
    reply = client.post("/once", json=BODY)
    assert "transfer-encoding" not in reply.headers
    assert reply.json() == ANSWER


def test_an_error_before_any_response_has_its_status(client: httpx.Client) -> None:
    reply = client.post("/broken", json=BODY)
    assert (reply.status_code, reply.json()["message"]) == (500, BROKEN)
    reply = client.post("/repeat", json={"data": [[1.0]]})
    assert (reply.status_code, reply.json()["type"]) == (400, "BadRequestException")
    assert client.post("/repeat/9", json=BODY).status_code == 404


@pytest.mark.parametrize("model", ["breaking", "endless"])
def test_a_stream_that_fails_is_cut_off_and_never_taken_for_whole(
    client: httpx.Client, model: str
) -> None:
    received: list[bytes] = []  # those before the end count
    with pytest.raises(httpx.RemoteProtocolError):
        received.extend(parts(client, model, **{"x-envoy-expected-rq-timeout-ms": "200"}))
    assert len(received) >= 2
    assert client.post("/once", json=BODY).status_code == 200


def test_a_client_that_goes_stops_the_work(client: httpx.Client, streaming: Gateway) -> None:
    before = statistics(streaming, "endless")["inference_stats"]["fail"]["count"]
    next(parts(client, "endless"))
    eventually(
        lambda: statistics(streaming, "endless")["inference_stats"]["fail"]["count"] == before + 1,
        seconds=PROMPT_SECONDS,
    )


def test_stream_predictions_gives_every_response(stub: Any) -> None:
    found = [json.loads(reply.prediction) for reply in messages(stub, "repeat")]
    assert found == [ANSWER] * 3
    assert [json.loads(reply.prediction) for reply in messages(stub, "once")] == [ANSWER]
    assert list(messages(stub, "silent")) == []


def test_stream_predictions_ends_with_the_models_error(stub: Any) -> None:
    found: list[Any] = []  # those before the error count
    with pytest.raises(grpc.RpcError) as caught:
        found.extend(messages(stub, "breaking"))
    assert len(found) == 2
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, BROKEN)


def test_a_cancelled_stream_of_predictions_stops_the_work(stub: Any, streaming: Gateway) -> None:
    before = statistics(streaming, "endless")["inference_stats"]["fail"]["count"]
    call = messages(stub, "endless")
    next(call)
    call.cancel()
    eventually(
        lambda: statistics(streaming, "endless")["inference_stats"]["fail"]["count"] == before + 1,
        seconds=PROMPT_SECONDS,
    )
