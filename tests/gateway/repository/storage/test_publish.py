"""Publishing into object storage: whoever dies or races, a version is there whole or not at all."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from modelport.cli import modelport
from modelport.exporters.publishing import contract, object_storage, publish
from modelport.gateway.errors import AlreadyExists, InvalidArgument, UsageError
from modelport.gateway.repository import config, manifest
from modelport.gateway.repository.storage import complete_versions
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.storage.mirror import Mirror
from modelport.gateway.repository.storage.objects import ObjectStore
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.gateway.repository.storage.moto_server import BUCKET, Moto

pytestmark = pytest.mark.usefixtures("storage_environment")
#: Every call that changes the storage.
CHANGES = ("create", "upload", "delete")


def wanted(name: str = "m", width: int = 4) -> config.ModelConfig:
    tensor = TensorSpec("x", Datatype.FP32, (width,))
    return config.build(name, config.PLATFORMS[0], ModelSignature((tensor,), (tensor,), 8))


def put(
    location: Location,
    version: int | None = None,
    content: bytes = b"onnx",
    model: config.ModelConfig | None = None,
) -> contract.PublishedVersion:
    with publish.staging(location) as staged:
        (staged / "model.onnx").write_bytes(content)
        (staged / "certificate.json").write_text("{}")
        (staged.parent / "labels.txt").write_text("cat\ndog\n")
        return publish.publish(staged, location, model or wanted(), version)


def whole(location: Location, cache: Path, name: str = "m") -> dict[int, bytes]:
    """Fetch and verify every version, and return the artifacts."""
    found = Mirror(location, cache).look()
    artifacts = {}
    for number, entry in found[name].versions.items() if name in found else ():
        assert entry.fetch is not None
        entry.fetch()
        assert manifest.verify(entry.path)
        config.parse(found[name].config_text or "")
        artifacts[number] = (entry.path / "model.onnx").read_bytes()
    return artifacts


def test_a_version_is_claimed_uploaded_and_completed_by_its_manifest(
    moto: Moto, prefix: str, tmp_path: Path
) -> None:
    location, before = moto.location(prefix), len(moto.requests())
    done = put(location)
    assert (done.name, done.version, str(done.path)) == ("m", 1, f"{location}/m/1")
    changed = [
        line.split('"')[1].split()[1].removeprefix(f"/{BUCKET}/{prefix}/m/")
        for line in moto.requests()[before:]
        if "PUT" in line or "DELETE" in line
    ]
    assert changed[0] == f"1/{complete_versions.CLAIM}"
    assert changed[-2:] == ["1/manifest.json", f"1/{complete_versions.CLAIM}"]
    assert changed.index("config.pbtxt") > changed.index("labels.txt")
    assert whole(location, tmp_path) == {1: b"onnx"}
    assert complete_versions.CLAIM not in "".join(moto.keys(prefix))


def test_a_version_is_never_overwritten_and_a_model_keeps_its_contract(
    moto: Moto, prefix: str, tmp_path: Path
) -> None:
    location = moto.location(prefix)
    put(location)
    moto.put(f"{prefix}/m/config.pbtxt", config.to_text(wanted()).encode() + b"# by hand\n")
    assert put(location, content=b"two").version == 2
    assert b"# by hand" in ObjectStore(location).read("m/config.pbtxt", 10_000)
    with pytest.raises(AlreadyExists, match="version 2 of 'm' is published and never overwritten"):
        put(location, 2)
    with pytest.raises(UsageError, match="contradicts this export"):
        put(location, model=wanted(width=5))
    moto.put(f"{prefix}/plain/1/model.onnx", b"of another tool")
    with pytest.raises(UsageError, match=r"without a config\.pbtxt"):
        put(location, model=wanted("plain"))
    assert whole(location, tmp_path) == {1: b"onnx", 2: b"two"}


def test_racing_publishers_get_a_number_each_and_of_one_number_one_wins(
    moto: Moto, prefix: str, tmp_path: Path
) -> None:
    location = moto.location(prefix)

    def race(version: int | None, content: bytes) -> int | None:
        with contextlib.suppress(AlreadyExists):
            return put(location, version, content).version
        return None

    contents = [bytes([65 + index]) * 10 for index in range(5)]
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        numbers = list(pool.map(lambda content: race(None, content), contents))
        won = list(pool.map(lambda content: race(9, content), contents))
    assert sorted(filter(None, numbers)) == [1, 2, 3, 4, 5]
    assert won.count(9) == 1
    assert won.count(None) == 4
    found = whole(location, tmp_path)
    assert {found[number] for number in range(1, 6)} == {*contents}
    assert found[9] == contents[won.index(9)]


@pytest.mark.parametrize("version", [None, 1])
def test_a_number_that_another_has_finished_before_it_is_claimed_is_not_taken(
    moto: Moto,
    prefix: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: int | None,
) -> None:
    location, create = moto.location(prefix), ObjectStore.create

    def slow(self: ObjectStore, key: str, content: bytes) -> bool:
        monkeypatch.setattr(ObjectStore, "create", create)
        put(location, content=b"another's")
        return create(self, key, content)

    monkeypatch.setattr(ObjectStore, "create", slow)
    if version is None:
        assert put(location, version).version == 2
    else:
        with pytest.raises(AlreadyExists, match="version 1 of 'm' is published"):
            put(location, version)
    assert whole(location, tmp_path)[1] == b"another's"
    assert complete_versions.CLAIM not in "".join(moto.keys(prefix))


class Killed(BaseException):
    """Nothing that the program does after it reaches the storage."""


@pytest.mark.thorough
def test_a_publisher_that_dies_at_any_call_leaves_nothing_that_is_served(
    moto: Moto, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; ``make storage`` does the same with SIGKILL."""
    monkeypatch.setattr(complete_versions, "SETTLE_SECONDS", 0.0)
    location, left = moto.location(prefix), 0

    def dying(change: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return change(*arguments)

        return call

    originals = {name: getattr(ObjectStore, name) for name in CHANGES}
    served = []
    while True:
        name, left = f"m{len(served)}", len(served)
        with monkeypatch.context() as patched:
            for each, change in originals.items():
                patched.setattr(ObjectStore, each, dying(change))
            try:
                put(location, model=wanted(name))
                break
            except Killed:
                pass
        watching = Mirror(location, tmp_path)
        for _ in range(3):  # whatever is looked at for long enough would be taken for whole
            found = watching.look().get(name)
        served.append(found is not None and [*found.versions] == [1])
    # Claim, certificate, artifact, labels, configuration, manifest; and the claim's end.
    assert served == [False] * 6 + [True]
    assert put(location, model=wanted("m5")).version == 2
    assert whole(location, tmp_path, "m5") == {2: b"onnx"}
    assert whole(location, tmp_path, "m6") == {1: b"onnx"}
    monkeypatch.setattr(object_storage, "LEFT_BEHIND_SECONDS", -1.0)
    put(location, model=wanted("m5"))
    assert not [key for key in moto.keys(prefix) if key.startswith("m5/1/")]


def test_a_failed_upload_leaves_nothing_behind(
    moto: Moto, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise InvalidArgument("the object store refuses access (AccessDenied)")

    monkeypatch.setattr(ObjectStore, "upload", refused)
    with pytest.raises(InvalidArgument, match="AccessDenied"):
        put(moto.location(prefix))
    assert moto.keys(prefix) == []


@pytest.mark.parametrize("name", ["certificate.json", "model.onnx"])
def test_a_publisher_that_slept_too_long_leaves_alone_what_another_made_of_its_number(
    moto: Moto, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    location, upload = moto.location(prefix), ObjectStore.upload

    def sleeps(self: ObjectStore, path: Path, key: str) -> None:
        upload(self, path, key)
        if not key.endswith(name):
            return
        with monkeypatch.context() as later:
            later.setattr(ObjectStore, "upload", upload)
            later.setattr(object_storage, "LEFT_BEHIND_SECONDS", -1.0)
            assert put(location, content=b"another's").version == 1

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "upload", sleeps)
        with pytest.raises(UsageError, match="removed by another publisher"):
            put(location)
    assert whole(location, tmp_path) == {1: b"another's"}


def test_a_claimed_version_number_is_refused_and_skipped(
    moto: Moto, prefix: str, tmp_path: Path
) -> None:
    location = moto.location(prefix)
    moto.put(f"{prefix}/m/1/{complete_versions.CLAIM}", b"another's")
    with pytest.raises(AlreadyExists, match="is being published by another"):
        put(location, 1)
    assert put(location).version == 2
    assert whole(location, tmp_path) == {2: b"onnx"}


def test_a_missing_bucket_is_a_usage_error(moto: Moto, prefix: str) -> None:
    with pytest.raises(UsageError, match="no such bucket"):
        put(Location("s3", "nowhere", prefix, moto.endpoint))


def test_a_verified_version_is_copied_bit_for_bit(moto: Moto, prefix: str, tmp_path: Path) -> None:
    with publish.staging(tmp_path / "here") as staged:
        (staged / "model.onnx").write_bytes(b"onnx")
        digest = manifest.sha256_of(staged / "model.onnx")
        certificate = {
            "format": "modelport-certificate/1",
            "model": {"name": "m"},
            "artifact": {
                "format": "onnx",
                "files": {"model.onnx": {"sha256": digest}},
                "size_bytes": 4,
            },
        }
        (staged / "certificate.json").write_text(json.dumps(certificate))
        publish.publish(staged, tmp_path / "here", wanted(), None)
    url = moto.url(prefix)

    def call(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(modelport, arguments)
        return result.exit_code, result.output

    code, said = call("publish", str(tmp_path / "here" / "m"), "--repository", url)
    assert (code, f"{url}/m/1" in said) == (0, True), said
    code, said = call("verify", "--integrity", f"{url}/m")
    assert (code, f"1 ({url}/m)" in said) == (0, True), said
    code, said = call("publish", f"{url}/m/1", "--repository", str(tmp_path / "there"))
    assert code == 0, said
    for name in manifest.files_of(tmp_path / "here" / "m"):
        there = (tmp_path / "there" / "m" / name).read_bytes()
        assert there == (tmp_path / "here" / "m" / name).read_bytes()
    moto.put(f"{prefix}/m/1/model.onnx", b"onnX")
    assert call("verify", "--integrity", f"{url}/m/1")[0] == 5
    assert call("publish", f"{url}/m/1", "--repository", str(tmp_path / "there"))[0] == 5
    assert call("verify", "--integrity", f"{url}/m/7")[0] == 2
