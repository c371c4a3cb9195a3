"""Tests of the mirror of object storage, which holds only complete versions."""

from __future__ import annotations

import concurrent.futures
import contextlib
import shutil
import threading
from pathlib import Path

import pytest

from modelport.gateway.errors import IntegrityError, InvalidArgument, Unavailable, Unsupported
from modelport.gateway.repository import manifest
from modelport.gateway.repository.storage import complete_versions
from modelport.gateway.repository.storage import mirror as mirrors
from modelport.gateway.repository.storage.location import is_url, parse
from modelport.gateway.repository.storage.mirror import Mirror
from modelport.gateway.repository.storage.objects import Object, ObjectStore
from tests.gateway.repository.storage.moto_server import Moto, fetch

pytestmark = pytest.mark.usefixtures("storage_environment")
CONFIG = b'backend: "fake"'


@pytest.fixture
def mirror(moto: Moto, prefix: str, tmp_path: Path) -> Mirror:
    return Mirror(moto.location(prefix), tmp_path / "cache")


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that are downloaded."""
    keys: list[str] = []
    download = ObjectStore.download

    def counted(self: ObjectStore, key: str, found: Object, path: Path) -> None:
        keys.append(key)
        download(self, key, found, path)

    monkeypatch.setattr(ObjectStore, "download", counted)
    return keys


def version(folder: Path, content: bytes = b"weights", certificate: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(content)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "table").write_bytes(content * 2)
    if certificate:
        (folder / "certificate.json").write_text("{}")
    manifest.write(folder)
    return folder


def publish(moto: Moto, prefix: str, folder: Path, number: int = 1) -> None:
    moto.put(f"{prefix}/m/config.pbtxt", CONFIG)
    moto.upload(folder, f"{prefix}/m/{number}")


def test_urls_are_read_as_triton_reads_them() -> None:
    assert not is_url("model_repository")
    assert str(parse("s3://bucket/some/prefix/")) == "s3://bucket/some/prefix"
    location = parse("s3://localhost:9000/bucket/prefix")
    assert (location.endpoint, location.path) == ("http://localhost:9000", "bucket/prefix")
    assert str(location) == "s3://localhost:9000/bucket/prefix"
    location = parse("s3://https://minio.example:443/bucket")
    assert (location.endpoint, location.path) == ("https://minio.example:443", "bucket")
    assert parse(str(location)) == location
    assert str(parse("gs://bucket/p") / "m") == "gs://bucket/p/m"


@pytest.mark.parametrize(
    "url",
    [
        "s3://MARKED:MARKED@bucket/prefix",
        "s3://https://MARKED:MARKED@host:443/bucket",
        "s3://bucket/prefix?secret=MARKED",
        "gs://bucket/prefix#MARKED",
        "ftp://MARKED:MARKED@host/x",
        "s3://",
        "s3://bucket/../MARKED",
        "s3://bucket//MARKED",
    ],
)
def test_a_url_with_credentials_or_without_a_bucket_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(url)
    assert "MARKED" not in str(refused.value)


def test_a_storage_whose_library_is_missing_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(Unsupported, match=r"pip install '\.\[gcs\]' in modelport's checkout"):
        Mirror(parse("gs://bucket/p"), tmp_path).look()


def test_a_whole_version_is_found_fetched_by_one_rename_and_never_downloaded_again(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, downloads: list[str]
) -> None:
    published = version(tmp_path / "1")
    publish(moto, prefix, published)
    found = mirror.look()
    assert found["m"].config_text == CONFIG.decode()
    assert not found["m"].versions[1].path.exists()
    here = fetch(found)
    assert manifest.verify(here)
    assert (here / "data" / "table").read_bytes() == (published / "data" / "table").read_bytes()
    assert (mirror.folder / "m" / "config.pbtxt").read_bytes() == CONFIG
    count = len(downloads)
    fetch(mirror.look())
    again = Mirror(mirror.location, tmp_path / "cache")  # another process, later
    assert again.look() == found
    fetch(again.look())
    assert len(downloads) == count


def test_a_version_is_not_there_before_its_last_object_whatever_the_order(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    folder = version(tmp_path / "1")
    names = [*manifest.files_of(folder), manifest.FILENAME]
    for turn in range(len(names)):
        order = names[turn:] + names[:turn]
        moto.put(f"{prefix}/m{turn}/1/{complete_versions.CLAIM}", b"claim")
        for name in order:
            found = mirror.look()
            assert f"m{turn}" not in found
            moto.upload(folder, f"{prefix}/m{turn}/1", [name])
        assert list(mirror.look()[f"m{turn}"].versions) == [1]


def test_a_version_with_a_certificate_and_no_manifest_is_still_being_uploaded(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete_versions, "SETTLE_SECONDS", 0.0)
    moto.upload(version(tmp_path / "1"), f"{prefix}/m/1", ["certificate.json", "model.onnx"])
    assert mirror.look() == mirror.look() == mirror.look() == {}
    assert not mirror.unsettled


def test_the_text_of_a_pipeline_is_known_before_its_version_is_downloaded(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, downloads: list[str]
) -> None:
    for number, content in ((1, b"inputs = []"), (2, b"\xff"), (3, b"#" * 2**21)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "pipeline.toml").write_bytes(content)
        manifest.write(folder)
        publish(moto, prefix, folder, number)
    versions = mirror.look()["m"].versions
    assert {n: each.pipeline for n, each in versions.items()} == {1: "inputs = []", 2: "", 3: ""}
    assert downloads == []


def test_a_version_without_a_manifest_is_used_once_two_polls_see_it_unchanged(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete_versions, "SETTLE_SECONDS", 0.0)
    moto.put(f"{prefix}/m/config.pbtxt", CONFIG)
    moto.put(f"{prefix}/m/1/model.onnx", b"weights")
    assert mirror.look() == {}
    assert mirror.unsettled
    moto.put(f"{prefix}/m/1/model.data", b"more")  # it was still being uploaded
    assert mirror.look() == {}
    assert sorted(path.name for path in fetch(mirror.look()).iterdir()) == [
        "model.data",
        "model.onnx",
    ]
    assert not mirror.unsettled
    before = mirror.look()["m"].versions[1]
    moto.put(f"{prefix}/m/1/model.onnx", b"changed")
    assert mirror.look()["m"].versions[1] == before  # what serves stays until it has settled
    assert (fetch(mirror.look()) / "model.onnx").read_bytes() == b"changed"


def test_a_version_that_does_not_match_its_manifest_is_never_here(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, downloads: list[str]
) -> None:
    publish(moto, prefix, version(tmp_path / "1", b"weights"))
    moto.put(f"{prefix}/m/1/model.onnx", b"wEights")  # of the same size
    with pytest.raises(IntegrityError, match=r"'model.onnx' does not match"):
        fetch(mirror.look())
    assert downloads.count("m/1/model.onnx") == mirrors.DOWNLOADS
    assert not (mirror.folder / "m" / "1").exists()
    assert not list((mirror.folder / ".staging").iterdir())


def test_a_version_that_changes_while_it_is_downloaded_is_not_taken(
    moto: Moto, prefix: str, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete_versions, "SETTLE_SECONDS", 0.0)
    moto.put(f"{prefix}/m/1/model.onnx", b"weights")
    mirror.look()
    found = mirror.look()
    download = ObjectStore.download

    def changed(self: ObjectStore, key: str, listed: Object, path: Path) -> None:
        download(self, key, listed, path)
        moto.put(f"{prefix}/{key}", b"CHANGED")

    monkeypatch.setattr(ObjectStore, "download", changed)
    with pytest.raises(Unavailable, match="changed while it was downloaded"):
        fetch(found)
    assert not found["m"].versions[1].path.exists()


def test_removed_versions_go_and_changed_configurations_come(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, downloads: list[str]
) -> None:
    folder = version(tmp_path / "1")
    for number in (1, 2):
        publish(moto, prefix, folder, number)
        fetch(mirror.look(), number)
    moto.put(f"{prefix}/m/config.pbtxt", CONFIG + b"\nmax_batch_size: 2")
    moto.put(f"{prefix}/m/labels.txt", b"cat")
    moto.delete(*(f"{prefix}/m/1/{name}" for name in moto.keys(f"{prefix}/m/1")))
    found = mirror.look()
    assert list(found["m"].versions) == [2]
    assert not (mirror.folder / "m" / "1").exists()
    assert "max_batch_size: 2" in (found["m"].config_text or "")
    downloads.clear()
    fetch(found, 2)
    assert sorted(downloads) == ["m/config.pbtxt", "m/labels.txt"]
    assert found["m"].labels("labels.txt") == ("cat",)
    moto.delete(*(f"{prefix}/{name}" for name in moto.keys(prefix)))
    assert mirror.look() == {}
    assert not (mirror.folder / "m").exists()


def test_a_full_disk_is_reported_and_leaves_no_partial_version(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(moto, prefix, version(tmp_path / "1"))
    monkeypatch.setattr(mirrors, "SPARE_BYTES", 2**62)
    with pytest.raises(Unavailable, match="the disk of --repository-cache is full"):
        fetch(mirror.look())
    monkeypatch.undo()
    assert not (mirror.folder / "m" / "1").exists()


def test_processes_that_share_a_cache_download_once(
    moto: Moto, prefix: str, tmp_path: Path, downloads: list[str]
) -> None:
    publish(moto, prefix, version(tmp_path / "1", b"w" * 100_000))
    found = [Mirror(moto.location(prefix), tmp_path / "cache").look() for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(fetch, found)}) == 1
    assert sorted(downloads) == sorted({*downloads})


def test_what_another_has_just_downloaded_is_not_removed_by_an_older_look(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = version(tmp_path / "1")
    publish(moto, prefix, folder)
    fetch(mirror.look())
    another = Mirror(mirror.location, tmp_path / "cache")
    listing = ObjectStore.listing
    fetched: list[Path] = []

    def slow(self: ObjectStore, below: str = "") -> dict[str, Object]:
        found = listing(self, below)
        if self is mirror._objects:
            publish(moto, prefix, folder, 2)
            moto.upload(folder, f"{prefix}/new/1")
            later = another.look()
            fetched.extend((fetch(later, 2), fetch(later, name="new")))
        return found

    monkeypatch.setattr(ObjectStore, "listing", slow)
    assert list(mirror.look()["m"].versions) == [1]
    assert [manifest.verify(path) for path in fetched] == [True, True]
    monkeypatch.undo()
    moto.delete(*(f"{prefix}/{key}" for key in moto.keys(prefix) if key.startswith(("m/2", "new"))))
    assert list(another.look()) == ["m"]
    assert not [path for path in fetched if path.exists()]


def test_a_download_that_was_killed_is_made_again(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    publish(moto, prefix, version(tmp_path / "1"))
    here = fetch(mirror.look())
    left = mirror.folder / ".staging" / "m" / "1"
    left.mkdir(parents=True)
    (left / "half").write_text("")
    (here / "model.onnx").unlink()
    assert manifest.verify(fetch(mirror.look()))
    shutil.rmtree(here)
    assert manifest.verify(fetch(mirror.look()))


def test_files_of_any_name_come_under_it(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path
) -> None:
    folder = version(tmp_path / "1")
    names = ["a b", "a%20b", "a+b", "a?b*[c]", "a#b", "größe", "模型", "~$x", "a=b&c;d:e@f,g"]
    for name in names:
        (folder / "data" / name).write_text(name)
    manifest.write(folder)
    publish(moto, prefix, folder)
    here = fetch(mirror.look())
    assert {name: (here / "data" / name).read_text() for name in names} == {n: n for n in names}
    assert manifest.verify(here)


def test_what_is_still_being_written_of_a_failed_download_is_in_no_later_one(
    moto: Moto, prefix: str, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No manifest would tell."""
    monkeypatch.setattr(complete_versions, "SETTLE_SECONDS", 0.0)
    for name in ("a", "b"):
        moto.put(f"{prefix}/m/1/{name}", b"right")
    mirror.look()
    found = mirror.look()
    b_began, b_is_there, b_ended = (threading.Event() for _ in range(3))
    calls: list[str] = []
    download = ObjectStore.download

    def slow(self: ObjectStore, key: str, listed: Object, path: Path) -> None:
        calls.append(key)
        again = calls.count(key) > 1
        if key == "m/1/b" and not again:
            b_began.set()
            assert b_is_there.wait(60)
            with contextlib.suppress(OSError):
                path.write_bytes(b"WRONG")
            b_ended.set()
            return
        if key == "m/1/a" and not again:
            assert b_began.wait(60)
            raise Unavailable("the connection broke")
        download(self, key, listed, path)
        if key == "m/1/b":
            b_is_there.set()
        assert b_ended.wait(60)

    monkeypatch.setattr(ObjectStore, "download", slow)
    with pytest.raises(Unavailable, match="the connection broke"):
        fetch(found)
    assert (fetch(found) / "b").read_bytes() == b"right"


def test_a_copy_that_was_damaged_here_is_downloaded_again(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, downloads: list[str]
) -> None:
    publish(moto, prefix, version(tmp_path / "1"))
    here = fetch(mirror.look())
    count = len(downloads)
    (here / "model.onnx").write_bytes(bytes(len(b"weights")))  # as after a loss of power
    later = Mirror(mirror.location, tmp_path / "cache")
    assert manifest.verify(fetch(later.look()))
    assert len(downloads) > count
    count = len(downloads)
    fetch(later.look())
    assert len(downloads) == count


@pytest.mark.parametrize("key", ["m/config.pbtxt", "m/1/manifest.json", "m/1/empty"])
def test_an_object_without_content_is_read_as_such(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, key: str
) -> None:
    folder = version(tmp_path / "1")
    (folder / "empty").touch()
    manifest.write(folder)
    publish(moto, prefix, folder)
    moto.upload(folder, f"{prefix}/other/1")
    moto.put(f"{prefix}/{key}", b"")
    found = mirror.look()
    assert manifest.verify(fetch(found, name="other"))
    if key == "m/1/manifest.json":
        with pytest.raises(IntegrityError, match="not a manifest"):
            fetch(found)
    else:
        assert manifest.verify(fetch(found))


def test_a_manifest_that_may_not_be_read_keeps_its_version_back_and_no_other(
    moto: Moto, prefix: str, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = version(tmp_path / "1")
    publish(moto, prefix, folder)
    moto.upload(folder, f"{prefix}/other/1")
    read, refused = ObjectStore.read, ["m/1/manifest.json"]

    def guarded(self: ObjectStore, key: str, most_bytes: int) -> bytes:
        if key in refused:
            raise InvalidArgument("the object store refuses access (AccessDenied)")
        return read(self, key, most_bytes)

    monkeypatch.setattr(ObjectStore, "read", guarded)
    assert list(mirror.look()) == ["other"]
    refused.append("other/1/manifest.json")
    with pytest.raises(InvalidArgument, match="refuses access"):
        Mirror(mirror.location, tmp_path / "another").look()
    refused.clear()
    assert sorted(mirror.look()) == ["m", "other"]
