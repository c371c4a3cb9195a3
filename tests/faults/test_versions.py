"""Versions come, go, fail and are repaired; something that works keeps serving."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.fake import FakeBackend
from modelport.gateway.models.manager import Lifecycle
from modelport.gateway.repository import manifest, scan
from modelport.gateway.settings import ModelControlMode, Settings
from tests import models
from tests.faults import probes
from tests.faults.probes import EXPLICIT, POLL, Background, Repository, eventually
from tests.server import Gateway, serving

LATEST_2 = "version_policy { latest { num_versions: 2 } }"
ALL = "version_policy { all { } }"
SETTLE_SECONDS = 5.0
SPECIFIC = "version_policy { specific { versions: [ 1, 3 ] } }"


def ready_versions(gateway: Gateway, model: str = "m") -> list[str]:
    return sorted(v for v, (s, _) in probes.index(gateway, model).items() if s == "READY")


def polled(gateway: Gateway, repository: Repository, times: int = 3) -> None:
    """Wait until the gateway has looked at the repository: it finds each new model."""
    for turn in range(times):
        name = f"marker-{len(list(repository.root.glob('marker-*')))}-{turn}"
        repository.config('backend: "fake"', name)
        eventually(partial(probes.index, gateway, name), "a poll")


# -- bad versions, repaired -----------------------------------------------------------------------


def test_a_bad_version_2_leaves_version_1_and_repaired_it_takes_over(
    repository: Repository,
) -> None:
    repository.version(2.0, 1)
    with serving(repository.root, *POLL) as gateway:
        bad = repository.file(2)
        bad.parent.mkdir()
        bad.write_bytes(b"not a model")
        eventually(lambda: probes.state(gateway, 2) == "UNAVAILABLE", "version 2 refused")
        assert "'model.onnx' does not load" in probes.reason(gateway, 2)
        assert probes.answer(gateway) == ("1", 2.0)
        models.multiply(bad.with_name("new"), 3.0).rename(bad)
        eventually(lambda: probes.state(gateway, 2) == "READY", "version 2 repaired")
        assert probes.answer(gateway) == ("2", 3.0)
        eventually(lambda: probes.index(gateway)["1"] == ("UNAVAILABLE", "unloaded"))


def test_a_bad_version_2_at_start_repaired_by_an_explicit_load(repository: Repository) -> None:
    repository.version(2.0, 1)
    probes.flip(repository.version(3.0, 2) / "model.onnx")
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        models.multiply(repository.file(2), 3.0)
        manifest.write(repository.file(2).parent)
        assert probes.load(gateway).status_code == 200
        assert probes.answer(gateway) == ("2", 3.0)


def test_a_bad_version_is_not_loaded_again_and_again(repository: Repository) -> None:
    repository.version(2.0, 1)
    probes.flip(repository.version(3.0, 2) / "model.onnx")
    with serving(repository.root, *POLL) as gateway:
        polled(gateway, repository)
        failures = [e for e in gateway.logs if e.get("event") == "model version is not served"]
        assert len([entry for entry in failures if entry["model"] == "m"]) == 1


def test_a_failed_first_load_is_unavailable_with_its_reason(repository: Repository) -> None:
    repository.version(2.0, 1, model="good")
    repository.config(probes.CONFIG.format(backend="onnxruntime"))
    repository.file(1).parent.mkdir()
    with serving(repository.root, *EXPLICIT) as gateway:
        reply = probes.load(gateway)
        assert reply.status_code == 400
        why = "'model.onnx' is missing from version 1"
        assert why in reply.json()["error"]
        assert probes.index(gateway)["1"] == ("UNAVAILABLE", why)


def test_a_failed_reload_leaves_the_old_one_ready(repository: Repository) -> None:
    repository.version(2.0, 1)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        probes.flip(repository.file(1))
        assert probes.load(gateway).status_code == 400
        state, why = probes.index(gateway)["1"]
        assert state == "READY"
        assert "does not match its SHA-256" in why
        assert probes.answer(gateway) == ("1", 2.0)
        assert probes.status(gateway, "/v2/models/m/ready") == 200


def test_the_last_version_serves_on_when_only_a_bad_one_is_left_on_disk(
    repository: Repository,
) -> None:
    """A publisher that replaces version 1 by a bad version 2 takes no model down."""
    repository.version(2.0, 1)
    with serving(repository.root, *POLL) as gateway:
        probes.flip(repository.version(3.0, 2) / "model.onnx")
        repository.remove(1)
        eventually(lambda: probes.state(gateway, 2) == "UNAVAILABLE", "version 2 refused")
        polled(gateway, repository)
        assert probes.answer(gateway) == ("1", 2.0)


# -- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("", ["3"]), (LATEST_2, ["2", "3"]), (ALL, ["1", "2", "3"]), (SPECIFIC, ["1", "3"])],
    ids=["latest", "latest 2", "all", "specific"],
)
def test_the_policy_decides_which_versions_serve(
    policy: str, expected: list[str], repository: Repository
) -> None:
    for number in (1, 2, 3):
        repository.version(float(number), number, config=policy)
    with serving(repository.root, *POLL) as gateway:
        assert ready_versions(gateway) == expected
        assert probes.answer(gateway) == ("3", 3.0)
        for name in expected:
            assert probes.answer(gateway, number=name) == (name, float(name))
        metadata = httpx.get(f"http://{gateway.http}/v2/models/m").json()
        assert metadata["versions"] == expected
        assert probes.ask(gateway, number=9).status_code == 404
        repository.version(4.0, 4)
        if policy == SPECIFIC:
            polled(gateway, repository)
            assert ready_versions(gateway) == expected
        else:
            eventually(lambda: "4" in ready_versions(gateway), "version 4")
            kept = {"": 1, LATEST_2: 2}.get(policy, 4)
            eventually(lambda: len(ready_versions(gateway)) == kept, "older versions unloaded")
            assert probes.answer(gateway) == ("4", 4.0)


def test_a_config_edit_in_poll_mode_takes_effect(repository: Repository) -> None:
    for number in (1, 2):
        repository.version(float(number + 1), number)
    config = repository.root / "m" / "config.pbtxt"
    with serving(repository.root, *POLL) as gateway:
        assert ready_versions(gateway) == ["2"]
        plain = config.read_text()
        repository.config(plain + ALL)
        eventually(lambda: ready_versions(gateway) == ["1", "2"], "the policy all")
        repository.config(plain.replace("max_batch_size: 8", "max_batch_size: 3") + ALL)

        def batch() -> int:
            document = httpx.get(f"http://{gateway.http}/v2/models/m/config").json()
            return int(document["max_batch_size"])

        eventually(lambda: batch() == 3, "the new batch size")
        assert probes.answer(gateway) == ("2", 3.0)


# -- changes on disk ------------------------------------------------------------------------------


def test_a_file_changed_in_place_is_loaded_again(repository: Repository) -> None:
    repository.version(2.0, 1, signed=False)
    with serving(repository.root, *POLL) as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        models.multiply(repository.file(1), 3.0)
        eventually(lambda: probes.answer(gateway) == ("1", 3.0), "the new factor")
        assert probes.state(gateway, 1) == "READY"


def test_a_version_that_is_still_being_written_does_not_serve_until_it_is_whole(
    repository: Repository,
) -> None:
    repository.version(2.0, 1)
    whole = models.multiply(repository.root / ".whole", 3.0).read_bytes()
    with serving(repository.root, *POLL) as gateway:
        path = repository.file(2)
        path.parent.mkdir()
        eventually(lambda: probes.state(gateway, 2) == "UNAVAILABLE", "an empty version")
        for size in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:size])
            polled(gateway, repository, 1)
            assert probes.answer(gateway) == ("1", 2.0)
        path.write_bytes(whole)
        eventually(lambda: probes.state(gateway, 2) == "READY", "the whole version")
        assert probes.answer(gateway) == ("2", 3.0)


def test_when_all_versions_are_deleted_what_serves_keeps_serving(repository: Repository) -> None:
    repository.version(2.0, 1)
    with serving(repository.root, *POLL) as gateway:
        repository.remove(1)
        polled(gateway, repository)
        assert probes.answer(gateway) == ("1", 2.0)
        assert probes.state(gateway, 1) == "READY"
        repository.version(3.0, 2)
        eventually(lambda: probes.answer(gateway) == ("2", 3.0), "the next version")


def test_a_model_whose_folder_is_removed_is_unloaded_in_poll_mode(repository: Repository) -> None:
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
    flags: tuple[str, ...], repository: Repository
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
    repository: Repository, background: Background
) -> None:
    repository.slow(1.0)
    with serving(repository.root, *EXPLICIT, "--load-model", "slow") as gateway:
        reply = background(probes.ask, gateway, "slow")
        pending = "pending_request_count"
        eventually(lambda: probes.metric(gateway, pending, model="slow") == 1, "in flight")
        assert probes.unload(gateway, "slow").status_code == 200
        assert reply.result(10).status_code == 200
        assert probes.ask(gateway, "slow").status_code == 503


def test_a_slow_request_on_one_model_does_not_hold_up_another_models_release(
    repository: Repository, background: Background
) -> None:
    """Version 1 of ``slow`` waits for its last request; ``m`` must not wait with it."""
    repository.slow(4.0)
    repository.version(2.0, 1)
    with serving(repository.root, *POLL) as gateway:
        reply = background(probes.ask, gateway, "slow")
        pending = "pending_request_count"
        eventually(lambda: probes.metric(gateway, pending, model="slow") == 1, "in flight")
        (repository.root / "slow" / "2").mkdir()
        eventually(lambda: probes.state(gateway, 1, "slow") == "UNLOADING", "slow 1 draining")
        repository.version(3.0, 2)
        eventually(lambda: probes.answer(gateway) == ("2", 3.0), "m 2 serves", seconds=2.0)
        assert not reply.done()  # the slow one was still in flight: m did not wait for it
        assert reply.result(10).status_code == 200


# -- manifests ------------------------------------------------------------------------------------


def test_a_plain_triton_repository_is_served_with_a_warning(tmp_path: Path) -> None:
    models.repository(tmp_path)
    with serving(tmp_path) as gateway:
        warning = gateway.wait_for("no manifest.json: served unverified", model="x2", version=1)
        assert warning["level"] == "warning"
        assert probes.answer(gateway, "x2") == ("1", 2.0)


def test_a_published_version_is_served_without_a_warning(repository: Repository) -> None:
    repository.version(2.0, 1)
    with serving(repository.root) as gateway:
        assert [e for e in gateway.logs if e.get("level") not in ("info", None)] == []


def test_where_manifests_are_required_a_version_without_one_is_refused(
    repository: Repository,
) -> None:
    repository.version(2.0, 1)
    repository.version(3.0, 2, signed=False)
    repository.version(3.0, 1, model="plain", signed=False)
    with serving(repository.root, "--require-manifest") as gateway:
        assert probes.answer(gateway) == ("1", 2.0)
        for number, model in ((2, "m"), (1, "plain")):
            assert probes.state(gateway, number, model) == "UNAVAILABLE"
            assert "--require-manifest" in probes.reason(gateway, number, model)
        assert probes.ask(gateway, "plain").status_code == 503


# -- repositories ---------------------------------------------------------------------------------


def test_a_model_in_two_repositories_is_served_from_neither(
    repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = Repository(tmp_path / "second")
    repository.version(2.0, 1)
    second.version(3.0, 1)
    second.version(3.0, 1, model="other")
    both = ("--model-repository", str(second.root))
    with serving(repository.root, *both, *POLL) as gateway:
        assert probes.ask(gateway).status_code == 503
        assert "appears in two or more repositories" in str(probes.index(gateway))
        assert probes.answer(gateway, "other") == ("1", 3.0)
        shutil.rmtree(second.root / "m")
        eventually(lambda: probes.state(gateway) == "READY", "the duplicate is gone")
        assert probes.answer(gateway) == ("1", 2.0)


def test_a_model_that_serves_is_not_disturbed_by_a_namesake_elsewhere(
    repository: Repository, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    second = Repository(tmp_path / "second")
    repository.version(2.0, 1)
    both = ("--model-repository", str(second.root))
    with serving(repository.root, *both, *POLL) as gateway:
        second.version(3.0, 1)
        eventually(lambda: "two or more repositories" in probes.reason(gateway), "found")
        assert probes.answer(gateway) == ("1", 2.0)


# -- calls that overlap or are given up, in this process ------------------------------------------


class Held:
    """A backend whose loads and unloads wait until the test lets them."""

    def __init__(self) -> None:
        self.may_load, self.may_unload = threading.Event(), threading.Event()
        self.loading, self.unloading = threading.Event(), threading.Event()

    def find(self, _: str) -> Callable[[Artifact], FakeBackend]:
        held = self

        class Backend(FakeBackend):
            def unload(self) -> None:
                held.unloading.set()
                assert held.may_unload.wait(probes.WAIT_SECONDS)

        def load(artifact: Artifact) -> FakeBackend:
            held.loading.set()
            assert held.may_load.wait(probes.WAIT_SECONDS)
            return Backend(artifact)

        return load


async def explicit(repository: Repository, held: Held) -> Lifecycle:
    """A started lifecycle that has loaded nothing."""
    settings = Settings((repository.root,), ModelControlMode.EXPLICIT)
    lifecycle = Lifecycle(settings, held.find)
    await lifecycle.start()
    return lifecycle


async def happened(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, probes.WAIT_SECONDS)


async def settles(lifecycle: Lifecycle, state: str, reason: str = "") -> None:
    """The only version of the index comes to that state."""
    async with asyncio.timeout(SETTLE_SECONDS):
        while [(r["state"], r["reason"]) for r in lifecycle.index()] != [(state, reason)]:
            await asyncio.sleep(0.001)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.may_load.set()
    made.may_unload.set()


async def test_a_scan_that_takes_long_brings_back_nothing_that_a_later_one_replaced(
    repository: Repository, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    held.may_load.set()
    held.may_unload.set()
    repository.slow(0, "m")
    lifecycle = await explicit(repository, held)
    real, scans = scan.together, itertools.count()
    scanned, go_on = threading.Event(), threading.Event()

    def delayed(folders: Iterable[dict[str, scan.ModelEntry]]) -> dict[str, scan.ModelEntry]:
        found = real(folders)
        if next(scans) == 0:
            scanned.set()
            assert go_on.wait(probes.WAIT_SECONDS)
        return found

    monkeypatch.setattr(scan, "together", delayed)
    first = asyncio.create_task(lifecycle.load("m"))
    await happened(scanned)
    (repository.root / "m" / "2").mkdir()
    second = asyncio.create_task(lifecycle.load("m"))
    await asyncio.wait({second}, timeout=0.3)  # as far as it comes while the first one stands
    go_on.set()
    await asyncio.gather(first, second)
    assert lifecycle.versions("m") == [2]
    assert lifecycle.get("m").number == 2
    await lifecycle.stop()


async def test_a_load_that_its_caller_gives_up_is_finished(
    repository: Repository, held: Held
) -> None:
    repository.slow(0, "m")
    lifecycle = await explicit(repository, held)
    load = asyncio.create_task(lifecycle.load("m"))
    await happened(held.loading)
    await settles(lifecycle, "LOADING")
    load.cancel()
    with pytest.raises(asyncio.CancelledError):
        await load
    held.may_load.set()
    await settles(lifecycle, "READY")
    assert lifecycle.get("m").number == 1
    held.may_unload.set()
    await lifecycle.unload("m")  # nothing is locked any more
    await settles(lifecycle, "UNAVAILABLE", "unloaded")


async def test_an_unload_that_its_caller_gives_up_is_finished(
    repository: Repository, held: Held
) -> None:
    held.may_load.set()
    repository.slow(0, "m")
    lifecycle = await explicit(repository, held)
    await lifecycle.load("m")
    unload = asyncio.create_task(lifecycle.unload("m"))
    await happened(held.unloading)
    await settles(lifecycle, "UNLOADING")
    unload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unload
    held.may_unload.set()
    await settles(lifecycle, "UNAVAILABLE", "unloaded")
    await lifecycle.load("m")
    await settles(lifecycle, "READY")


async def test_a_load_given_up_while_another_holds_the_model_is_finished_too(
    repository: Repository, held: Held
) -> None:
    repository.slow(0, "m")
    lifecycle = await explicit(repository, held)
    first = asyncio.create_task(lifecycle.load("m"))
    await happened(held.loading)
    second = asyncio.create_task(lifecycle.load("m"))
    await asyncio.sleep(0)
    for load in (second, first):
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    held.may_load.set()
    held.may_unload.set()
    await settles(lifecycle, "READY")
    await lifecycle.stop()


async def test_an_unload_given_up_while_a_load_holds_the_model_is_finished_too(
    repository: Repository, held: Held
) -> None:
    held.may_unload.set()
    repository.slow(0, "m")
    lifecycle = await explicit(repository, held)
    load = asyncio.create_task(lifecycle.load("m"))
    await happened(held.loading)
    unload = asyncio.create_task(lifecycle.unload("m"))
    await asyncio.sleep(0)
    unload.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unload
    held.may_load.set()
    await load
    await settles(lifecycle, "UNAVAILABLE", "unloaded")


async def test_a_broken_model_that_is_repaired_is_not_ready_before_it_serves(
    repository: Repository, held: Held
) -> None:
    repository.slow(0, "m")
    config = repository.root / "m" / "config.pbtxt"
    good = config.read_text()
    config.write_text("nonsense")
    lifecycle = Lifecycle(Settings((repository.root,), ModelControlMode.POLL), held.find)
    await lifecycle.start()
    assert not lifecycle.ready
    config.write_text(good)
    await lifecycle.refresh()  # it may still be being written
    assert not lifecycle.ready
    poll = asyncio.create_task(lifecycle.refresh())
    await happened(held.loading)
    await settles(lifecycle, "LOADING")
    assert not lifecycle.ready, "ready, and every request is refused"
    held.may_load.set()
    await poll
    assert lifecycle.ready
