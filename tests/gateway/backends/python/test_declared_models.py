"""Models of ``@modelport.model`` behind a gateway."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import modelport
from modelport.gateway.errors import Internal
from tests.gateway.backends.python import declared
from tests.polling import eventually

FILE = Path(declared.__file__)


@pytest.fixture(scope="module")
def server() -> Iterator[modelport.Server]:
    with modelport.testing.serve(FILE, allow_python=True) as server:
        yield server


@pytest.fixture(scope="module")
def url(server: modelport.Server) -> str:
    return server.http_url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[modelport.Client]:
    with modelport.Client(url) as client:
        yield client


def test_each_declaration_is_a_model_with_its_signature(client: modelport.Client) -> None:
    assert {status.name for status in client.models() if status.state == "READY"} == {
        *("score", "act", "calls counted", "Meeting", "Patient", "words", "characters"),
    }
    described = client.metadata("score")
    assert [(each.name, each.datatype, each.shape) for each in described.inputs] == [
        ("text", "BYTES", (-1, 1)), ("bias", "FP32", (-1, 1)),
    ]  # fmt: skip
    assert described.outputs[0].shape == (-1, 2)


def test_requests_of_equal_inputs_are_one_call(url: str) -> None:
    def ask(number: int) -> Any:
        bias = {"bias": np.full((1, 1), number, np.float32)} if number % 2 else {}
        with modelport.Client(url) as client:
            return client.infer("score", {"text": [["a" * number]], **bias})["output"].tolist()

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, range(9)))
    sizes = []
    for number, [[length, size]] in enumerate(answers):
        bias = number if number % 2 else 0
        assert length - bias == number
        sizes.append(size - bias)
    assert 1 < max(sizes) <= 8


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [(b"\xff", "input 'text' is not UTF-8"), (b"refuse me", "'refuse me' is refused")],
)
def test_an_input_that_is_wrong_fails_no_other_request_of_its_batch(
    url: str, wrong: bytes, reason: str
) -> None:
    """The second one passes the checks, and fails the call of the batch."""

    def ask(number: int) -> Any:
        with modelport.Client(url) as client:
            text = wrong if number == 4 else b"a"
            try:
                return client.infer("score", {"text": [[text]]})["output"][0, 0]
            except modelport.InvalidArgument as error:
                return str(error)

    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(ask, range(9)))
    assert answers.pop(4) == reason
    assert answers == [1] * 8


def test_a_request_of_several_items_gets_all_of_them(client: modelport.Client) -> None:
    found = client.infer("score", {"text": [["a"], ["über"]]})["output"]
    assert found.tolist() == [[1, 2], [4, 2]]


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("[1, 2]", None, ""),
        ("np.zeros(2)", Internal, "output 'output' must be FP32, but the model returns FP64; conv"),
        ("np.zeros(3, np.float32)", Internal, "output 'output' must have dims [2], but the model"),
        ("None", Internal, "output 'output' must be FP32, but the model returns NoneType"),
        ("{'z': [1, 2]}", Internal, "model 'act' must return the outputs output, not z"),
        ("1/0", Internal, "message: ZeroDivisionError: division by zero\n\nAt:\n  <string>(1)"),
        ("exit(3)", Internal, "message: SystemExit: 3"),
        ("os._exit(3)", modelport.Unavailable, "it has ended with status 3; it is restarted"),
        *(
            (f"(_ for _ in ()).throw(modelport.{kind}('no'))", getattr(modelport, kind), "no")
            for kind in (
                *("InvalidArgument", "NotFound", "Unavailable", "Unsupported", "AlreadyExists"),
                *("ModelportError", "TimedOut"),
            )
        ),
        ("modelport.infer('none', {'x': [1.0]})", modelport.NotFound, "unknown model: 'none'"),
        (
            "modelport.infer('act', {'code': ['[1, 2]']})", modelport.Unavailable,
            "model 'act' calls itself",
        ),
        (
            "modelport.infer('score', {'text': ['a']})", modelport.InvalidArgument,
            "unexpected shape for input 'text' for model 'score'. Expected [-1,1], got [1]",
        ),
        ("modelport.infer('score', {'text': [1j]})", modelport.InvalidArgument, "not supported"),
        ("next(modelport.infer_stream('words', {'text': ['a b']}))['output']", Internal, "BYTES"),
        (
            "list(modelport.infer_stream('words', {'text': ['a never']}))", modelport.Unsupported,
            "never say never",
        ),
        ("[len(list(modelport.infer_stream('words', {'text': ['a b c']}))), 0]", None, ""),
        ("modelport.infer('score', {'text': [['a']]})['output'][0]", None, ""),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_a_model_returns_or_raises_reaches_the_client(
    client: modelport.Client, code: str, error: type[modelport.ModelportError] | None, words: str
) -> None:
    if error is None:
        assert client.infer("act", {"code": [code]})["output"].shape == (2,)
        return
    with pytest.raises(modelport.ModelportError) as caught:
        client.infer("act", {"code": [code]})
    assert words in str(caught.value)
    assert str(FILE.parent) not in str(caught.value)
    # HTTP has one status for both.
    both = {modelport.AlreadyExists: modelport.InvalidArgument}
    assert caught.value.code == both.get(error, error).code


def test_a_class_is_loaded_once_and_says_itself_if_it_is_ready(client: modelport.Client) -> None:
    for number in (1, 2, 3):
        assert client.ready("calls counted")
        found = client.infer("calls counted", {"text": ["a"]})
        assert (found["text"].tolist(), found["calls"].tolist()) == ([b"A"], [number])
    assert not client.ready("calls counted")


def test_an_async_model_answers_requests_at_the_same_time(url: str) -> None:
    def ask(_: int) -> Any:
        with modelport.Client(url) as client:
            return client.infer("Meeting", {"model": ["score"]})["output"].tolist()

    with ThreadPoolExecutor(2) as pool:
        (length, *_), (other, *_) = pool.map(ask, range(2))
    assert (length, other) == (4, 4)


def test_an_async_model_is_cancelled_when_its_client_has_gone(
    url: str, client: modelport.Client
) -> None:
    with modelport.Client(url, timeout_seconds=0.2) as hasty, pytest.raises(modelport.TimedOut):
        hasty.infer("Patient", {"seconds": [1000.0]})
    eventually(lambda: client.infer("Patient", {"seconds": [0.0]})["output"].tolist() == [1])


def test_a_request_to_another_model_has_the_deadline_of_the_callers(
    server: modelport.Server, client: modelport.Client
) -> None:
    def cancelled() -> int:
        return int(client.infer("Patient", {"seconds": [0.0]})["output"][0])

    before = cancelled()
    code = "modelport.infer('Patient', {'seconds': np.array([1000.0])})"
    with (
        modelport.Client(server.grpc_url, timeout_seconds=0.3) as hasty,
        pytest.raises(modelport.TimedOut),
    ):
        hasty.infer("act", {"code": [code]})
    eventually(lambda: cancelled() == before + 1)
    assert client.infer("act", {"code": ["[1, 2]"]})["output"].tolist() == [1, 2]


def test_generators_stream(client: modelport.Client) -> None:
    for model, parts in (("words", [b"to", b"be"]), ("characters", [b"t", b"o", b" "])):
        responses = client.stream(model, {"text": ["to be"]})
        found = [response["output"][0] for response in responses]
        assert found[: len(parts)] == parts


def test_a_client_that_does_not_read_holds_up_no_other_stream(
    url: str, client: modelport.Client
) -> None:
    slow = client.stream("characters", {"text": ["a" * 1000], "times": [100_000]})
    next(slow)
    with modelport.Client(url, timeout_seconds=20) as other:

        def made() -> int:
            [response] = other.stream("characters", {"text": ["?"]})
            return int(response["output"][0])

        eventually(lambda: made() + 1 == made())  # the slow stream makes no more
        assert len(list(other.stream("characters", {"text": ["a" * 200]}))) == 200
    slow.close()


def test_an_error_ends_a_stream(client: modelport.Client) -> None:
    responses = client.stream("words", {"text": ["never"]})
    with pytest.raises(modelport.ModelportError, match="never say never"):
        next(responses)


def test_a_generator_gives_no_single_response(client: modelport.Client) -> None:
    with pytest.raises(modelport.Unsupported, match="decoupled transaction policy"):
        client.infer("words", {"text": ["a"]})


def test_text_that_is_not_utf_8_is_refused(client: modelport.Client) -> None:
    with pytest.raises(modelport.InvalidArgument, match="input 'code' is not UTF-8"):
        client.infer("act", {"code": [b"\xff"]})
