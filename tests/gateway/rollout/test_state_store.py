"""Tests of the store of rollouts: in a folder and in S3, with racing processes, hostile files."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.errors import InvalidArgument, ModelportError, NotFound, Unavailable
from modelport.gateway.repository import scan
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.mirror import Mirror
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.state import (
    MAX_STATE_BYTES,
    RecordedCriterion,
    RolloutPhase,
    RolloutState,
)
from modelport.gateway.rollout.shared_state.state_files import FOLDER, FolderFiles, RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import (
    KEPT_REVISIONS,
    MAX_COUNTS_BYTES,
    MAX_HISTORY,
    MOST_REVISIONS,
    RolloutStore,
    latest_of,
)
from modelport.gateway.rollout.shared_state.transitions import Change
from modelport.gateway.rollout.statistics.counts import SideCounts, StageCounts
from modelport.gateway.rollout.statistics.evidence import CriterionStatus
from modelport.gateway.runtime import checked_json
from tests.gateway.repository.storage.moto_server import Moto
from tests.gateway.rollout.plans import plan

pytestmark = pytest.mark.usefixtures("storage_environment")
ME, OTHER = "a" * 32, "b" * 32
COUNTS = StageCounts(candidate=SideCounts(requests=7))
SIDE = COUNTS.to_json()["candidate"]
EVIDENCE: dict[str, Any] = {
    "name": "p99", "relative": True, "limit": 1.0, "status": CriterionStatus.OPEN, "events": 3,
    "trials": 5, "alpha": 0.02, "log_e_value": 1.5, "log_e_value_kept": -2.5, "estimate": 1.25,
    "lower": 0.5, "upper": None,
}  # fmt: skip


@pytest.fixture(params=["folder", "s3"])
def repository(
    request: pytest.FixtureRequest, tmp_path: Path, moto: Moto
) -> Iterator[Path | Location]:
    """An empty repository, in a folder or in S3."""
    if request.param == "folder":
        yield tmp_path
    else:
        yield moto.location(uuid.uuid4().hex)


@pytest.fixture
def files(repository: Path | Location) -> RolloutFiles:
    return RolloutFiles(repository, 30.0)


def state(revision: int = 1, **fields: Any) -> RolloutState:
    return replace(transitions.started(plan(), None, ME, Change(1e9)), revision=revision, **fields)


def put(repository: Path, key: str, content: bytes) -> Path:
    path = repository / FOLDER / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


async def test_a_revision_is_written_once_and_read_again(files: RolloutFiles) -> None:
    store = RolloutStore(files)
    assert await store.look() == {}
    first = state(evidence=(RecordedCriterion(**EVIDENCE),), counts=(COUNTS.to_json(),))
    assert await store.write(first)
    assert await store.write(first)  # repeated, because its answer was lost
    assert not await store.write(state())  # of another gateway
    assert await store.look() == {"fraud": 1}
    assert await RolloutStore(files).read("fraud", 1) == first
    with pytest.raises(NotFound):
        await store.read("fraud", 2)


async def test_old_revisions_are_deleted_and_cannot_come_back(files: RolloutFiles) -> None:
    store, first = RolloutStore(files), state()
    for revision in range(1, MOST_REVISIONS + 2):
        assert await store.write(replace(first, revision=revision))
    left = await files.listing("state/fraud")
    assert len(left) == KEPT_REVISIONS
    stale = replace(first, revision=2, leader=OTHER)
    assert not await store.write(stale)
    # Known to be bad: without the look afterwards, the stale gateway would be believed.
    assert await files.create("state/fraud/0000000003.json", checked_json.write(stale))
    assert await store.look() == {"fraud": MOST_REVISIONS + 1}


async def test_a_revision_that_is_deleted_while_another_gateway_writes_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, first = RolloutStore(RolloutFiles(tmp_path, 30.0)), state()
    assert await store.write(first)
    link = os.link

    def too_late(*paths: Any, **folders: Any) -> None:
        try:
            link(*paths, **folders)
        finally:
            (tmp_path / FOLDER / "state/fraud/0000000001.json").unlink()

    monkeypatch.setattr(os, "link", too_late)
    assert not await store.write(replace(first, leader=OTHER))


async def test_counts_of_all_other_lives_add_up(files: RolloutFiles) -> None:
    store, rollout = RolloutStore(files), uuid.uuid4().hex
    stages = {"1": COUNTS.to_json()}
    for replica in (ME, OTHER):
        await store.write_counts("fraud", rollout, replica, stages)
    await store.write_counts("fraud", uuid.uuid4().hex, OTHER, stages)
    assert await store.read_counts("fraud", rollout, ME) == {1: COUNTS}
    assert await store.read_counts("fraud", rollout, "c" * 32) == {1: COUNTS + COUNTS}
    await store.write_counts("fraud", rollout, OTHER, {"1": (COUNTS + COUNTS).to_json()})
    assert await store.read_counts("fraud", rollout, ME) == {1: COUNTS + COUNTS}
    await store.forget_counts("fraud", keep=rollout)
    assert len(await files.listing("counts/fraud")) == 2
    await store.forget_counts("fraud", keep="")
    assert await store.read_counts("fraud", rollout, ME) == {}


async def test_the_history_has_the_latest_rollouts_first(tmp_path: Path) -> None:
    store = RolloutStore(RolloutFiles(tmp_path, 30.0))
    for number in range(MAX_HISTORY + 3):
        began = transitions.started(plan(), None, ME, Change(1e9 + number))
        ended = transitions.rolled_back(began, ME, Change(2e9, "slow"))
        await store.archive(transitions.settled(ended, ME, ""))
    await store.archive(transitions.settled(ended, ME, "read-only"))  # once more
    found = await store.history("fraud")
    assert len(found) == MAX_HISTORY
    assert found[0].unsettled_reason == "read-only"
    assert [each.events[0].time for each in found[:2]] == [1e9 + number, 1e9 + number - 1]
    assert found[0].phase is RolloutPhase.ROLLED_BACK
    assert await store.history("../state") == []


RACE = """
import asyncio, json, sys, uuid
from dataclasses import replace
from modelport.gateway.repository.storage.location import parse
from modelport.gateway.runtime import checked_json
from modelport.gateway.rollout.shared_state.state import RolloutState
from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from pathlib import Path

where, first, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
repository = parse(where) if "://" in where else Path(where)

async def main():
    store, me, won = RolloutStore(RolloutFiles(repository, 30.0)), uuid.uuid4().hex, []
    state = checked_json.read(RolloutState, first.encode())
    print("ready", flush=True)
    sys.stdin.readline()
    while True:
        revision = (await store.look()).get("fraud", 0) + 1
        if revision > rounds:
            break
        if await store.write(replace(state, revision=revision, leader=me)):
            won.append(revision)
    print(json.dumps(won))

asyncio.run(main())
"""


def race(where: str, rounds: int, code: str = RACE) -> list[int]:
    """The revisions that processes say they wrote, of those that they race for."""
    first = checked_json.write(state()).decode()
    command = [sys.executable, "-c", code, where, first, str(rounds)]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    won: list[int] = []
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    for racer in racers:
        printed, _ = racer.communicate(timeout=120)
        assert racer.returncode == 0
        won += json.loads(printed)
    return sorted(won)


@pytest.mark.thorough
def test_of_processes_that_race_for_a_revision_at_most_one_wins(
    repository: Path | Location,
) -> None:
    rounds = 100 if isinstance(repository, Path) else 10
    won = race(str(repository), rounds)
    assert len(set(won)) == len(won)
    # A winner that was overtaken before it looked again does not count itself.
    assert len(won) > rounds / 4
    if isinstance(repository, Path):
        assert not list(repository.glob(f"{FOLDER}/**/*.tmp"))


@pytest.mark.thorough
def test_a_race_that_the_last_writer_wins_is_caught(tmp_path: Path) -> None:
    broken = RACE.replace(
        "async def main():",
        "from modelport.gateway.rollout.shared_state.state_files import FolderFiles\n"
        "FolderFiles.create = lambda self, *each: self.replace(*each) or True\n"
        "async def main():",
    )
    won = race(str(tmp_path), 100, broken)
    assert len(set(won)) < len(won)


def hostile(**fields: Any) -> bytes:
    return json.dumps({**json.loads(checked_json.write(state())), **fields}).encode()


HOSTILE = {
    "empty": b"",
    "binary": os.urandom(1000),
    "deep": b"[" * 1_000_000,
    "deep evidence": hostile()[:-1] + b', "counts": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a list": b"[]",
    "huge": b" " * (MAX_STATE_BYTES + 1),
    "another model's": hostile(plan=plan("other").to_json()),
    "another revision's": hostile(revision=7),
    "of the future": hostile(format=2),
    "no such stage": hostile(stage=99),
    "a stage below zero": hostile(stage=-1),
    "a stage as text": hostile(stage="0"),
    "a phase that does not exist": hostile(phase="paid"),
    "settled while running": hostile(settled=True),
    "endless seconds": hostile().replace(b'"seconds": 0.0', b'"seconds": 1e999'),
    "no number": hostile().replace(b'"seconds": 0.0', b'"seconds": NaN'),
    "a leader with a path": hostile(leader="../../etc"),
    "a plan that shrinks": hostile(plan={**plan().to_json(), "steps": [1.0, 0.5]}),
    "events of another kind": hostile(events=[{"time": 1, "kind": "bribed", "stage": 0}]),
    "many events": hostile(events={}),
    "an event of no stage": hostile(events=[{"time": 1, "kind": "started", "stage": -1}]),
    "an event at no time": hostile(events=[{"time": 1e300, "kind": "started", "stage": 0}]),
    "evidence of nothing": hostile(evidence=[{}]),
    "evidence without an error": hostile(evidence=[{**EVIDENCE, "alpha": 0.0}]),
    "counts of nothing": hostile(counts=[{}]),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
async def test_a_hostile_state_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    put(tmp_path, "state/fraud/0000000001.json", content)
    store = RolloutStore(RolloutFiles(tmp_path, 30.0))
    assert await store.look() == {"fraud": 1}
    with pytest.raises(InvalidArgument, match="is not the state of a rollout") as refusal:
        await store.read("fraud", 1)
    assert "\n" not in str(refusal.value)
    assert "remove '.rollouts/state/fraud'" in str(refusal.value)


@pytest.mark.parametrize("written", [1, 5, 30])
@pytest.mark.parametrize("content", [b"", hostile(revision=9_999_999_999)], ids=["empty", "valid"])
async def test_a_forged_highest_revision_stops_nobody(
    tmp_path: Path, written: int, content: bytes
) -> None:
    store = RolloutStore(RolloutFiles(tmp_path, 30.0))
    for revision in range(1, written + 1):
        assert await store.write(state(revision))
    put(tmp_path, "state/fraud/9999999999.json", content)
    for revision in range(written, written + 30):
        assert await store.look() == {"fraud": revision}
        assert (await store.read("fraud", revision)).revision == revision
        assert await store.write(state(revision + 1))


def test_the_highest_number_alone_would_be_the_forged_one() -> None:
    """The known-bad rule, and numbers of a gateway that was stopped for long."""
    kept = [*range(100, 108), 9_999_999_999]
    assert max(kept) != latest_of(kept) == 107
    assert latest_of([3, *range(100, 108)]) == 107
    assert latest_of([57]) == 57


async def test_files_that_are_no_states_are_not_looked_at(tmp_path: Path) -> None:
    for name in (
        "1.json",
        "0000000001.json.bak",
        "-000000001.json",
        "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661.json",
        ".x.tmp",
    ):
        put(tmp_path, f"state/fraud/{name}", b"{}")
    put(tmp_path, "state/.hidden/0000000001.json", b"{}")
    put(tmp_path, "state/0000000001.json", b"{}")
    put(tmp_path, "state/a/b/0000000001.json", b"{}")
    assert await RolloutStore(RolloutFiles(tmp_path, 30.0)).look() == {}


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


PLACES: dict[str, Callable[[Path, Path], None]] = {
    "the folder": lambda root, outside: link(root / FOLDER, outside),
    "a model's folder": lambda root, outside: link(
        root / FOLDER / "state" / "fraud", outside / "state" / "fraud"
    ),
    "a file": lambda root, outside: link(
        root / FOLDER / "state" / "fraud" / "0000000001.json",
        outside / "state" / "fraud" / "0000000001.json",
    ),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
async def test_no_symbolic_link_is_followed(
    tmp_path: Path, place: Callable[[Path, Path], None]
) -> None:
    outside, root = tmp_path / "outside", tmp_path / "repository"
    path = outside / "state" / "fraud" / "0000000001.json"
    path.parent.mkdir(parents=True)
    content = checked_json.write(state())
    path.write_bytes(content)
    root.mkdir()
    place(root, outside)
    files = FolderFiles(root)
    for attempt in (
        lambda: files.listing("state")["fraud/0000000001.json"],
        lambda: files.read("state/fraud/0000000001.json", 100),
        lambda: files.create("state/fraud/0000000001.json", b"x"),
    ):
        with pytest.raises((InvalidArgument, KeyError)):
            attempt()
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == [path.name]


async def test_a_pipe_in_place_of_a_state_does_not_block(tmp_path: Path) -> None:
    path = put(tmp_path, "state/fraud/0000000001.json", b"")
    path.unlink()
    os.mkfifo(path)
    store = RolloutStore(RolloutFiles(tmp_path, 5.0))
    assert await store.look() == {}
    with pytest.raises(InvalidArgument, match="not a regular file"):
        await store.read("fraud", 1)


async def test_hostile_counts_are_ignored(tmp_path: Path) -> None:
    rollout = uuid.uuid4().hex
    for number, content in enumerate(
        (
            b"",
            b"[]",
            b"[" * 100_000,
            b'{"stages": {"x": {}}}',
            b'{"stages": {"0": {"compared": -1}}}',
            json.dumps({"stages": {"101": COUNTS.to_json()}}).encode(),
            *(
                json.dumps({"stages": {"0": COUNTS.to_json() | wrong}}).encode()
                for wrong in (
                    {"errors": ["a", 1]},
                    {"errors": [5, 3]},
                    {"sources": "many"},
                    {"disagreed": 2, "compared": 1},
                    {"baseline": {**SIDE, "errors": 8}},
                    {"baseline": {**SIDE, "over_limit": {"p99_ms": 8}}},
                )
            ),
            b" " * (MAX_COUNTS_BYTES + 1),
        )
    ):
        put(tmp_path, f"counts/fraud/{rollout}.{number:032x}.json", content)
    good = json.dumps({"stages": {"0": COUNTS.to_json()}}).encode()
    put(tmp_path, f"counts/fraud/{rollout}.{OTHER}.json", good)
    store = RolloutStore(RolloutFiles(tmp_path, 30.0))
    assert await store.read_counts("fraud", rollout, ME) == {0: COUNTS}


async def test_a_repository_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file")
    with pytest.raises(InvalidArgument, match=r"'\.rollouts' of the repository cannot be used"):
        await RolloutStore(RolloutFiles(tmp_path, 30.0)).write(state())
    with pytest.raises(Unavailable, match="folder is gone"):
        await RolloutStore(RolloutFiles(tmp_path / "absent", 30.0)).look()


async def test_files_that_a_dead_process_left_behind_are_deleted(tmp_path: Path) -> None:
    files = FolderFiles(tmp_path)
    old = put(tmp_path, "state/fraud/.old.tmp", b"")
    os.utime(old, (1, 1))
    young = put(tmp_path, "state/fraud/.young.tmp", b"")
    files.create("state/fraud/0000000001.json", b"")
    files.delete(["state/fraud/0000000001.json", "state/fraud/0000000002.json", "absent/x"])
    assert [each.name for each in young.parent.iterdir()] == [young.name]


async def test_a_store_that_hangs_is_given_up(tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path, 0.05)
    released = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(self: FolderFiles, below: str) -> dict[str, str]:
        asyncio.run_coroutine_threadsafe(released.wait(), loop).result()
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderFiles, "listing", hang)
        with pytest.raises(Unavailable, match="does not respond in time"):
            await files.listing("state")
        with pytest.raises(Unavailable, match="does not respond in time"):  # it waits its turn
            await files.create("state/fraud/0000000001.json", b"")
        released.set()
    assert await RolloutFiles(tmp_path, 30.0).listing("state") == {}


async def test_a_scan_does_not_take_the_states_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "fraud" / "1").mkdir(parents=True)
    assert await RolloutStore(RolloutFiles(tmp_path, 30.0)).write(state())
    assert list(scan.scan([tmp_path])) == ["fraud"]


async def test_a_mirror_neither_takes_the_states_for_a_model_nor_loads_nor_deletes_them(
    moto: Moto, prefix: str, tmp_path: Path
) -> None:
    moto.put(f"{prefix}/fraud/config.pbtxt", b'backend: "fake"')
    moto.put(f"{prefix}/fraud/1/model.fake", b"weights")
    location = moto.location(prefix)
    assert await RolloutStore(RolloutFiles(location, 30.0)).write(state())
    before = len(moto.requests())
    mirror = Mirror(location, tmp_path / "cache")
    for _ in range(2):
        assert list(await asyncio.to_thread(mirror.look)) in ([], ["fraud"])
    asked = [line for line in moto.requests()[before:] if FOLDER in line]
    assert asked == []
    assert list((tmp_path / "cache").rglob("*.json")) == []
    assert moto.keys(f"{prefix}/{FOLDER}") == ["state/fraud/0000000001.json"]


def test_a_folder_in_place_of_the_state_takes_no_descriptor(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    files, before = FolderFiles(tmp_path), len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        with pytest.raises(ModelportError):
            files.read("state", 100)
    assert len(os.listdir("/proc/self/fd")) == before
