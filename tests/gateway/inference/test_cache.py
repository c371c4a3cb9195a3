"""The response cache: what it holds, what hits, and what can never come out of it."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from modelport.gateway.cli import serve_settings
from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.inference import cache
from modelport.gateway.inference.cache import (
    ENTRY_BYTES,
    INLINE_BYTES,
    TENSOR_BYTES,
    CachedInfer,
    ResponseCache,
)
from modelport.gateway.models.loader import VersionLoader
from modelport.gateway.repository import config as configuration
from modelport.gateway.settings import Settings
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    NO_DEADLINE,
    Array,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
    finished,
)
from tests.gateway.cli.test_serve import modelport, one_line
from tests.gateway.inference.cached_requests import SIZE, copied, keyed, nothing, subject

# -- versions and models that share a store -------------------------------------------------------


class WithoutName(CachedInfer):
    """Known bad: MLServer's cache, whose key lacks the model's name."""

    def identity(self, name: str, number: int) -> bytes:
        return repr(number).encode()


class WithoutLoad(CachedInfer):
    """Known bad: a version that is loaded again has the old one's answers."""

    def identity(self, name: str, number: int) -> bytes:
        return repr((name, number)).encode()


def answers(constant: float) -> Callable[[InferRequest, Deadline], Awaitable[InferResponse]]:
    async def infer(request: InferRequest, deadline: Deadline) -> InferResponse:
        return InferResponse("m", 1, [Tensor("y", Datatype.FP32, np.float32([constant]))])

    return infer


async def first_value(cached: CachedInfer) -> float:
    response = await finished(cached.infer(subject(), NO_DEADLINE))
    return float(response.outputs[0].data[0])


async def told_apart(kind: type[CachedInfer], *identities: tuple[str, int]) -> bool:
    store = ResponseCache(SIZE)
    models = [kind(answers(float(i)), store, *who) for i, who in enumerate(identities)]
    for _ in range(2):
        for i, model in enumerate(models):
            if await first_value(model) != float(i):
                return False
    return True


async def test_models_and_versions_with_equal_inputs_do_not_mix() -> None:
    assert await told_apart(CachedInfer, ("a", 1), ("b", 1), ("a", 2), ("a1", 1), ("a", 11))
    assert not await told_apart(WithoutName, ("a", 1), ("b", 1))


async def test_a_version_loaded_again_has_none_of_the_old_ones_answers() -> None:
    assert await told_apart(CachedInfer, ("a", 1), ("a", 1))
    assert not await told_apart(WithoutLoad, ("a", 1), ("a", 1))


def test_cache_keys_are_unpredictable() -> None:
    assert keyed(WithoutLoad).key(subject()) != keyed(WithoutLoad).key(subject())


# -- the store ------------------------------------------------------------------------------------


def response(*data: Array, **parameters: Parameter) -> InferResponse:
    outputs = []
    for i, each in enumerate(data):
        datatype = Datatype.BYTES if each.dtype == object else Datatype.UINT8
        outputs.append(Tensor(f"y{i}", datatype, each))
    return InferResponse("m", 1, outputs, parameters=parameters)


def number(i: int) -> bytes:
    return hashlib.blake2b(str(i).encode(), digest_size=32).digest()


def test_the_size_is_never_exceeded_and_always_what_the_entries_take() -> None:
    store = ResponseCache(64 * 1024)
    random = np.random.default_rng(7)
    kept: dict[bytes, int] = {}
    for i in range(2000):
        length = int(random.integers(0, 6000)) if i % 25 else int(random.integers(0, 200_000))
        data = np.zeros(length, np.uint8)
        if i % 3 == 0:
            data = np.array([b"x" * (j % 40) for j in range(length // 60)], object)
        key = number(int(random.integers(0, 200)))
        before = store.look_up(key) is not None
        made = response(data)
        is_kept = store.insert(key, made)
        assert is_kept or cache._size_bytes(made) > store.size
        if is_kept and not before:
            kept[key] = cache._size_bytes(made)
        kept = {key: size for key, size in kept.items() if store.look_up(key) is not None}
        assert store.used_bytes == sum(kept.values()) <= store.size
        assert len(store._entries) == len(kept)
    assert len(store._entries) > 5


@pytest.mark.parametrize("length", [0, 4, 4096])
@pytest.mark.parametrize("kind", ["UINT8", "BYTES"])
def test_what_is_counted_is_what_it_takes(length: int, kind: str) -> None:
    """Counted too little, a cache of small answers would take many times its size."""
    store = ResponseCache(2**30)
    items = np.empty(length // 4, object)
    gc.collect()
    tracemalloc.start()
    try:
        for i in range(1000 if length < 4096 else 100):
            data = np.zeros(length, np.uint8)
            if kind == "BYTES":
                items[:] = [b"%d" % j for j in range(length // 4)]
                data = items
            store.insert(number(i), response(data))
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.85 < taken / store.used_bytes < 1.1


def test_the_least_recently_used_goes_first() -> None:
    size = cache._size_bytes(response(np.zeros(1000, np.uint8)))
    store = ResponseCache(3 * size)
    for i in range(3):
        store.insert(number(i), response(np.full(1000, i, np.uint8)))
    assert store.look_up(number(0)) is not None
    store.insert(number(3), response(np.zeros(1000, np.uint8)))
    assert [i for i in range(4) if store.look_up(number(i)) is not None] == [0, 2, 3]


def test_an_answer_larger_than_the_store_is_not_kept_and_drives_none_out() -> None:
    store = ResponseCache(ENTRY_BYTES + TENSOR_BYTES + 2000)
    store.insert(number(0), response(np.zeros(1000, np.uint8)))
    assert not store.insert(number(1), response(np.zeros(3000, np.uint8)))
    assert store.look_up(number(0)) is not None
    assert store.look_up(number(1)) is None


def test_cached_answers_cannot_be_changed() -> None:
    store = ResponseCache(SIZE)
    given = response(np.arange(4, dtype=np.uint8), np.array([b"a", b"b"], object), note="n")
    store.insert(number(0), given)
    given.outputs[0].data[:] = 9  # the backend's buffer is used again
    given.outputs[1].data[0] = b"z"
    given.outputs.clear()
    for _ in range(2):
        found = store.look_up(number(0))
        assert found is not None
        assert found.outputs[0].data.tolist() == [0, 1, 2, 3]
        assert found.outputs[1].data.tolist() == [b"a", b"b"]
        assert found.parameters == {"note": "n"}
        for tensor in found.outputs:
            with pytest.raises(ValueError, match="read-only"):
                tensor.data[...] = tensor.data[::-1].copy()
            with pytest.raises(ValueError, match="WRITEABLE"):
                tensor.data.flags.writeable = True
            tensor.name, tensor.data = "other", np.zeros(1)
        found.outputs.clear()
        found.parameters["note"] = "changed"  # type: ignore[index]


# -- requests -------------------------------------------------------------------------------------


class CountingModel:
    """A model that counts its executions and does what the test says."""

    def __init__(self) -> None:
        self.executions = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: Exception | None = None

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        self.executions += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return InferResponse("m", 1, [Tensor("y", Datatype.FP32, request.inputs[0].data * 2)])


async def test_a_hit_executes_nothing_and_is_timed_as_one() -> None:
    model = CountingModel()
    cached = CachedInfer(model, ResponseCache(SIZE), "m", 1)
    missed, hit = subject(), copied(subject())
    first = await finished(cached.infer(missed, NO_DEADLINE))
    second = await finished(cached.infer(hit, NO_DEADLINE))
    assert model.executions == 1
    assert first.outputs[0].data.tobytes() == second.outputs[0].data.tobytes()
    assert missed.timing.cache_miss_ns > 0 == missed.timing.cache_hit_ns
    assert hit.timing.cache_hit_ns > 0 == hit.timing.cache_miss_ns


async def test_errors_are_never_kept() -> None:
    model = CountingModel()
    model.error = Internal("out of memory")
    cached = CachedInfer(model, store := ResponseCache(SIZE), "m", 1)
    for _ in range(2):
        with pytest.raises(Internal):
            await finished(cached.infer(subject(), NO_DEADLINE))
    assert (model.executions, len(store._entries)) == (2, 0)
    model.error = None
    await finished(cached.infer(subject(), NO_DEADLINE))
    assert len(store._entries) == 1


async def test_one_of_two_identical_requests_that_is_cancelled_leaves_the_other_its_answer() -> (
    None
):
    model = CountingModel()
    model.gate.clear()
    cached = CachedInfer(model, store := ResponseCache(SIZE), "m", 1)
    one, other = (
        asyncio.ensure_future(finished(cached.infer(subject(), NO_DEADLINE))) for _ in range(2)
    )
    while model.executions < 2:
        await asyncio.sleep(0)
    one.cancel()
    model.gate.set()
    assert (await other).outputs[0].data[0, 1] == 2
    with pytest.raises(asyncio.CancelledError):
        await one
    assert len(store._entries) == 1


@pytest.mark.parametrize("key", ["sequence_id", "sequence_start", "sequence_end"])
async def test_a_step_of_a_sequence_is_not_looked_up(key: str) -> None:
    model = CountingModel()
    cached = CachedInfer(model, store := ResponseCache(SIZE), "m", 1)
    for _ in range(2):
        request = replace(subject(), parameters={key: 1})
        await finished(cached.infer(request, NO_DEADLINE))
        assert request.timing.cache_miss_ns == 0
    assert (model.executions, len(store._entries)) == (2, 0)


@pytest.mark.parametrize("datatype", [Datatype.FP32, Datatype.BYTES])
async def test_the_event_loop_does_not_hash_large_inputs(
    datatype: Datatype, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    hashed: list[str] = []

    class Watched(CachedInfer):
        def key(self, request: InferRequest, loads: tuple[int, ...] = ()) -> bytes:
            hashed.append(threading.current_thread().name)
            return super().key(request, loads)

    cached = Watched(nothing, ResponseCache(SIZE), "m", 1)
    for count in (4, INLINE_BYTES):
        data: Array = np.zeros(count, np.float32)
        if datatype is Datatype.BYTES:
            data = np.array([b"x"] * count, object)
        request = InferRequest("m", [Tensor("x", datatype, data)])
        await finished(cached.infer(request, NO_DEADLINE))
        assert (await finished(cached.infer(request, NO_DEADLINE))).outputs == []
    here = threading.current_thread().name
    assert hashed[:2] == [here, here]
    assert all(name.startswith("offload") for name in hashed[2:])


# -- what the configuration asks for --------------------------------------------------------------


def parsed(text: str) -> Any:
    return configuration.parse(text)


def wrapped(text: str, store: ResponseCache | None) -> tuple[bool, Statistics]:
    statistics = Statistics()
    backend: Any = SimpleNamespace(config=parsed(text))
    chain = cache.wrap(nothing, "m", 1, backend, statistics, store)
    return chain is not nothing, statistics


def test_only_a_model_that_asks_for_it_is_cached() -> None:
    assert not wrapped("", ResponseCache(SIZE))[0]
    assert not wrapped("response_cache { enable: false }", ResponseCache(SIZE))[0]
    is_cached, statistics = wrapped("response_cache { enable: true }", ResponseCache(SIZE))
    assert is_cached
    assert statistics.cached


@pytest.mark.parametrize(
    ("text", "store", "reason"),
    [
        ("", None, "--cache-config"),
        ('platform: "pipeline"', ResponseCache(SIZE), "the models of its steps"),
    ],
)
def test_a_model_that_cannot_be_cached_is_served_with_one_warning(
    text: str, store: ResponseCache | None, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_cached, statistics = wrapped(f"{text} response_cache {{ enable: true }}", store)
    told = capsys.readouterr()
    assert (is_cached, statistics.cached) == (False, False)
    assert (told.out + told.err).count("response_cache has no effect") == 1
    assert reason in told.out + told.err


def test_a_decoupled_model_that_asks_for_it_does_not_load() -> None:
    text = "model_transaction_policy { decoupled: true } response_cache { enable: %s }"
    cache.check("m", parsed(text % "false"))
    with pytest.raises(InvalidArgument, match="decoupled"):
        cache.check("m", parsed(text % "true"))


# -- flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "mentions"),
    [
        (["--cache-config", "redis,host=localhost"], "there is no cache 'redis'"),
        (["--cache-config", "size=4096"], "use local,size=BYTES"),
        (["--cache-config", "local,size=0"], "above 0"),
        (["--cache-config", "local,size=1k"], "size=1k"),
        (["--cache-config=local,size=9", "--response-cache-byte-size=9"], "use one of them"),
        (["--response-cache-byte-size", "-1"], "--response-cache-byte-size"),
    ],
)
def test_a_wrong_size_is_one_line_that_says_what_is_right(
    arguments: list[str], mentions: str, tmp_path: Path
) -> None:
    run = modelport("serve", "--model-repository", str(tmp_path), *arguments)
    assert mentions in one_line(run, 2)


def test_sizes_are_read_as_triton_reads_them() -> None:
    sizes = serve_settings.cache_sizes(None, None, ("local,size=1048576",))
    assert (
        serve_settings.cache_size(sizes, None) == serve_settings.cache_size((), 1048576) == 1048576
    )
    assert serve_settings.cache_size((), None) == serve_settings.cache_size((), 0) == 0


def test_workers_share_the_size(tmp_path: Path) -> None:
    loader = VersionLoader(Settings((tmp_path,), cache_bytes=1000, workers=4), lambda kind: None, 1)  # type: ignore[arg-type,return-value]
    assert loader.shared.response_cache is not None
    assert loader.shared.response_cache.size == 250
