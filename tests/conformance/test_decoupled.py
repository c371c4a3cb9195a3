"""Decoupled models over ``ModelStreamInfer``, with Triton's own clients."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tests.conformance import wire
from tests.conformance.clients import TIMEOUT_SECONDS
from tests.conformance.decoupled import BROKEN
from tests.polling import PROMPT_SECONDS, eventually
from tests.server import Gateway

VALUES = [1.0, 2.0, 3.0, 4.0]


def tensor(width: int = 4) -> tritonclient.grpc.InferInput:
    array = np.resize(np.array(VALUES, np.float32), (1, width))
    return tritonclient.grpc.InferInput("x", [1, width], "FP32").set_data_from_numpy(array)


def message(model: str, request_id: str = "", width: int = 4, **parameters: int) -> Any:
    value = np.resize(np.array(VALUES, np.float32), width).tobytes()
    asked = wire.message(model, ("x", "FP32", [1, width]), raw=[value], request_id=request_id)
    for key, number in parameters.items():
        asked.parameters[key].int64_param = number
    return asked


def final(answer: Any) -> bool:
    return bool(answer.infer_response.parameters["triton_final_response"].bool_param)


def statistics(gateway: Gateway, model: str) -> Any:
    return wire.send(gateway.http, "GET", f"/v2/models/{model}/stats").json["model_stats"][0]


@pytest.fixture
def opened(
    streaming: Gateway,
) -> Iterator[tuple[tritonclient.grpc.InferenceServerClient, queue.Queue[tuple[Any, Any]]]]:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(streaming.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        yield client, answers
        client.stop_stream()


def test_a_request_has_as_many_responses_as_its_model_gives(opened: Any) -> None:
    client, answers = opened
    client.async_stream_infer(
        "repeat", [tensor()], request_id="7", enable_empty_final_response=True
    )
    found = [answers.get(timeout=TIMEOUT_SECONDS) for _ in range(4)]
    assert [error for _, error in found] == [None] * 4
    responses = [result.get_response() for result, _ in found]
    assert [each.id for each in responses] == ["7"] * 4
    assert [each.model_name for each in responses] == ["repeat"] * 4
    flags = [each.parameters["triton_final_response"].bool_param for each in responses]
    assert flags == [False, False, False, True]
    assert all(result.as_numpy("y").tolist() == [VALUES] for result, _ in found[:3])
    assert len(responses[3].outputs) == 0


def test_the_empty_final_response_comes_only_where_it_is_asked_for(streaming: Gateway) -> None:
    with wire.stub(streaming.grpc) as stub:
        requests = iter([message("repeat"), message("silent")])
        plain = list(stub.ModelStreamInfer(requests, timeout=TIMEOUT_SECONDS))
        asked = message("silent", request_id="9")
        asked.parameters["triton_enable_empty_final_response"].bool_param = True
        (empty,) = stub.ModelStreamInfer(iter([asked]), timeout=TIMEOUT_SECONDS)
    assert [final(answer) for answer in plain] == [False] * 3
    assert final(empty)
    assert (empty.infer_response.id, empty.infer_response.model_name) == ("9", "silent")
    assert empty.error_message == ""


@pytest.mark.parametrize("model", ["staged", "nested", "piped"])
@pytest.mark.parametrize("empty", [False, True])
def test_the_last_response_of_a_graph_is_final(opened: Any, model: str, empty: bool) -> None:
    client, answers = opened
    client.async_stream_infer(model, [tensor()], enable_empty_final_response=empty)
    found = []
    while not found or not found[-1].parameters["triton_final_response"].bool_param:
        result, error = answers.get(timeout=TIMEOUT_SECONDS)
        assert error is None
        found.append(result.get_response())
    assert [len(each.outputs) for each in found] == [1] * 3
    assert answers.empty()


def test_a_long_stream_delays_no_other_request(opened: Any) -> None:
    client, answers = opened
    client.async_stream_infer("endless", [tensor()], request_id="long")
    assert answers.get(timeout=TIMEOUT_SECONDS)[0].get_response().id == "long"
    client.async_stream_infer("repeat", [tensor()], request_id="short")
    client.async_stream_infer("once", [tensor()], request_id="once")
    seen: dict[str, int] = {}
    limit = time.monotonic() + 10
    while (seen.get("short"), seen.get("once")) != (3, 1):
        result, error = answers.get(timeout=TIMEOUT_SECONDS)
        assert error is None
        request_id = result.get_response().id
        seen[request_id] = seen.get(request_id, 0) + 1
        assert time.monotonic() < limit
    client.stop_stream(cancel_requests=True)


def test_those_that_answer_once_keep_their_order_beside_streams(streaming: Gateway) -> None:
    requests = [
        message("slow", "slow"),
        *(message("once", str(index)) for index in range(5)),
        message("repeat", "many"),
    ]
    with wire.stub(streaming.grpc) as stub:
        answers = list(stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_SECONDS))
    found = [answer.infer_response.id for answer in answers]
    assert found[:3] == ["many"] * 3  # a decoupled model waits for nobody
    assert found[3:] == ["slow", "0", "1", "2", "3", "4"]
    assert [final(answer) for answer in answers] == [False] * 3 + [True] * 6


def test_an_error_behind_responses_ends_them_and_leaves_the_stream_open(
    streaming: Gateway,
) -> None:
    requests = [message("breaking", "a"), message("once", "b")]
    with wire.stub(streaming.grpc) as stub:
        answers = list(stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_SECONDS))
    broken = [answer for answer in answers if answer.infer_response.id == "a"]
    assert [answer.error_message for answer in broken] == ["", "", BROKEN]
    assert final(broken[-1])
    assert [a.infer_response.id for a in answers if a.error_message == ""].count("b") == 1


def test_a_bad_request_to_a_decoupled_model_is_an_answer_too(streaming: Gateway) -> None:
    with wire.stub(streaming.grpc) as stub:
        requests = iter([message("repeat", "bad", width=3), message("once", "good")])
        answers = list(stub.ModelStreamInfer(requests, timeout=TIMEOUT_SECONDS))
    by_id = {answer.infer_response.id: answer.error_message for answer in answers}
    assert by_id["bad"].startswith("unexpected shape for input 'x' for model 'repeat'")
    assert by_id["good"] == ""


def test_infer_is_refused_in_tritons_words(streaming: Gateway) -> None:
    with wire.stub(streaming.grpc) as stub:
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message("repeat"), timeout=TIMEOUT_SECONDS)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        said = "ModelInfer RPC doesn't support models with decoupled transaction policy"
        assert caught.value.details() == said
    array = np.array([VALUES], np.float32)
    with tritonclient.http.InferenceServerClient(streaming.http) as client:
        asked = tritonclient.http.InferInput("x", [1, 4], "FP32").set_data_from_numpy(array)
        with pytest.raises(InferenceServerException) as refused:
            client.infer("repeat", [asked])
    assert refused.value.status() == "501"
    expected = "HTTP end point doesn't support models with decoupled transaction policy"
    assert refused.value.message() == expected


@pytest.mark.parametrize("path", ["/v1/models/repeat:predict", "/invocations"])
def test_dialects_that_have_no_streams_say_so(streaming: Gateway, path: str) -> None:
    reply = httpx.post(
        f"http://{streaming.http}{path}",
        json={"instances": [VALUES]},
        headers={"X-Amzn-SageMaker-Target-Model": "repeat"},
    )
    assert reply.status_code == 501
    assert "decoupled transaction policy" in reply.json()["error"]


def test_the_first_response_does_not_wait_for_the_last(streaming: Gateway) -> None:
    with wire.stub(streaming.grpc) as stub:
        answers = stub.ModelStreamInfer(iter([message("trickle")]), timeout=TIMEOUT_SECONDS)
        assert next(answers).error_message == ""
        answers.cancel()


def test_a_client_that_goes_stops_the_work(streaming: Gateway) -> None:
    before = statistics(streaming, "endless")["inference_stats"]["fail"]["count"]
    with wire.stub(streaming.grpc) as stub:
        asked = [message("endless", name) for name in "abc"]
        call = stub.ModelStreamInfer(iter(asked), timeout=TIMEOUT_SECONDS)
        begun: set[str] = set()
        while len(begun) < 3:
            begun.add(next(call).infer_response.id)
        call.cancel()
    eventually(
        lambda: statistics(streaming, "endless")["inference_stats"]["fail"]["count"] == before + 3,
        seconds=PROMPT_SECONDS,
    )


def test_a_client_that_does_not_read_holds_up_its_stream_and_not_the_memory(
    streaming: Gateway,
) -> None:
    with wire.stub(streaming.grpc) as stub:
        asked = message("wide", width=250_000)  # a megabyte each, a gigabyte in all
        call = stub.ModelStreamInfer(iter([asked]), timeout=TIMEOUT_SECONDS)
        next(call)
        for _ in range(50):  # exchanges, while nothing is read
            made = len(statistics(streaming, "wide")["response_stats"])
        assert made < 100
        call.cancel()


def test_deadlines_bound_the_whole_stream(streaming: Gateway) -> None:
    with wire.stub(streaming.grpc) as stub:
        requests = iter([message("endless", "timed", timeout=100_000), message("once", "once")])
        answers = list(stub.ModelStreamInfer(requests, timeout=TIMEOUT_SECONDS))
    assert answers[-1].error_message == "Request timeout expired"
    assert answers[-1].infer_response.id == "timed"


def test_the_clients_own_deadline_ends_the_call(streaming: Gateway) -> None:
    with wire.stub(streaming.grpc) as stub:
        call = stub.ModelStreamInfer(iter([message("endless")]), timeout=0.2)
        next(call)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: _pending(streaming, "endless") == 0, seconds=PROMPT_SECONDS)


def _pending(gateway: Gateway, model: str) -> int:
    text = httpx.get(gateway.metrics).text
    line = f'modelport_requests_in_flight{{model="{model}",version="1"}} '
    return int(float(next(row for row in text.splitlines() if row.startswith(line)).split()[-1]))


def test_an_async_client_streams(streaming: Gateway, runner: asyncio.Runner) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for index in range(4):
            yield {"model_name": "repeat", "inputs": [tensor()], "request_id": str(index)}

    async def collect() -> list[Any]:
        async with tritonclient.grpc.aio.InferenceServerClient(streaming.grpc) as client:
            answers = client.stream_infer(requests(), stream_timeout=TIMEOUT_SECONDS)
            return [answer async for answer in answers]

    found = runner.run(collect())
    assert all(error is None for _, error in found)
    ids = [result.get_response().id for result, _ in found]
    assert sorted(ids) == [str(index) for index in range(4) for _ in range(3)]


def test_response_statistics_reach_tritons_client(streaming: Gateway) -> None:
    with (
        wire.stub(streaming.grpc) as stub,
        tritonclient.grpc.InferenceServerClient(streaming.grpc) as client,
    ):
        counts = []
        for _ in range(2):
            list(stub.ModelStreamInfer(iter([message("repeat")]), timeout=TIMEOUT_SECONDS))
            (found,) = client.get_inference_statistics("repeat").model_stats
            places = [found.response_stats[key] for key in ("0", "1", "2")]
            counts.append(
                [
                    found.inference_stats.success.count,
                    *(place.success.count for place in places),
                    found.response_stats["3"].empty_response.count,
                ]
            )
    assert [after - before for before, after in zip(*counts, strict=True)] == [1] * 5
