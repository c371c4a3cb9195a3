"""The errors that unmodified ``tritonclient`` raises: status and message, over every way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.conformance.clients import Ask, ControlCaller, InferCaller, Output, status
from tests.conformance.repository import SLOW_SECONDS

ROW = np.array([[1, 2, 3, 4]], np.float32)
PAIR = [("a", ROW), ("b", ROW)]


@dataclass(frozen=True)
class Refusal:
    """``message`` in full, or its beginning where it ends in an ellipsis."""

    ask: Ask
    http: int
    grpc: str
    message: str


REFUSALS = {
    "an unknown model": Refusal(
        Ask("nobody", [("x", ROW)]),
        404,
        "NOT_FOUND",
        "Request for unknown model: 'nobody' is not found",
    ),
    "an unknown version": Refusal(
        Ask("x2", [("x", ROW)], version="7"),
        404,
        "NOT_FOUND",
        "Request for unknown model: 'x2' version 7 is not found",
    ),
    "a datatype that the model does not take": Refusal(
        Ask("x2", [("x", ROW.astype(np.float64))]),
        400,
        "INVALID_ARGUMENT",
        "inference input 'x' data-type is 'FP64', but model 'x2' expects 'FP32'",
    ),
    "a shape that the model does not take": Refusal(
        Ask("x2", [("x", ROW[:, :3])]),
        400,
        "INVALID_ARGUMENT",
        "unexpected shape for input 'x' for model 'x2'. Expected [-1,4], got [1,3]…",
    ),
    "a rank that the model does not take": Refusal(
        Ask("x2", [("x", ROW[0])]),
        400,
        "INVALID_ARGUMENT",
        "unexpected shape for input 'x' for model 'x2'. Expected [-1,4], got [4]. NOTE: Setting a "
        "non-zero max_batch_size in the model config requires a batch dimension to be prepended "
        "to each input shape.",
    ),
    "a shape that a model without batching does not take": Refusal(
        Ask("fixed", [("x", np.zeros((1, 2, 3), np.float32))]),
        400,
        "INVALID_ARGUMENT",
        "unexpected shape for input 'x' for model 'fixed'. Expected [2,3], got [1,2,3].",
    ),
    "a batch that is too large": Refusal(
        Ask("x2", [("x", np.zeros((9, 4), np.float32))]),
        400,
        "INVALID_ARGUMENT",
        "inference request batch-size must be <= 8 for 'x2'",
    ),
    "a batch of nothing": Refusal(
        Ask("x2", [("x", np.zeros((0, 4), np.float32))]),
        400,
        "INVALID_ARGUMENT",
        "inference request batch-size must be >= 1 for 'x2'",
    ),
    "batches that differ": Refusal(
        Ask("add_and_subtract", [("a", ROW), ("b", np.zeros((2, 4), np.float32))]),
        400,
        "INVALID_ARGUMENT",
        "input 'b' batch size does not match other inputs for 'add_and_subtract'",
    ),
    "an unknown input": Refusal(
        Ask("x2", [("z", ROW)]),
        400,
        "INVALID_ARGUMENT",
        "unexpected inference input 'z' for model 'x2'",
    ),
    "an unknown input beside the known one": Refusal(
        Ask("x2", [("x", ROW), ("z", ROW)]),
        400,
        "INVALID_ARGUMENT",
        "unexpected inference input 'z' for model 'x2'",
    ),
    "an unknown output": Refusal(
        Ask("x2", [("x", ROW)], outputs=[Output("z")]),
        400,
        "INVALID_ARGUMENT",
        "unexpected inference output 'z' for model 'x2'",
    ),
    "a missing input": Refusal(
        Ask("add_and_subtract", PAIR[:1]),
        400,
        "INVALID_ARGUMENT",
        "expected 2 inputs but got 1 inputs for model 'add_and_subtract'. Got input(s) ['a'], but "
        "missing required input(s) ['b']. Please provide all required input(s).",
    ),
    "an input given twice": Refusal(
        Ask("add_and_subtract", [*PAIR, PAIR[0]]),
        400,
        "INVALID_ARGUMENT",
        "input 'a' already exists in request",
    ),
    "an input given twice in another's place": Refusal(
        Ask("add_and_subtract", [PAIR[0], PAIR[0]]),
        400,
        "INVALID_ARGUMENT",
        "input 'a' already exists in request",
    ),
    "an output asked for twice": Refusal(
        Ask("x2", [("x", ROW)], outputs=[Output("y"), Output("y")]),
        400,
        "INVALID_ARGUMENT",
        "output 'y' already exists in request",
    ),
    "a timeout that has passed": Refusal(
        Ask("x2", [("x", ROW)], timeout_microseconds=1),
        503,
        "UNAVAILABLE",
        "Request timeout expired",
    ),
    "classes of strings": Refusal(
        Ask("echo_bytes", [("x", np.array([[b"a"]], object))], [Output("y", class_count=1)]),
        400,
        "INVALID_ARGUMENT",
        "class result not available for output due to unsupported type 'BYTES': 'y' must hold "
        "numbers",
    ),
    "a model that fails": Refusal(
        Ask("failing", [("x", ROW)]), 500, "INTERNAL", "the model failed on purpose"
    ),
    "bytes that are not text for a model of text": Refusal(
        Ask("identity_bytes", [("x", np.array([[b"\xff"]], object))]),
        400,
        "INVALID_ARGUMENT",
        "input 'x' holds bytes that are not UTF-8, the encoding of ONNX strings; if the model only "
        "passes them on, set the parameter 'string_encoding' to 'latin-1' in its config.pbtxt",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_the_client_raises_status_and_message_for(caller: InferCaller, what: str) -> None:
    refusal = REFUSALS[what]
    error = caller.refusal(refusal.ask)
    if not caller.streams:  # tritonclient gives the errors of a stream no status
        assert error.status() == status(caller.transport, refusal.http, refusal.grpc)
    if refusal.message.endswith("…"):
        assert error.message().startswith(refusal.message[:-1])
    else:
        assert error.message() == refusal.message


@pytest.mark.parametrize("what", REFUSALS)
def test_after_an_error_the_same_client_goes_on_with(caller: InferCaller, what: str) -> None:
    caller.refusal(REFUSALS[what].ask)
    result = caller.infer(Ask("x2", [("x", ROW)]))
    np.testing.assert_array_equal(result.arrays["y"], ROW * 2)


def test_a_timeout_ends_the_wait_for_a_slow_model(caller: InferCaller) -> None:
    nonce = np.array([[1]], np.int64)
    timeout = int(SLOW_SECONDS / 10 * 1_000_000)
    error = caller.refusal(Ask("slow", [("x", nonce)], timeout_microseconds=timeout))
    assert error.message() == "Request timeout expired"


UNKNOWN = "Request for unknown model: 'nobody' is not found"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("get_model_metadata", UNKNOWN),
        ("get_model_config", UNKNOWN),
        ("get_inference_statistics", "requested model 'nobody' is not available"),
    ],
)
def test_asking_about_an_unknown_model_raises(
    control: ControlCaller, method: str, message: str
) -> None:
    error = control.refusal(method, "nobody")
    assert error.status() == status(control.transport, 404, "NOT_FOUND")
    assert error.message() == message


UNKNOWN_VERSION = "Request for unknown model: 'x2' version 9 is not found"


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("get_model_metadata", UNKNOWN_VERSION),
        ("get_model_config", UNKNOWN_VERSION),
        (
            "get_inference_statistics",
            "requested model version is not available for model 'x2'",
        ),
    ],
)
def test_asking_about_an_unknown_version_raises(
    control: ControlCaller, method: str, message: str
) -> None:
    error = control.refusal(method, "x2", "9")
    assert error.status() == status(control.transport, 404, "NOT_FOUND")
    assert error.message() == message


@pytest.mark.parametrize("method", ["load_model", "unload_model"])
@pytest.mark.parametrize("model", ["x2", "nobody"])
def test_without_explicit_control_loading_is_refused(
    control: ControlCaller, method: str, model: str
) -> None:
    error = control.refusal(method, model)
    assert error.status() == status(control.transport, 503, "UNAVAILABLE")
    assert error.message().startswith("explicit model load / unload is not allowed")
    assert control("is_model_ready", "x2")
