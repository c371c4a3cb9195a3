"""``model_warmup``: the samples of a configuration, which a version answers before it is READY."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend, SessionPool
from modelport.gateway.errors import Internal, InvalidArgument, Unavailable
from modelport.gateway.models import model_warmup
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.models.model import VersionState
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, InferRequest, TensorSpec
from modelport.gateway.upstream.pool import on_loop
from tests.gateway.models.managers import World, host, served
from tests.polling import until

X = 'inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 %s } }'
ZERO = X % "zero_data: true"
TYPES = {d: "STRING" if d is Datatype.BYTES else d.value for d in Datatype}


def sample(inputs: str = ZERO, name: str = "s", batch: int = 1, count: int = 0) -> str:
    counted = f"count: {count}" if count else ""
    return f'\nmodel_warmup {{ name: "{name}" batch_size: {batch} {counted} {inputs} }}'


def from_file(name: str) -> str:
    return sample(X % f'input_data_file: "{name}"')


@pytest.fixture
def world(tmp_path: Path) -> World:
    (tmp_path / "repository").mkdir()
    return World(tmp_path / "repository")


async def asked(world: World, config: str) -> list[InferRequest]:
    """The requests to the model when it loads with ``config``, which it does."""
    world.publish(1, config=config)
    manager = await world.serve()
    assert manager.states("m") == [(1, VersionState.READY, "")]
    requests = served(manager).requests
    await manager.stop()
    return requests


async def reason(world: World, config: str, **settings: Any) -> str:
    """The reason for which the model does not load with ``config``."""
    world.publish(1, config=config)
    manager = await world.serve(**settings)
    ((_, state, text),) = manager.states("m")
    assert state is VersionState.UNAVAILABLE
    assert manager.versions("m") == []
    await manager.stop()
    assert "\n" not in text
    assert text.startswith("failed to run warmup sample '"), text
    return text


# -- what is asked --------------------------------------------------------------------------------


async def test_every_sample_runs_in_order_count_times_on_every_instance(world: World) -> None:
    config = sample(name="a", batch=4, count=2) + sample(name="b") + "instance_group { count: 3 }"
    requests = await asked(world, config)
    assert [request.inputs[0].data.shape for request in requests] == [(4, 2)] * 6 + [(1, 2)] * 3
    assert {request.model_version for request in requests} == {1}


class CountingSession:
    """A session of one instance, which counts its runs."""

    bounded = random = False
    state: Sequence[str] = ()

    def __init__(self) -> None:
        self.inputs = [ArtifactTensor("x", Datatype.FP32, (-1, 2))]
        self.outputs = [ArtifactTensor("y", Datatype.FP32, (-1, 2))]
        self.runs = 0

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> list[Array]:
        self.runs += 1
        return [inputs["x"]]

    def close(self) -> None: ...


async def test_every_session_of_a_pool_runs_the_sample_count_times(world: World) -> None:
    world.publish(1, config=sample(count=2) + "instance_group { count: 3 }")
    sessions = [CountingSession() for _ in range(3)]

    def load(artifact: Artifact) -> EmbeddedBackend:
        return EmbeddedBackend(artifact, SessionPool(sessions), artifact.config)

    manager = ModelManager(world.settings(), lambda _: load, make_host=host)
    await manager.start()
    assert manager.versions("m") == [1]
    assert [session.runs for session in sessions] == [2, 2, 2]
    await manager.stop()


async def test_warm_up_leaves_no_trace_in_the_statistics(world: World) -> None:
    world.publish(1, config=sample(count=5) + "dynamic_batching {} response_cache { enable: true }")
    manager = await world.serve()
    ((_, _, statistics),) = manager.statistics()
    assert (statistics.success.count, statistics.inference_count) == (0, 0)
    assert len(served(manager).requests) == 5
    await manager.stop()


async def test_elements_of_a_batch_are_the_same_and_come_from_the_file(world: World) -> None:
    data = np.array([1.5, -2.5], "<f4")
    (world.root / "m/warmup").mkdir(parents=True)
    (world.root / "m/warmup/raw").write_bytes(data.tobytes())
    (request,) = await asked(world, from_file("raw").replace("batch_size: 1", "batch_size: 3"))
    assert np.array_equal(request.inputs[0].data, [data] * 3)


async def test_a_longer_file_is_accepted_as_in_triton(world: World) -> None:
    (world.root / "m/warmup/sub").mkdir(parents=True)
    (world.root / "m/warmup/sub/raw").write_bytes(np.array([1, 2, 3], "<f4").tobytes())
    (request,) = await asked(world, from_file("sub/raw"))
    assert request.inputs[0].data.tolist() == [[1, 2]]


async def test_a_file_of_strings_has_their_lengths(world: World) -> None:
    (world.root / "m/warmup").mkdir(parents=True)
    words = [b"233", b"", b"\0\xff"]
    raw = b"".join(struct.pack("<I", len(word)) + word for word in words)
    (world.root / "m/warmup/raw").write_bytes(raw)
    config = (
        'input { name: "s" data_type: TYPE_STRING dims: 3 optional: true }'
        'model_warmup { batch_size: 2 inputs { key: "s" value { data_type: TYPE_STRING dims: 3 '
        f'input_data_file: "raw" }} }} {ZERO} }}'
    )
    (request,) = await asked(world, config)
    (strings,) = [tensor for tensor in request.inputs if tensor.name == "s"]
    assert strings.data.tolist() == [words, words]


@pytest.mark.parametrize("kind", ["zero_data", "random_data"])
async def test_made_data_has_the_datatype_and_respects_the_declared_range(
    kind: str, world: World
) -> None:
    """``false`` counts as well: Triton looks at which field is set, not at its value."""
    config = 'parameters { key: "axis.n" value { string_value: "1..7" } }'
    samples = ""
    for datatype, name in TYPES.items():
        config += (
            f'input {{ name: "{name}" data_type: TYPE_{name} dims: -1 optional: true }}'
            f'parameters {{ key: "axes.{name}" value {{ string_value: "n" }} }}'
        )
        samples += f'inputs {{ key: "{name}" value {{ data_type: TYPE_{name} dims: 7 {kind}: false '
        samples += "} }"
        if datatype not in (Datatype.BYTES, Datatype.BOOL, Datatype.BF16) and kind != "zero_data":
            bounds = "3..n" if datatype in (Datatype.INT64, Datatype.FP16) else "2..5"
            config += f'parameters {{ key: "range.{name}" value {{ string_value: "{bounds}" }} }}'
    (request,) = await asked(world, config + sample(samples + ZERO, batch=4))
    found = {tensor.name: tensor for tensor in request.inputs}
    assert found.keys() == {"x", *TYPES.values()}
    for datatype, name in TYPES.items():
        data = found[name].data
        assert (data.shape, data.dtype) == ((4, 7), NUMPY_DTYPES[datatype]), name
        if datatype is Datatype.BYTES:
            assert set(data.flat) == {b""}
        elif kind == "zero_data":
            assert not data.any(), name


@pytest.mark.parametrize(
    ("least", "most", "low", "high"),
    [(None, None, 0, 1), (None, -5, -5, -5), (3, None, 3, 4), (-2, 1, -2, 1), (0.5, 300, 1, 127)],
)
def test_random_integers_lie_in_the_declared_range_and_are_small_without_one(
    least: float | None, most: float | None, low: int, high: int
) -> None:
    spec = TensorSpec("x", Datatype.INT8, (64,), least, most)
    values = model_warmup._random(spec, Datatype.INT8, (64,), {})
    assert low <= values.min() <= values.max() <= high


async def test_a_sample_of_no_batch_does_not_run(world: World) -> None:
    assert await asked(world, sample(batch=0)) == []


async def test_a_model_that_does_not_batch_gets_one_element(world: World) -> None:
    world.publish(1)
    text = (world.root / "m/config.pbtxt").read_text().replace("batch_size: 4", "batch_size: 0")
    (world.root / "m/config.pbtxt").write_text(text + sample())
    manager = await world.serve()
    (request,) = served(manager).requests
    assert request.inputs[0].data.shape == (2,)
    await manager.stop()


# -- what fails -----------------------------------------------------------------------------------

FAILING = {
    "unknown input": (sample(ZERO.replace('"x"', '"xx"')), "input 'xx'.*do you mean 'x'"),
    "no input": (sample(""), "missing required input.*'x'"),
    "datatype": (sample(ZERO.replace("FP32", "INT32")), "'x' data-type is 'INT32'"),
    "no datatype": (sample(ZERO.replace("data_type: TYPE_FP32", "")), "input 'x' must specify"),
    "dims": (
        sample(ZERO.replace("dims: 2", "dims: 3")),
        r"unexpected shape for input 'x'.*\[1,3\]",
    ),
    "variable dims": (sample(ZERO.replace("dims: 2", "dims: -1")), "variable-size .* input 'x'"),
    "negative dims": (
        sample(ZERO.replace("dims: 2", "dims: -2")),
        "input 'x'.*integer >= 0, not -2",
    ),
    "many dims": (sample(ZERO.replace("2", "2 dims: 1" * 40, 1)), "input 'x'.*dimensions"),
    "no data": (sample(X % ""), "input 'x' has no data: set zero_data"),
    "batch": (sample(batch=5), "'batch_size' is 5, but 'max_batch_size' of the model is 4"),
    "largest batch": (sample(batch=2**32 - 1), "'max_batch_size' of the model is 4"),
    "count": (sample(count=2**32 - 1), "'count' 4294967295 on 1 instances makes 4294967295 runs"),
    "counts": (sample(count=6000) * 2, "all samples together may make 10000"),
    "no file": (from_file("gone"), "'warmup/gone' of input 'x'.*add the file"),
    "empty name": (from_file(""), "'warmup/' of input 'x'.*not a file"),
    "outside": (from_file("../config.pbtxt"), "'warmup/../config.pbtxt' of input 'x'"),
    "absolute": (from_file("/etc/hostname"), "of input 'x' cannot be read"),
    "nul": (from_file(r"a\000b"), "of input 'x' cannot be read"),
    "long": (from_file("a" * 5000), "of input 'x' cannot be read: File name too long"),
    "folder": (from_file("folder"), "of input 'x' cannot be read"),
    "pipe": (from_file("pipe"), "of input 'x' cannot be read"),
    "link": (from_file("link"), "of input 'x' cannot be read"),
    "loop": (from_file("loop"), "of input 'x' cannot be read"),
    "short": (from_file("short"), "'warmup/short': .*input 'x'. Expected 8, got 3"),
    "large": (sample(ZERO.replace("dims: 2", "dims: 1000000000000")), "inputs take 3,814,697 MiB"),
    "random": (
        sample(ZERO.replace("2 zero", "1000000000000 random")),
        "lower 'batch_size' or 'dims'",
    ),
    "overflow": (sample(ZERO.replace("dims: 2", "dims: 4611686018427387904 dims: 8")), "input 'x'"),
}


@pytest.mark.parametrize("case", FAILING)
async def test_a_bad_sample_fails_the_load_and_costs_little(case: str, world: World) -> None:
    config, expected = FAILING[case]
    folder = world.root / "m/warmup"
    (folder / "folder").mkdir(parents=True)
    os.mkfifo(folder / "pipe")
    (folder / "short").write_bytes(b"123")
    (world.root.parent / "secret").write_bytes(bytes(8))
    (folder / "link").symlink_to("../../../secret")
    (folder / "loop").symlink_to("loop")
    tracemalloc.start()
    text = await reason(world, config)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    assert text.endswith("; correct or remove it in 'model_warmup'")
    assert re.search(expected, text), text


async def test_a_link_within_the_repository_is_followed(world: World) -> None:
    (world.root / "m/warmup/..data").mkdir(parents=True)
    (world.root / "m/warmup/..data/raw").write_bytes(bytes(8))
    (world.root / "m/warmup/raw").symlink_to("..data/raw")
    assert len(await asked(world, from_file("raw"))) == 1


async def test_a_model_that_refuses_a_sample_does_not_load_and_stops_at_the_first(
    world: World,
) -> None:
    def refuse(request: InferRequest) -> None:
        raise Internal("inference failed: An Error Occurred")

    world.obey = refuse
    text = await reason(world, sample(name="first") + sample(name="second"))
    assert "sample 'first': inference failed: An Error Occurred" in text
    assert world.events == [("load", 1), ("unload", 1)]


async def test_a_version_that_serves_stays_when_a_sample_of_its_reload_fails(world: World) -> None:
    world.publish(1)
    manager = await world.serve()
    world.configure(from_file("gone"))
    with pytest.raises(InvalidArgument, match=r"load failed for model 'm'.*warmup sample 's'"):
        await manager.load("m")
    ((_, state, text),) = manager.states("m")
    assert state is VersionState.READY
    assert "previously loaded version still serves" in text
    (world.root / "m/warmup").mkdir()
    (world.root / "m/warmup/gone").write_bytes(bytes(8))
    await manager.load("m")  # the file alone was wrong
    assert manager.states("m") == [(1, VersionState.READY, "")]
    await manager.stop()


async def test_samples_end_with_the_time_limit_of_the_load(world: World) -> None:
    async def wait(manager: ModelManager) -> None:
        while manager.states("m")[0][1] is VersionState.LOADING:
            await asyncio.sleep(0.01)

    ran: list[InferRequest] = []
    world.obey = ran.append
    world.publish(1, config=sample(count=10_000))
    manager = await world.serve(model_load_timeout_seconds=0.05)
    await wait(manager)
    assert "--model-load-timeout-secs" in manager.states("m")[0][2]
    await manager.stop()
    assert len(ran) < 10_000


async def test_a_version_that_warms_up_is_not_served_and_an_unload_waits_for_it(
    world: World,
) -> None:
    asked = asyncio.Event()
    world.obey = lambda request: asked.set()
    world.publish(1, config=sample(count=1000))
    manager = await world.serve(load="")
    loading = asyncio.create_task(manager.load("m"))
    await asked.wait()
    assert manager.states("m") == [(1, VersionState.LOADING, "")]
    assert manager.versions("m") == []
    await asyncio.gather(loading, manager.unload("m"), manager.load("m"), manager.unload("m"))
    await manager.unload("m")
    assert manager.states("m") == [(1, VersionState.UNAVAILABLE, "unloaded")]
    assert world.events.count(("load", 1)) == world.events.count(("unload", 1))
    await manager.stop()


async def test_a_gateway_that_stops_does_not_wait_for_samples(world: World) -> None:
    asked: list[InferRequest] = []
    world.obey = asked.append
    world.publish(1, config=sample(count=2000))
    manager = await world.serve(load="")
    loading = asyncio.create_task(manager.load("m"))
    await until(lambda: bool(asked))
    await manager.stop()
    assert len(asked) < 2000
    with pytest.raises(Unavailable, match="shutting down"):
        await loading
    await until(lambda: world.events == [("load", 1), ("unload", 1)])


def test_work_for_a_loop_that_is_closed_is_closed_too() -> None:
    async def work() -> None: ...

    loop = asyncio.new_event_loop()
    loop.close()
    coroutine = work()
    with pytest.raises(RuntimeError, match="closed"):
        on_loop(loop, coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
