"""Frames of a worker that does not keep to the protocol: it is ended, and nothing else happens."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.python import codec
from modelport.gateway.backends.python.codec import ResponseDecoder
from modelport.gateway.backends.python.metrics import ModelMetrics
from modelport.gateway.backends.python_worker import frames
from modelport.gateway.backends.python_worker.frames import HEADER, FrameError, FrameReader
from modelport.gateway.errors import ModelportError
from modelport.gateway.repository import config
from modelport.gateway.types import Datatype, InferRequest, InferResponse, Tensor

TENSORS = (
    'name: "m" input { name: "x" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "y" data_type: TYPE_FP32 dims: -1 } '
    'output { name: "s" data_type: TYPE_STRING dims: -1 }'
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, FrameReader]]:
    theirs, ours = socket.socketpair()
    reader = FrameReader(ours, 1 << 20, writable=False)
    yield theirs, reader
    reader.close()
    theirs.close()
    ours.close()


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_frame_arrives_whole_however_it_is_cut(ends: tuple[socket.socket, FrameReader]) -> None:
    theirs, reader = ends
    sent = [frames.pack(frames.RESULT, n, n, b"[%d]" % n, [b"x" * n]).data for n in range(50)]
    data, found = b"".join(sent), []
    cut = random.Random(1)
    while data:
        size = cut.randint(1, 400)
        theirs.send(data[:size])
        data = data[size:]
        found += reader.read()
    assert [(f.number, f.value, f.meta) for f in found] == [(n, n, b"[%d]" % n) for n in range(50)]
    assert [len(f.content or b"") for f in found] == list(range(50))


@pytest.mark.parametrize(
    "header",
    [
        (2, 1, 1, 0, 0, 0, 0),  # more JSON than there is content
        (0, 2**32 - 1, 1, 0, 0, 0, 0),
        (frames.MAX_META_BYTES * 2, frames.MAX_META_BYTES * 2, 1, 0, 0, 0, 0),
        (0, 0, 1, 2, 0, 0, 0),
        (0, 0, 1, 1, 0, 0, 0),  # a descriptor that never came
        (0, 1, 1, 1, 1, 0, 0),
        (0, 1, 1, 0, 1, 0, 0),  # a region that never came
        (2, 1, 1, 0, 1, 0, 0),
        (frames.MAX_META_BYTES * 2, 2**32 - 1, 1, 0, 1, 0, 0),
    ],
)
def test_a_false_header_is_refused(
    ends: tuple[socket.socket, FrameReader], header: tuple[int, ...]
) -> None:
    theirs, reader = ends
    theirs.send(HEADER.pack(*header))
    with pytest.raises(FrameError):
        reader.read()


def test_only_sealed_memory_of_a_bounded_size_is_mapped(
    ends: tuple[socket.socket, FrameReader],
) -> None:
    theirs, reader = ends
    before = opened()

    def send(descriptor: int) -> None:
        head = HEADER.pack(0, 0, 1, 1, 0, 0, 0)
        frames.send(theirs, frames.OutgoingFrame(head, descriptor))
        with pytest.raises(FrameError):
            reader.read()

    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    for size, sealed in ((4096, 0), (4096, fcntl.F_SEAL_WRITE), (0, seals), (2 << 20, seals)):
        file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, sealed)
        send(file)
    send(os.open("/dev/zero", os.O_RDONLY))
    send(os.pipe()[0])
    assert opened() <= before + 1  # the pipe's other end


def test_a_flood_of_descriptors_is_refused_and_leaks_none(
    ends: tuple[socket.socket, FrameReader],
) -> None:
    theirs, reader = ends
    before = opened()
    for _ in range(3):
        socket.send_fds(theirs, [b"x"], [0] * 20)
    reader.read()
    with pytest.raises(FrameError):
        reader.read()
    reader.close()
    assert opened() == before


def decoder() -> ResponseDecoder:
    return ResponseDecoder("m", 1, config.complete(config.parse(TENSORS), "m"))


def answered(made: ResponseDecoder, row: Any, content: Any, request: InferRequest) -> Any:
    (found,) = codec.described_batch(json.dumps([row]).encode())
    assert found is not None
    return made.response(found, content, 0, request)


def test_mutated_responses_are_responses_errors_or_refused() -> None:
    """Every outcome is one that the gateway expects; nothing else is raised."""
    good: Any = [0, [["y", "FP32", [2], 8], ["s", "BYTES", [1], 5]], {"a": 1}]
    content = np.ones(2, np.float32).tobytes().ljust(64) + b"\1\0\0\0z".ljust(64)
    request = InferRequest("m", [Tensor("x", Datatype.FP32, np.ones(2, np.float32))])
    made = decoder()
    outcome, _ = answered(made, good, content, request)
    assert isinstance(outcome, InferResponse)
    values = [
        None, -1, 0, 1, 2**63, 2**70, 1.5, "", "y", "FP64", "BYTES", [], {}, [[]], [2**40, 2**40],
        [-1], ["a"], {"a": [1]}, {"a": None}, True,
    ]  # fmt: skip
    rng, kinds = random.Random(7), set()
    for _ in range(3000):
        row = json.loads(json.dumps(good))
        for _ in range(rng.randint(1, 3)):
            place: Any = row
            while isinstance(place, list) and place and rng.random() < 0.7:
                index = rng.randrange(len(place))
                if not isinstance(place[index], list) or not place[index]:
                    break
                place = place[index]
            if isinstance(place, list) and place:
                place[rng.randrange(len(place))] = copy.deepcopy(rng.choice(values))
        cut = content[: rng.randint(0, len(content))] if rng.random() < 0.3 else content
        try:
            outcome, _ = answered(made, row, cut or None, request)
            kinds.add(InferResponse if isinstance(outcome, InferResponse) else ModelportError)
        except FrameError:
            kinds.add(FrameError)
    assert kinds == {InferResponse, ModelportError, FrameError}


def test_mutated_changes_of_metrics_are_refused() -> None:
    metrics = ModelMetrics()
    try:
        metrics.declare("good_total", "", "COUNTER")
        metrics.declare("good_times", "", "HISTOGRAM")
        metrics.update([["good_total", [["a", "b"]], "increment", 1]])
        metrics.update([["good_times", [], "declare 1,2", 0], ["good_times", [], "count 2", 1]])
        for rows in (
            None, 1, [1], [["good_total"]], [["none", [], "increment", 1]],
            [["good_total", [], "increment", -1]], [["good_total", [], "increment", "x"]],
            [["good_total", [], "set", 1]], [["good_total", [["a b", ""]], "increment", 1]],
            [["good_times", [], "count 9", 1]], [["good_times", [], "count x", 1]],
            [["good_total", [], "increment", float("inf")]], [["good_times", [], "other", 1]],
            [["good_times", [["z", "z"]], "declare " + ",".join(map(str, range(999))), 1]],
        ):  # fmt: skip
            with pytest.raises(FrameError):
                metrics.update(rows)
        assert metrics.value("good_total", {"a": "b"}) == 1
    finally:
        metrics.close()


def test_json_that_is_none_is_refused() -> None:
    for meta in (b"", b"{", b"[" * 100_000, b"\xff", b"NaN"):
        with pytest.raises(FrameError):
            codec.parsed(meta)
