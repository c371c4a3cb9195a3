"""The proof accepts a faithful copy and nothing else.

The artifact is played by a second copy of the model, which each test spoils in one way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelport.exporters.errors import ParityError
from modelport.exporters.model_spec import Decision, ModelSpec
from modelport.exporters.proof import parity
from modelport.exporters.proof.memory_forecast import MemoryForecast
from modelport.exporters.proof.parity_cases import ParityCase
from modelport.exporters.proof.parity_report import ParityReport
from modelport.exporters.requests.random_inputs import BEYOND, WITHIN, Fill
from modelport.exporters.sources.pytorch import source
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import Unsupported, UsageError, first_line
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec
from tests.thorough import thorough

Spoil = Callable[[dict[str, Array]], dict[str, Array]]


@dataclass
class ModuleSession:
    """A session that computes what ``module`` computes, then spoils it."""

    module: nn.Module
    signature: ModelSignature
    spoil: Spoil = lambda outputs: outputs

    @property
    def inputs(self) -> list[str]:
        return [spec.name for spec in self.signature.inputs]

    @property
    def outputs(self) -> list[str]:
        return [spec.name for spec in self.signature.outputs]

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        with inference_mode(self.module):
            result = self.module(*(torch.tensor(inputs[name]) for name in self.inputs))
        return self.spoil({self.outputs[0]: result.numpy()})


def check(
    module: nn.Module, session: Any, signature: ModelSignature | None = None, **overrides: Any
) -> ParityReport:
    spec: ModelSpec = overrides.pop("spec", None) or module.modelport_spec
    options = {"samples": 60, "seed": 0, "atol": spec.atol, "rtol": spec.rtol, **overrides}
    signature = signature or spec.signature(module, 4)
    return parity.check(source(module, spec, signature), session, **options)


def copied(module: nn.Module, spoil: Spoil = lambda outputs: outputs) -> ModuleSession:
    other = copy.deepcopy(module).eval()
    return ModuleSession(other, module.modelport_spec.signature(module, 4), spoil)


@pytest.mark.parametrize("name", ["fraud", "vit"])
def test_a_faithful_copy_passes(request: pytest.FixtureRequest, name: str) -> None:
    module: nn.Module = request.getfixturevalue(name)
    report = check(module, copied(module))
    assert report.agreement == 1.0
    assert report.samples >= 60
    assert report.edge_samples > 0
    assert report.batch_sizes == {1, 2, 4}
    if name == "fraud":
        assert {1, 6, 12} <= report.axis_sizes["sequence"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fraud", "vit"])
def test_a_change_in_any_weight_is_caught(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(parity, "MOST_UNEXPLAINED", 2)  # batches with a wrong weight are alike
    module: nn.Module = request.getfixturevalue(name)
    for key, _ in module.named_parameters():
        session = copied(module)
        with torch.no_grad():
            session.module.get_parameter(key).add_(
                torch.randn(module.get_parameter(key).shape) * 0.05
            )
        with pytest.raises(ParityError, match=r"differs from the checkpoint's by up to"):
            check(module, session, samples=1)


@pytest.mark.thorough
def test_one_changed_embedding_row_is_caught(fraud: nn.Module) -> None:
    session = copied(fraud)
    with torch.no_grad():
        session.module.get_parameter("embedding.weight")[17, 3] += 0.05
    with pytest.raises(ParityError):
        check(fraud, session, samples=200)


@pytest.mark.parametrize(
    ("name", "layers"), [("fraud", "encoder.layers"), thorough("vit", "blocks")]
)
def test_swapped_layers_are_caught(request: pytest.FixtureRequest, name: str, layers: str) -> None:
    module: nn.Module = request.getfixturevalue(name)
    session = copied(module)
    stack: Any = session.module.get_submodule(layers)
    stack[0], stack[1] = stack[1], stack[0]
    with pytest.raises(ParityError):
        check(module, session)


def test_the_message_names_output_error_tolerance_sizes_and_remedy(fraud: nn.Module) -> None:
    session = copied(fraud, lambda outputs: {k: v + np.float32(0.25) for k, v in outputs.items()})
    with pytest.raises(ParityError) as caught:
        check(fraud, session)
    text = str(caught.value)
    assert "\n" not in text
    for part in ("'probability'", "0.25", "5e-06 + 1e-05", "batch", "sequence", "--atol"):
        assert part in text


def test_a_wider_tolerance_is_honoured_and_recorded(fraud: nn.Module) -> None:
    session = copied(fraud, lambda outputs: {k: v + np.float32(1e-3) for k, v in outputs.items()})
    report = check(fraud, session, atol=2e-3)
    assert report.atol == 2e-3
    assert report.outputs["probability"].max_abs_error == pytest.approx(1e-3, rel=1e-3)
    assert report.outputs["probability"].mean_abs_error == pytest.approx(1e-3, rel=1e-3)


def test_too_few_equal_decisions_fail_even_within_tolerance(fraud: nn.Module) -> None:
    session = copied(fraud, lambda outputs: {k: np.float32(1) - v for k, v in outputs.items()})
    with pytest.raises(ParityError, match="decisions agree on"):
        check(fraud, session, atol=1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_is_caught(fraud: nn.Module, bad: float) -> None:
    def spoil(outputs: dict[str, Array]) -> dict[str, Array]:
        return {name: np.full_like(value, bad) for name, value in outputs.items()}

    with pytest.raises(ParityError, match=r"'probability' at batch 1.*not finite"):
        check(fraud, copied(fraud, spoil))


def test_nan_in_the_model_itself_is_caught(fraud: nn.Module) -> None:
    with torch.no_grad():
        fraud.get_parameter("head.bias").fill_(float("nan"))
    with pytest.raises(ParityError, match="the model's values are not finite"):
        check(fraud, copied(fraud))


def test_a_wrong_datatype_is_caught(fraud: nn.Module) -> None:
    session = copied(fraud, lambda outputs: {k: v.astype(np.float64) for k, v in outputs.items()})
    with pytest.raises(ParityError, match="the artifact's datatype is float64"):
        check(fraud, session)


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_a_wrong_name_is_caught(fraud: nn.Module, kind: str) -> None:
    session = copied(fraud)
    renamed = tuple(replace(spec, name="x") for spec in getattr(session.signature, kind)[:1])
    others = getattr(session.signature, kind)[1:]
    session.signature = replace(session.signature, **{kind: renamed + others})
    signature = fraud.modelport_spec.signature(fraud, 4)
    with pytest.raises(ParityError, match=f"the artifact's {kind} are x"):
        check(fraud, session, signature)


def test_a_dimension_that_the_runtime_refuses_is_caught_with_its_size(fraud: nn.Module) -> None:
    session = copied(fraud)

    class Baked(ModuleSession):
        def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
            if inputs["tokens"].shape[1] != 6:
                raise RuntimeError("Got invalid dimensions\nfor input: tokens")
            return super().__call__(inputs)

    with pytest.raises(ParityError, match="the artifact fails at batch 1, sequence 1: Got"):
        check(fraud, Baked(session.module, session.signature))


def test_onnx_runtimes_message_keeps_its_indices() -> None:
    error = RuntimeError(
        "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the "
        "following indices\n index: 0 Got: 3 Expected: 2\n Please fix either the inputs/outputs "
        "or the model."
    )
    assert first_line(error) == (
        "Got invalid dimensions for input: x for the following indices index: 0 Got: 3 Expected: 2"
    )
    error = RuntimeError(
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Gather node. "
        "Name:'g' Status Message: /onnxruntime_src/onnxruntime/core/providers/cpu/tensor/gather.cc:"
        "152 virtual onnxruntime::common::Status onnxruntime::GatherBase::Prepare(onnxruntime::"
        "OpKernelContext*) const indices element out of data bounds, idx=12"
    )
    assert first_line(error).endswith("idx=12")


def test_a_batch_that_comes_out_baked_in_is_caught(vit: nn.Module) -> None:
    session = copied(vit, lambda outputs: {name: value[:2] for name, value in outputs.items()})
    with pytest.raises(ParityError, match=r"gives \[2, 5\], the model \[4, 5\].*baked in"):
        check(vit, session)


class Ordinary(nn.Module):
    """Doubles ``[B, N]``; stands for a user's model, with everything about it configurable."""

    def __init__(self, result: Callable[[torch.Tensor], Any] = lambda x: x * 2) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: torch.Tensor) -> Any:
        return self.result(x)


def ordinary(dims: tuple[int | str, ...] = ("n",), batch: int = 3) -> ModelSignature:
    return ModelSignature(
        (TensorSpec("x", Datatype.FP32, ("n",)),),
        (TensorSpec("y", Datatype.FP32, dims),),
        batch,
        {"n": Axis("n", 1, 5)},
    )


SPEC = ModelSpec("ordinary", lambda module, batch: ordinary(batch=batch))


def test_a_model_without_a_batch_dimension_is_proven_over_its_axes() -> None:
    module, signature = Ordinary(), ordinary(batch=0)
    report = check(module, ModuleSession(module, signature), signature, spec=SPEC)
    assert report.batch_sizes == set()
    assert {1, 3, 5} <= report.axis_sizes["n"]
    assert report.agreement is None


def test_a_signature_that_misdeclares_the_output_is_caught() -> None:
    module, signature = Ordinary(), ordinary(dims=(4,))
    with pytest.raises(ParityError, match=r"the signature \[1, 4\].*misdeclared"):
        check(module, ModuleSession(module, signature), signature, spec=SPEC)


@pytest.mark.parametrize(
    ("result", "error", "said"),
    [
        (lambda x: [x, "y"], Unsupported, "returns str as 'output_1'"),
        (lambda x: (x, x), UsageError, "returns 2 tensors"),
        (lambda x: x.reshape(7, 7, 7), ParityError, "the model itself fails at batch 1, n 1"),
    ],
)
def test_a_model_that_violates_its_own_signature_is_refused(
    result: Callable[[torch.Tensor], Any], error: type[Exception], said: str
) -> None:
    module, signature = Ordinary(result), ordinary()
    with pytest.raises(error, match=said):
        check(module, ModuleSession(module, signature), signature, spec=SPEC)


def test_integers_must_be_equal_and_not_merely_close() -> None:
    signature = replace(ordinary(), outputs=(TensorSpec("y", Datatype.INT64, ("n",)),))
    module = Ordinary(lambda x: (x * 0).long() + 2**60)
    session = ModuleSession(module, signature)
    assert check(module, session, signature, spec=SPEC).max_abs_error == 0
    session.spoil = lambda outputs: {"y": outputs["y"] + 1}
    with pytest.raises(ParityError):
        check(module, session, signature, spec=SPEC, atol=10.0)


def test_a_decision_on_an_unknown_output_is_a_usage_error() -> None:
    module, signature = Ordinary(), ordinary()
    with pytest.raises(UsageError, match="names output 'z'"):
        check(
            module,
            ModuleSession(module, signature),
            signature,
            spec=replace(SPEC, decision=Decision("z")),
        )


def test_a_samplers_own_inputs_are_used() -> None:
    def ones(signature: ModelSignature, batch: int, sizes: Mapping[str, int], rng: Any) -> Any:
        return {"x": np.ones((batch, sizes["n"]), np.float32)}

    spec = replace(SPEC, sample=ones)
    random_cases = [c for c in parity.plan(ordinary(), spec, 30, 0) if not c.edges]
    assert all((case.inputs["x"] == 1).all() for case in random_cases)


def test_the_plan_is_the_same_for_the_same_seed() -> None:
    def plan(seed: int) -> list[str]:
        return [str(case) for case in parity.plan(ordinary(), SPEC, 50, seed)]

    assert plan(1) == plan(1) != plan(2)


def test_edges_run_at_both_ends_of_an_axis_and_beside_each_other_where_that_is_cheap() -> None:
    axes = {"time": Axis("time", 1, 20)}
    inputs = tuple(TensorSpec(name, Datatype.FP32, ("time",), minimum=-1) for name in "xy")
    signature = replace(ordinary(), inputs=inputs, max_batch_size=8, axes=axes)
    cases = list(parity.plan(signature, SPEC, 0, 0))
    edges = [(case.sizes["time"], case.batch) for case in cases if case.edges and not case.beyond]
    corners = 2 * (1 + len(inputs))
    within = corners + len(WITHIN) - 2
    assert edges == [(1, 1)] * within + [(20, 1)] * corners + [(1, 8), (1, 4)]
    kinds = [kind for case in cases if case.batch > 1 for kind in case.kinds]
    assert {*kinds} == {*WITHIN, Fill.RANDOM, Fill.LARGE}
    beyond = [(case.sizes["time"], case.batch, *case.kinds) for case in cases if case.beyond]
    assert beyond == [*((1, 1, kind) for kind in BEYOND), (1, 4, *[Fill.LARGE] * 4)]
    grid = {(case.sizes["time"], case.batch) for case in cases if not case.edges}
    assert grid == {(time, batch) for time in (1, 10, 20) for batch in (1, 2, 8)}
    done = [case.work[0] for case in cases]
    assert done == sorted(done)
    assert cases[-1].work == (done[-1], sum(2 * case.batch * case.sizes["time"] for case in cases))


def test_a_batch_that_memory_cannot_hold_is_refused_before_it_runs() -> None:
    held, left = [100], 4_000_000_000
    forecast = MemoryForecast(lambda: held[0], lambda: left)
    for batch in (1, 2):
        case = ParityCase(batch, {"n": 3}, {})
        forecast.begin(case)
        held[0] += 1_000_000_000
        forecast.end(case)
    forecast.begin(ParityCase(4, {"n": 3}, {}))
    with pytest.raises(ParityError, match=r"1\.0 GB for each row at batch 8, n 3.*-batch-size 4"):
        forecast.begin(ParityCase(8, {"n": 3}, {}))
    forecast.begin(ParityCase(8, {"n": 2}, {}))


def test_memory_that_is_taken_once_is_not_that_of_every_row() -> None:
    held = [100]
    forecast = MemoryForecast(lambda: held[0], lambda: 4_000_000_000)
    for batch, taken in ((1, 1_000), (2, 3_000_000_000)):
        forecast.begin(ParityCase(batch, {}, {}))
        held[0] += taken
        forecast.end(ParityCase(batch, {}, {}))
    forecast.begin(ParityCase(8, {}, {}))


def test_larger_models_take_fewer_samples() -> None:
    counts = [parity.default_samples(size) for size in (10, 86_000_000, 354_000_000)]
    assert counts == [1000, 64, 16]


def test_the_fast_path_setting_is_restored(fraud: nn.Module) -> None:
    assert torch.backends.mha.get_fastpath_enabled()
    with inference_mode(fraud.train()):
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not fraud.training
    assert torch.backends.mha.get_fastpath_enabled()
