"""Registered regions: what may be one, and that nothing its owner does to it hurts the gateway."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelport.gateway.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unavailable,
    Unsupported,
)
from modelport.gateway.inference import shared_memory
from modelport.gateway.inference.shared_memory import FOLDER, MAX_REGIONS, SharedMemoryRegions
from modelport.gateway.protocols.oip.shared_memory import SharedTensors
from modelport.gateway.types import Datatype, Tensor
from tests.gateway.conftest import NewObject

SIZE = 64


@pytest.fixture
def regions() -> SharedMemoryRegions:
    return SharedMemoryRegions(allowed=True)


def path_of(key: str) -> Path:
    return Path(FOLDER) / key.lstrip("/")


def descriptors() -> Counter[str]:
    """Count this process's open descriptors of files that the tests' keys could name."""
    gc.collect(1)  # what was made just now is young
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            found[os.readlink(f"/proc/self/fd/{number}")] += 1
    return Counter({name: n for name, n in found.items() if name.startswith((FOLDER, "/etc"))})


def refused(kind: type[ModelportError], regions: SharedMemoryRegions, *arguments: object) -> str:
    """The error's text: it names no place on this machine, and nothing is left open."""
    before = descriptors()
    with pytest.raises(kind) as caught:
        regions.register(*arguments)  # type: ignore[arg-type]
    text = str(caught.value)
    del caught
    assert descriptors() <= before
    assert FOLDER not in text.replace(str(arguments[1]), "")
    assert "Errno" not in text
    return text


# -- registering ----------------------------------------------------------------------------------


@pytest.mark.parametrize("slash", ["/", ""])
def test_a_region_is_a_part_of_an_object_that_is_there(
    regions: SharedMemoryRegions, new_object: NewObject, slash: str
) -> None:
    key = slash + new_object(content=b"0123456789").lstrip("/")
    regions.register("r", key, 2, 5)
    assert regions.status() == [{"name": "r", "key": key, "offset": 2, "byte_size": 5}]
    assert bytes(regions.get("r").read(1, 3)) == b"345"
    regions.get("r").write(4, memoryview(b"x"))
    assert path_of(key).read_bytes().startswith(b"012345x789")


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "//", "//x", ".", "..", "/.", "/..", "../etc/passwd", "/../etc/passwd"),
        *("/a/b", "a/b", "/dev/shm/x", "/etc/passwd", "x\0", "/" + "a" * 256, "\ud800"),
    ],
)
def test_a_key_that_is_more_than_a_name_is_refused(regions: SharedMemoryRegions, key: str) -> None:
    refused(InvalidArgument, regions, "r", key, 0, 1)


@pytest.mark.parametrize("prefix", shared_memory.RESERVED)
def test_objects_of_servers_are_not_for_clients(regions: SharedMemoryRegions, prefix: str) -> None:
    path = Path(FOLDER) / f"{prefix}test-{os.getpid()}"
    path.write_bytes(bytes(SIZE))
    try:
        for slashes in ("", "/", "///"):
            key = slashes + path.name
            said = refused(InvalidArgument, regions, "r", key, 0, SIZE)
            assert f"the reserved prefix '{prefix}'" in said
    finally:
        path.unlink()


def test_an_object_that_is_not_there_is_not_made(regions: SharedMemoryRegions) -> None:
    key = f"/test-never-{os.getpid()}"
    for size in (0, 1):  # a size that is wrong, too, does not hide it
        assert f"Unable to open shared memory region: '{key}'" == refused(
            Internal, regions, "r", key, 0, size
        )
    assert not path_of(key).exists()


def _link(path: Path) -> None:
    target = path.with_suffix(".target")
    target.write_bytes(bytes(SIZE))
    path.symlink_to(target)


@pytest.mark.parametrize("kind", [_link, os.mkfifo, os.mkdir])
def test_a_path_that_is_not_shared_memory_is_refused(
    regions: SharedMemoryRegions, kind: Callable[[Path], None], new_object: NewObject
) -> None:
    path = path_of(new_object()).with_suffix(".other")
    kind(path)
    try:
        refused(ModelportError, regions, "r", f"/{path.name}", 0, 1)
    finally:
        os.rmdir(path) if path.is_dir() else path.unlink()
        path.with_suffix(".target").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [
        *((0, 0), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (SIZE + 1, 0)),
        *((-1, 4), (4, -1), (2**63, 1), (1, 2**63), (2**63 - 1, 1), (2**64 - 1, 2)),
        *((2**64 - SIZE, 2 * SIZE), (2**62, 2**62)),
    ],
)
def test_a_part_that_is_not_within_the_object_is_refused(
    regions: SharedMemoryRegions, new_object: NewObject, offset: int, byte_size: int
) -> None:
    refused(InvalidArgument, regions, "r", new_object(), offset, byte_size)


@pytest.mark.parametrize("name", ["", "n" * 256])
def test_a_region_has_a_name(
    regions: SharedMemoryRegions, new_object: NewObject, name: str
) -> None:
    refused(InvalidArgument, regions, name, new_object(), 0, 1)


def test_a_name_is_given_once(regions: SharedMemoryRegions, new_object: NewObject) -> None:
    key = new_object()
    regions.register("r", key, 0, SIZE)
    refused(AlreadyExists, regions, "r", key, 0, SIZE)
    regions.unregister("r")
    regions.register("r", key, 4, 8)
    assert regions.status("r")[0]["offset"] == 4


def test_a_region_in_use_is_listed_and_usable_until_its_last_request_has_ended(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    for name in ("used", "idle"):
        regions.register(name, new_object(), 0, SIZE)
    first, second = (SharedTensors(regions, SIZE) for _ in range(2))
    place = {"shared_memory_region": "used", "shared_memory_byte_size": 8}
    first.read("x", Datatype.FP32, (2,), place)
    regions.unregister_all()
    assert [row["name"] for row in regions.status()] == ["used"]
    assert regions.registered() == []
    second.expect("y", place)  # a request that comes meanwhile
    del first
    assert [row["name"] for row in regions.status()] == ["used"]
    del second
    assert regions.status() == []
    with pytest.raises(NotFound):
        regions.get("used")


def test_the_number_of_regions_is_limited(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    key = new_object()
    for i in range(MAX_REGIONS):
        regions.register(str(i), key, 0, SIZE)
    assert descriptors()[str(path_of(key))] == MAX_REGIONS
    refused(Unavailable, regions, "one more", key, 0, SIZE)
    regions.unregister("7")
    regions.register("one more", key, 0, SIZE)
    regions.unregister_all()
    assert regions.status() == []
    assert str(path_of(key)) not in descriptors()


def test_names_that_nobody_gave_are_not_found_and_may_be_forgotten(
    regions: SharedMemoryRegions,
) -> None:
    with pytest.raises(NotFound):
        regions.status("r")
    with pytest.raises(NotFound):
        regions.get("r")
    regions.unregister("r")


def test_where_it_is_not_allowed_nothing_is_registered_or_used(new_object: NewObject) -> None:
    regions, key = SharedMemoryRegions(allowed=False), new_object()
    for forbidden in (
        lambda: regions.register("r", key, 0, 1),
        lambda: regions.unregister("r"),
        regions.unregister_all,
        lambda: regions.get("r"),
    ):
        with pytest.raises(Unsupported, match="--allow-client-shm=true"):
            forbidden()
    assert regions.status() == []


# -- reading and writing --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "byte_size"),
    [(0, 17), (16, 0), (16, 1), (1, 16), (-1, 1), (1, -1), (2**64, 1), (1, 2**64), (2**63, 2**63)],
)
def test_a_request_does_not_leave_its_region(
    regions: SharedMemoryRegions, new_object: NewObject, offset: int, byte_size: int
) -> None:
    regions.register("r", new_object(), 8, 16)
    region = regions.get("r")
    with pytest.raises(InvalidArgument):
        region.read(offset, byte_size)
    with pytest.raises(InvalidArgument):
        region.check(offset, byte_size)
    if 0 < byte_size < 100:
        with pytest.raises(InvalidArgument):
            region.write(offset, memoryview(bytes(byte_size)))


numbers = st.one_of(
    st.integers(-2, 70), st.integers(-(2**65), 2**65), st.sampled_from([2**63, 2**64, 2**64 - 8])
)


@settings(max_examples=300)
@given(numbers, numbers, numbers, numbers)
def test_no_numbers_reach_what_is_not_registered(
    offset: int, byte_size: int, within: int, length: int
) -> None:
    content = bytes(range(SIZE))
    path = Path(FOLDER) / f"test-regions-{os.getpid()}-numbers"
    path.write_bytes(content)
    try:
        regions = SharedMemoryRegions(allowed=True)
        try:
            regions.register("r", f"/{path.name}", offset, byte_size)
        except InvalidArgument:
            assert not (offset >= 0 and byte_size > 0 and offset + byte_size <= SIZE)
            return
        registered = content[offset : offset + byte_size]
        assert len(registered) == byte_size > 0
        try:
            found = bytes(regions.get("r").read(within, length))
        except InvalidArgument:
            assert not (0 <= within < byte_size and 0 <= length <= byte_size - within)
        else:
            assert found == registered[within : within + length]
            assert len(found) == length
    finally:
        path.unlink()


def test_data_read_from_a_region_is_a_copy(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    key = new_object(content=b"before")
    regions.register("r", key, 0, SIZE)
    found = regions.get("r").read(0, 6)
    with path_of(key).open("r+b") as file:
        file.write(b"after!")
    assert bytes(found) == b"before"


def test_a_region_that_became_shorter_fails_its_requests_and_nothing_else(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    key = new_object()
    regions.register("r", key, 0, SIZE)
    region = regions.get("r")
    for size in (SIZE - 1, 1, 0):
        os.truncate(path_of(key), size)
        with pytest.raises(InvalidArgument, match="smaller"):
            region.read(0, SIZE)
        with pytest.raises(InvalidArgument, match="smaller"):
            region.write(0, memoryview(bytes(SIZE)))
        assert path_of(key).stat().st_size == size
    os.truncate(path_of(key), SIZE)
    region.write(0, memoryview(b"x" * SIZE))
    assert bytes(region.read(0, SIZE)) == b"x" * SIZE


MAPPED = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR)
mapping = mmap.mmap(descriptor, 65536)
os.truncate(sys.argv[1], 0)
bytes(mapping[:65536])
"""
COPIED = """
import os, sys
from modelport.gateway.inference.shared_memory import SharedMemoryRegions
from modelport.gateway.errors import InvalidArgument
regions = SharedMemoryRegions(allowed=True)
regions.register("r", sys.argv[2], 0, 65536)
os.truncate(sys.argv[1], 0)
try:
    regions.get("r").read(0, 65536)
except InvalidArgument:
    sys.exit(7)
"""


@pytest.mark.parametrize(("program", "status"), [(MAPPED, -signal.SIGBUS), (COPIED, 7)])
def test_a_mapping_would_kill_the_process_and_a_copy_does_not(
    new_object: NewObject, program: str, status: int
) -> None:
    """The known-bad variant is the obvious one, and Triton's: ``mmap`` at registration."""
    key = new_object(65536)
    done = subprocess.run([sys.executable, "-c", program, str(path_of(key)), key], check=False)
    assert done.returncode == status


def test_a_region_in_use_outlives_its_registration(
    regions: SharedMemoryRegions, new_object: NewObject
) -> None:
    key = new_object()
    regions.register("r", key, 0, SIZE)
    transfer = SharedTensors(regions, SIZE)
    transfer.expect("y", {"shared_memory_region": "r", "shared_memory_byte_size": SIZE})
    regions.unregister_all()
    path_of(key).rename(path_of(key + "-moved"))
    assert transfer.write(Tensor("y", Datatype.UINT8, np.full(4, 7, np.uint8)))
    assert not transfer.write(Tensor("z", Datatype.UINT8, np.full(4, 8, np.uint8)))
    path_of(key + "-moved").rename(path_of(key))
    assert path_of(key).read_bytes()[:5] == b"\7\7\7\7\0"
    assert descriptors()[str(path_of(key))] == 1
    del transfer
    assert str(path_of(key)) not in descriptors()
