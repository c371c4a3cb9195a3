"""Shared memory that carries tensors again and again: no frame sees another one's content."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import socket
from collections.abc import Callable, Iterator

import pytest

from modelport.gateway.backends.python_worker import frames, regions
from modelport.gateway.backends.python_worker.frames import HEADER, FrameError, FrameReader
from modelport.gateway.backends.python_worker.regions import (
    ALIGNMENT,
    MAX_REGION_BYTES,
    MAX_REGIONS,
    SentRegions,
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
BIG = frames.INLINE_BYTES + 1


class CarelessRegions(SentRegions):
    """Regions that are filled before the receiver has read them."""

    def put(self, buffers: object, size: int) -> tuple[int, int]:
        for region in self._regions:
            region[0] = 0
        return super().put(buffers, size)  # type: ignore[arg-type]


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    theirs, ours = socket.socketpair()
    yield theirs, ours
    theirs.close()
    ours.close()


def exchanged(ends: Ends, sent: SentRegions, writable: bool) -> bool:
    """Whether frames that are read late, and kept, have their own contents to the end."""
    reader, rng = FrameReader(ends[1], 1 << 26, writable), random.Random(3)
    sizes, kept, waiting = [], [], 0
    for number in range(60):
        first, second = rng.choice((0, 1, 100, BIG)), rng.choice((1, 100, BIG, 300_000))
        parts = [bytes([number]) * first, bytes([number + 100]) * second]
        sizes.append((first, second))
        assert frames.send(ends[0], frames.pack(1, number, 0, b"[]", parts, sent)) is None
        waiting += 1
        if number == 59 or rng.random() < 0.3 or waiting == 2 * MAX_REGIONS:
            while waiting:
                found = reader.read()
                kept += found
                waiting -= len(found)
    same = 0
    for (first, second), frame in zip(sizes, kept, strict=True):
        content, begin = bytes(frame.content), regions.aligned(first)
        own = content[:first].count(frame.number), content[begin:].count(frame.number + 100)
        same += own[0] == first and own[1] >= second
    return same == len(kept)


@pytest.mark.parametrize("writable", [False, True])
def test_no_frame_overwrites_another(ends: Ends, writable: bool) -> None:
    assert exchanged(ends, SentRegions(), writable)


def test_regions_that_are_filled_too_early_are_noticed(ends: Ends) -> None:
    assert not exchanged(ends, CarelessRegions(), False)


def test_a_content_stays_as_it_was_checked(ends: Ends) -> None:
    sent, reader = SentRegions(), FrameReader(ends[1], 1 << 20, writable=False)
    frames.send(ends[0], frames.pack(1, 1, 0, b"", [b"a" * BIG], sent))
    (frame,) = reader.read()
    sent._regions[0][ALIGNMENT : ALIGNMENT + BIG] = b"b" * BIG  # a worker that goes on writing
    assert frame.content[:BIG] == b"a" * BIG


def test_regions_are_few_and_what_exceeds_them_arrives_too(ends: Ends) -> None:
    sent, reader = SentRegions(), FrameReader(ends[1], 1 << 26, writable=False)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for number in range(2 * MAX_REGIONS):
            frames.send(ends[0], frames.pack(1, number, 0, b"", [b"%d" % number * BIG], sent))
            assert sent.unread == min(number + 1, MAX_REGIONS)
        found: list[frames.Frame] = []
        while len(found) < 2 * MAX_REGIONS:
            found += reader.read()
        assert [frame.content[:1] for frame in found] == [b"%d" % n for n in range(len(found))]
        assert not sent.unread
    assert len(sent._regions) == MAX_REGIONS
    whole = bytes(MAX_REGION_BYTES + 1)
    frames.send(ends[0], frames.pack(1, 0, 0, b"", [whole], sent))
    (large,) = reader.read()
    assert isinstance(large.content, mmap.mmap)
    assert large.content[: len(whole)] == whole
    del large, found
    # Each region's map holds a descriptor on both sides.
    assert len(os.listdir("/proc/self/fd")) == before + 2 * MAX_REGIONS


def test_a_larger_content_gets_a_larger_region(ends: Ends) -> None:
    sent, reader = SentRegions(), FrameReader(ends[1], 1 << 26, writable=False)
    for size in (BIG, 2 * BIG, BIG, 4 * BIG):
        frames.send(ends[0], frames.pack(1, 0, 0, b"", [b"x" * size], sent))
        (frame,) = reader.read()
        assert frame.content[:size] == b"x" * size
        assert len(sent._regions) == 1


def memory(size: int, seals: int) -> int:
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize(
    ("region", "content", "made"),
    [
        (1, 8, lambda: memory(4096, 0)),
        (1, 8, lambda: memory(4096, fcntl.F_SEAL_SHRINK)),
        (1, 8, lambda: memory(4096, fcntl.F_SEAL_GROW)),
        (1, 8, lambda: memory(4096, SEALS | fcntl.F_SEAL_WRITE)),  # its first byte cannot be freed
        (1, 8, lambda: memory(0, SEALS)),
        (1, 8, lambda: memory(ALIGNMENT, SEALS)),
        (1, 8, lambda: memory(MAX_REGION_BYTES + ALIGNMENT + 1, SEALS)),
        (1, 4096 - ALIGNMENT + 1, lambda: memory(4096, SEALS)),
        (1, 2**32 - 1, lambda: memory(4096, SEALS)),
        (MAX_REGIONS + 1, 8, lambda: memory(4096, SEALS)),
        (255, 8, lambda: memory(4096, SEALS)),
        (1, 8, lambda: os.open("/dev/zero", os.O_RDWR)),
    ],
)
def test_a_false_region_is_refused(
    ends: Ends, region: int, content: int, made: Callable[[], int]
) -> None:
    reader = FrameReader(ends[1], 1 << 20, writable=False)
    before = len(os.listdir("/proc/self/fd"))
    head = HEADER.pack(0, content, 1, 1, region, 0, 0)
    frames.send(ends[0], frames.OutgoingFrame(head, made()))
    with pytest.raises(FrameError):
        reader.read()
    del reader
    assert len(os.listdir("/proc/self/fd")) == before
