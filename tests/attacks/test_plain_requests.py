"""Requests whose head is known are decoded by their tensors alone: never otherwise than as a whole.

Every case is decoded both ways; the short way may pass a request on, and do nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.message import DecodeError

from modelport.gateway.errors import ModelportError
from modelport.gateway.protocols.oip import grpc_request, http_request, request_template
from modelport.gateway.types import InferRequest
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests.attacks.test_fuzz import GRPC_SEEDS, HTTP_SEEDS, http_case, mutate_bytes
from tests.conformance import wire
from tests.conformance.wire import json_body, json_input

CASES = 20_000

#: In place of a number.
_DATA = (
    b"7",
    b"2.5",
    b"-0",
    b"1e999",
    b"NaN",
    b"[3]",
    b"3,4",
    b"true",
    b'"]"',
    b"null",
    b" 1 ",
    b"",
)
_X = b'"name":"x","datatype":"INT64","shape":[2]'
#: JSON that looks alike and says something else.
HOSTILE_JSON = (
    b'{"inputs":[{%b,"data":[5,6],"data":[1,2]}]}' % _X,
    b'{"inputs":[{%b,"data":[5,6], "data" : [1]}]}' % _X,
    b'{"inputs":[{%b,"data" : [1],"data":[5,6]}]}' % _X,
    b'{"inputs":[{%b,"x\\"data":[5,6],"data" : [1,2]}]}' % _X,
    b'{"inputs":[{%b,"data":[5,6]}],"inputs":[{%b,"data" : [1]}]}' % (_X, _X),
    b'{"inputs":[{%b,"data":[5,6]}],"parameters":{"timeout":1}}' % _X,
    b'{"inputs":[{%b,"data":[5,6]}],"id":"a"}' % _X,
    b'{"id":"\\"data\\":[1,2]","inputs":[{%b,"data":[5,6]}]}' % _X,
    b'{"outputs":[{"name":"y"},{"name":"z"}],"inputs":[{%b,"data":[[5],[6]]}]}' % _X,
    b'{"inputs":[{%b,"data":[5,6]},{%b,"data":[5,6]}]}' % (_X, _X.replace(b'"x"', b'"y"')),
    b'{"inputs":[{%b,"data":[[5,6]}]}' % _X,
    b'{"inputs":[{%b,"data":[5,6]]}]}' % _X,
    b'{"inputs":[{%b,"data":[5,true]}]}' % _X,
    b'{"inputs":[{%b,"data":[5,6}]}' % _X,
    b'{"inputs":[{%b,"data":' % _X,
    b'{"inputs":[{%b,"data":%b5%b}]}' % (_X, b"[" * 101, b"]" * 101),
    b'{"inputs":[{%b,"data":["]","[5,6]"]}]}' % _X.replace(b"INT64", b"BYTES"),
    b'{"inputs":[{%b,"data":[5,6],"parameters":{"binary_data_size":16}}]}' % _X,
)


def _plain_json() -> list[bytes]:
    good = [json_body(json_input("x", kind, [2, 1], [1, 2])) for kind in ("INT64", "FP32", "INT8")]
    spaced = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1.5, 2]}]}'
    nested = json_body(json_input("x", "FP32", [1, 2], [[1, 2]]), outputs=[{"name": "y"}])
    return [*good, spaced, nested]


def _said(request: InferRequest, form: Any = None) -> Any:
    tensors = [(t.name, t.datatype, t.data.shape, t.data.tolist()) for t in request.inputs]
    forms = form and (form.binary, form.by_output)
    return repr((
        request.model_name, request.model_version, request.id, dict(request.parameters), tensors,
        request.outputs, dict(request.classification), forms,
    ))  # fmt: skip


def _outcome(decode: Callable[[], Any]) -> str | None:
    """The decoded request or its error, as text; None if the decoder declined the request."""
    try:
        decoded = decode()
    except (ModelportError, DecodeError) as error:
        return f"{type(error).__name__} {error}"
    return None if decoded is None else str(decoded)


def _compare_json(body: bytes, length: int) -> bool:
    """Whether the short way took the request; then both must say the same."""

    def short() -> Any:
        decoded = request_template.decode(body, length, "m", 1)
        return decoded and _said(*decoded)

    took = _outcome(short)
    assert took is None or took == _outcome(
        lambda: _said(*http_request.decode(body, length, "m", 1))
    ), body
    return took is not None


def test_a_known_json_head_changes_nothing_of_a_request() -> None:
    took = 0
    plain = _plain_json()
    for number in range(CASES):
        chance = random.Random(f"plain json {number}")
        header, blob = chance.choice(plain), b""
        if number % 3 == 0:
            header, blob = http_case(chance)
        elif number % 3 == 1:
            header = mutate_bytes(chance, header)
        else:
            before, found, after = header.partition(b'"data"')
            header = before + found + after.replace(b"1", chance.choice(_DATA))
        took += _compare_json(header + blob, len(header))
    assert took > CASES * 0.02
    assert sum(_compare_json(body, len(body)) for body in plain) == len(plain)
    assert sum(_compare_json(head + blob, len(head)) for head, blob in HTTP_SEEDS) > 10


@pytest.mark.parametrize("body", HOSTILE_JSON)
def test_similar_json_is_not_mistaken_for_the_template(body: bytes) -> None:
    for _ in range(2):  # not known, known
        _compare_json(body, len(body))


def test_a_mark_that_a_client_can_send_would_be_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_template, "_MARK", 1)
    monkeypatch.setattr(request_template, "_MARKED", b"[1]")
    request_template._json_template.cache_clear()
    with pytest.raises(AssertionError):
        _compare_json(HOSTILE_JSON[1], len(HOSTILE_JSON[1]))
    request_template._json_template.cache_clear()


def _compare_grpc(content: bytes) -> bool:
    def short() -> Any:
        decoded = grpc_request.RawRequest.FromString(content)
        return _said(decoded) if isinstance(decoded, InferRequest) else None

    took = _outcome(short)
    if took is None or took.startswith("DecodeError"):  # the message class' own word
        return False

    def whole() -> Any:
        return _said(grpc_request.decode(pb.ModelInferRequest.FromString(content)))

    assert took == _outcome(whole), content
    return True


def test_a_known_grpc_head_changes_nothing_of_a_request() -> None:
    good = wire.good_message().SerializeToString()
    took = 0
    for number in range(CASES):
        chance = random.Random(f"plain grpc {number}")
        took += _compare_grpc(
            mutate_bytes(chance, good if number % 2 else chance.choice(GRPC_SEEDS))
        )
    assert took > CASES * 0.02
    assert _compare_grpc(good)


def test_a_grpc_message_with_other_order_or_lengths_is_not_mistaken_for_the_template() -> None:
    message = pb.ModelInferRequest.FromString(wire.good_message().SerializeToString())
    head, raws = pb.ModelInferRequest(), pb.ModelInferRequest()
    head.CopyFrom(message)
    head.ClearField("raw_input_contents")
    raws.raw_input_contents.extend(message.raw_input_contents)
    first, last = head.SerializeToString(), raws.SerializeToString()
    with_id = pb.ModelInferRequest(id="one").SerializeToString()
    other = pb.ModelInferRequest(id="two", model_version="3").SerializeToString()
    (data,) = message.raw_input_contents
    tag = last[:1]
    long = tag + bytes((len(data) | 0x80,)) + b"\x80" * 3 + b"\0" + data  # five bytes of length
    longer = tag + bytes((len(data) | 0x80,)) + b"\x80" * 9 + b"\0" + data  # no length any more
    bad_id = b"\x1a\x02\xff\xfe"
    took = [
        _compare_grpc(content)
        for content in (
            first + last, with_id + first + last, first + with_id + last, with_id + other + last,
            with_id + first + other + last, last + first, first + last + first, first + last + last,
            first + long, first + longer, bad_id + first + last, first + last[:-1], first, b"",
        )
    ]  # fmt: skip
    assert took == [True] * 3 + [False] * 5 + [True] + [False] * 5
