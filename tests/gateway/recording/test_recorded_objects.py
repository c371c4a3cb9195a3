"""Recorded traffic in object storage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelport.gateway.recording.record_files import files_in
from modelport.gateway.recording.record_reader import read
from modelport.gateway.recording.recorder import Dropped, RequestRecorder
from tests.commands import modelport
from tests.gateway.recording.test_recorded_traffic import ALL, put
from tests.gateway.repository.storage.moto_server import ENVIRONMENT, Moto

pytestmark = pytest.mark.thorough  # moto takes seconds to start


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    made = Moto(tmp_path_factory.mktemp("moto") / "log")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_records_appear_as_whole_objects_and_are_read_listed_and_pruned(moto: Moto) -> None:
    where = moto.location("records")
    made = RequestRecorder(ALL._replace(target=where, rotate_bytes=20_000))
    for number in range(100):
        put(made, "m" if number % 2 else "a model", value=number)
    made.close()
    assert made.written == 100
    notes: list[str] = []
    values = [next(each.inferences())[0][0].data for each in read(where, notes.append)]
    assert [float(each[0, 0]) for each in values if each is not None] == [*range(100)]
    assert notes == []
    assert {each.key.partition("/")[0] for each in files_in(where)} == {"m", "a%20model"}
    assert "a model" in modelport("records", "show", moto.url("records")).stdout
    done = modelport("records", "prune", moto.url("records"), "--max-size", "0")
    assert done.returncode == 0, done.stderr
    assert moto.keys("records") == []


def test_a_store_without_its_bucket_drops_and_counts(moto: Moto) -> None:
    where = moto.location("records")
    missing = type(where)("s3", "no-such-bucket", "records", where.endpoint)
    made = RequestRecorder(ALL._replace(target=missing))
    for _ in range(10):
        put(made)
    made.close()
    assert (made.sampled, made.written, made.dropped[Dropped.NOT_WRITTEN]) == (10, 0, 10)


def test_a_store_that_is_down_holds_nobody_up(moto: Moto, tmp_path: Path) -> None:
    where = moto.location("records")
    down = type(where)("s3", where.bucket, "records", "http://127.0.0.1:1")
    made = RequestRecorder(ALL._replace(target=down))
    for _ in range(10):
        put(made)
    made.close()
    assert made.sampled == 10
    assert made.written == 0
