"""The proof asks what users send: edges of values, rows beside other rows, integers of any size."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

from modelport.exporters import artifact_conversion
from modelport.exporters.errors import ParityError
from modelport.exporters.formats.registry import find_format
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.proof import certificate, parity
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.requests import random_inputs
from modelport.exporters.sources import input_bounds, pytorch, randomness
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.inference.validation import Validator
from modelport.gateway.repository import config
from modelport.gateway.types import (
    Array,
    Datatype,
    InferRequest,
    ModelSignature,
    TensorSpec,
)
from modelport.gateway.types import Tensor as WireTensor
from tests.exporters import odd_modules
from tests.exporters.test_export_rounding import Another, Computes

Function = Callable[[Tensor], Tensor]

X = TensorSpec("x", Datatype.FP32, (4,))
IDS = TensorSpec("x", Datatype.INT64, (4,))


def prove(
    model: Function,
    artifact: Function | None = None,
    x: TensorSpec = X,
    y: Datatype = Datatype.FP32,
    batch: int = 8,
    samples: int = 8,
) -> ParityReport:
    """Prove that ``artifact`` computes what ``model`` does; both map ``[B, 4]`` to ``[B, 4]``."""
    signature = ModelSignature((x,), (TensorSpec("y", y, (4,)),), batch)
    spec = ModelSpec("m", lambda module, size: signature)
    source = pytorch.source(Computes(model), spec, signature)
    session = Another(signature, artifact or model)
    return parity.check(source, session, samples=samples, seed=0, atol=1e-5, rtol=1e-4)


#: Rows of an input at which an artifact is wrong.
WRONG_AT: Mapping[str, Callable[[Tensor], Tensor]] = {
    "zero": lambda x: (x == 0).all(1),
    "constant": lambda x: (x == x[:, :1]).all(1) & (x[:, 0] != 0) & (x[:, 0].abs() < 3),
    "one-hot": lambda x: ((x != 0).sum(1) == 1) & x.isfinite().all(1),
    "equal to the row before": lambda x: torch.tensor(
        [i > 0 and bool((x[i] == x[i - 1]).all()) for i in range(len(x))]
    ),
    "an edge alone": lambda x: (x.abs() == 3).all(1) & (len(x) == 1),
    "an edge beside others": lambda x: (x.abs() == 3).all(1) & (len(x) > 2),
}


def wrong_at(rows: Callable[[Tensor], Tensor]) -> Function:
    return lambda x: torch.where(rows(x)[:, None], x * 2 + 1, x * 2)


@pytest.mark.parametrize("kind", WRONG_AT)
def test_an_artifact_that_is_wrong_at_one_kind_of_row_is_refused(kind: str) -> None:
    with pytest.raises(ParityError, match="'y' differs from the checkpoint's by up to 1"):
        prove(lambda x: x * 2, wrong_at(WRONG_AT[kind]))


@pytest.mark.parametrize("kind", ["zero", "constant", "one-hot"])
def test_the_corners_of_ranges_alone_do_not_find_it(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(random_inputs, "WITHIN", random_inputs.WITHIN[:2])
    assert prove(lambda x: x * 2, wrong_at(WRONG_AT[kind])).max_abs_error == 0


def test_the_certificate_says_what_was_asked() -> None:
    document = certificate._parity(prove(lambda x: x * 2))
    asked = document["edge_cases"]
    assert {*random_inputs.WITHIN, *random_inputs.BEYOND} <= {*asked}
    assert document["edge_samples"] == sum(asked.values())
    assert document["rows_beside_others"] > 0
    assert document["limits"] == []
    json.dumps(document, allow_nan=False)


# -- numbers that are none ------------------------------------------------------------------------


def by_comparison(x: Tensor) -> Tensor:
    """ReLU of a runtime that compares: NaN is not larger than 0."""
    return torch.where(x > 0, x, torch.zeros(()))


def test_a_difference_where_the_model_has_no_number_is_a_limit_in_the_certificate() -> None:
    report = prove(torch.relu, by_comparison)
    assert [str(limit) for limit in report.limits] == [
        f"inputs of {kind}: output 'y' is nan of the model, 0 of the artifact"
        for kind in ("one NaN", "NaN")
    ]
    assert not prove(torch.relu).limits


def test_an_artifact_that_forgets_how_the_model_replaces_nan_is_refused() -> None:
    def model(x: Tensor) -> Tensor:
        return torch.nan_to_num(x, 0.5, 2, -2)

    with pytest.raises(ParityError, match=r"one NaN: output 'y' is 0.5 .* declare the range"):
        prove(model, lambda x: torch.nan_to_num(x, 0, 2, -2))
    with pytest.raises(ParityError, match="minus infinity"):
        prove(model, lambda x: torch.nan_to_num(x, 0.5, 2, 2))
    ranged = TensorSpec("x", Datatype.FP32, (4,), -1, 1)  # what the message advises
    assert not prove(model, lambda x: torch.nan_to_num(x, 0, 2, 2), ranged).limits


def test_a_model_that_fails_or_has_no_number_on_an_edge_is_not_refused_for_it() -> None:
    def picks(x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise ValueError("no number")
        return x

    report = prove(picks)
    assert report.edges["NaN, where the model fails"] == 1
    assert by_norm(torch.zeros(1, 4)).isnan().all()
    assert prove(by_norm).max_abs_error == 0
    with pytest.raises(ParityError, match="the artifact's value is 0, the model's nan"):
        prove(by_norm, lambda x: by_norm(x).nan_to_num(0))
    with pytest.raises(ParityError, match="the artifact's value is nan, the model's 0"):
        prove(lambda x: by_norm(x).nan_to_num(0), by_norm)


def test_an_artifact_that_overflows_where_the_model_does_not_is_refused() -> None:
    def naive(x: Tensor) -> Tensor:
        return torch.log(1 + torch.exp(x))

    with pytest.raises(ParityError, match=r"about 1e4: output 'y' .* declare the range"):
        prove(nn.functional.softplus, naive)
    ranged = TensorSpec("x", Datatype.FP32, (4,), -20, 20)  # what the message advises
    assert prove(nn.functional.softplus, naive, ranged).max_abs_error < 1e-5
    assert prove(naive).limits == []


def by_norm(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


# -- rows beside other rows -----------------------------------------------------------------------

MIXING: Mapping[str, tuple[Function, str]] = {
    "mean": (lambda x: x - x.mean(0), "aten.mean"),
    "rare mean": (lambda x: torch.where(x > 2.9, x - x.mean(0), x), "aten.mean"),
    "mean of large values": (lambda x: torch.where(x > 50, x.max(), x), "aten.max"),
    "softmax": (lambda x: x.softmax(0), "aten._softmax"),
    "running sum": (lambda x: x.cumsum(0), "aten.cumsum"),
    "attention": (lambda x: (x @ x.T).softmax(-1) @ x, "aten.mm"),
    "shuffled": (lambda x: x.flip(0), "aten.flip"),
    "size": (lambda x: x / len(x), ""),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_whose_rows_depend_on_each_other_is_refused_by_its_operator(name: str) -> None:
    model, operator = MIXING[name]
    with pytest.raises(Unsupported, match="changes with the other rows of its batch") as caught:
        prove(model)
    assert f"({operator})" in str(caught.value) or not operator
    assert prove(model, batch=1).max_abs_error == 0


@pytest.mark.parametrize(
    "model",
    [
        lambda x: x - x.mean(-1, keepdim=True),
        lambda x: x.T.softmax(0).T,
        lambda x: (x.reshape(-1) * 2).reshape(x.shape),
        lambda x: x if bool((x > 0).all()) else x * 1.0,
        lambda x: x / x.norm(dim=-1, keepdim=True),
    ],
    ids=["mean of a row", "transposed", "flattened", "a hint for all rows", "NaN"],
)
def test_rows_that_are_computed_together_but_independently_are_accepted(model: Function) -> None:
    assert prove(model).neighbours > 0


# -- random numbers -------------------------------------------------------------------------------

DRAWING: Mapping[str, tuple[Function, str]] = {
    "rand_like": (lambda x: torch.where(x > 6, x + torch.rand_like(x), x), "aten.rand_like"),
    "in place": (lambda x: torch.where(x > 6, torch.empty_like(x).uniform_(), x), "aten.uniform_"),
    "bernoulli": (lambda x: torch.where(x > 6, torch.bernoulli(x.sigmoid()), x), "bernoulli"),
    "multinomial": (
        lambda x: torch.where(x > 6, torch.multinomial(x.softmax(-1), 1) + x, x),
        "aten.multinomial",
    ),
    "randperm": (lambda x: torch.where(x > 6, x[:, torch.randperm(4)], x), "aten.randperm"),
    "dropout": (lambda x: torch.where(x > 6, nn.functional.dropout(x, 0.5), x), "aten.bernoulli_"),
    "a branch of Python": (lambda x: x + 1 if torch.rand([]).item() > 2 else x, "aten.rand"),
    "a branch of the graph": (
        lambda x: torch.cond(x.max() > 6, lambda x: x + torch.rand_like(x), lambda x: x * 1, (x,)),
        "aten.rand_like",
    ),
}


def answers(model: Function) -> Callable[[], dict[str, Tensor]]:
    def run() -> dict[str, Tensor]:
        with inference_mode(nn.Identity()):
            return {"y": model(torch.ones(2, 4))}

    return run


@pytest.mark.parametrize("name", DRAWING)
def test_a_model_that_rarely_uses_a_random_number_is_refused_by_its_operator(name: str) -> None:
    model, operator = DRAWING[name]
    with pytest.raises(Unsupported, match="draws random numbers") as caught:
        randomness.check_operators(nn.Identity(), answers(model))
    assert operator in str(caught.value)
    randomness.check(nn.Identity(), answers(model))  # two seeds do not tell


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (torch.rand([]), x)[1],
        lambda x: x + torch.zeros_like(torch.rand_like(x)),
        lambda x: nn.functional.dropout(x, 0.5, training=False),
        lambda x: nn.functional.rrelu(x),
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        lambda x: torch.where(x > 6, x + torch.ones_like(x), x),
    ],
    ids=["unused", "its shape", "dropout in eval", "rrelu in eval", "attention", "none"],
)
def test_a_number_that_no_output_depends_on_is_accepted(model: Function) -> None:
    randomness.check_operators(nn.Identity(), answers(model))


@pytest.mark.parametrize(
    ("name", "draws"),
    [
        *[(name, True) for name in ("RandomUniformLike", "Bernoulli", "Multinomial")],
        *[(name, True) for name in ("RandomUniform", "TruncatedNormal", "StatefulUniformInt")],
        *[(name, True) for name in ("RANDOM_STANDARD_NORMAL", "ParameterizedTruncatedNormal")],
        *[(name, False) for name in ("StatelessRandomUniformV2", "StatefulPartitionedCall")],
        *[(name, False) for name in ("Dropout", "Where", "GatherV2")],
    ],
)
def test_operators_of_artifacts_that_draw_are_known(name: str, draws: bool) -> None:
    assert bool(artifact_conversion.RANDOM.match(name)) is draws


def test_an_artifact_that_rarely_draws_is_refused(tmp_path: Path) -> None:
    """Such as a file from elsewhere, or the graph of a Keras model."""
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 4])
    nodes = [
        onnx.helper.make_node("RandomUniformLike", ["x"], ["noise"]),
        onnx.helper.make_node("IsNaN", ["x"], ["rare"]),
        onnx.helper.make_node("Where", ["rare", "noise", "x"], ["y"]),
    ]
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 4])
    onnx.save(
        onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [value], [result])),
        tmp_path / "model.onnx",
    )
    with pytest.raises(Unsupported, match=r"draws random numbers \(RandomUniformLike\)"):
        artifact_conversion._check_draws_nothing(tmp_path / "model.onnx", find_format("onnx"))


# -- integers without a range ---------------------------------------------------------------------

TABLE = torch.arange(120.0).reshape(30, 4)
LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    ("model", "datatype", "low", "high"),
    [
        (lambda x: nn.functional.embedding(x, TABLE)[:, 0], Datatype.INT64, 0, 29),
        (lambda x: TABLE[x][:, 0], Datatype.INT64, -30, 29),
        (lambda x: x / 2, Datatype.INT64, -LARGEST - 1, LARGEST),
        (lambda x: x / 2, Datatype.INT16, -(2**15), 2**15 - 1),
        (lambda x: x / 2, Datatype.UINT8, 0, 255),
        (lambda x: torch.exp(x.double()).float(), Datatype.INT32, -(2**31), 88),
        (lambda x: TABLE[x.clamp(max=29)][:, 0], Datatype.INT64, -30, LARGEST),
        (lambda x: torch.log(x.float()), Datatype.INT32, 1, 2**31 - 1),
    ],
    ids=["embedding", "index", "any", "INT16", "UINT8", "finite results", "clamped", "not 0"],
)
def test_the_values_that_a_model_takes_are_found(
    model: Function, datatype: Datatype, low: int, high: int
) -> None:
    report = prove(model, x=TensorSpec("x", datatype, (4,)), samples=1)
    assert report.ranges == {"x": (low, high)}


def test_a_model_that_takes_no_small_number_needs_a_range() -> None:
    with pytest.raises(
        ParityError, match=r"the model itself fails at batch 1: .*declare only sizes and values"
    ):
        prove(lambda x: TABLE[x - 500][:, 0], x=IDS)
    declared = TensorSpec("x", Datatype.INT64, (4,), 500, 529)  # what the message asks for
    assert prove(lambda x: TABLE[x - 500][:, 0], x=declared).ranges == {}


def thirds(x: Tensor) -> Tensor:
    return torch.div(x, 3, rounding_mode="trunc")


def thirds_in_float32(x: Tensor) -> Tensor:
    return torch.div(x.float(), 3).trunc().long()


def test_an_artifact_that_is_right_on_small_integers_is_proven_and_bounded_there() -> None:
    report = prove(thirds, thirds_in_float32, IDS, Datatype.INT64)
    assert report.ranges == {"x": (1 - 2**24, 2**24 - 1)}
    bad = torch.tensor([2**24 + 2**8 + 1])
    assert thirds(bad) != thirds_in_float32(bad)
    report = prove(thirds, lambda x: thirds(x.abs()), IDS, Datatype.INT64)
    assert report.ranges == {"x": (0, LARGEST)}
    with pytest.raises(ParityError, match="differs"):
        prove(thirds, lambda x: thirds(x) + (x == 5), IDS, Datatype.INT64, samples=300)


def sum_in_float64(x: Tensor) -> Tensor:
    return x + x.double().sum(-1, keepdim=True).long()


def test_a_sum_that_leaves_the_exact_integers_of_a_float_narrows_the_range(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model(x: Tensor) -> Tensor:
        return x + x.sum(-1, keepdim=True)

    report = prove(model, sum_in_float64, IDS, Datatype.INT64)
    assert report.ranges == {"x": (1 - 2**31, 2**31 - 1)}
    monkeypatch.setattr(random_inputs, "LARGEST_ROWS", 0)  # the known-bad variant
    naive = prove(model, sum_in_float64, IDS, Datatype.INT64)
    assert naive.ranges == {"x": (1 - 2**53, 2**53 - 1)}


def test_each_of_two_inputs_gets_its_range_without_the_lowest_number() -> None:
    """The lowest number divided by -1 ends the process."""
    signature = ModelSignature(
        (TensorSpec("a", Datatype.INT64, (4,)), TensorSpec("b", Datatype.INT64, (4,))),
        (TensorSpec("y", Datatype.INT64, (4,)),),
        8,
    )

    class Quotient(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.div(a, b, rounding_mode="trunc")

    spec = ModelSpec("m", lambda module, size: signature)
    source = pytorch.source(Quotient(), spec, signature)
    assert source.found_ranges == {"a", "b"}
    ends = [(x.minimum, x.maximum) for x in source.signature.inputs]
    assert ends == [(-LARGEST, LARGEST), (1, LARGEST)]


def test_a_declared_range_is_proven_as_it_is() -> None:
    declared = TensorSpec("x", Datatype.INT64, (4,), -5, 2**40)
    with pytest.raises(ParityError, match="differs"):
        prove(thirds, thirds_in_float32, declared, Datatype.INT64)


def test_a_value_that_needs_too_much_memory_ends_the_range_at_a_fixed_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(input_bounds, "MOST_MEMORY", 1 << 26)

    def sized(x: Tensor) -> Tensor:
        return x + torch.ones(int(x.abs().max()) + 1).numel() * 0

    found = prove(sized, x=IDS, y=Datatype.INT64, samples=1).ranges["x"]
    assert found[1] in [(1 << bits) - 1 for bits in range(7, 28, 4)]


# -- as users meet it -----------------------------------------------------------------------------

FACTORY = "tests.exporters.odd_modules:build"


def exported(invoke: Any, folder: Path, name: str, *arguments: str, row: str) -> Result:
    path = folder / f"{name}.pt"
    torch.save(odd_modules.build(name).state_dict(), path)
    kwargs = ("--model-kwargs", f'{{"name": "{name}"}}', "--name", name, "--format", row)
    found: Result = invoke(path, *kwargs, *arguments, model=FACTORY)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("row", ["onnx", "torchscript"])
def test_the_remedy_of_each_refusal_leads_on(invoke: Any, tmp_path: Path, row: str) -> None:
    def run(name: str, *arguments: str) -> Result:
        return exported(invoke, tmp_path, name, *arguments, row=row)

    rare = run("rarely_random", "--input", "x:FP32[4]")
    assert rare.exit_code == 4
    assert "aten.rand_like" in rare.stderr
    assert "remove them, or make them an input" in rare.stderr
    given = ("--input", "x:FP32[4]", "--input", "noise:FP32[4]=0..1")
    assert run("random_given", *given).exit_code == 0
    rows = run("mean_of_rows", "--input", "x:FP32[4]")
    assert rows.exit_code == 4
    assert "aten.mean" in rows.stderr
    assert "--max-batch-size 1, " in rows.stderr
    assert run("mean_of_rows", "--input", "x:FP32[4]", "--max-batch-size", "1").exit_code == 0
    whole = ("--input", "x:FP32[rows=1..8,4]", "--max-batch-size", "0", "--name", "whole")
    assert run("mean_of_rows", *whole).exit_code == 0


@pytest.mark.thorough
def test_a_found_range_is_published_enforced_and_kept_by_later_versions(
    invoke: Any, tmp_path: Path
) -> None:
    def run(row: str, *arguments: str) -> Result:
        return exported(invoke, tmp_path, "thirds", "--input", "x:INT64[4]", *arguments, row=row)

    done = run("onnx")
    assert done.exit_code == 0, done.stderr
    assert "ranges     x -16777215..16777215 (found by trial; others are not served)" in done.stdout
    model = tmp_path / "repository" / "thirds"
    wanted = config.parse((model / "config.pbtxt").read_text())
    assert wanted.parameters["range.x"].string_value == "-16777215..16777215"
    proven = json.loads((model / "1" / "certificate.json").read_text())["parity"]
    assert proven["ranges"] == {"x": [-16777215, 16777215]}
    validator = Validator("thirds", config.signature(config.complete(wanted, "thirds")))
    validator.check(request(2**24 - 1))
    with pytest.raises(InvalidArgument, match="must lie in"):
        validator.check(request(2**24 + 3))
    assert run("onnx").exit_code == 0, "a second version"
    assert run("torchscript", "--name", "any").exit_code == 0
    assert "range.x" not in (tmp_path / "repository" / "any" / "config.pbtxt").read_text()
    narrow = model / "config.pbtxt"
    narrow.write_text(narrow.read_text().replace("16777215", "99"))
    assert run("onnx").exit_code == 0
    proven = json.loads((model / "3" / "certificate.json").read_text())["parity"]
    assert proven["ranges"] == {"x": [-99, 99]}


def request(value: int) -> InferRequest:
    x: Array = np.full((1, 4), value, np.int64)
    return InferRequest("thirds", [WireTensor("x", Datatype.INT64, x)])


@pytest.mark.thorough
def test_onnx_division_of_integers_is_in_float32(tmp_path: Path) -> None:
    """The harm: an artifact that the proof bounds."""
    from modelport.exporters.formats.base import ExportTarget
    from tests.torch_subjects import subject

    signature = ModelSignature((IDS,), (TensorSpec("y", Datatype.INT64, (4,)),), 8)
    row = find_format("onnx")
    row.export(subject(Computes(thirds).eval(), signature), tmp_path / "m.onnx", ExportTarget())
    x = np.full((1, 4), 2**24 + 2**8 + 1)
    found = row.open_session(tmp_path / "m.onnx")({"x": x})["y"]
    assert (found != thirds(torch.from_numpy(x)).numpy()).all()
