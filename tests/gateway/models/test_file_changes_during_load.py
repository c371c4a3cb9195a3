"""Files that change between the checks of an unsigned version and the end of its load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import IntegrityError
from modelport.gateway.models.loader import VersionLoader
from modelport.gateway.models.model import ServedVersion, VersionState
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest, scan, signed_config, signing, standalone_model
from modelport.gateway.repository.file_states import VersionFiles
from modelport.gateway.repository.signing_keys import PrivateKey
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import Statistics
from tests import models
from tests.gateway.models.managers import CONFIG, Obedient, World
from tests.polling import until

CHECKED, OTHER = b"checked", b"hostile"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository: model ``m`` with a version of several files."""
    version = tmp_path / "repository/m/1"
    (version / "variables").mkdir(parents=True)
    for name in ("model.onnx", "variables/weights"):
        (version / name).write_bytes(CHECKED)
    (tmp_path / "repository/m/config.pbtxt").write_text(CONFIG)
    return tmp_path / "repository"


def replaced(file: Path) -> None:
    """Another file takes its place, of the same size and times."""
    found = file.stat()
    new = file.with_name("new")
    new.write_bytes(OTHER)
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.replace(file)


def overwritten(file: Path) -> None:
    """Its content changes, and its times do not."""
    found = file.stat()
    file.write_bytes(OTHER)
    os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns))


def linked(file: Path) -> None:
    other = file.parents[2] / "other"
    other.write_bytes(OTHER)
    file.unlink()
    file.symlink_to(other)


def swapped_folder(file: Path) -> None:
    """The folder of the version is another one, whose files have the same names."""
    version = file.parent
    shutil.copytree(version, version.with_name("copy"))
    version.rename(version.with_name("old"))
    version.with_name("copy").rename(version)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "replaced": (replaced, "model.onnx"),
    "overwritten": (overwritten, "model.onnx"),
    "a link": (linked, "model.onnx"),
    "removed": (Path.unlink, "model.onnx"),
    "another folder": (swapped_folder, "model.onnx"),
    "a new neighbour": (lambda file: file.with_name("a.data").write_bytes(OTHER), "a.data"),
    "nested": (lambda file: replaced(file.parent / "variables/weights"), "variables/weights"),
}


class SwappingLoad:
    """A backend whose load lets ``change`` come between the checks and the end."""

    def __init__(self, change: Callable[[], object], world: World) -> None:
        self._change, self._world = change, world
        self.loaded: list[bytes] = []

    def __call__(self, artifact: Artifact) -> Obedient:
        self._change()
        file = artifact.path / "model.onnx"
        self.loaded.append(file.read_bytes() if file.is_file() else b"")
        return Obedient(self._world, artifact)


def load(root: Path, change: SwappingLoad, name: str = "m", **settings: object) -> ServedVersion:
    """Load the model ``m`` under a ``name``."""
    entry = scan.scan([root])["m"]
    entry = entry if name == "m" else entry.registered_as(name)
    config = configuration.complete(configuration.parse(entry.config_text or ""), name)
    loader = VersionLoader(Settings((root,), **settings), lambda _: change, 1)  # type: ignore[arg-type]
    return loader.load(entry, entry.versions[1], config, Statistics())


@pytest.mark.parametrize("model", ["m", "registered"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_version_that_changes_while_it_loads_is_unloaded_and_fails(
    root: Path, what: str, model: str
) -> None:
    change, name = CHANGES[what]
    world = World(root)
    with pytest.raises(IntegrityError) as caught:
        load(root, SwappingLoad(lambda: change(root / "m/1/model.onnx"), world), model)
    assert str(caught.value) == (
        f"'m/1/{name}' changed while it was loading; publish into a new version folder"
    )
    assert world.events == [("unload", 1)]


def test_a_swap_right_after_the_manifest_was_verified_is_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest.write(root / "m/1")
    verify = manifest.verify

    def then_swapped(version: Path) -> bool:
        verified = verify(version)
        replaced(version / "model.onnx")
        return verified

    monkeypatch.setattr(manifest, "verify", then_swapped)
    backend = SwappingLoad(lambda: None, World(root))
    with pytest.raises(IntegrityError, match=r"'m/1/model\.onnx' changed"):
        load(root, backend)
    assert backend.loaded == [OTHER], "the swap came too late: this test could not fail"


def test_a_version_that_stays_as_it_is_loads(root: Path) -> None:
    world = World(root)
    version = load(root, SwappingLoad(lambda: (root / "m/1/model.onnx").read_bytes(), world))
    assert (version.number, world.events) == (1, [])


def test_a_configuration_that_changes_during_the_load_was_read_before(root: Path) -> None:
    world = World(root)
    version = load(root, SwappingLoad(lambda: world.configure("# a comment"), world))
    assert version.config.max_batch_size == 4


@pytest.mark.parametrize("model", ["m", "registered"])
def test_a_signed_version_is_loaded_from_its_verified_copy(
    root: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Its certificate names the model of the repository."""
    version, key = root / "m/1", PrivateKey.generate()
    names = list(manifest.files_of(version))
    artifact = {
        "size_bytes": len(CHECKED) * len(names),
        "files": {name: {"sha256": manifest.sha256_of(version / name)} for name in names},
    }
    certificate = {"model": {"name": "m"}, "artifact": artifact}
    (version / signing.CERTIFICATE).write_text(json.dumps(certificate))
    signing.sign(version, key)
    monkeypatch.setattr(signed_config, "check_format", lambda *_, **__: None)
    monkeypatch.setattr(signed_config, "apply", lambda config, _: config)
    backend = SwappingLoad(lambda: replaced(version / "model.onnx"), World(root))
    assert load(root, backend, model, require_signature=(key.public,)).name == model
    assert backend.loaded == [CHECKED]
    assert (version / "model.onnx").read_bytes() == OTHER


def test_neighbours_of_a_single_file_may_change(tmp_path: Path) -> None:
    path = models.multiply(tmp_path / "net.onnx")
    entry = standalone_model.scan(path, "m")
    before = VersionFiles(entry, entry.versions[1])
    (tmp_path / "notes.txt").write_text("unrelated")
    before.check()
    overwritten(path)
    with pytest.raises(IntegrityError, match=r"^'net\.onnx' changed while it was loading"):
        before.check()


def test_files_behind_a_linked_folder_count_and_links_in_a_circle_end(root: Path) -> None:
    shared = root / "m/shared"
    shared.mkdir()
    (shared / "weights").write_bytes(CHECKED)
    (root / "m/1/linked").symlink_to(shared)
    (shared / "again").symlink_to(root / "m/1")
    entry = scan.scan([root])["m"]
    before = VersionFiles(entry, entry.versions[1])
    before.check()
    overwritten(shared / "weights")
    with pytest.raises(IntegrityError, match=r"linked/weights' changed"):
        before.check()


async def test_a_load_that_failed_by_a_change_is_tried_again(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.publish(1)
    (tmp_path / "m/1/model.onnx").write_bytes(CHECKED)
    find, swaps = world.find, [overwritten]

    def find_swapping(backend: str) -> Callable[[Artifact], Obedient]:
        load = find(backend)

        def swapping(artifact: Artifact) -> Obedient:
            while swaps:
                swaps.pop()(artifact.path / "model.onnx")
            return load(artifact)  # type: ignore[return-value]

        return swapping

    world.find = find_swapping  # type: ignore[method-assign,assignment]
    manager = await world.serve(load="", model_load_retry_count=1, load_retry_interval_seconds=0.01)
    await manager.load("m")
    assert manager.states("m") == [(1, VersionState.READY, "")]
    assert world.events == [("load", 1), ("unload", 1), ("load", 1)]
    await manager.stop()


async def test_a_load_has_the_outcome_of_the_one_that_came_meanwhile_with_newer_files(
    tmp_path: Path,
) -> None:
    world = World(tmp_path / "repository")
    world.publish(1)
    file = world.root / "m/1/model.onnx"
    file.write_bytes(CHECKED)
    world.gate.clear()
    manager = await world.serve(load="")
    first = asyncio.create_task(manager.load("m"))
    await until(lambda: world.events == [("load", 1)])
    replaced(file)
    second = asyncio.create_task(manager.load("m"))
    await until(lambda: manager._models["m"].reconciliations == 2)
    world.gate.set()
    await asyncio.gather(first, second)
    assert world.events == [("load", 1), ("unload", 1), ("load", 1)]
    assert manager.versions("m") == [1]
    await manager.stop()
