"""Python models that call other models (BLS), have metrics and logs, and are steps of ensembles."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask
from tests.gateway.backends.python.python_models import DECOUPLED
from tests.server import Gateway, serving

ENSEMBLE = """
platform: "ensemble"
input { name: "code" data_type: TYPE_STRING dims: 1 }
output { name: "z" data_type: TYPE_FP32 dims: -1 }
ensemble_scheduling {
  step {
    model_name: "act"
    model_version: -1
    input_map { key: "code" value: "code" }
    output_map { key: "y" value: "between" }
  }
  step {
    model_name: "double"
    model_version: -1
    input_map { key: "x" value: "between" }
    output_map { key: "y" value: "z" }
  }
}
"""
DOUBLE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(r, "x") for r in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", t.as_numpy() * len(requests))])
            for t in tensors
        ]
"""
WAITS = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        if len(requests) == 2:
            print("both are here")
        until = time.monotonic() + 10
        while len(requests) == 2 and time.monotonic() < until:
            if any(r.is_cancelled() for r in requests):
                break
            time.sleep(0.001)
        count = np.array([[sum(r.is_cancelled() for r in requests)]], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", count)]) for r in requests]
"""
X_TO_Y = """
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = tmp_path_factory.mktemp("repository")
    python_models.coded(repository, "act")
    python_models.coded(repository, "stream", DECOUPLED)
    python_models.coded(repository, "awaited", asynchronous=True)
    python_models.model(
        repository, "double", DOUBLE,
        X_TO_Y + "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 200000 "
        "preferred_batch_size: 2 }\n",
    )  # fmt: skip
    python_models.model(
        repository, "waits", WAITS,
        X_TO_Y + "max_batch_size: 2\ndynamic_batching { max_queue_delay_microseconds: 9000000 "
        "preferred_batch_size: 2 }\n",
    )  # fmt: skip
    python_models.coded(repository, "late")
    (repository / "all").mkdir()
    (repository / "all" / "config.pbtxt").write_text(ENSEMBLE.replace('"double"', '"act2"'))
    (repository / "all" / "1").mkdir()
    python_models.model(repository, "act2", DOUBLE, X_TO_Y)
    models = ("act", "stream", "awaited", "double", "act2", "all")
    flags = [word for name in models for word in ("--load-model", name)]
    with serving(
        repository, "--allow-python", "--model-control-mode", "explicit", *flags
    ) as gateway:
        yield gateway


def call(model: str, code: str, how: str = "exec()", **options: Any) -> str:
    """Code that calls ``model``, whose request has ``code``, and tells of its answer."""
    extra = "".join(f", {key}={value!r}" for key, value in options.items())
    return f"""
request = pb.InferenceRequest(model_name={model!r}, requested_output_names=["y"],
    inputs=[Tensor("code", np.array([{code.encode()!r}], object))]{extra})
answer = {"await " if "async" in how else ""}request.{how}
if answer.has_error(): return [Response(error=Error("told: " + answer.error().message()))]
return [Response(answer.output_tensors())]
"""


def test_a_model_calls_another(gateway: Gateway) -> None:
    assert ask(gateway, call("awaited", "return [reply(7)]"))[1]["outputs"][0]["data"] == [7.0]
    status, document = ask(gateway, call("act", "return [reply(8)]", "async_exec()"), "awaited")
    assert (status, document["outputs"][0]["data"]) == (200, [8.0])
    coroutine = "async def run():\n" + "\n".join(
        f"    {line}" for line in call("awaited", "return [reply(6)]", "async_exec()").splitlines()
    )
    assert ask(gateway, f"{coroutine}\nreturn run()")[1]["outputs"][0]["data"] == [6.0]


def test_calls_carry_the_fields_of_the_request(gateway: Gateway) -> None:
    told = (
        "r = requests[0]\nreturn [Response([], Error(str([r.request_id(), r.correlation_id(), "
        "r.flags(), r.timeout(), r.parameters()])))]"
    )
    fields = {"request_id": "me", "correlation_id": 9, "flags": 3, "parameters": {"a": 1}}
    _, text = ask(gateway, call("awaited", told, **fields))
    assert text == """told: ['me', 9, 3, 0, '{"a":1}']"""


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (
            call("none", ""),
            "told: Model none - Error when running inference: Request for unknown model: 'none' is "
            "not found",
        ),
        (
            call("double", ""),
            "told: Model double - Error when running inference: unexpected inference input 'code' "
            "for model 'double'",
        ),
        (
            call("awaited", "raise ValueError('bad')"),
            "told: Failed to process the request(s) for model 'awaited_0', message: ValueError: "
            "bad",
        ),
        (
            call("awaited", "return [Response(error=Error('no', Error.INVALID_ARG))]"),
            "told: no",
        ),
        (
            call("stream", ""),
            "told: Model stream - Error when running inference: Model stream is using the "
            "decoupled. The current BLS request call doesn't support",
        ),
        (
            call("awaited", "", parameters={"a": 1.5}),
            "Failed to process the request(s) for model 'act_0', message: TritonModelException: "
            "Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        (call("act", ""), "told: model 'act' calls itself, and each of its instances waits"),
    ],
)
def test_a_failed_call_has_tritons_text(gateway: Gateway, code: str, text: str) -> None:
    status, found = ask(gateway, code)
    assert status == 500
    assert found.startswith(text)
    assert ask(gateway, "return [reply(1)]")[0] == 200


def test_a_call_to_oneself_over_another_model_ends(gateway: Gateway) -> None:
    inner = call("act", "return [reply(1)]", "async_exec()")
    status, text = ask(gateway, call("awaited", inner))
    assert status == 500
    assert "calls itself" in text


def test_a_decoupled_model_is_called_by_an_iterator(gateway: Gateway) -> None:
    inner = (
        "s = requests[0].get_response_sender()\nfor n in range(5): s.send(reply(n))\n"
        "s.send(flags=FINAL)"
    )
    code = f"""
request = pb.InferenceRequest(model_name="stream", requested_output_names=["y"],
    inputs=[Tensor("code", np.array([{inner.encode()!r}], object))])
responses = request.exec(decoupled=True)
values = [t.as_numpy()[0] for r in responses for t in r.output_tensors()]
assert [len(r.output_tensors()) for r in responses] == [1] * 5 + [0]  # the end came by itself
assert values == [t.as_numpy()[0] for r in responses for t in r.output_tensors()]
first = next(iter(request.exec(decoupled=True)))
other = request.exec(decoupled=True)
next(other); other.cancel()
assert [r.error().code() for r in other] == [Error.CANCELLED]
other = request.exec(decoupled=True)
assert [len([next(other)]), len(list(other)), len(list(other))] == [1, 5, 6]
return [reply(*values)]
"""
    assert ask(gateway, code)[1]["outputs"][0]["data"] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("model", ["act", "awaited"])
def test_a_coroutine_waits_for_the_first_response_beside_others(
    gateway: Gateway, tmp_path: Path, model: str
) -> None:
    """The called model responds when another coroutine has made a file."""
    flag = tmp_path / "flag"
    inner = (
        "import os, time\ns = requests[0].get_response_sender()\n"
        f"for _ in range(300):\n    if os.path.exists({str(flag)!r}): break\n    time.sleep(0.01)\n"
        f"s.send(reply(os.path.exists({str(flag)!r})))\ns.send(reply(2))\ns.send(flags=FINAL)"
    )
    code = f"""
request = pb.InferenceRequest(model_name="stream", requested_output_names=["y"],
    inputs=[Tensor("code", np.array([{inner.encode()!r}], object))])
async def called():
    responses = await request.async_exec(decoupled=True)
    return [t.as_numpy()[0] for r in responses for t in r.output_tensors()]
async def cancelled():
    try:
        await asyncio.wait_for(request.async_exec(decoupled=True), 0.001)
    except TimeoutError:
        open({str(flag)!r}, "w").close()
async def both():
    values, _ = await asyncio.gather(called(), cancelled())
    return [reply(*values)]
return {"await both()" if model == "awaited" else "both()"}
"""
    status, document = ask(gateway, code, model)
    assert (status, document["outputs"][0]["data"]) == (200, [1.0, 2.0])
    assert ask(gateway, "return [reply(1)]", model)[0] == 200


def test_an_ordinary_model_has_one_response_for_an_iterator(gateway: Gateway) -> None:
    code = call("awaited", "return [reply(1)]").partition("answer = ")[0]
    code += "return [reply(len(list(request.exec(decoupled=True))))]"
    assert ask(gateway, code)[1]["outputs"][0]["data"] == [1.0]


def test_a_model_loads_and_unloads_others(gateway: Gateway) -> None:
    code = """
told = [pb.is_model_ready("late")]
pb.load_model("late")
told += [pb.is_model_ready("late"), pb.is_model_ready("late", "1"), pb.is_model_ready("late", "2")]
pb.unload_model("late")
told += [pb.is_model_ready("late")]
pb.unload_model("no_such")
try: pb.load_model("no_such")
except pb.TritonModelException as error: return [Response(error=Error(f"{told} {error}"))]
"""
    assert ask(gateway, code)[1] == (
        "[False, True, True, False, False] Failed to load model: failed to load 'no_such', failed "
        "to poll from model repository"
    )


def test_a_model_loads_another_from_files(gateway: Gateway) -> None:
    code = """
import pathlib
model = pathlib.Path(pb.get_model_dir(), "model.py").read_bytes()
files = {"file:3/model.py": model, "file:3/empty": b"", "file:3/large": bytes(100_000)}
config = json.dumps({"backend": "python", "input": CODE, "output": [
    {"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]})
told = []
for given, sent in (("", files), (config, {"3/model.py": model}), (config, {"file:../m": b"a"})):
    try: pb.load_model("sent", given, sent)
    except pb.TritonModelException as error: told.append(str(error))
pb.load_model("sent", config, files)
told.append(pb.is_model_ready("sent", "3"))
pb.unload_model("sent")
return [Response(error=Error(str([*told, pb.is_model_ready("sent")])))]
"""
    code = code.replace("CODE", '[{"name": "code", "data_type": "TYPE_STRING", "dims": [1]}]')
    told = ask(gateway, "import json" + code)[1]
    assert "need the parameter 'config'" in told
    assert "'3/model.py' does not begin with 'file:'" in told
    assert "file '../m' must be a path" in told
    assert told.endswith(", True, False]")


def test_metrics_are_shown_at_once_and_go_with_their_model(gateway: Gateway) -> None:
    def shown() -> list[str]:
        with urllib.request.urlopen(gateway.metrics) as answer:
            lines = answer.read().decode().splitlines()
        return sorted(line for line in lines if "mine_" in line)

    code = """
labels = {"a": "b"}
counter = pb.MetricFamily("mine_count", "Counts", pb.MetricFamily.COUNTER).Metric(labels)
gauge = pb.MetricFamily("mine_gauge", "Gauge", pb.MetricFamily.GAUGE).Metric(labels)
times = pb.MetricFamily("mine_times", "Times", pb.MetricFamily.HISTOGRAM).Metric(buckets=[1, 2])
pb.MetricFamily("mine_plain", "Plain", pb.MetricFamily.HISTOGRAM).Metric(buckets=[]).observe(3)
for n in range(3): counter.increment(1.5)
gauge.set(7); gauge.increment(-2)
for n in (0.5, 1.5, 9): times.observe(n)
assert (counter.value(), gauge.value()) == (4.5, 5.0), (counter.value(), gauge.value())
for wrong in ("counter.increment(-1)", "counter.set(1)", "times.value()",
              "pb.MetricFamily('mine_count', '', pb.MetricFamily.GAUGE)",
              "pb.MetricFamily('nv_inference_count', '', pb.MetricFamily.COUNTER)"):
    try: eval(wrong, dict(counter=counter, times=times, pb=pb))
    except pb.TritonModelException as error: print(error)
    else: raise AssertionError(wrong)
return [reply(1)]
"""
    control(gateway, "late", "load")
    assert ask(gateway, code, "late")[0] == 200
    assert shown() == [
        "# HELP mine_count Counts",
        "# HELP mine_gauge Gauge",
        "# HELP mine_plain Plain",
        "# HELP mine_times Times",
        "# TYPE mine_count counter",
        "# TYPE mine_gauge gauge",
        "# TYPE mine_plain histogram",
        "# TYPE mine_times histogram",
        'mine_count{a="b"} 4.5',
        'mine_gauge{a="b"} 5',
        'mine_plain_bucket{le="+Inf"} 1',
        "mine_plain_count 1",
        "mine_plain_sum 3",
        'mine_times_bucket{le="+Inf"} 3',
        'mine_times_bucket{le="1"} 1',
        'mine_times_bucket{le="2"} 2',
        "mine_times_count 3",
        "mine_times_sum 11",
    ]
    control(gateway, "late", "unload")
    assert shown() == []


def control(gateway: Gateway, model: str, verb: str) -> None:
    url = f"http://{gateway.http}/v2/repository/models/{model}/{verb}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}")):
        pass


def test_one_request_of_a_batch_is_cancelled_alone(gateway: Gateway) -> None:
    """Its batch-mate is answered, and tells that the other was cancelled."""

    def body(number: int) -> bytes:
        row = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [number]}
        return json.dumps({"inputs": [row]}).encode()

    control(gateway, "waits", "load")
    url = f"http://{gateway.http}/v2/models/waits/infer"
    with socket.create_connection(("127.0.0.1", gateway.http_port)) as client:
        head = f"POST /v2/models/waits/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body(1))}"
        client.sendall(head.encode() + b"\r\n\r\n" + body(1))
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            asked = thread.submit(urllib.request.urlopen, urllib.request.Request(url, body(2)))
            gateway.wait_for("model output", line="both are here")
            client.close()
            with asked.result(20) as answer:
                assert json.load(answer)["outputs"][0]["data"] == [1.0]


def test_texts_and_numbers_that_are_no_json_are_answered(gateway: Gateway) -> None:
    status, text = ask(gateway, "return [Response(error=Error(chr(0xd800)))]")
    assert (status, text) == (500, "?")
    nan = "Response(reply(1).output_tensors(), None, {'a': float('nan')})"
    status, text = ask(gateway, f"return [{nan}]")
    assert (status, text.partition("Exception: ")[2][:17]) == (500, "Expect parameters")
    status, text = ask(gateway, f"requests[0].get_response_sender().send({nan}, FINAL)")
    assert (status, text.partition("Exception: ")[2][:17]) == (500, "Expect parameters")
    ended = [row["reason"] for row in gateway.logs if row["event"] == "a worker has ended"]
    assert not any("protocol" in reason for reason in ended)


def test_a_dynamic_batch_is_requests_side_by_side(gateway: Gateway) -> None:
    def asked(number: int) -> Any:
        row = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [number]}
        url = f"http://{gateway.http}/v2/models/double/infer"
        body = json.dumps({"inputs": [row]}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, body)) as answer:
            return json.load(answer)["outputs"][0]["data"]

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(asked, (1, 2)))
    assert found == [[2.0], [4.0]]


def test_an_ensemble_has_steps_in_python(gateway: Gateway) -> None:
    status, document = ask(gateway, "return [reply(4)]", "all")
    assert (status, document["outputs"][0]["data"]) == (200, [4.0])
    status, text = ask(gateway, "return [Response(error=Error('no', Error.NOT_FOUND))]", "all")
    assert (status, text) == (404, "in ensemble 'all', no")


def test_records_of_the_logger_have_the_callers_place(gateway: Gateway) -> None:
    assert ask(gateway, "pb.Logger.log_warn('look\\nhere')\nreturn [reply(1)]")[0] == 200
    row = gateway.wait_for("look\nhere")
    assert (row["level"], row["instance"]) == ("warning", "act_0")
    assert row["file"] == "request.py:2"
