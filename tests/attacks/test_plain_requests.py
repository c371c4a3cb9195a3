"""Requests whose head is known are decoded by their tensors alone: never otherwise than as a whole.

Every case is decoded both ways; the short way may pass a request on, and do nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from modelport.gateway.errors import ModelportError
from modelport.gateway.protocols.oip import grpc_request
from modelport.gateway.types import InferRequest
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests.attacks.test_fuzz import GRPC_SEEDS, mutate_bytes
from tests.conformance import wire

CASES = 20_000


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
