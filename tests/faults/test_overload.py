"""Overload and deadlines: a full queue says so, and no answer comes later than it may."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from modelport.gateway.server import time_limits
from modelport.gateway.server.http1.listener import HttpListener
from modelport.gateway.server.listening_socket import bind
from modelport.gateway.types import Deadline
from tests.faults import probes
from tests.faults.probes import Background, ChangingRepository, elapsed
from tests.gateway.server.handlers import echo_body
from tests.polling import eventually
from tests.server import Gateway, serving

QUEUE_OF_ONE = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
URL = "/v2/models/count/infer"
#: So many turns of the loop take an hour or so: what is answered sooner has not waited for them.
FOR_AN_HOUR = 4_000_000_000


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = ChangingRepository(tmp_path_factory.mktemp("counting"))
    repository.count(QUEUE_OF_ONE)
    with serving(repository.root) as gateway:
        yield gateway


def count(gateway: Gateway, n: int, **parameters: Any) -> httpx.Response:
    return probes.post(gateway, URL, probes.count_request(n, **parameters))


def pending(gateway: Gateway, number: int) -> None:
    eventually(
        lambda: probes.metric(gateway, "modelport_requests_in_flight", model="count") == number,
        f"{number} pending",
    )


def turns(gateway: Gateway, seconds: float) -> int:
    """The number of loop iterations that take about ``seconds`` on this machine now."""
    assert count(gateway, 1000).status_code == 200
    with elapsed() as so_far:
        assert count(gateway, 300_000).status_code == 200
        return max(300_000, int(300_000 * seconds / so_far()))


def message(n: int, **parameters: int) -> Any:
    request = pb.ModelInferRequest(model_name="count")
    request.inputs.add(name="n", datatype="INT64", shape=[1])
    request.raw_input_contents.append(np.array([n], np.int64).tobytes())
    for key, value in parameters.items():
        request.parameters[key].int64_param = value
    return request


def grpc_code(gateway: Gateway, request: Any, timeout: float) -> tuple[str, str]:
    """Code and details."""
    with grpc.insecure_channel(gateway.grpc) as channel:
        grpc.channel_ready_future(channel).result(60)
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=timeout)
        except grpc.RpcError as error:
            return error.code().name, error.details() or ""
        return "OK", ""


# -- the queue ------------------------------------------------------------------------------------


def test_a_full_queue_is_503_while_another_runs_and_those_before_it_are_answered(
    counting: Gateway, background: Background
) -> None:
    long = turns(counting, 1.0)
    rejected = partial(probes.metric, counting, "request_failure", model="count", reason="REJECTED")
    before = rejected()
    runs: Future[httpx.Response] = background(count, counting, long)
    pending(counting, 1)
    waits: Future[httpx.Response] = background(count, counting, 1000)
    pending(counting, 2)
    refused = count(counting, 1000)
    assert not runs.done()
    assert refused.status_code == 503
    assert refused.json() == {"error": "Exceeds maximum queue size"}
    assert refused.headers["retry-after"]
    answer = grpc_code(counting, message(1000), 10)
    assert answer == ("UNAVAILABLE", "Exceeds maximum queue size")
    assert not runs.done()
    for reply, expected in ((runs, long), (waits, 1000)):
        assert reply.result(60).json()["outputs"][0]["data"] == [expected]
    assert count(counting, 1000).status_code == 200
    assert rejected() == before + 2


def test_a_gateway_whose_model_is_busy_still_answers_everything_else(
    counting: Gateway, background: Background
) -> None:
    runs = background(count, counting, turns(counting, 1.0))
    pending(counting, 1)
    for path in (
        "/v2/health/live",
        "/v2/health/ready",
        "/v2/models/count",
        "/v2/models/count/config",
    ):
        assert probes.status(counting, path) == 200
    assert not runs.done()
    assert runs.result(60).status_code == 200


@pytest.mark.thorough
def test_a_long_run_of_a_small_input_does_not_stop_the_gateway(
    repository: ChangingRepository, background: Background
) -> None:
    """Without a lower bound the model is warm in microseconds; one value then takes seconds."""
    text = probes.COUNT.replace("1000..", "0..")
    repository.count(model="count")
    repository.config(text, "count")
    repository.version(2.0)
    with serving(repository.root) as gateway:
        runs = background(count, gateway, 800_000)
        answered = 0
        while not runs.done():
            assert probes.live(gateway)
            answered += 1
        assert answered > 3, "the event loop stood still"
        assert runs.result(60).status_code == 200


# -- deadlines ------------------------------------------------------------------------------------


def test_a_request_that_runs_past_its_timeout_is_answered_at_its_timeout(
    repository: ChangingRepository,
) -> None:
    repository.count(QUEUE_OF_ONE)
    with serving(repository.root) as gateway:
        reply = count(gateway, FOR_AN_HOUR, timeout=300_000)
    assert reply.status_code == 503
    assert reply.json() == {"error": "Request timeout expired"}


def test_a_request_that_waits_past_its_timeout_is_answered_at_its_timeout_and_never_computed(
    counting: Gateway, background: Background
) -> None:
    long = turns(counting, 1.0)
    executed = probes.metric(counting, "exec_count", model="count")
    runs = background(count, counting, long)
    pending(counting, 1)
    answer = grpc_code(counting, message(2000, timeout=200_000), 60)
    assert answer == ("UNAVAILABLE", "Request timeout expired")
    assert not runs.done()
    assert runs.result(60).status_code == 200
    assert count(counting, 1000).status_code == 200
    assert probes.metric(counting, "exec_count", model="count") == executed + 2


def test_a_grpc_deadline_is_kept_and_gives_the_request_up_on_the_server_too(
    counting: Gateway, background: Background
) -> None:
    long = turns(counting, 1.2)
    executed = probes.metric(counting, "exec_count", model="count")
    runs = background(count, counting, long)
    pending(counting, 1)
    assert grpc_code(counting, message(2000), 0.2)[0] == "DEADLINE_EXCEEDED"
    pending(counting, 1)
    assert not runs.done()
    assert runs.result(60).status_code == 200
    assert count(counting, 1000).status_code == 200
    done = probes.metric(counting, "exec_count", model="count") - executed
    assert done == 2


def test_a_grpc_deadline_that_passes_is_always_deadline_exceeded(
    repository: ChangingRepository, background: Background
) -> None:
    """The server's own timer may be first with its answer: it must say the same."""
    repository.count()
    with serving(repository.root) as gateway:
        runs = background(probes.post, gateway, URL, probes.count_request(FOR_AN_HOUR), 60)
        pending(gateway, 1)
        codes = {grpc_code(gateway, message(2000), 0.05 + n / 100)[0] for n in range(12)}
        assert codes == {"DEADLINE_EXCEEDED"}
    left = runs.exception(20)  # the gateway is gone, and has said so if it had the time
    assert isinstance(left, httpx.HTTPError) or runs.result().status_code == 503


def test_the_earlier_of_timeout_and_grpc_deadline_counts(
    counting: Gateway, background: Background
) -> None:
    runs = background(count, counting, turns(counting, 1.0))
    pending(counting, 1)
    answer = grpc_code(counting, message(2000, timeout=100_000), 60)
    assert answer == ("UNAVAILABLE", "Request timeout expired")
    code, _ = grpc_code(counting, message(2000, timeout=60_000_000), 0.2)
    assert code == "DEADLINE_EXCEEDED"
    assert not runs.done()
    assert runs.result(60).status_code == 200


def test_a_deadline_that_is_far_away_changes_nothing(counting: Gateway) -> None:
    reply = count(counting, 1000, timeout=60_000_000)
    assert reply.status_code == 200
    assert grpc_code(counting, message(1000, timeout=60_000_000), 60)[0] == "OK"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_no_backend_outlives_a_deadline(protocol: str, repository: ChangingRepository) -> None:
    """Whatever computes, and however: one that ignores the deadline is answered for."""
    repository.slow(600)
    with serving(repository.root) as gateway:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        if protocol == "http":
            body = {"inputs": [tensor], "parameters": {"timeout": 300_000}}
            reply = probes.post(gateway, "/v2/models/slow/infer", body)
            assert (reply.status_code, reply.json()) == (503, {"error": "Request timeout expired"})
        else:
            request = pb.ModelInferRequest(model_name="slow")
            request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
            request.raw_input_contents.append(bytes(16))
            request.parameters["timeout"].int64_param = 300_000
            answer = grpc_code(gateway, request, 10)
            assert answer == ("UNAVAILABLE", "Request timeout expired")


# -- a sender that stands still -------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """The port of a listener in this process."""
    listener = HttpListener(echo_body, bind("127.0.0.1", 0, "--http-port"))
    await listener.start()
    try:
        yield listener.port
    finally:
        await listener.drain(Deadline.after(2))


async def upload(port: int, length: int, *pieces: bytes, pause: float = 0) -> bytes:
    """The reply to a body said to be ``length`` long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: {length}\r\nconnection: close\r\n"
        writer.write(head.encode() + b"\r\n")
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause)  # the pace of the client, which is what is tested
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("pieces", [(), (b"ab",)], ids=["no body", "half a body"])
async def test_a_stalled_upload_is_refused(
    pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.2)
    async with listening() as port:
        head, _, body = (await upload(port, 4, *pieces)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert json.loads(body) == {"error": "Request Timeout"}


async def test_an_upload_that_is_slow_but_goes_on_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes within the limit, all of them together take longer."""
    monkeypatch.setattr(time_limits, "BODY_IDLE_SECONDS", 0.5)
    async with listening() as port:
        reply = await upload(port, 8, *[b"x"] * 8, pause=0.1)
    assert reply.startswith(b"HTTP/1.1 200 ")
    assert b"xxxxxxxx" in reply
