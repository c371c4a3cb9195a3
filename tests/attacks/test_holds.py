"""No large body keeps the interpreter lock: each is decoded in pieces of less than a millisecond.

Every case has the module constant without which its work is one piece, as the known-bad variant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.prediction import form_body, predictor
from modelport.gateway.protocols.tfserving import examples
from modelport.gateway.protocols.tfserving.grpc_request import PredictMessage, SizedMessage
from modelport.gateway.wire import (
    json_text,
    json_window,
    raw_tensors,
    repeated_values,
    tensor_proto,
)
from modelport.gateway.wire.proto import serving_pb2, tensorflow_pb2
from tests.attacks import holds
from tests.gateway.protocols.test_tfserving_codecs import servable
from tests.thorough import sampled

SIZE = 8_000_000
EVERYTHING = 1 << 40


class HoldCase(NamedTuple):
    work: Callable[[bytes], object]
    body: bytes
    #: The size of a piece.
    module: ModuleType
    constant: str


def predict(body: bytes) -> object:
    request = PredictMessage().FromString(body)
    return tensor_proto.decode_large("x", request.tensors["x"])


def features(body: bytes) -> object:
    request = SizedMessage(serving_pb2.ClassificationRequest).FromString(body)
    return examples.decode(request.message.input, servable("x INT64 -1"), request.size)


def form(body: bytes) -> object:
    return form_body.data_field(body, b"multipart/form-data; boundary=b")


def whole(begin: bytes, filling: bytes, end: bytes) -> bytes:
    return begin + filling * (SIZE // len(filling)) + end


def tensor_of_integers() -> bytes:
    request = serving_pb2.PredictRequest()
    x = request.inputs["x"]
    x.dtype = tensorflow_pb2.DT_INT64
    x.tensor_shape.dim.add(size=SIZE)
    x.int64_val.extend([1] * SIZE)
    content: bytes = request.SerializeToString()
    return content


def example_of_integers() -> bytes:
    request = serving_pb2.ClassificationRequest()
    feature = request.input.example_list.examples.add().features.feature["x"]
    feature.int64_list.value.extend([1] * (SIZE // 8))
    content: bytes = request.SerializeToString()
    return content


PART = b'--b\r\nContent-Disposition: form-data; name="data"\r\n\r\n'
CASES = {
    "a long string of escapes": HoldCase(
        json_text.loads, whole(b'["', b"\\ud83d\\ude00", b'"]'), json_window, "SLICE_BYTES"
    ),
    "an invalid long string": HoldCase(
        json_text.loads, whole(b'{"a":"', b"\r\n", b'"}'), json_window, "SLICE_BYTES"
    ),
    "an invalid long key": HoldCase(
        json_text.loads, whole(b'{"', b"\x02\0\0\0ab", b'":1}'), json_window, "SLICE_BYTES"
    ),
    "bytes after an invalid value": HoldCase(
        predictor._leading_json, whole(b'{"a":"', b'\\"', b" x"), json_text, "_CHUNK_BYTES"
    ),
    "duplicate keys": HoldCase(
        json_text.count_keys, whole(b'{"a":"', b'\\":', b'"}'), json_text, "_CHUNK_BYTES"
    ),
    "values of a tensor": HoldCase(predict, tensor_of_integers(), repeated_values, "PIECE_BYTES"),
    "values of a feature": HoldCase(features, example_of_integers(), raw_tensors, "PIECE"),
    "a part that looks like its delimiter": HoldCase(
        form, whole(PART, b"\r\n--", b"\r\n--b--\r\n"), form_body, "_SEARCHED_BYTES"
    ),
}


@pytest.mark.parametrize("name", sampled(CASES, "an invalid long key", "values of a feature"))
def test_a_large_body_never_keeps_the_interpreter_lock(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]

    def work() -> None:
        with contextlib.suppress(InvalidArgument):
            case.work(case.body)

    def work_as_one_piece() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(case.module, case.constant, EVERYTHING)
            work()

    assert holds.in_pieces(work, work_as_one_piece) == ""
