"""Answers of Python models: Triton's texts and codes, and its omissions mended."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from tests.gateway.backends.python import python_models
from tests.gateway.backends.python.asking import ask
from tests.server import Gateway, serving

PREFIX = "Failed to process the request(s) for model 'act_0', message: "


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    repository = tmp_path_factory.mktemp("repository")
    python_models.coded(repository, "act")
    flags = [
        f"--{port}-header-forward-pattern=^(x-my-|headers|triton_)" for port in ("http", "grpc")
    ]
    with serving(repository, "--allow-python", *flags) as gateway:
        yield gateway


def test_a_response_has_the_outputs_of_the_model(gateway: Gateway) -> None:
    status, document = ask(gateway, "return [reply(1, 2)]", id="seven")
    assert status == 200
    assert document["id"] == "seven"
    assert document["outputs"] == [
        {"name": "y", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
    ]


#: Code, status, and the error, which begins with PREFIX unless it begins with ``=``.
WRONG = [
    (
        "return []", 500,
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:0\n",
    ),
    (
        "return [reply(1), reply(2)]", 500,
        "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
        "InferenceRequest(s) size is:1, and InferenceResponse(s) size is:2\n",
    ),
    (
        "return (reply(1),)", 500,
        "Expected a list in the execute return, found type '<class 'tuple'>'.",
    ),
    (
        "return reply(1)", 500,
        "Expected a list in the execute return, found type "
        "'<class 'c_python_backend_utils.InferenceResponse'>'.",
    ),
    (
        "return [{'y': 1}]", 500,
        "Expected an 'InferenceResponse' object in the execute function return list, found type "
        "'<class 'dict'>'.",
    ),
    (
        "yield 1", 500,
        "Expected a list in the execute return, found type '<class 'generator'>'.",
    ),
    (
        "return [Response([None])]", 500,
        "TritonModelException: Output tensor for inference response should not be empty.\n\nAt:\n"
        "  request.py(2): run\n  model.py(",
    ),
    (
        "return [reply(1, name='')]", 500,
        "TritonModelException: Tensor name cannot be an empty string.",
    ),
    (
        "return [Response([Tensor('y', np.array(['a']))])]", 500,
        "TritonModelException: NumPy dtype is not supported.",
    ),
    (
        "return [Response([Tensor('y', np.array([1j]))])]", 500,
        "TritonModelException: NumPy dtype is not supported.",
    ),
    ("raise ValueError('bad')", 500, "ValueError: bad\n\nAt:\n  request.py(2): run\n  model.py("),
    ("raise KeyboardInterrupt", 500, "KeyboardInterrupt: <EMPTY MESSAGE>\n\nAt:\n"),
    ("raise StopIteration", 500, "StopIteration: <EMPTY MESSAGE>"),
    ("sys.exit(3)", 500, "SystemExit: 3\n\nAt:\n"),
    ("raise MemoryError('much')", 500, "MemoryError: much\n\nAt:\n"),
    (
        "class Odd(Exception):\n  def __str__(self): raise ValueError\nraise Odd", 500,
        "Odd: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>",
    ),
    *(
        (f"return [Response([], Error('no', Error.{code}))]", status, "=no")
        for code, status in (
            ("UNKNOWN", 400), ("INTERNAL", 500), ("NOT_FOUND", 404), ("INVALID_ARG", 400),
            ("UNAVAILABLE", 503), ("UNSUPPORTED", 501), ("ALREADY_EXISTS", 400), ("CANCELLED", 400),
        )
    ),
    # Better than Triton, which never answers, or passes the outputs on.
    ("return None", 500, "=Python model 'act_0' has returned no response to a request; "),
    ("return [None]", 500, "=Python model 'act_0' has returned no response to a request; "),
    ("requests[0].get_response_sender()", 500, "the model has dropped the sender"),
    ("return [Response()]", 500, "=output 'y' is missing in the model's response"),
    ("return [reply(1, name='z')]", 500, "=output 'y' is missing in the model's response"),
    (
        "return [Response([*reply(1).output_tensors(), *reply(2).output_tensors()])]", 500,
        "=output 'y' is in the model's response twice",
    ),
    (
        "requests[0].set_release_flags(2)", 500,
        "=Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which needs "
        "'sequence_batching { iterative_sequence: true }'",
    ),
    (
        "requests[0].set_release_flags(2)\nreturn [reply(1)]", 500,
        "Expected a None object in the execute function return list for reschduled request, found "
        "type '<class 'c_python_backend_utils.InferenceResponse'>'.",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("code", "status", "error"), WRONG, ids=[row[0][:50] for row in WRONG])
def test_a_wrong_answer_is_an_error_with_tritons_text(
    gateway: Gateway, code: str, status: int, error: str
) -> None:
    found, text = ask(gateway, code)
    expected = error[1:] if error.startswith("=") else PREFIX + error
    assert found == status
    assert text.startswith(expected)
    assert str(Path.cwd()) not in text
    assert "/" not in text.partition("At:")[2]
    assert ask(gateway, "return [reply(1)]")[0] == 200  # the same process serves on


@pytest.mark.parametrize(
    ("tensor", "datatype", "shape"),
    [
        ("np.array([1])", "INT64", [1]),
        ("np.float32([[1]])", "FP32", [1, 1]),
        ("np.array(1, np.float32)", "FP32", []),
    ],
)
def test_an_output_that_differs_from_the_configuration_is_passed_on(
    gateway: Gateway, tensor: str, datatype: str, shape: list[int]
) -> None:
    """The log says so once for each output."""
    for _ in range(2):
        status, document = ask(gateway, f"return [Response([Tensor('y', {tensor})])]")
        (output,) = document["outputs"]
        assert status == 200
        assert (output["datatype"], output["shape"]) == (datatype, shape)
    told = "an output differs from config.pbtxt and is passed on"
    rows = [row for row in gateway.logs if row["event"] == told]
    assert len(rows) == 1
    assert rows[0]["reason"].startswith("output 'y' must ")


def test_no_wrong_answer_has_ended_the_worker(gateway: Gateway) -> None:
    assert [row for row in gateway.logs if row["event"] == "a worker has ended"] == []


def test_a_sender_answers_after_execute_has_returned(gateway: Gateway) -> None:
    code = """
sender = requests[0].get_response_sender()
def later():
    time.sleep(0.01)
    sender.send(reply(5))
    sender.send(flags=FINAL)
threading.Thread(target=later).start()
"""
    assert ask(gateway, code)[1]["outputs"][0]["data"] == [5.0]


#: What a model does with its sender, and the error's text.
SENDERS = {
    "s.send(reply(1), 2)": "Unable to send response. Unsupported flag provided.",
    "s.send()": (
        "Inference Response object must be provided when the response flags is set to zero."
    ),
    "s.send(flags=FINAL)": (
        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
        "response."
    ),
    "s.send(reply(1), FINAL)\ns.send(reply(1))": (
        "Unable to send response. Response sender has been closed."
    ),
    "s.send(reply(1))\ns.send(reply(1))": (
        "Unable to send response. Non-decoupled model cannot send more than one response."
    ),
}


def told(code: str) -> str:
    """Code that fails with the text of the exception of ``code``, which has a sender ``s``."""
    lines = "\n".join(f"    {line}" for line in code.splitlines())
    return (
        f"s = requests[0].get_response_sender()\ntry:\n{lines}\n"
        "except pb.TritonModelException as e:\n    text = str(e)\n"
        "raise ValueError(text)"
    )


@pytest.mark.parametrize("code", SENDERS)
def test_a_sender_refuses_with_tritons_text(gateway: Gateway, code: str) -> None:
    status, found = ask(gateway, told(code))
    if "reply(1)" not in code or code.endswith("2)"):
        assert (status, found.partition("\n")[0]) == (500, f"{PREFIX}ValueError: {SENDERS[code]}")
    else:  # a response has been sent before
        assert status == 200
        kept = told(code).replace("raise ValueError(text)", "self.kept.append(text)")
        assert ask(gateway, kept)[0] == 200
        _, text = ask(gateway, "return [Response(error=Error(self.kept.pop()))]")
        assert text == SENDERS[code]


def test_a_request_has_its_fields(gateway: Gateway) -> None:
    code = """
import json
r = requests[0]
told = [r.request_id(), r.correlation_id(), r.flags(), r.timeout(), json.loads(r.parameters()),
        sorted(r.requested_output_names()), r.is_cancelled(), __import__("builtins").str(self.args)]
return [Response([], Error(json.dumps(told)))]
"""
    parameters = {
        "a": 1, "b": "two", "c": True, "sequence_id": 7, "sequence_start": True, "priority": 3,
        "timeout": 30_000_000,
    }  # fmt: skip
    _, text = ask(gateway, code, id="me", parameters=parameters)
    request_id, correlation, flags, timeout, own, outputs, cancelled, arguments = json.loads(text)
    assert (request_id, correlation, flags, timeout) == ("me", 7, 1, 30_000_000)
    assert own == {"a": 1, "b": "two", "c": True}
    assert (outputs, cancelled) == (["y"], False)
    assert "'model_instance_name': 'act_0'" in arguments
    assert "'model_version': '1'" in arguments
    assert "'model_instance_kind': 'CPU'" in arguments


PARAMETERS = "return [Response([], Error(requests[0].parameters()))]"
#: Fields that are forwarded, and one that is not.
FIELDS = {"x-my-b": 'a "quoted" \\ value', "X-My-C": "c", "other": "no"}
FORWARDED = {"x-my-a": "field", "x-my-b": 'a "quoted" \\ value', "x-my-c": "c"}


def test_fields_that_match_the_pattern_are_parameters_over_http(gateway: Gateway) -> None:
    fields = FIELDS | {"x-my-a": "field"}
    _, text = ask(gateway, PARAMETERS, headers=fields, parameters={"x-my-a": "own"})
    assert json.loads(text) == FORWARDED
    body = json.dumps({"code": PARAMETERS, "x-my-a": "own"}).encode()
    for path in ("generate", "generate_stream"):
        url = f"http://{gateway.http}/v2/models/act/{path}"
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(url, body, fields), timeout=30)
        with caught.value as error:
            answer = json.loads(error.read().removeprefix(b"data: "))
        assert json.loads(answer["error"]) == FORWARDED


def test_metadata_that_matches_the_pattern_is_parameters_over_grpc(gateway: Gateway) -> None:
    tensor = triton_grpc.InferInput("code", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([PARAMETERS], dtype=object))
    told: list[InferenceServerException] = []
    with triton_grpc.InferenceServerClient(gateway.grpc) as client:
        fields = {name.lower(): value for name, value in FIELDS.items()} | {"x-my-a": "field"}
        with pytest.raises(InferenceServerException) as caught:
            client.infer("act", [tensor], headers=fields, parameters={"x-my-a": "own"})
        client.start_stream(lambda result, error: told.append(error), headers=fields)
        client.async_stream_infer("act", [tensor])
        client.stop_stream()
        for error in (caught.value, *told):
            assert json.loads(error.message()) == FORWARDED
        with pytest.raises(InferenceServerException, match="Header 'triton_a' is reserved"):
            client.infer("act", [tensor], headers={"triton_a": "b"})


@pytest.mark.parametrize("name", ["headers", "triton_final_response"])
def test_a_reserved_field_that_matches_the_pattern_is_refused(gateway: Gateway, name: str) -> None:
    answer = ask(gateway, PARAMETERS, headers={name: "1"})
    told = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert answer == (400, told)


CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "UNAVAILABLE", "ALREADY_EXISTS", "CANCELLED")
STATUSES = {
    **dict(zip(CODES, CODES, strict=True)),
    **{"INVALID_ARG": "INVALID_ARGUMENT", "UNSUPPORTED": "UNIMPLEMENTED"},
}


@pytest.mark.parametrize(("code", "status"), STATUSES.items())
def test_every_code_of_an_error_has_its_status_over_grpc(
    gateway: Gateway, code: str, status: str
) -> None:
    tensor = triton_grpc.InferInput("code", [1], "BYTES")
    told = f"return [Response([], Error('no', Error.{code}))]"
    tensor.set_data_from_numpy(np.array([told], dtype=object))
    with (
        triton_grpc.InferenceServerClient(gateway.grpc) as client,
        pytest.raises(InferenceServerException, match=rf"\[StatusCode\.{status}\] no"),
    ):
        client.infer("act", [tensor])


def test_a_model_sees_no_arguments_of_its_process(gateway: Gateway) -> None:
    assert ask(gateway, "import sys; return [Response(error=Error(repr(sys.argv)))]")[1] == "['']"


@pytest.mark.parametrize("count", [0, 3, 70_000, 2_000_000])
def test_tensors_of_every_size_arrive_over_both_protocols(gateway: Gateway, count: int) -> None:
    code = (
        "x = pb.get_input_tensor_by_name(requests[0], 'x').as_numpy()\n"
        "assert x.flags.writeable\nx += 1\nreturn [Response([Tensor('y', x)])]"
    )
    sent = np.arange(count, dtype=np.float32)
    for kind, url in ((triton_http, gateway.http), (triton_grpc, gateway.grpc)):
        inputs = [kind.InferInput("code", [1], "BYTES"), kind.InferInput("x", [count], "FP32")]
        inputs[0].set_data_from_numpy(np.array([code], dtype=object))
        inputs[1].set_data_from_numpy(sent)
        with kind.InferenceServerClient(url) as client:
            found = client.infer("act", inputs).as_numpy("y")
        assert np.array_equal(found, sent + 1)


def test_an_error_has_its_status_over_grpc(gateway: Gateway) -> None:
    code = triton_grpc.InferInput("code", [1], "BYTES")
    code.set_data_from_numpy(
        np.array(["return [Response([], Error('none', Error.NOT_FOUND))]"], dtype=object)
    )
    with (
        triton_grpc.InferenceServerClient(gateway.grpc) as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("act", [code])
    assert caught.value.status() == "StatusCode.NOT_FOUND"
    assert caught.value.message() == "none"


def test_error_responses_count_as_failures(gateway: Gateway) -> None:
    def failures() -> int:
        url = f"http://{gateway.http}/v2/models/act/stats"
        with urllib.request.urlopen(url) as answer:
            stats = json.load(answer)["model_stats"][0]["inference_stats"]
        return int(stats["fail"]["count"])

    before = failures()
    ask(gateway, "return [Response([], Error('no'))]")
    assert failures() == before + 1
