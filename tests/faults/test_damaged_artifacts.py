"""A damaged artifact is never served; the gateway lives, says why, and the older version serves.

What must hold, number 4, at start, on a poll and on an explicit load.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.faults import probes
from tests.faults.probes import EXPLICIT, POLL, ChangingRepository
from tests.polling import eventually
from tests.server import Gateway, serving

#: What is done to version 2, and what the index must say of it.
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (probes.flip, "'model.onnx' does not match its SHA-256 in manifest.json"),
    "truncated file": (probes.truncate, "bytes, manifest.json says"),
    "link out": (probes.link_out, "'model.onnx' is a symbolic link out of the repository"),
    "missing file": (Path.unlink, "'model.onnx' is listed in manifest.json but missing"),
    "pickle": (
        lambda path: path.with_name("weights.pkl").write_bytes(b""),
        "'weights.pkl' may run code when it is read",
    ),
    "unlisted file": (
        lambda path: path.with_name("extra.bin").write_bytes(b""),
        "'extra.bin' is not listed in manifest.json",
    ),
    "broken manifest": (
        lambda path: path.with_name("manifest.json").write_text("{"),
        "manifest.json is not a manifest",
    ),
}


def publish_damaged(
    repository: ChangingRepository, damage: str, number: int = 2, model: str = "m"
) -> str:
    """Publish a version that is damaged before anyone can see it; what the index must say."""
    spoil, reason = DAMAGE[damage]
    staged = repository.version(3.0, number, model=".damaged")
    # Beside the model's versions, where ``link_out`` finds the way out of the repository.
    staged = staged.rename(repository.root / model / ".damaged")
    shutil.rmtree(repository.root / ".damaged")
    spoil(staged / "model.onnx")
    staged.rename(repository.root / model / str(number))
    return reason


def older_serves(gateway: Gateway, why: str, model: str = "m") -> None:
    assert probes.live(gateway)
    assert why in probes.reason(gateway, 2, model)
    assert probes.state(gateway, 2, model) == "UNAVAILABLE"
    assert probes.state(gateway, 1, model) == "READY"
    assert probes.answer(gateway, model) == ("1", 2.0)
    assert probes.ask(gateway, model, 2).status_code == 404
    assert probes.ready(gateway)


def says(gateway: Gateway, number: int, why: str) -> bool:
    return why in probes.reason(gateway, number)


def named(damage: str) -> str:
    return damage.replace(" ", "-")


def test_at_start_the_older_version_serves(repository: ChangingRepository) -> None:
    whys = {}
    for damage in DAMAGE:
        repository.version(2.0, 1, named(damage))
        whys[named(damage)] = publish_damaged(repository, damage, 2, named(damage))
    with serving(repository.root) as gateway:
        for model, why in whys.items():
            older_serves(gateway, why, model)
            assert str(repository.root.parent) not in str(probes.index(gateway, model))


def test_undamaged_the_newer_version_serves(
    repository: ChangingRepository, monkeypatch: Any
) -> None:
    """The control: without the damage the same check fails."""
    monkeypatch.setitem(DAMAGE, "none", (lambda path: None, ""))
    repository.version(2.0, 1)
    publish_damaged(repository, "none")
    with serving(repository.root) as gateway:
        assert probes.answer(gateway) == ("2", 3.0)
        with pytest.raises(AssertionError):
            older_serves(gateway, "")


def test_on_a_poll_the_older_version_serves(repository: ChangingRepository) -> None:
    """Each damage in turn in the same gateway: as version 2, taken away, then the next."""
    repository.version(2.0, 1)
    with serving(repository.root, *POLL) as gateway:
        for damage in DAMAGE:
            why = publish_damaged(repository, damage)
            eventually(partial(says, gateway, 2, why), why)
            older_serves(gateway, why)
            repository.remove(2)
            eventually(lambda: probes.state(gateway, 2) == "", "version 2 forgotten")


def test_on_an_explicit_load_the_older_version_serves(repository: ChangingRepository) -> None:
    repository.version(2.0, 1)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        for damage in DAMAGE:
            why = publish_damaged(repository, damage)
            reply = probes.load(gateway)
            assert reply.status_code == 400
            assert why in reply.json()["error"]
            older_serves(gateway, why)
            repository.remove(2)
            assert probes.load(gateway).status_code == 200


def test_the_only_version_damaged_leaves_the_gateway_alive_and_not_ready(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1, model="good")
    whys = {}
    for damage in DAMAGE:
        model = named(damage)
        repository.config(probes.CONFIG.format(backend="onnxruntime"), model)
        whys[model] = publish_damaged(repository, damage, 1, model)
    with serving(repository.root) as gateway:
        assert probes.answer(gateway, "good") == ("1", 2.0)
        assert not probes.ready(gateway)
        for model, why in whys.items():
            assert why in probes.reason(gateway, 1, model)
            refused = probes.ask(gateway, model)
            assert refused.status_code == 404
            assert f"'{model}' has no available versions" in refused.json()["error"]


@pytest.mark.parametrize("damage", ["flipped byte", "truncated file", "link out"])
def test_what_serves_keeps_serving_when_its_own_file_is_damaged(
    damage: str, repository: ChangingRepository
) -> None:
    repository.version(2.0, 1)
    spoil, why = DAMAGE[damage]
    with serving(repository.root, *POLL) as gateway:
        spoil(repository.file(1))
        eventually(lambda: why in probes.reason(gateway, 1), why)
        assert probes.state(gateway, 1) == "READY"
        assert "still serves" in probes.reason(gateway, 1)
        assert probes.answer(gateway) == ("1", 2.0)
        assert probes.ready(gateway)


# -- configurations -------------------------------------------------------------------------------

BROKEN_CONFIGS = {
    "no text format": ("max_batch_size: {", "config.pbtxt is not a valid model configuration"),
    "unknown field": ("nonsense: 1", "config.pbtxt is not a valid model configuration"),
    "another name": ('name: "other" backend: "onnxruntime"', "unexpected directory name"),
    "traversal": (
        'backend: "onnxruntime" default_model_filename: "../../1/model.onnx"',
        "must be a plain file name",
    ),
    "unknown backend": ('backend: "fortran"', "backend 'fortran' is not supported"),
    "code": ('backend: "python"', "is Python code, which can do anything; give --allow-python"),
    "contradiction": (
        probes.CONFIG.format(backend="onnxruntime").replace("dims: 4", "dims: 5"),
        "but the model has",
    ),
}


def test_a_broken_configuration_at_start_costs_its_model_and_no_other(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1, model="good")
    for broken, (text, _) in BROKEN_CONFIGS.items():
        repository.config(text, named(broken))
        repository.version(2.0, 1, named(broken))
    with serving(repository.root) as gateway:
        for broken, (_, why) in BROKEN_CONFIGS.items():
            assert why in probes.reason(gateway, 1, named(broken))
            assert probes.state(gateway, 1, named(broken)) == "UNAVAILABLE"
            assert probes.ask(gateway, named(broken)).status_code == 404
        assert probes.answer(gateway, "good") == ("1", 2.0)


def test_a_broken_configuration_on_a_poll_leaves_the_model_serving(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1)
    good = (repository.root / "m" / "config.pbtxt").read_text()
    with serving(repository.root, *POLL) as gateway:
        for text, why in BROKEN_CONFIGS.values():
            repository.config(text)
            eventually(partial(says, gateway, 1, why), why)
            assert probes.state(gateway, 1) == "READY"
            assert probes.answer(gateway) == ("1", 2.0)
            repository.config(good)
            eventually(lambda: probes.index(gateway)["1"] == ("READY", ""), f"after {why}")


def test_a_broken_configuration_on_a_load_is_refused_and_the_model_serves_on(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        for text, why in BROKEN_CONFIGS.values():
            repository.config(text)
            reply = probes.load(gateway)
            assert reply.status_code == 400
            assert why in reply.json()["error"]
            assert probes.state(gateway, 1) == "READY"
            assert probes.answer(gateway) == ("1", 2.0)


@pytest.mark.parametrize("flags", [(), POLL], ids=["start", "poll"])
def test_a_configuration_linked_from_outside_is_not_read(
    flags: tuple[str, ...], repository: ChangingRepository, tmp_path: Path
) -> None:
    repository.version(2.0, 1)
    repository.version(2.0, 1, model="good")
    outside = tmp_path / "outside.pbtxt"
    config = repository.root / "m" / "config.pbtxt"
    why = "'config.pbtxt' is a symbolic link out of the repository"
    if flags:
        with serving(repository.root, *flags) as gateway:
            config.rename(outside)
            config.symlink_to(outside)
            eventually(lambda: why in probes.reason(gateway, 1), why)
            assert probes.answer(gateway) == ("1", 2.0)
    else:
        config.rename(outside)
        config.symlink_to(outside)
        with serving(repository.root) as gateway:
            assert why in str(probes.index(gateway))
            assert probes.ask(gateway).status_code == 404
            assert probes.answer(gateway, "good") == ("1", 2.0)


@pytest.mark.parametrize("where", ["loop", "m/2", "m/2/model.onnx", "m/labels.txt"])
def test_a_link_to_itself_anywhere_does_not_take_the_gateway_down(
    where: str, repository: ChangingRepository
) -> None:
    repository.version(2.0, 1)
    path = repository.root / where
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(path.name)
    with serving(repository.root) as gateway:
        assert probes.answer(gateway) == ("1", 2.0)


def test_labels_linked_from_outside_are_not_served(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    """A classification would hand out the file's lines."""
    secret = tmp_path / "secret.txt"
    secret.write_text("\n".join(f"secret-{i}" for i in range(4)))
    repository.config(
        probes.CONFIG.format(backend="onnxruntime").replace(
            'output { name: "y"', 'output { name: "y" label_filename: "labels.txt"'
        )
    )
    (repository.root / "m" / "labels.txt").symlink_to(secret)
    repository.version(2.0, 1)
    body = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}],
        "outputs": [{"name": "y", "parameters": {"classification": 4}}],
    }
    with serving(repository.root) as gateway:
        reply = probes.post(gateway, "/v2/models/m/infer", body)
        assert "secret" not in reply.text
        assert probes.state(gateway, 1) == "UNAVAILABLE"
        assert "labels.txt" in probes.reason(gateway, 1)


def test_a_file_name_that_is_no_text_costs_nothing_but_its_version(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    folder = repository.version(3.0, model="odd", signed=False)
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff.pkl"))).write_bytes(b"content")
    with serving(repository.root, *POLL) as gateway, grpc.insecure_channel(gateway.grpc) as channel:
        assert probes.state(gateway, 1, "odd") == "UNAVAILABLE"
        assert ".pkl' may run code when it is read" in probes.reason(gateway, 1, "odd")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        rows = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=60).models
        states = {row.name: (row.state, "may run code" in row.reason) for row in rows}
        assert states == {"m": ("READY", False), "odd": ("UNAVAILABLE", True)}
        assert probes.answer(gateway) == ("1", 2.0)
        assert not probes.ready(gateway)
        repository.version(4.0, 2)
        eventually(lambda: probes.answer(gateway) == ("2", 4.0), "the next poll")
