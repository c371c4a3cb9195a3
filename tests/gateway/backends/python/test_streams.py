"""Decoupled and asynchronous Python models, and their cancellation."""

from __future__ import annotations

import json
import queue
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask
from tests.gateway.backends.python.python_models import DECOUPLED
from tests.polling import eventually
from tests.server import Gateway, serving

#: Tells whether an earlier request has seen that it is cancelled.
NOTED = "return [reply(float(getattr(self, 'noted', 0)))]"


#: Waits for three requests, or for the timeout of one.
GATHERS = """
max_batch_size: 3
dynamic_batching {
  max_queue_delay_microseconds: 60000000
  default_queue_policy { allow_timeout_override: true }
}
"""


#: ``y`` of ``stream`` through an echo that waits for three requests.
OVERLAPS = """
platform: "ensemble"
input { name: "code" data_type: TYPE_STRING dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
ensemble_scheduling {
  max_inflight_requests: 3
  step {
    model_name: "stream" model_version: -1
    input_map { key: "code" value: "code" } output_map { key: "y" value: "between" }
  }
  step {
    model_name: "echo" model_version: -1
    input_map { key: "INPUT0" value: "between" } output_map { key: "OUTPUT0" value: "y" }
  }
}
"""
ECHO = """
backend: "identity" max_batch_size: 3
input { name: "INPUT0" data_type: TYPE_FP32 dims: 1 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 1 }
dynamic_batching { max_queue_delay_microseconds: 60000000 }
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = tmp_path_factory.mktemp("repository")
    python_models.coded(repository, "act")
    python_models.coded(repository, "stream", DECOUPLED)
    python_models.coded(repository, "later", DECOUPLED, asynchronous=True)
    python_models.coded(repository, "awaited", asynchronous=True)
    python_models.coded(repository, "gathers", DECOUPLED + GATHERS)
    python_models.coded(repository, "sequences", f"{DECOUPLED} sequence_batching {{ oldest {{}} }}")
    for name, extra in (("loops", DECOUPLED), ("retries", "")):
        iterative = "sequence_batching { iterative_sequence: true }"
        python_models.coded(repository, name, f"{extra} {iterative}")
    for name, text in (("overlaps", OVERLAPS), ("echo", ECHO)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
    with serving(repository, "--allow-python", "--python-max-seconds", "5") as gateway:
        yield gateway


def code_input(code: str, rows: int = 0) -> Any:
    shape = [rows, 1] if rows else [1]
    tensor = triton_grpc.InferInput("code", shape, "BYTES")
    tensor.set_data_from_numpy(np.full(shape, code, dtype=object))
    return tensor


def streamed(
    gateway: Gateway,
    model: str,
    *codes: str,
    count: int | None = None,
    batch: int = 0,
    **options: Any,
) -> list[tuple[str, Any]]:
    """Id and value or error of each message, until ``count`` or every request has its last."""
    found: queue.Queue[Any] = queue.Queue()
    rows: list[tuple[str, Any]] = []
    with triton_grpc.InferenceServerClient(gateway.grpc) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        for number, code in enumerate(codes):
            client.async_stream_infer(
                model, [code_input(code, batch)], request_id=str(number),
                enable_empty_final_response=True, **options,
            )  # fmt: skip
        ended = 0
        while ended < len(codes) if count is None else len(rows) < count:
            result, error = found.get(timeout=20)
            if error is not None:
                rows.append(("", str(error.message())))
                ended += 1
                continue
            response = result.get_response()
            if response.outputs:
                rows.append((response.id, result.as_numpy("y").tolist()))
            ended += response.parameters["triton_final_response"].bool_param
        client.stop_stream(cancel_requests=True)
    return rows


SENDS = """
s = requests[0].get_response_sender()
for n in range(3): s.send(reply(n))
s.send(flags=FINAL)
"""


@pytest.mark.parametrize("model", ["stream", "later"])
def test_a_decoupled_model_sends_any_number_of_responses(gateway: Gateway, model: str) -> None:
    rows = [("0", [0.0]), ("0", [1.0]), ("0", [2.0])]
    assert streamed(gateway, model, SENDS) == rows
    last = SENDS.replace("s.send(flags=FINAL)", "s.send(reply(9), FINAL)")
    assert streamed(gateway, model, last) == [*rows, ("0", [9.0])]
    assert streamed(gateway, model, "requests[0].get_response_sender().send(flags=FINAL)") == []


def test_the_last_response_says_so_if_the_end_comes_with_it(gateway: Gateway) -> None:
    """Clients that ask for no empty response wait for this one."""
    code = SENDS.replace("s.send(flags=FINAL)", "s.send(reply(9), FINAL)")
    found: queue.Queue[Any] = queue.Queue()
    with triton_grpc.InferenceServerClient(gateway.grpc) as client:
        client.start_stream(lambda result, error: found.put(result))
        client.async_stream_infer("stream", [code_input(code)])
        results = [found.get(timeout=20).get_response() for _ in range(4)]
        client.async_stream_infer("stream", [code_input(code)], enable_empty_final_response=True)
        results += [found.get(timeout=20).get_response() for _ in range(4)]
        client.stop_stream()
    assert found.empty()
    finals = [each.parameters["triton_final_response"].bool_param for each in results]
    assert finals == [False, False, False, True] * 2


def test_a_thread_may_send_after_execute_has_returned(gateway: Gateway) -> None:
    code = """
request = requests[0]
def work():
    for n in range(3):
        time.sleep(0.01)
        s.send(reply(n))
    s.send(flags=FINAL)
s = request.get_response_sender()
threading.Thread(target=work).start()
"""
    assert len(streamed(gateway, "stream", code, code)) == 6


def test_many_responses_arrive_in_order_although_the_window_is_small(gateway: Gateway) -> None:
    code = SENDS.replace("range(3)", "range(500)")
    assert streamed(gateway, "stream", code) == [("0", [float(n)]) for n in range(500)]


def test_an_asynchronous_decoupled_model_works_on_several_requests(gateway: Gateway) -> None:
    code = """
self.waiting = getattr(self, 'waiting', 0) + 1
s = requests[0].get_response_sender()
while self.waiting < 3: await asyncio.sleep(0.001)
s.send(reply(self.waiting), FINAL)
"""
    assert [value for _, value in streamed(gateway, "later", code, code, code)] == [[3.0]] * 3


@pytest.mark.parametrize(
    ("model", "code", "error"),
    [
        ("stream", "requests[0].get_response_sender().send(reply(1))\nraise ValueError('bad')",
         "Failed to process the request(s) for model 'stream_0', message: ValueError: bad"),
        ("later", "raise ValueError('bad')",
         "Failed to process the request(s) for model 'later_0', message: ValueError: bad"),
        ("stream", "return []",
         "Failed to process the request(s) for model 'stream_0', message: Python model "
         "'stream_0' is using the decoupled mode and the execute function must return None."),
        ("stream", "pass", "Python model 'stream_0' has returned no response to a request"),
        ("stream", "requests[0].get_response_sender().send(reply(1))",
         "Failed to process the request(s) for model 'stream_0', message: the model has dropped"),
        ("stream", "requests[0].get_response_sender().send(Response(error=Error('no')), FINAL)",
         "no"),
        ("stream", "s = requests[0].get_response_sender()\ns.send(reply(1))\nos._exit(1)",
         "Stub process 'stream_0' is not healthy. it has ended with status 1"),
    ],
)  # fmt: skip
def test_no_stream_stays_without_an_end(
    gateway: Gateway, model: str, code: str, error: str
) -> None:
    rows = streamed(gateway, model, code)
    assert rows[-1][1].startswith(error)
    assert streamed(gateway, model, SENDS)[-1] == ("0", [2.0])


SENDS_ONE = "s = requests[0].get_response_sender()\ns.send(reply(1))\n"


@pytest.mark.parametrize(
    ("model", "end"),
    [
        ("stream", "os._exit(1)"),
        ("later", "raise ValueError"),
        pytest.param("stream", "raise ValueError", marks=pytest.mark.thorough),
        pytest.param("stream", "os.kill(os.getpid(), 19)", marks=pytest.mark.thorough),
        pytest.param("later", "os._exit(1)", marks=pytest.mark.thorough),
        pytest.param("later", "os.kill(os.getpid(), 19)", marks=pytest.mark.thorough),
    ],
)
def test_an_error_over_http_is_the_status_or_the_last_event(
    gateway: Gateway, model: str, end: str
) -> None:
    """Before the first response it is the status; afterwards that of the stream stays 200."""
    status = 500 if end.startswith("raise") else 503
    for path, sent, expected in (
        ("generate_stream", "", status),
        ("generate", "", status),
        ("generate", SENDS_ONE, status),
        ("generate_stream", SENDS_ONE, 200),
    ):
        body = json.dumps({"code": sent + end}).encode()
        url = f"http://{gateway.http}/v2/models/{model}/{path}"
        try:
            with urllib.request.urlopen(url, body, timeout=20) as answer:
                found, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                found, text = error.code, error.read().decode()
        assert found == expected, text
        last = text.rstrip().rpartition("\n")[2].removeprefix("data: ")
        assert f"'{model}_0'" in json.loads(last)["error"]


def test_a_sender_that_is_kept_and_silent_ends_at_the_limit(gateway: Gateway) -> None:
    rows = streamed(gateway, "stream", "self.kept.append(requests[0].get_response_sender())")
    assert "--python-max-seconds" in rows[-1][1]


def test_coroutines_of_execute_are_awaited(gateway: Gateway) -> None:
    code = "await asyncio.sleep(0.001)\nreturn [reply(4)]"
    assert ask(gateway, code, "awaited")[1]["outputs"][0]["data"] == [4.0]
    assert ask(gateway, "raise ValueError('bad')", "awaited")[0] == 500
    assert ask(gateway, code, "awaited")[0] == 200
    whole = "async def run():\n    return [reply(5)]\nreturn run()"
    assert ask(gateway, whole)[1]["outputs"][0]["data"] == [5.0]


WAITS = """
until = time.monotonic() + 5
while not requests[0].is_cancelled() and time.monotonic() < until: time.sleep(0.001)
self.noted = getattr(self, 'noted', 0) + requests[0].is_cancelled()
return [reply(1)]
"""


def test_a_client_that_disconnects_is_noticed(gateway: Gateway) -> None:
    before = ask(gateway, NOTED)[1]["outputs"][0]["data"][0]
    body = json.dumps(
        {"inputs": [{"name": "code", "datatype": "BYTES", "shape": [1], "data": [WAITS]}]}
    ).encode()
    with socket.create_connection(("127.0.0.1", gateway.http_port)) as client:
        head = f"POST /v2/models/act/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
        client.sendall(head.encode() + b"\r\n" + body)
        busy(gateway, "act")
    assert ask(gateway, NOTED)[1]["outputs"][0]["data"] == [before + 1]


def test_a_deadline_over_grpc_is_noticed(gateway: Gateway) -> None:
    before = ask(gateway, NOTED)[1]["outputs"][0]["data"][0]
    with triton_grpc.InferenceServerClient(gateway.grpc) as client, pytest.raises(Exception):  # noqa: B017, PT011
        client.infer("act", [code_input(WAITS)], client_timeout=0.1)
    assert ask(gateway, NOTED)[1]["outputs"][0]["data"] == [before + 1]


def busy(gateway: Gateway, model: str) -> None:
    """Wait until a request of ``model`` is in progress."""
    wanted = f'modelport_requests_in_flight{{model="{model}",version="1"}} 1\n'
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with urllib.request.urlopen(gateway.metrics) as answer:
            if wanted in answer.read().decode():
                return
    raise AssertionError(f"no request of {model} is in progress")


#: The number of requests that one execution gets, as responses to each.
COUNTS = """
for request in requests:
    s = request.get_response_sender()
    for n in range(2): s.send(reply([len(requests)]))
    s.send(flags=FINAL)
"""


def test_requests_to_a_decoupled_model_are_executed_as_a_batch(gateway: Gateway) -> None:
    before = executions(gateway, "gathers")
    rows = streamed(gateway, "gathers", COUNTS, COUNTS, COUNTS, batch=1)
    assert sorted(rows) == [(id, [[3.0]]) for id in "001122"]
    # The batch is counted when its execution has ended, after the last response.
    assert eventually(lambda: executions(gateway, "gathers") - before) == 1
    failed = streamed(gateway, "gathers", *["raise ValueError('bad')"] * 3, batch=1)
    assert [value.partition(" to")[0] for _, value in failed] == ["Failed"] * 3
    ends = streamed(gateway, "gathers", *["os._exit(1)"] * 3, batch=1)
    assert [value.partition(".")[0] for _, value in ends] == [
        "Stub process 'gathers_0' is not healthy"
    ] * 3


def test_a_request_that_waits_for_its_batch_can_be_refused_and_withdrawn(gateway: Gateway) -> None:
    (row,) = streamed(gateway, "gathers", COUNTS, batch=1, timeout=50_000)
    assert row[1] == "Request timeout expired"
    with triton_grpc.InferenceServerClient(gateway.grpc) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("gathers", [code_input(COUNTS, 1)])
        busy(gateway, "gathers")
        client.stop_stream(cancel_requests=True)
    rows = streamed(gateway, "gathers", COUNTS, COUNTS, COUNTS, batch=1)
    assert {value[0][0] for _, value in rows} == {3.0}


def test_an_exception_after_the_last_response_is_logged(gateway: Gateway) -> None:
    code = f"{SENDS}\nraise ValueError('late')"
    assert len(streamed(gateway, "stream", code)) == 3
    row = gateway.wait_for("a model has failed after its last response", instance="stream_0")
    assert "ValueError: late" in row["error"]


LOOPS = """
seen = self.__dict__.setdefault(requests[0].request_id(), [])
seen.append(requests[0].flags())
s = requests[0].get_response_sender()
s.send(reply(len(seen), seen[0], seen[-1]))
if len(seen) < 3: requests[0].set_release_flags(2)
else: s.send(flags=FINAL)
"""


def test_a_request_that_its_model_reschedules_comes_again(gateway: Gateway) -> None:
    """Its first execution has the flag START; others come between, and it needs no id."""
    rows = streamed(gateway, "loops", LOOPS, LOOPS)
    for id in "01":
        assert [value for each, value in rows if each == id] == [[1, 1, 1], [2, 1, 0], [3, 1, 0]]
    assert len(rows) == 6
    code = "if self.calls == 1: requests[0].set_release_flags(2)\nelse: return [reply(self.calls)]"
    status, answer = ask(gateway, code, "retries")
    assert (status, answer["outputs"][0]["data"]) == (200, [2.0])


def test_a_request_that_is_rescheduled_for_ever_ends_with_its_client(gateway: Gateway) -> None:
    for_ever = "time.sleep(0.01); requests[0].set_release_flags(2)"
    with triton_grpc.InferenceServerClient(gateway.grpc) as client, pytest.raises(Exception):  # noqa: B017, PT011
        client.infer("retries", [code_input(for_ever)], client_timeout=0.1)
    assert ask(gateway, "return [reply(7)]", "retries")[0] == 200


def test_responses_of_a_decoupled_step_are_together_in_the_next_one(gateway: Gateway) -> None:
    assert streamed(gateway, "overlaps", SENDS) == [("0", [n]) for n in range(3)]
    assert executions(gateway, "echo") == 1
    assert streamed(gateway, "overlaps", SENDS) == [("0", [n]) for n in range(3)]


def executions(gateway: Gateway, model: str) -> int:
    with urllib.request.urlopen(f"http://{gateway.http}/v2/models/{model}/stats") as answer:
        return int(json.load(answer)["model_stats"][0]["execution_count"])


def test_the_next_request_of_a_sequence_begins_after_the_last_response_of_the_one_before(
    gateway: Gateway,
) -> None:
    twice = (
        "sender, number = requests[0].get_response_sender(), self.calls\n"
        "def later():\n"
        "  for _ in range(2):\n"
        "    time.sleep(0.02); sender.send(reply(number))\n"
        "  sender.send(flags=FINAL)\n"
        "threading.Thread(target=later).start()"
    )
    options = {"sequence_id": 3, "sequence_start": True}
    found = [value for _, value in streamed(gateway, "sequences", *[twice] * 3, **options)]
    values = [value for value in found if value is not None]
    assert values == sorted(values)
    assert len({*map(str, values)}) == 3
    assert len(values) == 6
