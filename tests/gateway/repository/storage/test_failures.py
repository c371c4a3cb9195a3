"""Failures of object storage and of the cache's disk, tested without a gateway."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from modelport.gateway.errors import InvalidArgument, Unavailable
from modelport.gateway.repository import manifest
from modelport.gateway.repository.storage import complete_versions
from modelport.gateway.repository.storage import mirror as mirrors
from modelport.gateway.repository.storage import objects as storage
from modelport.gateway.repository.storage.location import parse
from modelport.gateway.repository.storage.mirror import Mirror
from modelport.gateway.repository.storage.objects import Object, ObjectStore
from tests.gateway.repository.storage.moto_server import BUCKET, Moto, fetch

pytestmark = pytest.mark.usefixtures("storage_environment")
CONFIG = b'backend: "fake"'


@pytest.fixture
def mirror(moto: Moto, prefix: str, tmp_path: Path) -> Mirror:
    return Mirror(moto.location(prefix), tmp_path / "shared")


def upload(moto: Moto, folder: Path, below: str, content: bytes) -> None:
    """A version with a manifest, whatever was there before: as a tool does that overwrites."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(content)
    (folder / "model.data").write_bytes(content)
    manifest.write(folder)
    moto.upload(folder, below)


def content(path: Path) -> set[bytes]:
    return {(path / name).read_bytes() for name in ("model.onnx", "model.data")}


def test_loading_a_version_never_mixes_files_of_two_uploads(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    """Two processes share the cache: one is loading when the other follows the storage."""
    upload(moto, tmp_path / "v", f"{prefix}/m/1", b"old")
    loading = fetch(mirror.look())
    another = Mirror(mirror.location, tmp_path / "shared")
    another.look()
    upload(moto, tmp_path / "v", f"{prefix}/m/1", b"new")
    with capture_logs() as logs:
        newest = fetch(another.look())
        another.look()
    assert [(e["event"], e["model"], e["version"], e["log_level"]) for e in logs] == [
        ("model version was overwritten in storage", "m", 1, "warning")
    ]
    assert (content(loading), content(newest)) == ({b"old"}, {b"new"})
    assert manifest.verify(loading)
    assert fetch(mirror.look()) == newest


def test_what_has_been_overwritten_twice_leaves_the_disk(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    paths = []
    for each in (b"one", b"two", b"three"):
        upload(moto, tmp_path / "v", f"{prefix}/m/1", each)
        paths.append(fetch(mirror.look()))
    assert [path.exists() for path in paths] == [False, True, True]
    moto.delete(*(f"{prefix}/{key}" for key in moto.keys(prefix)))
    assert mirror.look() == {}
    assert not (mirror.folder / "m").exists()


def test_a_name_that_begins_like_another_is_another(
    moto: Moto, prefix: str, tmp_path: Path
) -> None:
    names = ("fraud", "fraud-v2", "fraud2", "fraud.old")
    for name in names:
        for number in (1, 10):
            moto.put(f"{prefix}/{name}/config.pbtxt", CONFIG)
            upload(moto, tmp_path / "v", f"{prefix}/{name}/{number}", f"{name}{number}".encode())
    upload(moto, tmp_path / "v", f"{prefix}-2/m/1", b"beside the repository")
    mirror = Mirror(moto.location(prefix), tmp_path / "cache")
    found = mirror.look()
    assert sorted(found) == sorted(names)
    for name in names:
        for number in (1, 10):
            assert content(fetch(found, number, name)) == {f"{name}{number}".encode()}
    one = ObjectStore(moto.location(prefix))
    assert {key.partition("/")[0] for key in one.listing("fraud/1")} == {
        "manifest.json", "model.data", "model.onnx",
    }  # fmt: skip
    one.delete(f"fraud/1/{key}" for key in one.listing("fraud/1"))
    found = mirror.look()
    assert [*found["fraud"].versions] == [10]
    assert [*found["fraud-v2"].versions] == [1, 10]
    # A repository whose name is a model's: nothing is seen of the models beside it.
    found = Mirror(moto.location(f"{prefix}/fraud"), tmp_path / "inner").look()
    assert {name: entry.is_model for name, entry in found.items()} == {
        "10": True, "config.pbtxt": False,
    }  # fmt: skip


def test_polling_many_unchanged_models_takes_one_listing(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    folder = tmp_path / "v"
    upload(moto, folder, f"{prefix}/m00/1", b"x")
    for number in range(40):
        name = f"{prefix}/m{number:02}"
        moto.put(f"{name}/config.pbtxt", CONFIG)
        moto.put(f"{name}/1/manifest.json", b'{"format": "modelport-manifest/1", "files": {}}')
    assert len(mirror.look()) == 40
    before = len(moto.requests())
    assert len(mirror.look()) == 40
    asked = [line.split('"')[1] for line in moto.requests()[before:]]
    assert [line.split("?")[0] for line in asked] == [f"GET /{BUCKET}"], asked


def test_a_storage_that_ends_while_many_configurations_are_read_is_not_asked_for_each(
    moto: Moto, prefix: str, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        moto.put(f"{prefix}/m{number}/config.pbtxt", CONFIG)
    asked: list[str] = []

    def down(_: ObjectStore, key: str, __: int) -> bytes:
        asked.append(key)
        raise Unavailable("the object store cannot be reached")

    monkeypatch.setattr(ObjectStore, "read", down)
    with pytest.raises(Unavailable, match="cannot be reached"):
        mirror.look()
    mirror._objects.threads.shutdown(wait=True)
    assert len(asked) < 50


def test_an_update_is_followed_although_clocks_are_wrong(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what is served depends on anybody's clock."""
    upload(moto, tmp_path / "v", f"{prefix}/m/1", b"old")
    fetch(mirror.look())
    now: Any = __import__("time").time
    for shift in (-10 * 86400.0, 10 * 86400.0):
        monkeypatch.setattr("time.time", lambda shift=shift: now() + shift)
        upload(moto, tmp_path / "v", f"{prefix}/m/1", f"{shift}".encode())
        assert content(fetch(mirror.look())) == {f"{shift}".encode()}
    monkeypatch.undo()
    moto.delete(*(f"{prefix}/{key}" for key in moto.keys(prefix)))


def test_an_object_named_like_a_version_does_not_hide_the_version(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    upload(moto, tmp_path / "v", f"{prefix}/m/1", b"weights")
    for content in (b"what some tools", b"leave for a folder"):
        moto.put(f"{prefix}/m/1", content)
        assert manifest.verify(fetch(mirror.look()))


def test_a_name_that_no_file_may_have_is_passed_over(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    upload(moto, tmp_path / "v", f"{prefix}/m/1", b"weights")
    moto.put(f"{prefix}/m/{'l' * 300}", b"")
    moto.put(f"{prefix}/m/2/{'ä' * 150}", b"")
    found = mirror.look()
    assert manifest.verify(fetch(found))
    assert complete_versions.group({f"m/2/{'ä' * 150}": Object(0, "")})["m"].problems


def test_keys_that_are_no_names_of_files_make_no_files() -> None:
    some = Object(1, "etag")
    keys = ["m/1/../../evil", "m/1/a\\b", "m/2//x", "m/3/a", "m/3/a/b", "m/4/x.pkl", "m/5/ok"]
    models = complete_versions.group(
        dict.fromkeys([*keys, "m/../x", "x", "../m/1/x", "m/6/"], some)
    )
    assert list(models) == ["m"]
    assert sorted(models["m"].problems) == [1, 2, 3, 4]
    assert models["m"].beside == {}
    assert complete_versions.files_of_version(models["m"].versions[6]) == {}


def test_unavailable_storage_is_reported_without_its_address(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as told:
        Mirror(parse("s3://127.0.0.1:1/bucket"), tmp_path).look()
    assert "127.0.0.1" not in str(told.value)
    assert told.value.__cause__ is told.value.__context__ is None


def test_every_call_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes connections and never answers."""
    import socket

    monkeypatch.setattr(storage, "LIST_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"s3://127.0.0.1:{silent.getsockname()[1]}/bucket"
        with pytest.raises(Unavailable, match="does not respond in time"):
            Mirror(parse(url), tmp_path).look()


def test_the_error_for_a_user_without_a_home_names_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(InvalidArgument, match="--repository-cache"):
        mirrors.default_cache()


def test_looks_do_not_meet(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that asked for one may be given up, and the next be there before it has ended."""
    upload(moto, tmp_path / "v", f"{prefix}/m/1", b"weights")
    listing, within, most = ObjectStore.listing, 0, 0
    second = threading.Event()

    def counted(self: ObjectStore, below: str = "") -> dict[str, Object]:
        nonlocal within, most
        within += 1
        most = max(most, within)
        if within > 1:
            second.set()
        second.wait(0.2)
        found = listing(self, below)
        within -= 1
        return found

    monkeypatch.setattr(ObjectStore, "listing", counted)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, other = (pool.submit(mirror.look) for _ in range(2))
        assert first.result() == other.result()
    assert most == 1
