"""``ModelStreamInfer``: order, and errors that leave the stream open."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2 as pb

from tests.conformance import wire
from tests.conformance.clients import TIMEOUT_SECONDS
from tests.conformance.repository import GATHERED
from tests.server import Gateway


def tensor(values: Any, datatype: str = "FP32") -> tritonclient.grpc.InferInput:
    dtype = {"FP32": np.float32, "INT64": np.int64}[datatype]
    array = np.array([values], dtype)
    return tritonclient.grpc.InferInput("x", list(array.shape), datatype).set_data_from_numpy(array)


@pytest.fixture
def opened(
    gateway: Gateway,
) -> Iterator[tuple[tritonclient.grpc.InferenceServerClient, queue.Queue[tuple[Any, Any]]]]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(gateway.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        yield client, answers
        client.stop_stream(cancel_requests=True)


def test_answers_come_in_the_order_of_the_requests_though_the_first_is_slow(opened: Any) -> None:
    client, answers = opened
    client.async_stream_infer("slow", [tensor([7], "INT64")], request_id="slow")
    for index in range(20):
        client.async_stream_infer("x2", [tensor([index] * 4)], request_id=str(index))
    found = [answers.get(timeout=TIMEOUT_SECONDS) for _ in range(21)]
    assert all(error is None for _, error in found)
    results = [result for result, _ in found]
    assert [r.get_response().id for r in results] == ["slow", *map(str, range(20))]
    assert results[0].as_numpy("y").tolist() == [[7]]
    for index, result in enumerate(results[1:]):
        assert result.as_numpy("y").tolist() == [[2 * index] * 4]


def test_requests_of_one_stream_run_concurrently(opened: Any) -> None:
    client, answers = opened
    for index in range(GATHERED):
        client.async_stream_infer("gathered", [tensor([index], "INT64")])
    found = [answers.get(timeout=TIMEOUT_SECONDS) for _ in range(GATHERED)]
    assert all(error is None for _, error in found)
    assert [result.as_numpy("y")[0, 0] for result, _ in found] == list(range(GATHERED))


def test_an_error_in_the_middle_leaves_the_stream_open(opened: Any) -> None:
    client, answers = opened
    client.async_stream_infer("x2", [tensor([1, 2, 3, 4])], request_id="first")
    client.async_stream_infer("nobody", [tensor([1, 2, 3, 4])], request_id="second")
    client.async_stream_infer("x2", [tensor([1])], request_id="third")
    client.async_stream_infer("x2", [tensor([5, 6, 7, 8])], request_id="fourth")
    found = [answers.get(timeout=TIMEOUT_SECONDS) for _ in range(4)]
    errors = [error.message() if error else None for _, error in found]
    assert errors[0] is None
    assert errors[1] == "Request for unknown model: 'nobody' is not found"
    assert str(errors[2]).startswith("unexpected shape for input 'x' for model 'x2'")
    assert errors[3] is None
    assert found[3][0].as_numpy("y").tolist() == [[10, 12, 14, 16]]


@pytest.mark.parametrize(("value", "ends"), [("true", True), ("false", False)])
def test_the_first_error_ends_a_stream_that_asks_for_it(
    gateway: Gateway, value: str, ends: bool
) -> None:
    """Its status is that of the error, as in Triton; earlier answers come before."""
    content = [np.ones(4, np.float32).tobytes()]
    requests = [
        wire.message(model, ("x", "FP32", [1, 4]), raw=content, request_id=id)
        for model, id in (("x2", "first"), ("nobody", "bad"), ("x2", "last"))
    ]
    with grpc.insecure_channel(gateway.grpc) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        answers = call(iter(requests), metadata=[("triton_grpc_error", value)])
        found = [next(answers).infer_response.id]
        with contextlib.suppress(grpc.RpcError):
            found += [answer.infer_response.id for answer in answers]
        code, details = answers.code(), answers.details()
    if ends:
        assert found == ["first"]
        assert (code, details) == (
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'nobody' is not found",
        )
    else:
        assert (found, code) == (["first", "bad", "last"], grpc.StatusCode.OK)


def test_the_answer_with_an_error_carries_the_id_of_its_request(gateway: Gateway) -> None:
    requests = [
        wire.message("nobody", request_id="bad"),
        wire.message("x2", request_id="worse"),
        wire.good_message(),
    ]
    with wire.stub(gateway.grpc) as stub:
        answers = list(stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_SECONDS))
    assert [answer.infer_response.id for answer in answers] == ["bad", "worse", ""]
    assert [bool(answer.error_message) for answer in answers] == [True, True, False]


def test_a_good_answer_has_an_empty_error_message(gateway: Gateway) -> None:
    with wire.stub(gateway.grpc) as stub:
        requests = iter([wire.good_message()])
        (answer,) = stub.ModelStreamInfer(requests, timeout=TIMEOUT_SECONDS)
    assert answer.error_message == ""
    assert answer.infer_response.model_name == "x2"


def test_an_empty_stream_ends_well(gateway: Gateway) -> None:
    with wire.stub(gateway.grpc) as stub:
        assert list(stub.ModelStreamInfer(iter([]), timeout=TIMEOUT_SECONDS)) == []


def test_a_stream_may_mix_models(opened: Any) -> None:
    client, answers = opened
    for model, factor in (("x2", 2), ("x3", 3), ("two_versions", 3), ("x2", 2)):
        client.async_stream_infer(model, [tensor([1, 2, 3, 4])])
        result, error = answers.get(timeout=TIMEOUT_SECONDS)
        assert error is None
        assert result.get_response().model_name == model
        assert result.as_numpy("y").tolist() == [[factor * n for n in (1, 2, 3, 4)]]


def test_many_messages_of_one_stream_are_all_answered(gateway: Gateway) -> None:
    values = [np.array([[n] * 4], np.float32).tobytes() for n in range(1000)]
    requests = (wire.message("x2", ("x", "FP32", [1, 4]), raw=[value]) for value in values)
    with wire.stub(gateway.grpc) as stub:
        answers = stub.ModelStreamInfer(requests, timeout=TIMEOUT_SECONDS)
        found = [
            np.frombuffer(answer.infer_response.raw_output_contents[0], np.float32)[0]
            for answer in answers
        ]
    assert found == [2.0 * n for n in range(1000)]


def test_an_async_stream_keeps_order_and_survives_errors(
    gateway: Gateway, runner: asyncio.Runner
) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index in range(10):
            model = "nobody" if index == 4 else "x2"
            inputs = [tensor([index] * 4)]
            yield {"model_name": model, "inputs": inputs, "request_id": str(index)}

    async def collect() -> list[tuple[Any, Any]]:
        async with tritonclient.grpc.aio.InferenceServerClient(gateway.grpc) as client:
            answers = client.stream_infer(requests(), stream_timeout=TIMEOUT_SECONDS)
            return [answer async for answer in answers]

    found = runner.run(collect())
    assert len(found) == 10
    for index, (result, error) in enumerate(found):
        if index == 4:
            assert error.message() == "Request for unknown model: 'nobody' is not found"
        else:
            assert result.get_response().id == str(index)
            assert result.as_numpy("y").tolist() == [[2 * index] * 4]


def test_a_cancelled_stream_leaves_the_server_serving(gateway: Gateway) -> None:
    with wire.stub(gateway.grpc) as stub:
        slow = wire.message("slow", ("x", "INT64", [1, 1]), raw=[np.int64(1).tobytes()])
        call = stub.ModelStreamInfer(iter([slow] * 20), timeout=TIMEOUT_SECONDS)
        call.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        wire.assert_serves_grpc(stub)


def test_a_message_that_is_no_message_ends_the_stream_at_once(gateway: Gateway) -> None:
    """It must not leave the client waiting for an answer that never comes."""
    with wire.channel(gateway.grpc) as channel:
        method = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=None,
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(method(iter([b"\xff" * 20]), timeout=60))
        assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        wire.assert_public(caught.value.details() or "")
