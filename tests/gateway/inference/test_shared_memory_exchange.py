"""Tensors of requests in shared memory, and the registration of regions in every worker."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.errors import AlreadyExists, Internal, InvalidArgument, Unavailable
from modelport.gateway.inference.shared_memory import (
    FOLDER,
    MAX_REGIONS,
    Region,
    SharedMemoryRegions,
)
from modelport.gateway.models.control import Operations
from modelport.gateway.protocols.oip.shared_memory import SharedMemory, SharedTensors
from modelport.gateway.types import Datatype, Tensor
from tests.gateway.conftest import NewObject

SIZE = 64


@pytest.fixture
def regions() -> SharedMemoryRegions:
    return SharedMemoryRegions(allowed=True)


def path_of(key: str) -> Path:
    return Path(FOLDER) / key.lstrip("/")


# -- what one request passes ----------------------------------------------------------------------


def parameters(**others: object) -> dict[str, object]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": 16, **others}


def test_a_small_request_cannot_make_the_server_copy_without_end(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    regions.register("r", new_object(), 0, SIZE)
    transfer = SharedTensors(regions, 40)
    for _ in range(2):
        transfer.read("x", Datatype.FP32, (4,), parameters())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="40 bytes"):
        transfer.read("x", Datatype.FP32, (4,), parameters())  # type: ignore[arg-type]


def test_nothing_is_read_where_the_shape_needs_another_size(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    key = new_object(1)
    os.truncate(path_of(key), 2**50)  # a hole: it takes no memory until it is read
    regions.register("r", key, 0, 2**50)
    transfer = SharedTensors(regions, 2**60)
    huge = parameters(shared_memory_byte_size=2**50)
    with pytest.raises(InvalidArgument, match="got 1125899906842624"):
        transfer.read("x", Datatype.FP32, (4,), huge)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="too large"):
        SharedTensors(regions, 100).read("x", Datatype.BYTES, (4,), huge)  # type: ignore[arg-type]


def test_an_input_of_another_size_is_refused_in_the_name_of_its_model(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    regions.register("r", new_object(), 0, SIZE)
    expected = "^input byte size mismatch for input 'x' for model 'm'. Expected 12, got 16$"
    with pytest.raises(InvalidArgument, match=expected):
        SharedTensors(regions, SIZE).read("x", Datatype.FP32, (3,), parameters(), "m")  # type: ignore[arg-type]


def test_an_offset_and_a_size_past_64_bits_are_an_overflow(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    regions.register("r", new_object(), 0, SIZE)
    place = parameters(shared_memory_offset=8, shared_memory_byte_size=2**64 - 8)
    with pytest.raises(InvalidArgument, match=r"^Integer overflow detected: byte_size \(1844"):
        SharedTensors(regions, SIZE).expect("y", place)  # type: ignore[arg-type]
    place["shared_memory_byte_size"] = 2**64 - 9
    with pytest.raises(InvalidArgument, match=r"^Invalid offset \+ byte size"):
        SharedTensors(regions, SIZE).expect("y", place)  # type: ignore[arg-type]


def test_an_output_that_needs_more_room_is_not_written(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    key = new_object(content=b"untouched")
    regions.register("r", key, 0, SIZE)
    transfer = SharedTensors(regions, SIZE)
    transfer.expect("y", parameters())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="should be at least 17 bytes"):
        transfer.write(Tensor("y", Datatype.UINT8, np.zeros(17, np.uint8)))
    assert path_of(key).read_bytes().startswith(b"untouched")


# -- every process of the gateway -----------------------------------------------------------------


class Workers:
    """Two processes' worth of registries behind one ``broadcast``."""

    def __init__(self) -> None:
        self.operations = [Operations(), Operations()]
        self.regions = [SharedMemoryRegions(allowed=True), SharedMemoryRegions(allowed=True)]
        self.shared = [
            SharedMemory(regions, _Control(self, operations), SIZE)  # type: ignore[arg-type]
            for regions, operations in zip(self.regions, self.operations, strict=True)
        ]


class _Control:
    def __init__(self, workers: Workers, own: Operations) -> None:
        self._workers = workers
        self.register = own.register

    async def broadcast(self, name: str, arguments: dict[str, object]) -> None:
        for operations in self._workers.operations:
            await operations.run(name, arguments)


async def test_a_region_is_registered_everywhere_or_nowhere(new_object: NewObject) -> None:
    workers, key = Workers(), new_object()
    await workers.shared[1].register("r", key, 0, SIZE)
    assert workers.regions[0].status() == workers.regions[1].status() != []
    with pytest.raises(AlreadyExists):
        await workers.shared[0].register("r", key, 0, SIZE)
    workers.regions[1]._regions.update(
        {str(i): Region(str(i), key, 0, 1, os.dup(0)) for i in range(MAX_REGIONS)}
    )
    with pytest.raises(Unavailable):
        await workers.shared[0].register("other", key, 0, SIZE)
    assert [row["name"] for row in workers.regions[0].status()] == ["r"]
    await workers.shared[0].unregister()
    assert workers.regions[0].status() == workers.regions[1].status() == []


async def test_a_registration_that_fails_leaves_one_that_comes_meanwhile(
    new_object: NewObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, key = Workers(), new_object()
    broadcast = _Control.broadcast

    async def overtaken(self: _Control, name: str, arguments: dict[str, object]) -> None:
        monkeypatch.setattr(_Control, "broadcast", broadcast)
        try:
            await broadcast(self, name, arguments)
        finally:
            await workers.shared[1].register("r", key, 0, SIZE)

    monkeypatch.setattr(_Control, "broadcast", overtaken)
    with pytest.raises(Internal):
        await workers.shared[0].register("r", "no-such-object", 0, SIZE)
    (row,) = workers.regions[0].status()
    assert row["key"] == key
    assert workers.regions[1].status() == [row]


async def test_a_worker_that_is_started_again_has_the_regions_of_the_others(
    new_object: NewObject,
) -> None:
    workers, keys = Workers(), [new_object(), new_object(), new_object()]
    old, new = workers.regions
    for i, key in enumerate(keys):
        old.register(str(i), key, i, 8)
    new.register("1", keys[0], 0, 4)  # by that name something else
    new.register("stale", keys[0], 0, 4)
    for _ in range(2):  # again changes nothing
        await workers.operations[1].restore(workers.operations[0].states())
        assert {row["name"]: row for row in new.status()} == {
            row["name"]: row for row in old.status()
        }
    path_of(keys[2]).unlink()
    new.unregister("2")
    await workers.operations[1].restore(workers.operations[0].states())
    assert sorted(row["name"] for row in new.status()) == ["0", "1"]
