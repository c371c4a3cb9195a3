"""Ensembles, pipelines and the models of their steps: in which order they come, and how they go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.backend_registry import find_loader
from modelport.gateway.backends.backend_host import Host, Loads
from modelport.gateway.backends.base import Artifact, Backend, BackendLoader
from modelport.gateway.errors import NotFound, Unavailable
from modelport.gateway.models import manager, reconciler
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionSettings, VersionState
from modelport.gateway.repository import manifest
from modelport.gateway.settings import ModelControlMode, Settings
from modelport.gateway.types import (
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests.polling import WAIT_SECONDS, until

TENSORS = """
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""
STEP = 'backend: "fake"' + TENSORS
SLOW = STEP + 'parameters { key: "delay_seconds" value { string_value: "0.2" } }'
#: By name it comes before the models it needs.
ENSEMBLE = (
    """
platform: "ensemble"
ensemble_scheduling {
  step { model_name: "first" model_version: -1
         input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
  step { model_name: "second" model_version: -1
         input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
}
"""
    + TENSORS
)
PIPELINE = """
inputs = ["x"]
max_batch_size = 4
outputs = { y = "b.y" }
[steps.a]
model = "first"
inputs = { x = "x" }
[steps.b]
model = "second"
inputs = { x = "a.y" }
"""
of_both_kinds = pytest.mark.parametrize("kind", ["ensemble", "pipeline"])


def declare(root: Path, name: str, kind: str, second: str = "second") -> None:
    """Write an ensemble or a pipeline of the models ``first`` and ``second``."""
    (root / name / "1").mkdir(parents=True, exist_ok=True)
    text, file = {
        "ensemble": (ENSEMBLE, root / name / "config.pbtxt"),
        "pipeline": (PIPELINE, root / name / "1" / "pipeline.toml"),
    }[kind]
    file.write_text(text.replace('"second"', f'"{second}"'))


class EnsembleGateway:
    steps_finish = True

    def __init__(
        self,
        root: Path,
        mode: ModelControlMode,
        *load: str,
        require_manifest: bool = False,
        find_backend: Callable[[str], BackendLoader] = find_loader,
    ) -> None:
        settings = Settings(
            (root,), mode, load, require_manifest=require_manifest, cache_bytes=2**20
        )
        #: Models whose versions vary by request, as during a rollout.
        self.varying: set[str] = set()
        self.manager = ModelManager(settings, find_backend, make_host=self._host)
        self.service = InferenceService(self.manager)

    def _host(self, manager: ModelManager) -> Host:
        return Host(
            loop=asyncio.get_running_loop(),
            infer=partial(self.service.infer, step=self.steps_finish),
            config_of=lambda name, number: manager.get(name, number).config,
            stream=partial(self.service.stream, step=self.steps_finish),
            labels_of=lambda name, number, output: manager.get(name, number).labels_of(output),
            loads_of=lambda name, number: self.loads_of(manager, name, number),
        )

    def loads_of(self, manager: ModelManager, name: str, number: int) -> Loads | None:
        return None if name in self.varying else manager.get(name, number).loads()

    async def ask(self, model: str = "all", caller: str = "") -> InferResponse:
        data = np.arange(4, dtype=np.float32).reshape(2, 2)
        request = InferRequest(model, [Tensor("x", Datatype.FP32, data)], caller=caller)
        return await finished(self.service.infer(request, Deadline.after(10)))

    async def computed(self, model: str) -> bool:
        """Whether ``model`` has the second step compute an answer that could be cached."""
        before = self.counts()["second"][0]
        await self.ask(model)
        return self.counts()["second"][0] > before

    def counts(self) -> dict[str, tuple[int, int]]:
        return {n: (s.inference_count, s.success.count) for n, _, s in self.manager.statistics()}


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads at once on any machine: here one waits for the other."""
    monkeypatch.setattr(manager, "usable_cores", lambda: 2)


@pytest.fixture
def kind() -> str:
    return "ensemble"


@pytest.fixture
def root(tmp_path: Path, kind: str) -> Path:
    declare(tmp_path, "all", kind)
    for name, config in {"first": SLOW, "second": STEP}.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
    return tmp_path


@of_both_kinds
@pytest.mark.parametrize("mode", [ModelControlMode.NONE, ModelControlMode.POLL])
async def test_the_models_of_its_steps_come_first_whatever_they_are_called(
    root: Path, mode: ModelControlMode
) -> None:
    gateway = EnsembleGateway(root, mode)
    await gateway.manager.start()
    assert gateway.manager.ready
    assert gateway.manager.versions("all") == [1]
    await gateway.manager.stop()


@of_both_kinds
async def test_an_ensemble_is_not_tried_before_the_models_of_its_steps_are_ready(
    root: Path, kind: str
) -> None:
    tried: list[str] = []
    gate = threading.Event()

    def find(backend: str) -> BackendLoader:
        def load(artifact: Artifact) -> Backend:
            tried.append(artifact.model_name)
            if artifact.model_name == "second":
                assert gate.wait(WAIT_SECONDS)
            return find_loader(backend)(artifact)

        return load

    declare(root, "outer", kind, "all")
    gateway = EnsembleGateway(root, ModelControlMode.NONE, find_backend=find)
    starting = asyncio.create_task(gateway.manager.start())
    await until(lambda: "second" in tried and served_now(gateway, "first"))
    assert sorted(tried) == ["first", "second"]
    gate.set()
    await starting
    assert tried[2:] == ["all", "outer"]
    assert gateway.manager.ready
    assert set(gateway.manager.load_failures().values()) == {0}
    await gateway.manager.stop()


@of_both_kinds
async def test_ensembles_of_a_circle_are_refused_and_hold_up_no_other_model(
    root: Path, kind: str
) -> None:
    for name, step in (("all", "outer"), ("outer", "all"), ("beyond", "outer")):
        declare(root, name, kind, step)
    gateway = EnsembleGateway(root, ModelControlMode.NONE)
    await gateway.manager.start()
    assert gateway.manager.broken() == ["all", "beyond", "outer"]
    assert served_now(gateway, "first")
    await gateway.manager.stop()


@of_both_kinds
async def test_a_model_that_becomes_ready_while_its_ensemble_is_refused_is_not_missed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "FIRST_RETRY_SECONDS", 3600.0)
    refused, ready = threading.Event(), threading.Event()

    def find(backend: str) -> BackendLoader:
        def load(artifact: Artifact) -> Backend:
            if artifact.model_name == "second":
                assert refused.wait(WAIT_SECONDS)
            try:
                return find_loader(backend)(artifact)
            except Unavailable:
                refused.set()
                assert ready.wait(WAIT_SECONDS)
                raise

        return load

    for name in ("all", "second"):
        (root / name).rename(root / f".{name}")
    gateway = EnsembleGateway(root, ModelControlMode.POLL, find_backend=find)
    await gateway.manager.start()
    for name in ("all", "second"):
        (root / f".{name}").rename(root / name)
    await gateway.manager.follow()
    await gateway.manager.follow()  # the second look finds the folders settled
    await until(lambda: "second" in gateway.manager.names() and served_now(gateway, "second"))
    ready.set()
    await until(lambda: served_now(gateway, "all"))
    await gateway.manager.stop()


async def test_an_ensemble_of_verified_models_needs_no_manifest_of_its_own(root: Path) -> None:
    manifest.write(root / "first" / "1")
    gateway = EnsembleGateway(root, ModelControlMode.NONE, require_manifest=True)
    await gateway.manager.start()
    assert gateway.manager.broken() == ["all", "second"]  # for want of one
    await gateway.manager.stop()
    manifest.write(root / "second" / "1")
    gateway = EnsembleGateway(root, ModelControlMode.NONE, require_manifest=True)
    await gateway.manager.start()
    assert gateway.manager.ready
    await gateway.manager.stop()


@of_both_kinds
async def test_loading_an_ensemble_loads_the_models_of_its_steps(root: Path) -> None:
    gateway = EnsembleGateway(root, ModelControlMode.EXPLICIT)
    await gateway.manager.start()
    await gateway.manager.load("all")
    assert [gateway.manager.versions(n) for n in ("all", "first", "second")] == [[1], [1], [1]]
    await gateway.manager.stop()
    at_start = EnsembleGateway(root, ModelControlMode.EXPLICIT, "all")
    await at_start.manager.start()
    assert at_start.manager.ready
    assert at_start.manager.versions("all") == [1]
    await at_start.manager.stop()


@of_both_kinds
async def test_a_reload_that_lists_an_ensemble_keeps_and_loads_the_models_of_its_steps(
    root: Path,
) -> None:
    manager = EnsembleGateway(root, ModelControlMode.EXPLICIT).manager
    await manager.start()
    for names in (["all"], ["all"], ["all", "first", "second"]):
        await manager.reload(dict.fromkeys(names, VersionSettings()))
        assert [manager.versions(n) for n in ("all", "first", "second")] == [[1], [1], [1]]
    await manager.reload({"first": VersionSettings()})
    assert [manager.versions(n) for n in ("all", "first", "second")] == [[], [1], []]
    await manager.reload(dict.fromkeys(["all", "first", "second"], VersionSettings()))
    assert manager.ready
    await manager.stop()


async def test_an_ensembles_output_takes_the_labels_of_the_step_that_gives_it(root: Path) -> None:
    labelled = STEP.replace('name: "y"', 'name: "y" label_filename: "labels.txt"')
    (root / "second" / "config.pbtxt").write_text(labelled)
    (root / "second" / "labels.txt").write_text("cat\ndog\n")
    (root / "outer" / "1").mkdir(parents=True)
    outer = ENSEMBLE.replace('"second"', '"all"')
    (root / "outer" / "config.pbtxt").write_text(outer)
    gateway = EnsembleGateway(root, ModelControlMode.EXPLICIT, "outer", "all")
    await gateway.manager.start()

    async def top(model: str) -> list[bytes]:
        data = np.array([[0, 1]], np.float32)
        request = InferRequest(model, [Tensor("x", Datatype.FP32, data)], ("y",))
        request.classification = {"y": 1}
        (output,) = (await finished(gateway.service.infer(request, Deadline.after(10)))).outputs
        return list(output.data.flat)

    assert [await top(name) for name in ("second", "all", "outer")] == [[b"1.000000:1:dog"]] * 3
    assert await top("first") == [b"1.000000:1"]
    (root / "second" / "labels.txt").write_text("cow\nhen\n")  # a reload of the step is enough
    (root / "second" / "config.pbtxt").write_text(labelled + "# again")
    await gateway.manager.load("second")
    assert await top("outer") == [b"1.000000:1:hen"]
    (root / "outer" / "labels.txt").write_text("own\nwords\n")  # its own go first
    own = outer.replace('output { name: "y"', 'output { name: "y" label_filename: "labels.txt"')
    (root / "outer" / "config.pbtxt").write_text(own)
    await gateway.manager.load("outer")
    assert await top("outer") == [b"1.000000:1:words"]
    await gateway.manager.unload("second")
    with pytest.raises(NotFound):
        await top("all")
    await gateway.manager.stop()


CACHE = "response_cache { enable: true }"


class WithoutSteps(EnsembleGateway):
    """Known bad: the key of an ensemble has its own load alone."""

    def loads_of(self, manager: ModelManager, name: str, number: int) -> Loads | None:
        return ()


async def stale(root: Path, kind: type[EnsembleGateway]) -> list[str]:
    """Changes of a step after which an ensemble, or one of an ensemble, has an old answer."""
    (root / "first" / "config.pbtxt").write_text(STEP)
    (root / "outer" / "1").mkdir(parents=True)
    outer = ENSEMBLE.replace('"second"', '"all"') + CACHE
    (root / "outer" / "config.pbtxt").write_text(outer)
    (root / "all" / "config.pbtxt").write_text(ENSEMBLE + CACHE)
    gateway = kind(root, ModelControlMode.EXPLICIT, "outer", "all")
    manager = gateway.manager
    await manager.start()
    found = []
    for name in ("all", "outer"):
        for change in ("reload", "version", "rollout"):
            await gateway.ask(name)
            assert not await gateway.computed(name)
            if change == "reload":
                (root / "second" / "config.pbtxt").write_text(f"{STEP}# {name}")
                await manager.load("second")
            elif change == "version":
                (root / "second" / str(manager.versions("second")[-1] + 1)).mkdir()
                await manager.load("second")
            else:
                gateway.varying.add("second")
            if not await gateway.computed(name):
                found.append(f"{change} under {name}")
            gateway.varying.clear()
    await manager.stop()
    return found


async def test_the_answers_of_a_cached_ensemble_do_not_outlive_the_models_of_its_steps(
    root: Path,
) -> None:
    assert await stale(root, EnsembleGateway) == []


async def test_a_key_without_the_steps_gives_stale_answers(root: Path) -> None:
    assert len(await stale(root, WithoutSteps)) == 6


@of_both_kinds
async def test_an_ensemble_loads_once_a_missing_model_is_available(root: Path) -> None:
    (root / "second").rename(root / "later")
    gateway = EnsembleGateway(root, ModelControlMode.EXPLICIT)
    await gateway.manager.start()
    with pytest.raises(Unavailable):
        await gateway.manager.load("all")
    (root / "later").rename(root / "second")
    await gateway.manager.load("second")
    await until(lambda: gateway.manager.versions("all") == [1])
    await gateway.manager.stop()


@of_both_kinds
async def test_the_models_of_the_steps_are_counted_as_well_as_the_ensemble(root: Path) -> None:
    gateway = EnsembleGateway(root, ModelControlMode.NONE)
    await gateway.manager.start()
    response = await gateway.ask()
    assert response.outputs[0].data.tolist() == [[0, 1], [2, 3]]
    assert gateway.counts() == {"all": (2, 1), "first": (2, 1), "second": (2, 1)}
    await gateway.manager.stop()


async def test_an_ensemble_in_flight_is_finished_while_the_server_shuts_down(root: Path) -> None:
    gateway = EnsembleGateway(root, ModelControlMode.NONE)
    manager = gateway.manager
    await manager.start()
    request = asyncio.create_task(gateway.ask())
    await until(lambda: manager.get("first").in_flight)
    manager.draining.set()
    manager.closing.set()
    with pytest.raises(Unavailable, match="shutting down"):
        await gateway.ask()
    await manager.stop()
    assert (await request).outputs[0].data.tolist() == [[0, 1], [2, 3]]
    assert {name: manager.states(name)[0][1] for name in manager.names()} == dict.fromkeys(
        ("all", "first", "second"), VersionState.UNAVAILABLE
    )


async def test_the_check_sees_steps_that_are_refused_while_the_server_shuts_down(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EnsembleGateway, "steps_finish", False)
    gateway = EnsembleGateway(root, ModelControlMode.NONE)
    await gateway.manager.start()
    request = asyncio.create_task(gateway.ask())
    await until(lambda: gateway.manager.get("first").in_flight)
    gateway.manager.closing.set()
    await gateway.manager.stop()
    with pytest.raises(Unavailable, match="shutting down"):
        await request


@of_both_kinds
@pytest.mark.parametrize("dependents", [False, True])
async def test_a_step_is_unloaded_with_its_ensemble_where_that_is_asked_for(
    root: Path, dependents: bool
) -> None:
    gateway = EnsembleGateway(root, ModelControlMode.EXPLICIT, "second")
    await gateway.manager.start()
    await gateway.manager.load("all")
    await gateway.manager.unload("all", dependents)
    served = [name for name in ("all", "first", "second") if served_now(gateway, name)]
    # The second was asked for by itself.
    assert served == (["second"] if dependents else ["first", "second"])
    await gateway.manager.stop()


@of_both_kinds
async def test_an_ensemble_goes_and_comes_with_a_step_unless_it_was_unloaded_itself(
    root: Path,
) -> None:
    gateway = EnsembleGateway(root, ModelControlMode.EXPLICIT, "all")
    manager = gateway.manager
    await manager.start()
    await manager.unload("first")
    assert not served_now(gateway, "all")
    assert manager.ready
    await manager.load("first")
    await gateway.ask()
    await manager.unload("first")
    await manager.unload("all")
    await manager.load("first")
    assert served_now(gateway, "first")
    assert not served_now(gateway, "all")
    await manager.stop()


def served_now(gateway: EnsembleGateway, name: str) -> bool:
    return any(state is VersionState.READY for _, state, _ in gateway.manager.states(name))


async def test_the_same_repository_given_twice_is_one(root: Path, tmp_path: Path) -> None:
    (tmp_path / "by another path").symlink_to(root)
    other = tmp_path / "other"
    for repositories, served in (
        ((root, root / ".." / root.name, tmp_path / "by another path"), True),
        ((root, other), False),
    ):
        (other / "first" / "1").mkdir(parents=True, exist_ok=True)
        manager = ModelManager(Settings(repositories, ModelControlMode.EXPLICIT, ("first",)))
        await manager.start()
        states = [state for _, state, _ in manager.states("first")]
        assert (states == [VersionState.READY]) is served
        await manager.stop()


async def test_another_caller_of_a_step_waits_for_no_flood_of_its_ensemble(root: Path) -> None:
    (root / "first" / "config.pbtxt").write_text(STEP)
    gateway = EnsembleGateway(root, ModelControlMode.NONE)
    await gateway.manager.start()
    step = gateway.manager.get("first")
    infer, turns = step.infer, step.turns
    callers: list[str] = []
    going: list[asyncio.Event] = []

    async def held(request: InferRequest, deadline: Deadline) -> InferResponse:
        callers.append(request.caller)
        going.append(gate := asyncio.Event())
        await gate.wait()
        return await finished(infer(request, deadline))

    step.infer = held
    flood = [
        asyncio.create_task(gateway.ask(caller="flood")) for _ in range(turns.free + turns.room)
    ]
    await until(lambda: len(going) == len(flood))
    waiting = [asyncio.create_task(gateway.ask("first", "other"))]
    waiting += [asyncio.create_task(gateway.ask(caller="flood")) for _ in range(turns.room + 5)]
    await until(lambda: step.statistics.pending == len(flood) + len(waiting))
    assert len(going) == len(flood), "they take turns"
    for number in range(len(flood) + len(waiting)):
        await until(lambda number=number: len(going) > number)  # type: ignore[misc]
        going[number].set()
    await asyncio.gather(*flood, *waiting)  # no step is refused
    assert callers[len(flood)] == "other"
    await gateway.manager.stop()
