"""Inference by unmodified ``tritonclient``: one body of tests over every way of calling."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests.conformance import clients
from tests.conformance.clients import Ask, InferCaller, Output, bits
from tests.conformance.repository import FACTORS, IDENTITY, LABELS

ONE_TO_FOUR = np.array([[1, 2, 3, 4]], np.float32)
SAMPLES = clients.samples()
#: aiohttp's opinion of how tritonclient.http.aio sends large bodies.
CLIENT_MAY_BLOCK = pytest.mark.filterwarnings(
    "ignore:Sending a large body directly with raw bytes:ResourceWarning:aiohttp"
)
JSON_SAMPLES = sorted(set(SAMPLES) - {"FP16", "BF16"})


def test_a_float_model_answers(caller: InferCaller) -> None:
    result = caller.infer(Ask("x2", [("x", ONE_TO_FOUR)]))
    assert (result.model, result.version, result.id) == ("x2", "1", "")
    assert result.datatypes == {"y": "FP32"}
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * 2)


@pytest.mark.parametrize("datatype", sorted(SAMPLES))
def test_every_datatype_comes_back_bit_for_bit(caller: InferCaller, datatype: str) -> None:
    array = SAMPLES[datatype]
    result = caller.infer(Ask(IDENTITY[datatype], [("x", array)]))
    assert result.datatypes == {"y": datatype}
    assert bits(result.arrays["y"]) == bits(array)


@pytest.mark.parametrize("binary_output", [True, False])
@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("datatype", JSON_SAMPLES)
def test_every_datatype_survives_json_and_bytes_in_either_direction(
    http_caller: InferCaller, datatype: str, binary_input: bool, binary_output: bool
) -> None:
    array = SAMPLES[datatype]
    ask = Ask(
        IDENTITY[datatype],
        [("x", array)],
        outputs=[Output("y", binary=binary_output)],
        binary_input=binary_input,
    )
    assert bits(http_caller.infer(ask).arrays["y"]) == bits(array)


@pytest.mark.parametrize("datatype", ["FP32", "FP64"])
def test_nan_and_infinities_survive_json(http_caller: InferCaller, datatype: str) -> None:
    dtype = SAMPLES[datatype].dtype
    array = np.array([[np.nan, np.inf, -np.inf, 1.5]], dtype)
    ask = Ask(
        IDENTITY[datatype],
        [("x", array)],
        outputs=[Output("y", binary=False)],
        binary_input=False,
    )
    np.testing.assert_array_equal(http_caller.infer(ask).arrays["y"], array)


@pytest.mark.parametrize(
    ("datatype", "integer", "patterns"),
    [
        ("FP16", np.uint16, [0x7E01, 0xFE00, 0x7C00, 0xFC00]),
        ("BF16", np.uint16, [0x7FC1, 0xFFC0, 0x7F80, 0xFF80]),
        ("FP32", np.uint32, [0x7FC00001, 0xFFC00000, 0x7F800000, 0xFF800000]),
        ("FP64", np.uint64, [0x7FF8000000000001, 0xFFF8 << 48, 0x7FF << 52, 0xFFF << 52]),
    ],
)
def test_the_bits_of_nan_and_infinity_survive_as_bytes(
    caller: InferCaller, datatype: str, integer: type[np.unsignedinteger], patterns: list[int]
) -> None:
    array = np.array([patterns], integer).view(SAMPLES[datatype].dtype)
    result = caller.infer(Ask(IDENTITY[datatype], [("x", array)]))
    assert bits(result.arrays["y"]) == bits(array)


@pytest.mark.parametrize("datatype", sorted(SAMPLES))
def test_an_empty_tensor_comes_back_empty(caller: InferCaller, datatype: str) -> None:
    array = np.empty((3, 0), SAMPLES[datatype].dtype)
    result = caller.infer(Ask(IDENTITY[datatype], [("x", array)]))
    assert result.datatypes == {"y": datatype}
    assert result.arrays["y"].shape == (3, 0)


@pytest.mark.parametrize("datatype", JSON_SAMPLES)
def test_an_empty_tensor_comes_back_empty_as_json(http_caller: InferCaller, datatype: str) -> None:
    array = np.empty((2, 0), SAMPLES[datatype].dtype)
    ask = Ask(
        IDENTITY[datatype],
        [("x", array)],
        outputs=[Output("y", binary=False)],
        binary_input=False,
    )
    assert http_caller.infer(ask).arrays["y"].shape == (2, 0)


def test_strings_may_be_empty_hold_nul_and_be_long(caller: InferCaller) -> None:
    array = np.array([[b"", b"\0", b"a\0b", b"\0\0\0\0", b"z" * 100_000]], object)
    result = caller.infer(Ask(IDENTITY["BYTES"], [("x", array)]))
    assert bits(result.arrays["y"]) == bits(array)


def test_bytes_need_not_be_text_for_a_backend_that_does_not_mind(caller: InferCaller) -> None:
    array = np.array([[bytes(range(256)), b"\xff\xfe\0", b"\x80"]], object)
    result = caller.infer(Ask("echo_bytes", [("x", array)]))
    assert bits(result.arrays["y"]) == bits(array)


@CLIENT_MAY_BLOCK
def test_a_request_of_five_megabytes_is_answered(caller: InferCaller) -> None:
    array = np.arange(1_300_000, dtype=np.float32).reshape(1, -1)
    result = caller.infer(Ask(IDENTITY["FP32"], [("x", array)]))
    assert bits(result.arrays["y"]) == bits(array)


@CLIENT_MAY_BLOCK
def test_a_request_of_twenty_megabytes_is_answered(caller: InferCaller) -> None:
    array = np.arange(2_500_000, dtype=np.float64).reshape(2, -1)
    result = caller.infer(Ask(IDENTITY["FP64"], [("x", array)]))
    assert bits(result.arrays["y"]) == bits(array)


@pytest.mark.parametrize("rows", [1, 2, 7, 8])
def test_a_batch_is_answered_row_by_row(caller: InferCaller, rows: int) -> None:
    array = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    result = caller.infer(Ask("x2", [("x", array)]))
    assert bits(result.arrays["y"]) == bits(array * 2)


def test_inputs_are_identified_by_name_and_not_by_position(caller: InferCaller) -> None:
    a, b = np.array([[5, 6]], np.float32), np.array([[1, 2]], np.float32)
    for inputs in ([("a", a), ("b", b)], [("b", b), ("a", a)]):
        result = caller.infer(Ask("add_and_subtract", inputs))
        assert bits(result.arrays["total"]) == bits(a + b)
        assert bits(result.arrays["difference"]) == bits(a - b)


def test_outputs_come_in_the_order_asked_for_and_no_others(caller: InferCaller) -> None:
    inputs = [("a", ONE_TO_FOUR), ("b", ONE_TO_FOUR)]
    result = caller.infer(
        Ask("add_and_subtract", inputs, outputs=[Output("difference"), Output("total")])
    )
    assert list(result.arrays) == ["difference", "total"]
    assert not result.arrays["difference"].any()
    assert bits(result.arrays["total"]) == bits(ONE_TO_FOUR * 2)
    result = caller.infer(Ask("add_and_subtract", inputs, outputs=[Output("difference")]))
    assert list(result.arrays) == ["difference"]


def test_without_a_choice_all_outputs_come_in_the_order_of_the_model(caller: InferCaller) -> None:
    result = caller.infer(Ask("add_and_subtract", [("a", ONE_TO_FOUR), ("b", ONE_TO_FOUR)]))
    assert list(result.arrays) == ["total", "difference"]


def test_json_and_binary_outputs_may_be_mixed(http_caller: InferCaller) -> None:
    outputs = [Output("total", binary=False), Output("difference", binary=True)]
    result = http_caller.infer(
        Ask("add_and_subtract", [("a", ONE_TO_FOUR), ("b", ONE_TO_FOUR)], outputs=outputs)
    )
    assert bits(result.arrays["total"]) == bits(ONE_TO_FOUR * 2)
    assert bits(result.arrays["difference"]) == bits(ONE_TO_FOUR * 0)


def test_the_request_id_comes_back(caller: InferCaller) -> None:
    for request_id in ("42", "ключ-é", "x" * 1000):
        result = caller.infer(Ask("x2", [("x", ONE_TO_FOUR)], request_id=request_id))
        assert result.id == request_id


def test_parameters_of_every_type_are_taken(caller: InferCaller) -> None:
    parameters = {"text": "a", "whole": 7, "real": 0.5, "flag": True}
    result = caller.infer(Ask("x2", [("x", ONE_TO_FOUR)], parameters=parameters))
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * 2)


def test_a_priority_is_taken(caller: InferCaller) -> None:
    result = caller.infer(Ask("x2", [("x", ONE_TO_FOUR)], priority=3))
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * 2)


def test_a_generous_timeout_changes_nothing(caller: InferCaller) -> None:
    result = caller.infer(Ask("x2", [("x", ONE_TO_FOUR)], timeout_microseconds=20_000_000))
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * 2)


@pytest.mark.parametrize("version", sorted(FACTORS))
def test_the_version_asked_for_answers(caller: InferCaller, version: int) -> None:
    result = caller.infer(Ask("two_versions", [("x", ONE_TO_FOUR)], version=str(version)))
    assert result.version == str(version)
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * np.float32(FACTORS[version]))


def test_without_a_version_the_newest_answers(caller: InferCaller) -> None:
    result = caller.infer(Ask("two_versions", [("x", ONE_TO_FOUR)]))
    assert result.version == "2"
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * 3)


def test_a_model_without_batching_takes_its_whole_shape(caller: InferCaller) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bits(caller.infer(Ask("fixed", [("x", array)])).arrays["y"]) == bits(array)


def test_a_model_without_a_configuration_is_served(caller: InferCaller) -> None:
    result = caller.infer(Ask("auto", [("x", ONE_TO_FOUR)]))
    assert bits(result.arrays["y"]) == bits(ONE_TO_FOUR * 2)


def test_a_reshaped_scalar_travels_as_one_element(caller: InferCaller) -> None:
    array = np.array([[1], [2], [3]], np.float32)
    assert bits(caller.infer(Ask("scalar", [("x", array)])).arrays["y"]) == bits(array)


@pytest.mark.parametrize("binary", [True, False])
def test_classification_answers_the_largest_with_index_and_label(
    caller: InferCaller, binary: bool
) -> None:
    scores = np.array([[0.25, 2.5, -1.0], [3.0, 1.0, 2.0]], np.float32)
    outputs = [Output("y", binary=binary, class_count=2)]
    result = caller.infer(Ask("scores", [("x", scores)], outputs=outputs))
    assert result.datatypes == {"y": "BYTES"}
    expected = [
        [f"2.500000:1:{LABELS[1]}".encode(), f"0.250000:0:{LABELS[0]}".encode()],
        [f"3.000000:0:{LABELS[0]}".encode(), f"2.000000:2:{LABELS[2]}".encode()],
    ]
    assert bits(result.arrays["y"]) == bits(np.array(expected, object))


def test_classification_answers_no_more_classes_than_there_are(caller: InferCaller) -> None:
    scores = np.array([[0.5, 2.5, -1.0]], np.float32)
    result = caller.infer(Ask("scores", [("x", scores)], outputs=[Output("y", class_count=1000)]))
    assert result.arrays["y"].shape == (1, 3)


def test_classification_without_labels_answers_value_and_index(caller: InferCaller) -> None:
    result = caller.infer(
        Ask(IDENTITY["INT32"], [("x", np.array([[7, 9]], np.int32))], [Output("y", class_count=1)])
    )
    assert bits(result.arrays["y"]) == bits(np.array([[b"9:1"]], object))


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_are_answered(unary_caller: InferCaller, algorithm: str) -> None:
    array = np.zeros((2, 5000), np.float32)
    result = unary_caller.infer(
        Ask(IDENTITY["FP32"], [("x", array)], request_compression=algorithm)
    )
    assert bits(result.arrays["y"]) == bits(array)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_replies_are_understood(
    http_caller: InferCaller, algorithm: str, binary: bool
) -> None:
    array = np.arange(10_000, dtype=np.float32).reshape(2, -1)
    ask = Ask(
        IDENTITY["FP32"],
        [("x", array)],
        outputs=[Output("y", binary=binary)],
        request_compression=algorithm,
        response_compression=algorithm,
    )
    assert bits(http_caller.infer(ask).arrays["y"]) == bits(array)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_sixteen_bit_floats_are_refused_as_json(http_caller: InferCaller, datatype: str) -> None:
    array = np.ones((1, 2), {"FP16": np.float16, "BF16": ml_dtypes.bfloat16}[datatype])
    ask = Ask(IDENTITY[datatype], [("x", array)], outputs=[Output("y", binary=False)])
    error = http_caller.refusal(ask)
    assert isinstance(error, InferenceServerException)
    assert error.status() == "400"
    assert error.message().startswith(f"sending {datatype} data via JSON is not supported")
