"""Pipelines on models that these tests fake: what runs for which rows, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
import tomllib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.pipeline.graph_backend import GraphBackend
from modelport.gateway.backends.pipeline.pipeline import load
from modelport.gateway.errors import (
    InvalidArgument,
    ModelportError,
    NotFound,
    QueueFull,
    TimedOut,
    Unavailable,
)
from modelport.gateway.repository import config
from modelport.gateway.types import (
    NO_DEADLINE,
    NUMPY_DTYPES,
    Array,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests import models
from tests.gateway.backends.pipeline.test_ensemble import host

Models = Mapping[str, config.ModelConfig]


def model(
    name: str, inputs: Sequence[str], outputs: Sequence[str], batch: int = 8, extra: str = ""
) -> config.ModelConfig:
    described = models.config(name, list(inputs), list(outputs), batch)
    return config.complete(config.parse(f"{described}\n{extra}"), name)


#: ``judge`` says whether, and how much, each row is positive; the others compute from ``x``.
KNOWN = {
    "judge": model("judge", ["x FP32 2"], ["good BOOL 1", "score FP32 1", "name BYTES 1"]),
    "double": model("double", ["x FP32 2"], ["y FP32 2"]),
    "negate": model("negate", ["x FP32 2"], ["y FP32 2"]),
    "add": model("add", ["x FP32 2", "z FP32 2"], ["y FP32 2"]),
    "sum": model("sum", ["x FP32 2"], ["y FP32 1"]),
    "whole": model("whole", ["x FP32 -1,2"], ["y FP32 -1,2"], 0),
    "wide": model("wide", ["x FP32 3"], ["y FP32 3"]),
    "whole_numbers": model("whole_numbers", ["x INT64 2"], ["y INT64 2"]),
    "narrow": model("narrow", ["x FP32 2"], ["y FP32 2"], 2),
    "stream": model(
        "stream", ["x FP32 2"], ["y FP32 2"], 8, "model_transaction_policy { decoupled: true }"
    ),
}


def compute(name: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    x = inputs["x"]
    score = x.sum(axis=-1, keepdims=True)
    names = np.where(score > 0, b"good", b"bad").astype(object)
    return {
        "judge": {"good": score > 0, "score": score, "name": names},
        "negate": {"y": -x},
        "add": {"y": x + inputs.get("z", x)},
        "sum": {"y": score},
    }.get(name, {"y": x * 2})


class Runs:
    """The models, and what they were asked."""

    def __init__(self, failing: Mapping[str, ModelportError] | None = None) -> None:
        self.failing = failing or {}
        self.asked: list[tuple[str, list[list[float]]]] = []
        self.deadlines: list[Deadline] = []

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse:
        await asyncio.sleep(0)
        inputs = {tensor.name: tensor.data for tensor in request.inputs}
        self.asked.append((request.model_name, inputs["x"].tolist()))
        self.deadlines.append(deadline)
        if request.model_name in self.failing:
            raise self.failing[request.model_name]
        types = {v: k for k, v in NUMPY_DTYPES.items() if k is not Datatype.BF16}
        computed = compute(request.model_name, inputs)
        outputs = [Tensor(n, types[computed[n].dtype], computed[n]) for n in request.outputs]
        return InferResponse(request.model_name, 1, outputs)


Answer = Callable[[InferRequest, Deadline], Awaitable[InferResponse]]


def pipeline(
    folder: Path, text: str, answer: Answer | None = None, known: Models = KNOWN
) -> GraphBackend:
    (folder / "pipeline.toml").write_text(text)
    completed = config.complete(config.parse('backend: "pipeline"'), "p")
    return load(Artifact("p", 1, folder, completed, 1, host=host(known, answer or Runs())))


def request(rows: Sequence[Sequence[float]], **inputs: Tensor) -> InferRequest:
    data = np.array(rows, np.float32)
    return InferRequest("p", [Tensor("in", Datatype.FP32, data), *inputs.values()])


async def ask(
    backend: GraphBackend, asked: InferRequest, deadline: Deadline = NO_DEADLINE
) -> dict[str, list[object]]:
    response = await finished(backend(asked, deadline))
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


SWITCH = """
inputs = ["in"]
max_batch_size = 8

[outputs]
y = ["double.y", "negate.y"]
score = "judge.score"

[steps.judge]
model = "judge"
inputs = { x = "in" }

[steps.double]
model = "double"
inputs = { x = "in" }
condition = "judge.good"

[steps.negate]
model = "negate"
inputs = { x = "in" }
"""
ROWS = [[1.0, 2.0], [-3.0, 1.0], [4.0, 0.0]]


# -- running --------------------------------------------------------------------------------------


async def test_each_row_goes_its_own_way(tmp_path: Path) -> None:
    runs = Runs()
    only = SWITCH + 'condition = "not judge.good"\n'
    with pytest.raises(InvalidArgument, match=r"output 'y': there is none if 'double\.y' is"):
        pipeline(tmp_path, only)  # nobody knows that the two conditions are opposites
    text = only.replace('"negate.y"]', '"negate.y", { value = 0 }]')
    answers = await ask(pipeline(tmp_path, text, runs), request(ROWS))
    assert answers == {"y": [[2, 4], [3, -1], [8, 0]], "score": [[3], [-2], [4]]}
    assert sorted(runs.asked) == [
        ("double", [ROWS[0], ROWS[2]]), ("judge", ROWS), ("negate", [ROWS[1]]),
    ]  # fmt: skip
    one_by_one = [await ask(pipeline(tmp_path, text), request([row])) for row in ROWS]
    assert [one["y"][0] for one in one_by_one] == answers["y"]


async def test_a_step_that_no_row_needs_is_not_asked(tmp_path: Path) -> None:
    runs = Runs()
    answers = await ask(pipeline(tmp_path, SWITCH, runs), request([ROWS[1]]))
    assert answers["y"] == [[3, -1]]
    assert [name for name, _ in runs.asked] == ["judge", "negate"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("judge.good", [1, 0, 1]),
        ("not judge.good", [0, 1, 0]),
        ("judge.good == false", [0, 1, 0]),
        ("judge.score > 3", [0, 0, 1]),
        ("judge.score>=3.0", [1, 0, 1]),
        ("judge.score != 3", [0, 1, 1]),
        ("judge.score <= -2", [0, 1, 0]),
        ("judge.name == 'good'", [1, 0, 1]),
        ('judge.name != "good"', [0, 1, 0]),
        (["judge.score > 0", "judge.score < 4"], [1, 0, 0]),
        ("judge.score > nan", [0, 0, 0]),
    ],
)
async def test_conditions(tmp_path: Path, condition: object, expected: list[int]) -> None:
    text = SWITCH.replace('"judge.good"', repr(condition) if isinstance(condition, list)
                          else f"'''{condition}'''")  # fmt: skip
    y = (await ask(pipeline(tmp_path, text), request(ROWS)))["y"]
    doubled = [[2 * value for value in row] for row in ROWS]
    assert [int(a == b) for a, b in zip(y, doubled, strict=True)] == expected


async def test_steps_behind_a_skipped_one_are_skipped_for_its_rows(tmp_path: Path) -> None:
    runs = Runs()
    text = SWITCH.replace('["double.y", "negate.y"]', '["last.y", "negate.y"]')
    text += '[steps.last]\nmodel = "add"\ninputs = { x = "double.y", z = "in" }\n'
    answers = await ask(pipeline(tmp_path, text, runs), request(ROWS))
    assert answers["y"] == [[3, 6], [3, -1], [12, 0]]
    assert ("add", [[2, 4], [8, 0]]) in runs.asked


async def test_an_input_takes_the_first_tensor_that_there_is(tmp_path: Path) -> None:
    text = SWITCH.replace('y = ["double.y", "negate.y"]', 'y = "last.y"\nn = "negate.y"')
    text += '[steps.last]\nmodel = "sum"\ninputs = { x = ["double.y", { value = [7, 5] }] }\n'
    answers = await ask(pipeline(tmp_path, text), request(ROWS))
    assert answers["y"] == [[6], [12], [8]]


CHAIN = """
inputs = ["in"]
[outputs]
y = ["b.y", { value = -1 }]
[steps.a]
model = "double"
inputs = { x = "in" }
[steps.b]
model = "add"
inputs = { x = "a.y", z = { value = 0.5 } }
on_failure = "skip"
timeout_seconds = 5
"""


async def test_constants_go_with_every_row(tmp_path: Path) -> None:
    for batch in ("", "max_batch_size = 8\n"):
        answers = await ask(pipeline(tmp_path, batch + CHAIN), request(ROWS[:2]))
        assert answers["y"] == [[2.5, 4.5], [-5.5, 2.5]]


async def test_a_failed_step_is_skipped_if_it_may_be(tmp_path: Path) -> None:
    runs = Runs({"add": QueueFull()})
    answers = await ask(pipeline(tmp_path, "max_batch_size = 8\n" + CHAIN, runs), request(ROWS[:2]))
    assert answers["y"] == [[-1, -1], [-1, -1]]
    assert [name for name, _ in runs.asked] == ["double", "add"]


async def test_a_failed_step_is_the_answer_if_the_requests_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(TimedOut, match="in pipeline 'p', step 'b': Request timeout expired"):
        await ask(
            pipeline(tmp_path, CHAIN, Runs({"add": TimedOut()})), request(ROWS), Deadline.after(0)
        )


@pytest.mark.parametrize(
    "error", [InvalidArgument("bad x"), QueueFull(), TimedOut(), Unavailable("not now")]
)
async def test_an_error_names_its_step_and_keeps_its_kind(
    tmp_path: Path, error: ModelportError
) -> None:
    with pytest.raises(type(error), match=f"in pipeline 'p', step 'a': {error}"):
        await ask(pipeline(tmp_path, CHAIN, Runs({"double": error})), request(ROWS))


async def test_a_model_that_is_gone_is_unavailable_and_not_unknown(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="step 'a': gone"):
        await ask(pipeline(tmp_path, CHAIN, Runs({"double": NotFound("gone")})), request(ROWS))


async def test_a_step_has_the_remaining_time_and_its_own_limit(tmp_path: Path) -> None:
    runs, deadline = Runs(), Deadline.after(1000)
    await ask(pipeline(tmp_path, CHAIN, runs), request(ROWS), deadline)
    whole, limited = runs.deadlines
    assert whole is deadline
    assert (limited.remaining() or 1000) <= 5


async def test_a_step_has_at_most_max_inflight_requests_at_its_model(tmp_path: Path) -> None:
    present, most, runs = Counter[str](), Counter[str](), Runs()

    async def counted(asked: InferRequest, deadline: Deadline) -> InferResponse:
        present[asked.model_name] += 1
        most[asked.model_name] = max(most[asked.model_name], present[asked.model_name])
        try:
            return await runs(asked, deadline)
        finally:
            present[asked.model_name] -= 1

    for limit in (0, 2):
        most.clear()
        text = f"max_inflight_requests = {limit}\n{CHAIN}"
        backend = pipeline(tmp_path, text, counted)
        await asyncio.gather(*(ask(backend, request([row])) for row in [*ROWS, *ROWS]))
        assert set(most.values()) == {limit or 2 * len(ROWS)}


async def test_the_time_of_a_step_counts_while_it_waits_for_a_place(tmp_path: Path) -> None:
    ends = asyncio.Event()

    async def waits(asked: InferRequest, deadline: Deadline) -> InferResponse:
        await ends.wait()
        return await Runs()(asked, deadline)

    text = "max_inflight_requests = 1\n" + CHAIN.replace("seconds = 5", "seconds = 0.01")
    text = text.replace('model = "double"', 'model = "double"\ntimeout_seconds = 0.01')
    backend = pipeline(tmp_path, text, waits)
    first = asyncio.create_task(ask(backend, request(ROWS)))
    await asyncio.sleep(0)
    with pytest.raises(TimedOut, match="step 'a'"):
        await ask(backend, request(ROWS))
    ends.set()
    await first


async def test_branches_run_at_once_and_end_with_their_request(tmp_path: Path) -> None:
    both, ended = asyncio.Barrier(3), []

    async def answer(asked: InferRequest, deadline: Deadline) -> InferResponse:
        try:
            await both.wait()
            await asyncio.Event().wait()
        finally:
            ended.append(asked.model_name)
        raise AssertionError

    text = SWITCH.replace('condition = "judge.good"', "")
    text = text.replace('score = "judge.score"', "").replace('"negate.y"]', '"negate.y"]')
    text = re.sub(r"\[steps\.judge\][^\[]*", "", text)
    task = asyncio.create_task(ask(pipeline(tmp_path, text, answer), request(ROWS)))
    await both.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(ended) == ["double", "negate"]


async def test_an_input_may_be_left_out_if_every_step_has_another_tensor(tmp_path: Path) -> None:
    text = CHAIN.replace('["in"]', '["in", "shift"]').replace(
        "z = { value = 0.5 }", 'z = ["shift", { value = 0.5 }]'
    )
    backend = pipeline(tmp_path, "max_batch_size = 8\n" + text)
    assert [tensor.optional for tensor in backend.config.input] == [False, True]
    assert (await ask(backend, request(ROWS[:1])))["y"] == [[2.5, 4.5]]
    shift = Tensor("shift", Datatype.FP32, np.full((1, 2), 10, np.float32))
    assert (await ask(backend, request(ROWS[:1], shift=shift)))["y"] == [[12, 14]]


async def test_an_input_that_only_conditions_read_has_the_type_of_their_value(
    tmp_path: Path,
) -> None:
    text = SWITCH.replace('"judge.good"', "\"how == 'twice'\"").replace('["in"]', '["in", "how"]')
    backend = pipeline(tmp_path, text)
    assert [(t.name, t.data_type, list(t.dims)) for t in backend.config.input][1] == (
        "how", config.data_type(Datatype.BYTES), [1],
    )  # fmt: skip
    how = Tensor("how", Datatype.BYTES, np.array([[b"twice"], [b"never"]], object))
    assert (await ask(backend, request(ROWS[:2], how=how)))["y"] == [[2, 4], [3, -1]]


async def test_only_the_steps_behind_the_outputs_asked_for_run(tmp_path: Path) -> None:
    runs = Runs()
    asked = request(ROWS)
    asked.outputs = ("score",)
    assert list(await ask(pipeline(tmp_path, SWITCH, runs), asked)) == ["score"]
    assert [name for name, _ in runs.asked] == ["judge"]


async def test_the_rest_runs_for_each_response_of_a_decoupled_step(tmp_path: Path) -> None:
    text = """
inputs = ["in"]
[outputs]
y = "b.y"
[steps.a]
model = "stream"
inputs = { x = "in" }
[steps.b]
model = "negate"
inputs = { x = "a.y" }
"""
    backend = pipeline(tmp_path, text)
    assert backend.config.model_transaction_policy.decoupled
    answers = [a async for a in backend.stream(request([[2.0, 5.0]]), NO_DEADLINE)]
    assert [a.outputs[0].data.tolist() for a in answers] == [[[-2, -5]], [[-3, -6]]]
    skipped = text.replace('"b.y"', '["b.y", { value = 0 }]').replace("[steps.b]", 'condition = '
                           '"judge.good"\n[steps.judge]\nmodel = "judge"\ninputs = { x = "in" }\n'
                           "[steps.b]")  # fmt: skip
    backend = pipeline(tmp_path, skipped)
    answers = [a async for a in backend.stream(request([[-2.0, -5.0]]), NO_DEADLINE)]
    assert [a.outputs[0].data.tolist() for a in answers] == [[[0, 0]]]


async def test_a_condition_on_several_values_of_a_request_is_refused(tmp_path: Path) -> None:
    text = SWITCH.replace("max_batch_size = 8\n", "")  # the models batch, and the pipeline does not
    assert (await ask(pipeline(tmp_path, text), request(ROWS[:1])))["y"] == [[2, 4]]
    with pytest.raises(ModelportError, match=r"step 'double': the condition 'judge\.good' "):
        await ask(pipeline(tmp_path, text), request(ROWS))


# -- checked at load ------------------------------------------------------------------------------

#: What is replaced in ``GOOD``, by what, and the reason in the error.
GOOD = """
inputs = ["in", "how"]
max_batch_size = 8

[outputs]
y = ["double.y", "add.y"]

[steps.judge]
model = "judge"
inputs = { x = "in" }

[steps.double]
model = "double"
inputs = { x = "in" }
condition = ["judge.good", "how == 'twice'"]

[steps.add]
model = "add"
version = 1
inputs = { x = "in", z = { value = 0.5 } }
timeout_seconds = 1
"""
BAD = [
    # The file.
    ("[outputs]", "[outputs", "is not TOML: "),
    ("[steps.judge]", '[steps.judge]\nmodel = "a"', "is not TOML: Cannot overwrite a value"),
    ("max_batch_size", "max_batchsize", "unknown key 'max_batchsize' in [pipeline.toml]; its keys "
     "are inputs, outputs, steps, max_batch_size, max_inflight_requests; did you mean "
     "'max_batch_size'?"),
    ("version = 1", "verson = 1", "unknown key 'verson' in [steps.add]; its keys are model, inputs,"
     " version, condition, on_failure, timeout_seconds; did you mean 'version'?"),
    ('inputs = ["in", "how"]', "", "[pipeline.toml] needs the key 'inputs'"),
    ('["in", "how"]', "[]", "pipeline.toml.inputs = [] must be a list of names"),
    ('["in", "how"]', '["in", "how", "in"]', "input 'in' is listed twice"),
    ('["in", "how"]', '["in", "how", "a.b"]', "input 'a.b' may have no dot"),
    ("max_batch_size = 8", "max_batch_size = -8", "must be a whole number of at least 0"),
    ("max_batch_size = 8", "max_inflight_requests = -1", "must be a whole number of at least 0"),
    ('model = "judge"', "", "[steps.judge] needs the key 'model'"),
    ('model = "judge"', "model = 3", "steps.judge.model = 3 must be a non-empty string"),
    ("version = 1", "version = 0", "steps.add.version = 0 must be a whole number of at least 1"),
    ("timeout_seconds = 1", "timeout_seconds = 0", "must be a number above 0"),
    ("timeout_seconds = 1", 'on_failure = "ignore"', "must be one of fail, skip"),
    ("[steps.add]", "[steps.'a b']", "step 'a b' needs a name of up to 64 letters"),
    ('"judge.good"', '"judge.good >"', "steps.double.condition = "),
    ('"judge.good"', '"judge.good > x"', "must be 'TENSOR', 'not TENSOR', or 'TENSOR > 0.5'"),
    ('"judge.good"', '"judge.good > [1]"', "must be 'TENSOR', 'not TENSOR', or 'TENSOR > 0.5'"),
    ('"judge.good"', "7", "must be 'TENSOR', 'not TENSOR', or 'TENSOR > 0.5'"),
    ("z = { value = 0.5 }", "z = 0.5", "in which 'z' is a tensor as 'STEP.OUTPUT', { value ="),
    ("z = { value = 0.5 }", "z = { valu = 0.5 }", "in which 'z' is a tensor as 'STEP.OUTPUT'"),
    ("{ value = 0.5 }", '[{ value = 0.5 }, "in"]', "a { value = ... } may only be the last one"),
    ("[steps.judge]", "[steps]\njudge = 1\n[steps.judge2]", "write [steps.NAME] above the keys"),
    # The graph.
    ('"judge.good"', '"jugde.good"', "step 'double' names the unknown step 'jugde'; did you mean "
     "'judge'?"),
    ('"add.y"]', '"adder.y"]', "output 'y' names the unknown step 'adder'; did you mean 'add'?"),
    ('{ x = "in", z', '{ x = "inn", z', "step 'add' takes 'inn', which is neither an input of the "
     "pipeline nor 'STEP.OUTPUT'; did you mean 'in'?"),
    ('"add.y"]', '"add"]', "output 'y' takes the step 'add'; name one of its outputs, as 'add.OUT"),
    ('"add.y"]', '"add."]', "output 'y' names no output of the step in 'add.'"),
    ('{ x = "in", z', '{ x = "add.y", z', "the steps depend on each other in a circle: add -> add"),
    ('model = "judge"\ninputs = { x = "in" }', 'model = "judge"\ninputs = { x = "double.y" }',
     "depend on each other in a circle"),
    ('["in", "how"]', '["in", "how", "more"]', "input 'more' is used by no step; remove it"),
    ('["double.y", "add.y"]', '"add.y"', "uses an output of step 'double'; remove it, or add its"),
    ('y = ["double.y", "add.y"]', 'y = ["double.y", "add.y"]\nz = "in"', "output 'z' is made by no "
     "step; name 'STEP.OUTPUT'"),
    ('{ x = "in", z = {', "{ x = { value = 1 }, z = {", "step 'add' has only constants"),
    # The models.
    ('model = "judge"', 'model = "p"', "circular dependency between pipelines: p -> p"),
    ('{ x = "in", z', '{ xx = "in", z', "step 'add': model 'add' has no input 'xx'; did you mean "
     "'x'?"),
    ('"judge.good"', '"judge.goods"', "step 'judge': model 'judge' has no output 'goods'; did you "
     "mean 'good'?"),
    (", z = { value = 0.5 }", "", "step 'add': input 'z' of model 'add' is given no tensor; add"),
    ('model = "add"', 'model = "double"', "step 'add': model 'double' has no input 'z'; it has x"),
    ('model = "double"', 'model = "wide"', "tensor 'in': inconsistent shape: [-1,2] is inferred "
     "from model 'judge' while [-1,3] is inferred from model 'wide'"),
    ('model = "double"', 'model = "whole_numbers"', "tensor 'in': inconsistent data type: TYPE_FP32"
     " is inferred from model 'judge' while TYPE_INT64"),
    ('["double.y", "add.y"]', '["double.y", "add.y"]\ns = ["judge.score", "add.y"]',
     "tensor 'add.y': inconsistent shape"),
    ('model = "double"', 'model = "narrow"', "pipeline 'p' allows maximum batch size 8, but it "
     "contains model 'narrow'"),
    ('model = "double"', 'model = "whole"', "step 'double': it may run for some rows of a batch "
     "alone, and model 'whole' does not batch"),
    ('model = "double"', 'model = "stream"\non_failure = "skip"', "step 'double': model 'stream' is"
     " decoupled, and responses that were sent cannot be taken back; remove on_failure"),
    ('["double.y", "add.y"]', '"double.y"\nz = "add.y"', "output 'y': there is none if 'double.y' "
     "is skipped; let its list end with a { value = ... }"),
    ("timeout_seconds = 1", 'on_failure = "skip"', "output 'y': there is none if 'double.y' is"),
    ("{ value = 0.5 }", "{ value = [1, 2, 3] }", "step 'add', input 'z': its value has shape [3], "
     "and [2] is needed"),
    ("{ value = 0.5 }", "{ value = [[1], 2] }", "its value has lists of different lengths"),
    ("{ value = 0.5 }", "{ value = 'a' }", "its value has strings, and the tensor is FP32"),
    ("{ value = 0.5 }", "{ value = true }", "its value has booleans, and the tensor is FP32"),
    ("{ value = 0.5 }", "{ value = 1979-05-27 }", "its value has dates or tables"),
    ("{ value = 0.5 }", "{ value = 1e300 }", "its value has a number that does not fit FP32"),
    # Conditions.
    ('"judge.good"', '"judge.good", "add.y > 0.5"', "the condition 'add.y > 0.5' "
     "needs a single value, and 'add.y' has shape [-1,2]; let a step compute the value"),
    ('"judge.good"', '"judge.score"', "compares 'judge.score', which is FP32, with True"),
    ('"judge.good"', '"judge.good > true"', "compares 'judge.good', which is BOOL, with True"),
    ('"judge.good"', '"judge.name > 2"', "compares 'judge.name', which is BYTES, with 2"),
]  # fmt: skip


def test_the_declaration_that_the_bad_ones_differ_from_is_good(tmp_path: Path) -> None:
    pipeline(tmp_path, GOOD)


@pytest.mark.parametrize(("old", "new", "reason"), BAD)
def test_a_bad_declaration_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    assert GOOD.count(old) >= 1
    with pytest.raises(InvalidArgument) as caught:
        pipeline(tmp_path, GOOD.replace(old, new, 1))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


#: TOML values of every type, small, large and odd.
VALUES = [
    "true", "-1", "9223372036854775808", "1e400", "nan", "1979-05-27", "''", "'in'", "'judge.good'",
    "'.'", "'\u2028'", "[]", "[[]]", "['in', 'in']", "['add.y', { value = [1, 2] }]", "{}",
    "{ value = [[1, 2]] }", "{ value = {} }", "{ x = 'in' }", f"'{'n' * 5000}'",
]  # fmt: skip


def leaves(document: dict[str, object], path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in document.items():
        found.append((*path, key))
        if isinstance(value, dict):
            found += leaves(value, (*path, key))
    return found


def written(value: object, path: tuple[str, ...], wanted: tuple[str, ...], odd: str) -> str:
    """``value`` as TOML, with ``odd`` at the path ``wanted``."""
    if path == wanted:
        return odd
    if isinstance(value, dict):
        inner = (f"{k} = {written(v, (*path, k), wanted, odd)}" for k, v in value.items())
        return "{ " + ", ".join(inner) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(written(each, (), wanted, odd) for each in value) + "]"
    return json.dumps(value)


def test_any_value_at_any_key_is_accepted_or_refused_in_one_line(tmp_path: Path) -> None:
    document = tomllib.loads(GOOD.replace("[outputs]", '[outputs]\nz = "add.y"'))
    refusals = []
    for place in leaves(document):
        for odd in VALUES:
            lines = (f"{k} = {written(v, (k,), place, odd)}\n" for k, v in document.items())
            try:
                pipeline(tmp_path, "".join(lines))
            except ModelportError as error:
                refusals.append(str(error))
    assert not [each for each in refusals if "\n" in each]
    assert 0 < len(refusals) < len(leaves(document)) * len(VALUES)


def test_a_model_that_is_not_ready_is_waited_for(tmp_path: Path) -> None:
    known = {name: each for name, each in KNOWN.items() if name != "judge"}
    with pytest.raises(Unavailable, match="pipeline 'p' depends on 'judge' which has no version"):
        pipeline(tmp_path, GOOD, known=known)


@pytest.mark.parametrize("size", [2**20, 2**40])
def test_a_constant_fills_no_huge_tensor(tmp_path: Path, size: int) -> None:
    known = {**KNOWN, "add": model("add", ["x FP32 2", f"z FP32 {size}"], ["y FP32 2"])}
    with pytest.raises(InvalidArgument, match="its value fills more than 65536 elements"):
        pipeline(tmp_path, GOOD, known=known)


def test_a_file_that_is_too_large_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="larger than"):
        pipeline(tmp_path, GOOD + "#" * 2**16)
    (tmp_path / "pipeline.toml").write_bytes(b"\xff")
    completed = config.complete(config.parse('backend: "pipeline"'), "p")
    artifact = Artifact("p", 1, tmp_path, completed, 1, host=host(KNOWN))
    with pytest.raises(InvalidArgument, match="cannot be read: it is not UTF-8"):
        load(artifact)


@pytest.mark.parametrize(
    "extra",
    [
        "max_batch_size: 8", "input { name: 'x' data_type: TYPE_FP32 dims: 1 }",
        "instance_group { count: 2 }", "model_warmup { name: 'w' }",
        "model_transaction_policy { decoupled: true }",
    ],
)  # fmt: skip
def test_a_configuration_of_what_the_pipeline_declares_is_refused(extra: str) -> None:
    with pytest.raises(InvalidArgument, match="specified for pipeline 'p'"):
        config.complete(config.parse(f'backend: "pipeline" {extra}'), "p")
