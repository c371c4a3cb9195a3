"""Large messages in pieces: what the whole would give, and tensors that are never parsed."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from google.protobuf import empty_pb2
from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.oip import grpc_request
from modelport.gateway.protocols.oip.grpc_request import (
    LargeMessage,
    LargeRequest,
    decode,
    named_model,
)
from modelport.gateway.protocols.tfserving.grpc_request import PredictMessage
from modelport.gateway.wire import incremental_protobuf, tensor_proto
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.proto import serving_pb2, tensorflow_pb2, torchserve_inference_pb2
from modelport.gateway.wire.protobuf import varint
from tests import processor


def infer(chance: random.Random) -> Any:
    message = pb.ModelInferRequest(model_name="m" * chance.randrange(3), id="i")
    values = {
        "int64_contents": chance.randrange(-(2**62), 2**62),
        "fp32_contents": 1.5,
        "bool_contents": True,
        "bytes_contents": b"x" * chance.randrange(5),
    }
    for _ in range(chance.randrange(3)):
        item = message.inputs.add(name="x", datatype="FP32", shape=[chance.randrange(300)])
        item.parameters["a"].string_param = "x" * chance.randrange(50)
        for field, value in values.items():
            getattr(item.contents, field).extend([value] * chance.randrange(20))
    for _ in range(chance.randrange(4)):
        message.raw_input_contents.append(bytes(chance.randrange(60)))
    return message


def predict(chance: random.Random) -> Any:
    message = serving_pb2.PredictRequest()
    message.model_spec.name = "m"
    for number in range(chance.randrange(4)):
        tensor = message.inputs["k" * number]
        tensor.tensor_shape.dim.add(size=3)
        tensor.float_val.extend([1.0] * chance.randrange(30))
        tensor.int_val.extend([-1, 300] * chance.randrange(20))
        tensor.tensor_content = b"c" * chance.randrange(50)
    return message


def classify(chance: random.Random) -> Any:
    message = serving_pb2.ClassificationRequest()
    into = message.input.example_list_with_context
    for _ in range(chance.randrange(5)):
        features = into.examples.add().features.feature
        features["f"].int64_list.value.extend([chance.randrange(2**40)] * chance.randrange(20))
    into.context.features.feature["c"].bytes_list.value.extend([b"ab"] * chance.randrange(20))
    return message


def torchserve(chance: random.Random) -> Any:
    message = torchserve_inference_pb2.PredictionsRequest(model_name="a")
    message.input["data"] = b"x" * chance.randrange(100)
    message.input["é"] = b""
    return message


@pytest.mark.parametrize("make", [infer, predict, classify, torchserve])
def test_pieces_give_the_message_that_the_whole_gives(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(500):
        chance = random.Random(f"{make.__name__} {number}")
        monkeypatch.setattr(incremental_protobuf, "PIECE_BYTES", 8 * chance.randrange(1, 8))
        message = make(chance)
        content = message.SerializeToString()
        assert incremental_protobuf.parse(type(message), content) == message, number
        with pytest.raises(DecodeError):
            incremental_protobuf.parse(type(message), content + b"\x0a\x7f")


def strings(items: list[bytes], shape: list[int]) -> bytes:
    message = pb.ModelInferRequest(model_name="m", id="7")
    item = message.inputs.add(name="x", datatype="BYTES", shape=shape)
    item.contents.bytes_contents.extend(items)
    message.outputs.add(name="y")
    content: bytes = message.SerializeToString()
    return content


def test_a_million_strings_are_read_without_a_message_of_them() -> None:
    """They took 5.9 s."""
    items = [b"%d" % number for number in range(1_000_000)]
    content = strings(items, [len(items)])
    started = time.process_time()
    message = LargeRequest.FromString(content)
    assert type(message) is LargeMessage
    request = decode(message)
    assert processor.seconds_since(started) < 3
    assert request.inputs[0].data.tolist() == items
    assert (request.id, request.outputs) == ("7", ("y",))


@pytest.mark.parametrize("shape", [[999_999], [1_000_001], [2**40]])
def test_a_shape_of_other_strings_is_refused(shape: list[int]) -> None:
    content = strings([b"a"] * 1_000_000, shape)
    with pytest.raises(InvalidArgument, match="unexpected number of elements"):
        decode(LargeRequest.FromString(content))


@pytest.mark.parametrize(
    ("datatype", "field", "value"),
    [("FP32", "fp32_contents", 0.1), ("INT64", "int64_contents", -5), ("BOOL", "bool_contents", 1)],
)
def test_long_typed_contents_are_what_was_sent(datatype: str, field: str, value: Any) -> None:
    message = pb.ModelInferRequest(model_name="m")
    item = message.inputs.add(name="x", datatype=datatype, shape=[100_000])
    getattr(item.contents, field).extend([value] * 100_000)
    (found,) = decode(LargeRequest.FromString(message.SerializeToString())).inputs
    assert found.data.shape == (100_000,)
    assert (found.data == np.asarray(value, found.data.dtype)).all()


@pytest.mark.parametrize("field", ["raw_input_contents", "inputs", "outputs"])
def test_more_tensors_than_any_model_has_are_refused_before_they_are_built(field: str) -> None:
    tag = pb.ModelInferRequest.DESCRIPTOR.fields_by_name[field].number << 3 | 2
    content = b"\x0a\x01m" + bytes((tag, 0)) * 4_000_000
    started = time.process_time()
    with pytest.raises(InvalidArgument, match="more than 10000 tensors"):
        LargeRequest.FromString(content)
    assert processor.seconds_since(started) < 0.5


def test_a_large_request_names_its_model_first() -> None:
    message = pb.ModelInferRequest(model_name="m", model_version="3")
    assert named_model(message.SerializeToString()) == ("m", 3)
    with pytest.raises(InvalidArgument, match="must begin with its model_name"):
        named_model(b"\x3a\x00" + message.SerializeToString())


def test_a_head_without_end_is_left_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read on the event loop, for half a second."""

    def seconds(content: bytes) -> float:
        started = time.process_time()
        assert grpc_request.plain_request(content) is None
        return time.process_time() - started

    content = b"\x0a\x00" * 2_000_000
    assert seconds(content) < 0.01
    monkeypatch.setattr(grpc_request, "MAX_TEMPLATE_BYTES", len(content))
    assert seconds(content) > 0.05, "the known-bad variant is caught"


def test_more_items_than_any_request_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = serving_pb2.MultiInferenceRequest.DESCRIPTOR.fields_by_name["tasks"].number << 3 | 2
    with pytest.raises(InvalidArgument, match="more than 100000 items"):
        incremental_protobuf.parse(serving_pb2.MultiInferenceRequest, bytes((tasks, 0)) * 100_001)
    monkeypatch.setattr(incremental_protobuf, "MAX_STRINGS", 3)
    monkeypatch.setattr(incremental_protobuf, "MAX_NUMBERS", 3)
    monkeypatch.setattr(incremental_protobuf, "PIECE_BYTES", 2)
    incremental_protobuf._repeated.cache_clear()
    try:
        for kind, values in (
            (tensorflow_pb2.BytesList, [b"ab"] * 4),
            (tensorflow_pb2.Int64List, [1] * 4),
        ):
            with pytest.raises(InvalidArgument, match=r"'value' .* more than 3 values"):
                incremental_protobuf.parse(kind, kind(value=values).SerializeToString())
            few = kind(value=values[:3])
            assert incremental_protobuf.parse(kind, few.SerializeToString()) == few
    finally:
        incremental_protobuf._repeated.cache_clear()


def test_fields_and_tasks_are_limited() -> None:
    for message in (LargeRequest, PredictMessage()):
        with pytest.raises(InvalidArgument, match="more than 10000 tensors"):
            message.FromString(b"\x1a\x00" * 50_000)


def test_large_tensors_of_predict_are_read_in_pieces() -> None:
    request = serving_pb2.PredictRequest(output_filter=["y"])
    request.model_spec.name = "m"
    for name, count in (("small", 2), ("large", 100_000)):
        tensor = request.inputs[name]
        tensor.dtype = tensorflow_pb2.DT_STRING
        tensor.tensor_shape.dim.add(size=count)
        tensor.string_val.extend(b"%d" % number for number in range(count))
    found = PredictMessage().FromString(request.SerializeToString())
    assert found.names() == {"small", "large"}
    assert (set(found.tensors), set(found.message.inputs)) == ({"large"}, {"small"})
    assert (found.message.model_spec.name, list(found.message.output_filter)) == ("m", ["y"])
    large = tensor_proto.decode_large("large", found.tensors["large"]).data
    assert large.tolist() == [b"%d" % number for number in range(100_000)]


def _odd_fields(chance: random.Random) -> bytes:
    """Fields whose numbers are also 0, huge or written in more bytes, and some are cut off."""
    content = bytearray()
    for _ in range(chance.randrange(1, 5)):
        kind = chance.choice([0, 1, 2, 5])
        number = chance.choice([0, 1, 15, 40, 2**28, 2**29, 2**57])
        content += varint(number << 3 | kind)
        if chance.random() < 0.3:  # the same number, in more bytes
            content[-1] |= 0x80
            content += b"\x80" * chance.randrange(5) + b"\0"
        content += {0: b"\x05", 1: bytes(8), 2: b"\x02ab", 5: bytes(4)}[kind]
    if chance.random() < 0.2:
        content += bytes(chance.randrange(256) for _ in range(3))
    return bytes(content)


def test_fields_that_protobuf_refuses_are_refused() -> None:
    """Otherwise a check of the fields sees others than the runtime that reads the message."""
    accepted, refused = 0, 0
    for seed in range(20_000):
        content = _odd_fields(random.Random(seed))
        try:
            list(incremental_protobuf.fields(content))
        except DecodeError:
            refused += 1
            continue
        accepted += 1
        empty_pb2.Empty.FromString(content)  # raises DecodeError if protobuf refuses it
    assert accepted > 1000
    assert refused > 1000
