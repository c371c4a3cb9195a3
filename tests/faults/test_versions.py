"""Versions come, go, fail and are repaired; something that works keeps serving."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.fake import FakeBackend
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository import manifest, scan
from modelport.gateway.settings import ModelControlMode, Settings
from tests import models
from tests.conformance import wire
from tests.faults import probes
from tests.faults.probes import EXPLICIT, POLL, Background, ChangingRepository
from tests.gateway.models.managers import refresh
from tests.polling import WAIT_SECONDS, eventually
from tests.server import Gateway, serving

LATEST_2 = "version_policy { latest { num_versions: 2 } }"
ALL = "version_policy { all { } }"
SETTLE_SECONDS = 60.0
#: Of the models of the gateways that all tests share.
NUMBERS = itertools.count(1)
SPECIFIC = "version_policy { specific { versions: [ 1, 3 ] } }"


@dataclass(frozen=True)
class VersionedModel:
    """One model of a gateway that all tests share, and that has models of theirs beside it."""

    gateway: Gateway
    repository: ChangingRepository
    name: str

    @property
    def folder(self) -> Path:
        return self.repository.root / self.name

    def version(self, factor: float, number: int, signed: bool = True, config: str = "") -> Path:
        return self.repository.version(factor, number, self.name, signed, config=config)

    def config(self, text: str) -> None:
        self.repository.config(text, self.name)

    def file(self, number: int) -> Path:
        return self.repository.file(number, self.name)

    def remove(self, number: int) -> None:
        self.repository.remove(number, self.name)

    def load(self) -> httpx.Response:
        return probes.load(self.gateway, self.name)

    def ask(self, number: int | str = "") -> httpx.Response:
        return probes.ask(self.gateway, self.name, number)

    def answer(self, number: int | str = "") -> tuple[str, float]:
        return probes.answer(self.gateway, self.name, number)

    def index(self) -> dict[str, tuple[str, str]]:
        return probes.index(self.gateway, self.name)

    def state(self, number: int) -> str:
        return probes.state(self.gateway, number, self.name)

    def reason(self, number: int) -> str:
        return probes.reason(self.gateway, number, self.name)

    def document(self, path: str = "") -> Any:
        return httpx.get(f"http://{self.gateway.http}/v2/models/{self.name}{path}").json()

    def ready_versions(self) -> list[str]:
        return sorted(v for v, (state, _) in self.index().items() if state == "READY")

    def serves(self, number: int, factor: float) -> None:
        """Wait until the version is READY and answers requests that name none."""
        eventually(lambda: self.state(number) == "READY", f"version {number} is READY")
        assert self.answer() == (str(number), factor)

    def polled(self, times: int = 3) -> None:
        polled(self.gateway, self.repository, times)


def polled(gateway: Gateway, repository: ChangingRepository, times: int = 3) -> None:
    """Wait until the gateway has looked at the repository: it finds each new model."""
    for turn in range(times):
        name = f"marker-{len(list(repository.root.glob('marker-*')))}-{turn}"
        repository.config('backend: "fake"', name)
        eventually(partial(probes.index, gateway, name), "a poll")


@pytest.fixture(scope="module")
def gateways(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[Gateway, ChangingRepository]]]:
    """One gateway of each control mode."""
    with ExitStack() as stack:
        found = {}
        for mode, flags in (("poll", POLL), ("explicit", EXPLICIT)):
            repository = ChangingRepository(tmp_path_factory.mktemp(mode))
            found[mode] = (stack.enter_context(serving(repository.root, *flags)), repository)
        yield found


@pytest.fixture
def polling(gateways: dict[str, tuple[Gateway, ChangingRepository]]) -> VersionedModel:
    """A model that is not there yet, of the gateway that polls."""
    return VersionedModel(*gateways["poll"], f"m{next(NUMBERS)}")


@pytest.fixture
def explicit_model(gateways: dict[str, tuple[Gateway, ChangingRepository]]) -> VersionedModel:
    """A model that is not there yet, of the gateway that loads on request."""
    return VersionedModel(*gateways["explicit"], f"m{next(NUMBERS)}")


# -- bad versions, repaired -----------------------------------------------------------------------


def test_a_bad_version_2_leaves_version_1_and_repaired_it_takes_over(
    polling: VersionedModel,
) -> None:
    polling.version(2.0, 1)
    polling.serves(1, 2.0)
    bad = polling.file(2)
    bad.parent.mkdir()
    bad.write_bytes(b"not a model")
    eventually(lambda: polling.state(2) == "UNAVAILABLE", "version 2 refused")
    assert "'model.onnx' does not load" in polling.reason(2)
    assert polling.answer() == ("1", 2.0)
    models.multiply(bad.with_name("new"), 3.0).rename(bad)
    polling.serves(2, 3.0)
    eventually(lambda: polling.index()["1"] == ("UNAVAILABLE", "unloaded"))


def test_a_bad_version_2_at_start_repaired_by_an_explicit_load(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1)
    probes.flip(repository.version(3.0, 2) / "model.onnx")
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        models.multiply(repository.file(2), 3.0)
        manifest.write(repository.file(2).parent)
        assert probes.load(gateway).status_code == 200
        assert probes.answer(gateway) == ("2", 3.0)


def test_a_bad_version_is_not_loaded_again_and_again(polling: VersionedModel) -> None:
    polling.version(2.0, 1)
    probes.flip(polling.version(3.0, 2) / "model.onnx")
    eventually(lambda: polling.state(2) == "UNAVAILABLE", "version 2 refused")
    refusal = {"event": "model version is not served", "model": polling.name}
    first = polling.gateway.wait_for(**refusal)
    polling.polled()
    assert [e for e in polling.gateway.logs if refusal.items() <= e.items()] == [first]


def test_a_failed_first_load_is_unavailable_with_its_reason(explicit_model: VersionedModel) -> None:
    model = explicit_model
    model.config(probes.CONFIG.format(backend="onnxruntime"))
    model.file(1).parent.mkdir()
    reply = model.load()
    assert reply.status_code == 400
    why = "'model.onnx' is missing from version 1"
    assert why in reply.json()["error"]
    assert model.index()["1"] == ("UNAVAILABLE", why)


def test_a_failed_reload_leaves_the_old_one_ready(explicit_model: VersionedModel) -> None:
    model = explicit_model
    model.version(2.0, 1)
    assert model.load().status_code == 200
    probes.flip(model.file(1))
    assert model.load().status_code == 400
    state, why = model.index()["1"]
    assert state == "READY"
    assert "does not match its SHA-256" in why
    assert model.answer() == ("1", 2.0)
    assert probes.status(model.gateway, f"/v2/models/{model.name}/ready") == 200


def test_the_last_version_serves_on_when_only_a_bad_one_is_left_on_disk(
    polling: VersionedModel,
) -> None:
    """A publisher that replaces version 1 by a bad version 2 takes no model down."""
    polling.version(2.0, 1)
    polling.serves(1, 2.0)
    probes.flip(polling.version(3.0, 2) / "model.onnx")
    polling.remove(1)
    eventually(lambda: polling.state(2) == "UNAVAILABLE", "version 2 refused")
    polling.polled()
    assert polling.answer() == ("1", 2.0)


# -- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("", ["3"]), (LATEST_2, ["2", "3"]), (ALL, ["1", "2", "3"]), (SPECIFIC, ["1", "3"])],
    ids=["latest", "latest 2", "all", "specific"],
)
def test_the_policy_decides_which_versions_serve(
    policy: str, expected: list[str], polling: VersionedModel
) -> None:
    model = polling
    staged = VersionedModel(model.gateway, model.repository, f".{model.name}")
    for number in (1, 2, 3):
        staged.version(float(number), number, config=policy)
    staged.folder.rename(model.folder)  # all at once, as at a start
    eventually(lambda: model.ready_versions() == expected, f"{expected} are READY")
    assert model.answer() == ("3", 3.0)
    for name in expected:
        assert model.answer(name) == (name, float(name))
    assert model.document()["versions"] == expected
    assert model.ask(9).status_code == 404
    model.version(4.0, 4)
    if policy == SPECIFIC:
        model.polled()
        assert model.ready_versions() == expected
    else:
        eventually(lambda: "4" in model.ready_versions(), "version 4")
        kept = {"": 1, LATEST_2: 2}.get(policy, 4)
        eventually(lambda: len(model.ready_versions()) == kept, "older versions unloaded")
        assert model.answer() == ("4", 4.0)


def test_a_config_edit_in_poll_mode_takes_effect(polling: VersionedModel) -> None:
    model = polling
    for number in (1, 2):
        model.version(float(number + 1), number)
    eventually(lambda: model.ready_versions() == ["2"], "the latest")
    plain = (model.folder / "config.pbtxt").read_text()
    model.config(plain + ALL)
    eventually(lambda: model.ready_versions() == ["1", "2"], "the policy all")
    model.config(plain.replace("max_batch_size: 8", "max_batch_size: 3") + ALL)
    eventually(lambda: model.document("/config")["max_batch_size"] == 3, "the new batch size")
    assert model.answer() == ("2", 3.0)


# -- changes on disk ------------------------------------------------------------------------------


def test_a_file_changed_in_place_is_loaded_again(polling: VersionedModel) -> None:
    polling.version(2.0, 1, signed=False)
    polling.serves(1, 2.0)
    models.multiply(polling.file(1), 3.0)
    eventually(lambda: polling.answer() == ("1", 3.0), "the new factor")
    assert polling.state(1) == "READY"


def test_a_version_that_is_still_being_written_does_not_serve_until_it_is_whole(
    polling: VersionedModel,
) -> None:
    polling.version(2.0, 1)
    polling.serves(1, 2.0)
    whole = models.multiply(polling.repository.root / ".whole", 3.0).read_bytes()
    path = polling.file(2)
    path.parent.mkdir()
    eventually(lambda: polling.state(2) == "UNAVAILABLE", "an empty version")
    for size in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        polling.polled(1)
        assert polling.answer() == ("1", 2.0)
    path.write_bytes(whole)
    polling.serves(2, 3.0)


def test_when_all_versions_are_deleted_what_serves_keeps_serving(polling: VersionedModel) -> None:
    polling.version(2.0, 1)
    polling.serves(1, 2.0)
    polling.remove(1)
    polling.polled()
    assert polling.answer() == ("1", 2.0)
    assert polling.state(1) == "READY"
    polling.version(3.0, 2)
    eventually(lambda: polling.answer() == ("2", 3.0), "the next version")


def test_a_model_whose_folder_is_removed_is_unloaded_in_poll_mode(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1)
    repository.version(2.0, 1, model="other")
    with serving(repository.root, *POLL) as gateway:
        (repository.root / "m").rename(repository.root / ".gone")
        eventually(lambda: not probes.index(gateway), "forgotten")
        assert probes.ask(gateway).status_code == 404
        assert probes.answer(gateway, "other") == ("1", 2.0)
        assert probes.ready(gateway)
        (repository.root / ".gone").rename(repository.root / "m")
        eventually(lambda: probes.state(gateway) == "READY", "back again")
        assert probes.answer(gateway) == ("1", 2.0)


@pytest.mark.parametrize("flags", [POLL, EXPLICIT], ids=["poll", "explicit"])
def test_a_repository_that_vanishes_takes_nothing_down(
    flags: tuple[str, ...], repository: ChangingRepository
) -> None:
    repository.version(2.0, 1)
    load = ("--load-model", "*") if flags is EXPLICIT else ()
    with serving(repository.root, *flags, *load) as gateway:
        gone = repository.root.with_name("gone")
        repository.root.rename(gone)
        if flags is POLL:
            gateway.wait_for("the model repository cannot be read")
        else:
            reply = probes.load(gateway)
            assert reply.status_code in (400, 404, 500, 503)
            assert str(repository.root) not in reply.text
            assert reply.json().keys() == {"error"}
        assert probes.answer(gateway) == ("1", 2.0)
        gone.rename(repository.root)
        repository.version(3.0, 2)
        if flags is POLL:
            eventually(lambda: probes.answer(gateway) == ("2", 3.0), "polling goes on")
        else:
            assert probes.load(gateway).status_code == 200
            assert probes.answer(gateway) == ("2", 3.0)


def test_a_request_in_flight_on_a_version_that_is_unloaded_gets_its_answer(
    explicit_model: VersionedModel, background: Background
) -> None:
    model, gateway = explicit_model, explicit_model.gateway
    model.repository.slow(1.0, model.name)
    assert model.load().status_code == 200
    reply = background(model.ask)
    pending = "modelport_requests_in_flight"
    eventually(lambda: probes.metric(gateway, pending, model=model.name) == 1, "in flight")
    assert probes.unload(gateway, model.name).status_code == 200
    assert reply.result(60).status_code == 200
    assert model.ask().status_code == 404


def test_a_slow_request_on_one_model_does_not_hold_up_another_models_release(
    polling: VersionedModel,
) -> None:
    """Version 1 of ``slow`` waits for its last request; the other must not wait with it."""
    slow = VersionedModel(polling.gateway, polling.repository, f"{polling.name}-slow")
    polling.repository.slow(600, slow.name)
    polling.version(2.0, 1)
    polling.serves(1, 2.0)
    eventually(lambda: slow.state(1) == "READY", "slow 1 serves")
    with closing(http.client.HTTPConnection(polling.gateway.http)) as client:
        client.request("POST", f"/v2/models/{slow.name}/infer", json.dumps(probes.ONE))

        def in_flight() -> bool:
            pending = "modelport_requests_in_flight"
            return probes.metric(polling.gateway, pending, model=slow.name) == 1

        eventually(in_flight, "in flight")
        (slow.folder / "2").mkdir()
        eventually(lambda: slow.state(1) == "UNLOADING", "slow 1 draining")
        polling.version(3.0, 2)
        polling.serves(2, 3.0)
        assert in_flight()


# -- manifests ------------------------------------------------------------------------------------


def test_a_plain_triton_repository_is_served_with_a_warning(tmp_path: Path) -> None:
    models.repository(tmp_path)
    with serving(tmp_path) as gateway:
        warning = gateway.wait_for("no manifest.json: served unverified", model="x2", version=1)
        assert warning["level"] == "warning"
        assert probes.answer(gateway, "x2") == ("1", 2.0)


def test_a_published_version_is_served_without_a_warning(repository: ChangingRepository) -> None:
    repository.version(2.0, 1)
    with serving(repository.root) as gateway:
        assert [e for e in gateway.logs if e.get("level") not in ("info", None)] == []


def test_where_manifests_are_required_a_version_without_one_is_refused(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0, 1)
    repository.version(3.0, 2, signed=False)
    repository.version(3.0, 1, model="plain", signed=False)
    with serving(repository.root, "--require-manifest") as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        for number, model in ((2, "m"), (1, "plain")):
            assert probes.state(gateway, number, model) == "UNAVAILABLE"
            assert "--require-manifest" in probes.reason(gateway, number, model)
        assert probes.ask(gateway, "plain").status_code == 404


# -- repositories ---------------------------------------------------------------------------------


def test_a_model_in_two_repositories_is_served_from_neither(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = ChangingRepository(tmp_path / "second")
    repository.version(2.0, 1)
    second.version(3.0, 1)
    second.version(3.0, 1, model="other")
    both = ("--model-repository", str(second.root))
    with serving(repository.root, *both, *POLL) as gateway:
        assert probes.ask(gateway).status_code == 404
        assert "appears in two or more repositories" in str(probes.index(gateway))
        assert probes.answer(gateway, "other") == ("1", 3.0)
        shutil.rmtree(second.root / "m")
        eventually(lambda: probes.state(gateway) == "READY", "the duplicate is gone")
        assert probes.answer(gateway) == ("1", 2.0)


def test_a_model_that_serves_is_not_disturbed_by_a_namesake_elsewhere(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = ChangingRepository(tmp_path / "second")
    repository.version(2.0, 1)
    both = ("--model-repository", str(second.root))
    with serving(repository.root, *both, *POLL) as gateway:
        second.version(3.0, 1)
        eventually(lambda: "two or more repositories" in probes.reason(gateway), "found")
        assert probes.answer(gateway) == ("1", 2.0)


def test_a_model_in_two_repositories_is_not_loaded_on_request(
    repository: ChangingRepository, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = ChangingRepository(tmp_path / "second")
    repository.version(2.0, 1)
    second.version(3.0, 1)
    both = ("--model-repository", str(second.root))
    with serving(repository.root, *both, "--model-control-mode", "explicit") as gateway:
        reply = wire.send(gateway.http, "POST", "/v2/repository/models/m/load")
        assert reply.status == 400
        assert reply.json["error"] == (
            "failed to load 'm', failed to poll from model repository: "
            "model appears in two or more repositories"
        )


# -- calls that overlap or are given up, in this process ------------------------------------------


class Held:
    """A backend whose loads and unloads wait until the test lets them."""

    def __init__(self) -> None:
        self.may_load, self.may_unload = threading.Event(), threading.Event()
        self.loading, self.unloading = threading.Event(), threading.Event()

    def find(self, _: str) -> Callable[[Artifact], FakeBackend]:
        held = self

        class HeldBackend(FakeBackend):
            def unload(self) -> None:
                held.unloading.set()
                assert held.may_unload.wait(WAIT_SECONDS)

        def load(artifact: Artifact) -> FakeBackend:
            held.loading.set()
            assert held.may_load.wait(WAIT_SECONDS)
            return HeldBackend(artifact)

        return load


async def explicit(repository: ChangingRepository, held: Held) -> ModelManager:
    """A started manager that has loaded nothing."""
    settings = Settings((repository.root,), ModelControlMode.EXPLICIT)
    manager = ModelManager(settings, held.find)
    await manager.start()
    return manager


async def happened(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_SECONDS)


async def settles(manager: ModelManager, state: str, reason: str = "") -> None:
    """The only version of the index comes to that state."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while [(r["state"], r["reason"]) for r in manager.index()] != [(state, reason)]:
            await asyncio.sleep(0.001)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.may_load.set()
    made.may_unload.set()


async def test_a_scan_that_takes_long_brings_back_nothing_that_a_later_one_replaced(
    repository: ChangingRepository, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.may_load.set()
    held.may_unload.set()
    repository.slow(0, "m")
    manager = await explicit(repository, held)
    real, scans = scan.together, itertools.count()
    scanned, go_on = threading.Event(), threading.Event()

    def delayed(folders: Iterable[dict[str, scan.ModelEntry]]) -> dict[str, scan.ModelEntry]:
        found = real(folders)
        if next(scans) == 0:
            scanned.set()
            assert go_on.wait(WAIT_SECONDS)
        return found

    monkeypatch.setattr(scan, "together", delayed)
    first = asyncio.create_task(manager.load("m"))
    await happened(scanned)
    (repository.root / "m" / "2").mkdir()
    second = asyncio.create_task(manager.load("m"))
    await asyncio.wait({second}, timeout=0.3)  # as far as it comes while the first one stands
    go_on.set()
    await asyncio.gather(first, second)
    assert manager.versions("m") == [2]
    assert manager.get("m").number == 2
    await manager.stop()


async def test_a_load_that_its_caller_gives_up_is_finished(
    repository: ChangingRepository, held: Held
) -> None:
    repository.slow(0, "m")
    manager = await explicit(repository, held)
    load = asyncio.create_task(manager.load("m"))
    await happened(held.loading)
    await settles(manager, "LOADING")
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    held.may_load.set()
    await settles(manager, "READY")
    assert manager.get("m").number == 1
    held.may_unload.set()
    await manager.unload("m")  # nothing is locked any more
    await settles(manager, "UNAVAILABLE", "unloaded")


async def test_an_unload_that_its_caller_gives_up_is_finished(
    repository: ChangingRepository, held: Held
) -> None:
    held.may_load.set()
    repository.slow(0, "m")
    manager = await explicit(repository, held)
    await manager.load("m")
    unload = asyncio.create_task(manager.unload("m"))
    await happened(held.unloading)
    await settles(manager, "UNLOADING")
    unload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unload
    held.may_unload.set()
    await settles(manager, "UNAVAILABLE", "unloaded")
    await manager.load("m")
    await settles(manager, "READY")


async def test_a_load_given_up_while_another_holds_the_model_is_finished_too(
    repository: ChangingRepository, held: Held
) -> None:
    repository.slow(0, "m")
    manager = await explicit(repository, held)
    first = asyncio.create_task(manager.load("m"))
    await happened(held.loading)
    second = asyncio.create_task(manager.load("m"))
    await asyncio.sleep(0)
    for load in (second, first):
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    held.may_load.set()
    held.may_unload.set()
    await settles(manager, "READY")
    await manager.stop()


async def test_an_unload_given_up_while_a_load_holds_the_model_is_finished_too(
    repository: ChangingRepository, held: Held
) -> None:
    held.may_unload.set()
    repository.slow(0, "m")
    manager = await explicit(repository, held)
    load = asyncio.create_task(manager.load("m"))
    await happened(held.loading)
    unload = asyncio.create_task(manager.unload("m"))
    await asyncio.sleep(0)
    unload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unload
    held.may_load.set()
    await load
    await settles(manager, "UNAVAILABLE", "unloaded")


async def test_a_broken_model_that_is_repaired_is_not_ready_before_it_serves(
    repository: ChangingRepository, held: Held
) -> None:
    repository.slow(0, "m")
    config = repository.root / "m" / "config.pbtxt"
    good = config.read_text()
    config.write_text("nonsense")
    manager = ModelManager(Settings((repository.root,), ModelControlMode.POLL), held.find)
    await manager.start()
    assert not manager.ready
    config.write_text(good)
    await refresh(manager)  # it may still be being written
    assert not manager.ready
    poll = asyncio.create_task(refresh(manager))
    await happened(held.loading)
    await settles(manager, "LOADING")
    assert not manager.ready, "ready, and every request is refused"
    held.may_load.set()
    await poll
    assert manager.ready
