"""Batches of a real gateway, over both protocols: requests gather while a long one runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from modelport.gateway.telemetry import FAILURE_REASONS
from tests import models
from tests.faults import probes
from tests.faults.probes import Background, ChangingRepository, elapsed
from tests.polling import eventually
from tests.server import Gateway, serving
from tests.thorough import thorough

ROWS = 1000
FACTOR = 3
POISON = 5000
#: How long the request takes while which others gather.
LONG_SECONDS = 1.0
CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_INT64 dims: 2 }
output { name: "y" data_type: TYPE_INT64 dims: 1 }
dynamic_batching { %s }
"""
IMPATIENT = "default_queue_policy { default_timeout_microseconds: 100000 }"
#: Each for one test: later it is known beforehand that a second one would wait too long.
IMPATIENT_MODELS = ["impatient_a", "impatient_b"]
Outcome = tuple[str, Any]
#: A model, a nonce and how many turns to take; the code and the answer or the message.
Ask = Callable[..., Outcome]


def gather(path: Path) -> None:
    """``y`` is 3 times the first of each row, by a table that ends; the second ones' maximum is how
    many turns a loop takes meanwhile."""
    loop = helper.make_graph(
        [
            helper.make_node("Identity", ["more"], ["still"]),
            helper.make_node("Add", ["sum", "one"], ["next"]),
        ],
        "loop",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("more", TensorProto.BOOL, []),
            helper.make_tensor_value_info("sum", TensorProto.INT64, [1]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.INT64, [1]),
        ],
    )
    nodes = [
        helper.make_node("Split", ["x"], ["nonce", "turns"], axis=1, num_outputs=2),
        helper.make_node("ReduceMax", ["turns"], ["most"], keepdims=0),
        helper.make_node("Loop", ["most", "", "zero"], ["total"], body=loop),
        helper.make_node("Sub", ["total", "most"], ["nothing"]),
        helper.make_node("Gather", ["table", "nonce"], ["looked up"]),
        helper.make_node("Add", ["looked up", "nothing"], ["y"]),
    ]
    constants = {"zero": [0], "one": [1], "table": np.arange(ROWS) * FACTOR}
    models.save(
        path,
        helper.make_graph(
            nodes,
            "gather",
            [helper.make_tensor_value_info("x", TensorProto.INT64, ["batch", 2])],
            [helper.make_tensor_value_info("y", TensorProto.INT64, ["batch", 1])],
            [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in constants.items()],
        ),
    )


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = ChangingRepository(tmp_path_factory.mktemp("repository"))
    for model, policy in (("patient", ""), *((model, IMPATIENT) for model in IMPATIENT_MODELS)):
        repository.config(CONFIG % policy, model)
        gather(repository.file(model=model))
    with serving(repository.root) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[Ask]:
    with httpx.Client(base_url=f"http://{gateway.http}", timeout=30) as client:

        def ask(model: str, nonce: int, turns: int = 0) -> Outcome:
            tensor = {"name": "x", "datatype": "INT64", "shape": [1, 2], "data": [nonce, turns]}
            reply = client.post(f"/v2/models/{model}/infer", json={"inputs": [tensor]})
            if reply.status_code == 200:
                return "OK", reply.json()["outputs"][0]["data"][0]
            return {503: "UNAVAILABLE", 500: "INTERNAL"}[reply.status_code], reply.json()["error"]

        yield ask


@pytest.fixture(scope="module")
def stub(gateway: Gateway) -> Iterator[Any]:
    with grpc.insecure_channel(gateway.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def message(model: str, nonce: int, turns: int = 0) -> Any:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="INT64", shape=[1, 2])
    request.raw_input_contents.append(np.array([nonce, turns], np.int64).tobytes())
    return request


@pytest.fixture(scope="module")
def over_grpc(stub: Any) -> Ask:
    def ask(model: str, nonce: int, turns: int = 0) -> Outcome:
        try:
            reply = stub.ModelInfer(message(model, nonce, turns), timeout=30)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", int(np.frombuffer(reply.raw_output_contents[0], np.int64)[0])

    return ask


@pytest.fixture(scope="module")
def unused() -> Iterator[str]:
    return iter(IMPATIENT_MODELS)


@pytest.fixture(scope="module")
def ask(request: pytest.FixtureRequest) -> Ask:
    asked: Ask = request.getfixturevalue(request.param)
    return asked


@pytest.fixture(scope="module")
def long(http: Ask) -> int:
    """So many turns take ``LONG_SECONDS``."""
    with elapsed() as so_far:
        assert http("patient", 0, 100_000)[0] == "OK"
        return int(100_000 * LONG_SECONDS / so_far())


def pending(gateway: Gateway, model: str, number: int) -> None:
    eventually(
        lambda: probes.metric(gateway, "modelport_requests_in_flight", model=model) == number,
        f"{number} pending",
    )


def statistics(gateway: Gateway, model: str) -> Counter[str]:
    """Inferences, executions, and executions by the size of the batch."""
    url = f"http://{gateway.http}/v2/models/{model}/stats"
    document = httpx.get(url).json()["model_stats"][0]
    counts = {
        f"batch {b['batch_size']}": b["compute_infer"]["count"] for b in document["batch_stats"]
    }
    return Counter(
        counts, inferences=document["inference_count"], executions=document["execution_count"]
    )


def gathered(
    gateway: Gateway, ask: Ask, background: Background, long: int, *nonces: int
) -> list[Future[Outcome]]:
    """Requests that wait, all of them, while a long one runs, which is the first."""
    replies = [background(ask, "patient", 1, long)]
    pending(gateway, "patient", 1)
    replies += [background(ask, "patient", nonce) for nonce in nonces]
    pending(gateway, "patient", 1 + len(nonces))
    assert not replies[0].done(), "the long one is not long enough"
    return replies


@pytest.mark.parametrize("ask", ["over_grpc", thorough("http")], indirect=True, scope="module")
def test_requests_that_wait_run_as_one_and_the_statistics_say_so(
    ask: Ask, gateway: Gateway, background: Background, long: int
) -> None:
    before = statistics(gateway, "patient")
    executed = probes.metric(gateway, "exec_count", model="patient")
    replies = gathered(gateway, ask, background, long, *range(10, 17))
    assert [reply.result(30) for reply in replies] == [
        ("OK", FACTOR * nonce) for nonce in (1, *range(10, 17))
    ]
    assert statistics(gateway, "patient") - before == {
        "inferences": 8, "executions": 2, "batch 1": 1, "batch 7": 1
    }  # fmt: skip
    assert probes.metric(gateway, "exec_count", model="patient") == executed + 2


@pytest.mark.parametrize("ask", ["http", thorough("over_grpc")], indirect=True, scope="module")
def test_one_poison_request_of_eight_fails_alone(
    ask: Ask, gateway: Gateway, background: Background, long: int
) -> None:
    replies = gathered(gateway, ask, background, long, 2, 3, 4, POISON, 5, 6, 7)
    outcomes = [reply.result(30) for reply in replies]
    code, reason = outcomes.pop(4)
    assert code == "INTERNAL"
    assert "inference failed" in reason
    assert outcomes == [("OK", FACTOR * nonce) for nonce in range(1, 8)]
    assert ask("patient", 9) == ("OK", 27)


@pytest.mark.parametrize("ask", ["http", thorough("over_grpc")], indirect=True, scope="module")
def test_a_request_that_waits_longer_than_its_policy_allows_is_refused_and_never_computed(
    ask: Ask, gateway: Gateway, background: Background, long: int, unused: Iterator[str]
) -> None:
    model = next(unused)
    before = statistics(gateway, model)
    running = background(ask, model, 1, long)
    pending(gateway, model, 1)
    assert ask(model, 2) == ("UNAVAILABLE", "Request timeout expired")
    assert not running.done()
    assert running.result(30) == ("OK", FACTOR)
    assert statistics(gateway, model) - before == {
        "inferences": 1, "executions": 1, "batch 1": 1
    }  # fmt: skip


def test_a_client_that_goes_while_it_waits_is_left_out_and_the_others_are_answered(
    over_grpc: Ask, stub: Any, gateway: Gateway, background: Background, long: int
) -> None:
    before = statistics(gateway, "patient")
    replies = gathered(gateway, over_grpc, background, long, 2, 3)
    gone = stub.ModelInfer.future(message("patient", POISON), timeout=30)
    pending(gateway, "patient", 4)
    gone.cancel()
    pending(gateway, "patient", 3)
    assert [reply.result(30) for reply in replies] == [("OK", FACTOR * n) for n in (1, 2, 3)]
    assert statistics(gateway, "patient") - before == {
        "inferences": 3, "executions": 2, "batch 1": 1, "batch 2": 1
    }  # fmt: skip


def test_every_request_is_counted_once_however_it_ends(
    over_grpc: Ask, stub: Any, gateway: Gateway, background: Background, long: int
) -> None:
    def ends() -> Counter[str]:
        counts = {
            reason: probes.metric(gateway, "request_failure", model="patient", reason=reason)
            for reason in FAILURE_REASONS
        }
        success = probes.metric(gateway, "request_success", model="patient")
        return Counter({key: int(count) for key, count in counts.items()}, success=int(success))

    before, computed = ends(), statistics(gateway, "patient")
    replies = gathered(gateway, over_grpc, background, long, 2, POISON, 3)
    gone = stub.ModelInfer.future(message("patient", 4), timeout=30)
    pending(gateway, "patient", 5)
    gone.cancel()
    wrong = message("patient", 5)
    wrong.inputs[0].shape[:] = [2, 1]
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(wrong, timeout=30)
    assert [reply.result(30)[0] for reply in replies] == ["OK", "OK", "INTERNAL", "OK"]
    pending(gateway, "patient", 0)
    assert ends() - before == {"success": 3, "CANCELED": 1, "BACKEND": 1, "OTHER": 1}
    # The batch with the poison in it failed; each of it had a try of its own.
    assert statistics(gateway, "patient") - computed == {
        "inferences": 3, "executions": 3, "batch 1": 3
    }  # fmt: skip
