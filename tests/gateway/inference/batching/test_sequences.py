"""Sequences: each gets the answers that it would get alone, however requests of others come."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend
from modelport.gateway.errors import (
    Cancelled,
    InvalidArgument,
    QueueFull,
    TimedOut,
    Unavailable,
)
from modelport.gateway.inference.batching import Schedulers, sequences
from modelport.gateway.inference.batching.sequence_tensors import SequenceTensors
from modelport.gateway.inference.batching.sequences import SequenceScheduler
from modelport.gateway.inference.batching.slots import OldestSlots
from modelport.gateway.repository import config
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import (
    NO_DEADLINE,
    Array,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)

CONTROLS = " ".join(
    f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{name} {values} }} }}'
    for name, values in (
        ("START", "int32_false_true: [0, 1]"), ("END", "fp32_false_true: [0, 2]"),
        ("READY", "bool_false_true: [false, true]"), ("CORRID", "data_type: TYPE_UINT64"),
    )
)  # fmt: skip
STATE = 'state { input_name: "STATE" output_name: "NEXT" data_type: TYPE_INT64 dims: [1] }'
TENSORS = "".join(
    f'{side} {{ name: "{name}" data_type: TYPE_INT64 dims: [1] }}'
    for side, name in (("input", "INPUT"), ("output", "OUTPUT"), ("output", "ID"))
)


class Sums:
    """A ``ModelSession`` of implicit state: the output is the sum of a sequence's inputs."""

    bounded, state, random = True, "", False
    inputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()

    def __init__(self) -> None:
        #: Rows of each run, and those of them that are READY.
        self.runs: list[tuple[int, int]] = []

    def run(self, names: Sequence[str], feed: dict[str, Array]) -> list[Array]:
        ready, start = feed["READY"], feed["START"]
        total = np.where(start == 1, 0, feed["STATE"]) + feed["INPUT"]
        # What an empty row gives must not be seen.
        total = np.where(ready, total, -1)
        ends = np.where(feed["END"] == 2, 1000, 0)
        self.runs.append((ready.size, int(ready.sum())))
        found = {
            "OUTPUT": total + ends,
            "NEXT": total,
            "ID": feed["CORRID"].astype(np.int64),
        }
        return [found[name] for name in names]

    def close(self) -> None: ...


def served(text: str) -> tuple[SequenceScheduler, Sums, EmbeddedBackend]:
    """A scheduler in front of the model of sums."""
    made = config.complete(config.parse(f'name: "m" {TENSORS} {text}'), "m")
    session = Sums()
    backend = EmbeddedBackend(Artifact("m", 1, Path(), made, 1), session, made)
    scheduler = Schedulers(backend, Statistics()).sequences(backend, Path)  # type: ignore[arg-type]
    assert scheduler is not None
    return scheduler, session, backend


def model(strategy: str = "", batch: int = 4, instances: int = 1, idle: int = 0) -> str:
    return (
        f"max_batch_size: {batch} instance_group {{ kind: KIND_CPU count: {instances} }} "
        f"sequence_batching {{ {strategy} {CONTROLS} {STATE} "
        f"max_sequence_idle_microseconds: {idle} }}"
    )


def asked(
    id: int | str, value: int, start: bool = False, end: bool = False, batch: int = 4, **more: Any
) -> InferRequest:
    shape = (1, 1) if batch else (1,)
    data = np.full(shape, value, np.int64)
    flags = {"sequence_id": id, "sequence_start": start, "sequence_end": end}
    return InferRequest("m", [Tensor("INPUT", Datatype.INT64, data)], parameters={**flags, **more})


def sent(scheduler: SequenceScheduler, *args: Any, **more: Any) -> asyncio.Future[InferResponse]:
    return asyncio.ensure_future(finished(scheduler(asked(*args, **more), NO_DEADLINE)))


def answer(response: InferResponse) -> tuple[int, int]:
    output, id = (tensor.data.item() for tensor in response.outputs)
    return output, id


async def one_sequence(
    scheduler: SequenceScheduler, id: int, values: Sequence[int], draw: random.Random, batch: int
) -> None:
    """Send a sequence, some requests before earlier ones are answered, and check the answers."""
    replies, last = [], len(values) - 1
    for index, value in enumerate(values):
        for _ in range(draw.randrange(4)):
            await asyncio.sleep(0)
        replies.append(sent(scheduler, id, value, index == 0, index == last, batch))
        await asyncio.sleep(0)
        if draw.random() < 0.5:
            await asyncio.wait({replies[-1]})
    got = [answer(await reply) for reply in replies]
    sums = np.cumsum(values).tolist()
    assert got == [(each + 1000 * (i == last), id) for i, each in enumerate(sums)]


async def interleaved(strategy: str, batch: int, instances: int, seed: int) -> Sums:
    scheduler, session, backend = served(model(strategy, batch, instances, 60_000_000))
    draw = random.Random(seed)
    await asyncio.gather(
        *(
            one_sequence(
                scheduler, id, [draw.randrange(9) for _ in range(draw.randint(1, 5))], draw, batch
            )
            for id in range(1, 25)
        )
    )
    left = scheduler._open, scheduler._backlog, scheduler._waiting, scheduler._placed
    assert not any(left)
    backend.unload()
    return session


STRATEGIES = (
    "", "direct {}", "direct { max_queue_delay_microseconds: 2000 minimum_slot_utilization: 0.9 }",
    "oldest {}", "oldest { max_candidate_sequences: 3 preferred_batch_size: 1 }",
    "oldest { max_candidate_sequences: 9 max_queue_delay_microseconds: 2000 }",
    "oldest { preserve_ordering: true }",
)  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("batch", "instances"), [(0, 1), (4, 1), (2, 3)])
async def test_each_of_many_interleaved_sequences_gets_the_answers_it_would_get_alone(
    strategy: str, batch: int, instances: int
) -> None:
    session = await interleaved(strategy, batch, instances, seed=batch)
    if instances == 1 and batch and "preferred" not in strategy:
        assert max(rows for rows, _ in session.runs) > 1, "they share batches"
    if "oldest" in strategy:
        assert all(rows == ready for rows, ready in session.runs)


def forget(self: SequenceTensors, response: Any, *_: Any) -> Any:
    return response, self.first


def share(self: SequenceTensors, response: InferResponse, *_: Any) -> Any:
    states = {"STATE": response.outputs[-1].data}
    self.first = states
    return response, states


@pytest.mark.parametrize("wrong", [forget, share])
async def test_states_that_are_lost_or_shared_would_be_found(
    wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SequenceTensors, "response", wrong)
    with pytest.raises((AssertionError, ValueError)):
        await interleaved("", 4, 1, seed=1)


REFUSED = {
    "must specify a non-zero or non-empty correlation ID": asked(0, 1, start=True),
    "model 'm' must specify the START flag on the first request of the sequence": asked(7, 1),
    "sequence batching control 'CORRID' data-type is 'BYTES', but model 'm' expects 'UINT64'": (
        asked("seven", 1, start=True)
    ),
    "must specify batch-size 1 due to requirements of sequence batcher": InferRequest(
        "m", [Tensor("INPUT", Datatype.INT64, np.zeros((2, 1), np.int64))],
        parameters={"sequence_id": 1, "sequence_start": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
async def test_a_request_of_no_sequence_is_refused_in_tritons_words(text: str) -> None:
    scheduler, session, _ = served(model())
    with pytest.raises(InvalidArgument, match=text):
        await finished(scheduler(REFUSED[text], NO_DEADLINE))
    assert not session.runs
    assert not scheduler._placed


async def test_an_ended_sequence_takes_no_more_requests_and_its_id_may_start_again() -> None:
    scheduler, _, _ = served(model())
    assert answer(await sent(scheduler, 5, 1, start=True)) == (1, 5)
    assert answer(await sent(scheduler, 5, 2, end=True)) == (1003, 5)
    with pytest.raises(InvalidArgument, match="sequence 5 to model 'm' must specify the START"):
        await sent(scheduler, 5, 3)
    assert answer(await sent(scheduler, 5, 3, start=True)) == (3, 5)
    assert answer(await sent(scheduler, 5, 4, start=True)) == (4, 5), "it starts anew"


async def test_a_sequence_waits_for_a_slot_and_later_requests_of_it_too() -> None:
    scheduler, _, _ = served(model(batch=0))
    first = await sent(scheduler, 1, 1, start=True, batch=0)
    waiting = [sent(scheduler, 2, 5, start=True, batch=0), sent(scheduler, 2, 6, batch=0)]
    await asyncio.sleep(0)
    assert answer(first) == (1, 1)
    assert not any(reply.done() for reply in waiting)
    await sent(scheduler, 1, 1, end=True, batch=0)
    assert [answer(await reply) for reply in waiting] == [(5, 2), (11, 2)]
    assert answer(await sent(scheduler, 2, 7, end=True, batch=0)) == (1018, 2)


async def test_an_idle_sequence_gives_its_slot_to_the_next_one() -> None:
    scheduler, _, _ = served(model(batch=0, idle=10_000))
    await sent(scheduler, 1, 1, start=True, batch=0)
    assert answer(await sent(scheduler, 2, 5, start=True, batch=0)) == (5, 2)
    with pytest.raises(InvalidArgument, match="sequence 1 to model 'm' must specify the START"):
        await sent(scheduler, 1, 1, batch=0)


async def test_a_sequence_that_waits_longer_than_the_timeout_of_a_request_is_refused() -> None:
    scheduler, _, _ = served(model(batch=0, idle=60_000_000))
    await sent(scheduler, 1, 1, start=True, batch=0)
    waiting = [
        sent(scheduler, 2, 5, start=True, batch=0), sent(scheduler, 2, 5, batch=0, timeout=1000)
    ]  # fmt: skip
    for reply in waiting:
        with pytest.raises(Unavailable, match="timeout of the corresponding sequence has been"):
            await reply
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        await sent(scheduler, 2, 5, batch=0)
    assert not scheduler._waiting
    assert answer(await sent(scheduler, 1, 1, batch=0)) == (2, 1), "in its slot none expires"


async def test_a_cancelled_request_that_waits_ends_its_sequence_and_no_other() -> None:
    scheduler, _, _ = served(model(batch=0, idle=60_000_000))
    await sent(scheduler, 1, 1, start=True, batch=0)
    waiting = [sent(scheduler, 2, 5, start=True, batch=0), sent(scheduler, 2, 6, batch=0)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    with pytest.raises(Cancelled, match="sequence 2 has ended"):
        await waiting[1]
    assert not scheduler._backlog
    assert answer(await sent(scheduler, 1, 1, end=True, batch=0)) == (1002, 1)
    assert answer(await sent(scheduler, 2, 1, start=True, batch=0)) == (1, 2)


@pytest.mark.parametrize("strategy", ["", "oldest {}"])
async def test_a_sequence_that_its_instance_has_lost_is_refused(strategy: str) -> None:
    scheduler, _, _ = served(model(strategy))
    owner, generation = scheduler.owners[0], [0]
    owner.bound = owner.bound._replace(generation=lambda: generation[0])
    await sent(scheduler, 1, 1, start=True)
    generation[0] += 1
    with pytest.raises(Unavailable, match="has lost sequence 1; start it again"):
        await sent(scheduler, 1, 1)
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        await sent(scheduler, 1, 1)
    assert answer(await sent(scheduler, 1, 4, start=True)) == (4, 1)


async def test_sequences_of_one_request_each_run_one_after_another_however_many_wait() -> None:
    scheduler, _, _ = served(model("oldest {}", batch=0))
    replies = [sent(scheduler, id, id, start=True, end=True, batch=0) for id in range(1, 2000)]
    got = [answer(await reply)[0] for reply in replies]
    assert got == [1000 + id for id in range(1, 2000)]


async def test_direct_keeps_a_sequence_in_its_row_and_oldest_fills_no_rows() -> None:
    scheduler, session, _ = served(model())
    for id in (1, 2, 3):
        await sent(scheduler, id, id, start=True)
    session.runs.clear()
    assert answer(await sent(scheduler, 3, 10)) == (13, 3)
    assert session.runs == [(3, 1)]
    scheduler, session, _ = served(model("oldest {}"))
    for id in (1, 2, 3):
        await sent(scheduler, id, id, start=True)
    assert session.runs == [(1, 1)] * 3


@pytest.mark.parametrize("strategy", ["", "oldest {}"])
async def test_a_request_that_is_too_late_ends_its_sequence(strategy: str) -> None:
    scheduler, _, _ = served(model(strategy))
    await sent(scheduler, 1, 1, start=True)
    with pytest.raises(TimedOut):
        await finished(scheduler(asked(1, 2), Deadline.after(-1)))
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        await sent(scheduler, 1, 4)


async def test_a_request_for_which_there_is_no_room_ends_its_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, _, _ = served(model(batch=0, idle=60_000_000))
    monkeypatch.setattr(sequences, "DEFAULT_MAX_QUEUE_SIZE", 1)
    await sent(scheduler, 1, 1, start=True, batch=0)
    waiting = sent(scheduler, 2, 5, start=True, batch=0)
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await sent(scheduler, 1, 1, batch=0)
    assert answer(await waiting) == (5, 2), "it has the slot of the other one"


async def test_callers_have_sequences_of_their_own() -> None:
    scheduler, _, _ = served(model())
    await sent(scheduler, 1, 1, start=True)
    stranger = asked(1, 1)
    stranger.caller = "mallory"
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        await finished(scheduler(stranger, NO_DEADLINE))


async def test_instances_that_come_and_go_for_months_leave_nothing() -> None:
    scheduler, _, _ = served(model(instances=2, idle=60_000_000))
    await sent(scheduler, 1, 1, start=True)
    original = scheduler.owners[1]
    for _ in range(1000):
        bound = original.bound._replace(generation=lambda: 0)
        scheduler.adopt([OldestSlots(scheduler, bound, bound.infer)])
        scheduler.adopt([], [bound])
    assert len(scheduler.owners) == 2
    assert not scheduler._leaving
    for id in range(2, 9):  # four slots of each instance
        assert answer(await sent(scheduler, id, id, start=True)) == (id, id)
    waiting = sent(scheduler, 9, 9, start=True)
    await asyncio.sleep(0)
    assert not waiting.done()
    await sent(scheduler, 1, 1, end=True)
    assert answer(await waiting) == (9, 9)
