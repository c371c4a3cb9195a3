"""Messages by their bytes: bodies that come in pieces, and tensors that stay where they came."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from modelport.gateway.wire import protobuf
from modelport.gateway.wire.grpc_body import PREFIX_BYTES, Body
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from modelport.gateway.wire.protobuf import joined, tag, varint
from modelport.gateway.wire.raw_tensors import COPIED_BYTES, Buffer

ID, RAW = tag(pb.ModelInferRequest, "id"), tag(pb.ModelInferRequest, "raw_input_contents")
HEAD = frozenset(tag(pb.ModelInferRequest, field) for field in ("model_name", "inputs"))


def prefixed(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


@pytest.mark.parametrize("seed", range(30))
def test_a_body_is_its_pieces_wherever_they_are_read(seed: int) -> None:
    chosen = random.Random(seed)
    whole = prefixed(chosen.randbytes(chosen.choice((0, 3, 5_000, 6_000_000))))
    body, at = Body(), 0
    while at < len(whole):
        size = chosen.choice((1, 4, 700, 60_000, 2_000_000))
        if chosen.random() < 0.5 and len(place := body.place()):
            part = place[:size]
            part[:] = whole[at : at + len(part)]
        else:
            part = memoryview(whole)[at : at + size]
        body.add(part)
        at += len(part)
        assert body.size == at
    assert body.view() == whole
    assert body.view().readonly
    assert not len(body.place())


def test_a_body_has_no_room_for_what_is_only_announced() -> None:
    tracemalloc.start()
    try:
        bodies = [Body() for _ in range(50)]
        for body in bodies:
            body.add(memoryview(b"\0\x7f\xff\xff\xff" + bytes(100)))
            body.place()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50 * 5 * 2**20


def test_messages_behind_the_first_are_kept_too() -> None:
    whole = prefixed(b"first") + prefixed(b"second") * 1000
    body = Body()
    for at in range(0, len(whole), 97):
        body.add(memoryview(whole)[at : at + 97])
    assert body.view() == whole
    assert body.expected == PREFIX_BYTES + len(b"first")


def test_a_large_tensor_is_not_copied_out_of_its_message() -> None:
    message = pb.ModelInferRequest(model_name="m", id="7")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    large, small = bytes(COPIED_BYTES + 4), b"abcd"
    message.raw_input_contents.extend((large, small))
    content = memoryview(bytearray(message.SerializeToString()))
    found = protobuf.split(content, HEAD, ID, RAW, 2048)
    assert found is not None
    head, identity, blobs = found
    assert identity == "7"
    assert pb.ModelInferRequest.FromString(head).inputs == message.inputs
    assert [bytes(blob) for blob in blobs] == [large, small]
    assert isinstance(blobs[0], memoryview)
    assert blobs[0].obj is content.obj
    assert isinstance(blobs[1], bytes)


@pytest.mark.parametrize("seed", range(200))
def test_a_damaged_message_is_split_into_nothing_or_read_as_protobuf_reads_it(seed: int) -> None:
    chosen = random.Random(seed)
    message = pb.ModelInferRequest(model_name="m", id="7")
    message.raw_input_contents.extend(chosen.randbytes(chosen.choice((0, 5, 200))) for _ in "ab")
    content = bytearray(message.SerializeToString())
    for _ in range(chosen.randint(1, 3)):
        content[chosen.randrange(len(content))] = chosen.randrange(256)
    if chosen.random() < 0.3:
        del content[chosen.randrange(len(content)) :]
    found = protobuf.split(bytes(content), HEAD, ID, RAW, 2048)
    if found is not None:
        _, identity, blobs = found
        try:
            read = pb.ModelInferRequest.FromString(bytes(content))
        except Exception:
            return  # of the head, which its reader refuses
        assert read.id == identity
        assert list(read.raw_input_contents) == blobs


def test_small_parts_are_joined_and_large_ones_stay() -> None:
    large: list[Buffer] = [bytes([number]) * (COPIED_BYTES + 1) for number in (1, 2)]
    parts: list[Buffer] = [b"a", b"b", large[0], large[1], b"", b"c"]
    got = joined(parts)
    assert b"".join(got) == b"".join(parts)
    assert got == [b"ab", large[0], large[1], b"c"]
    assert got[1] is large[0]


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**21, 2**31 - 1])
def test_a_varint_is_read_as_it_was_written(number: int) -> None:
    assert protobuf.read_varint(varint(number) + b"rest", 0) == (number, len(varint(number)))
