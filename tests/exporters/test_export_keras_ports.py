"""The Keras ports compute what the PyTorch models compute, weight by weight and layer by layer."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from modelport.exporters.keras_ports import KerasPort, find_port
from modelport.exporters.keras_ports.weights import extract, port
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import UsageError
from tests.thorough import thorough

FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 4,
    "num_layers": 3,
    "dim_feedforward": 24,
    "max_positions": 12,
}
VIT_KWARGS: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "in_channels": 3,
    "num_classes": 5,
    "dim": 16,
    "depth": 3,
    "num_heads": 4,
    "mlp_dim": 24,
}

#: Of float16 and bfloat16, which keep eleven and eight bits.
COARSE = {"float16": 0.01, "bfloat16": 0.08}


class PortedPair:
    """A PyTorch model with every layer distinct, and its Keras port with the same weights."""

    def __init__(self, factory: Any, kwargs: dict[str, Any], dtype: str = "float32") -> None:
        torch.manual_seed(0)
        self.module: nn.Module = factory(**kwargs).eval()
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        spec = factory.modelport_spec
        signature = spec.signature(self.module, 8)
        self.source: Source = source(self.module, spec, signature, model_kwargs=kwargs)
        self.kwargs = kwargs
        self.port: KerasPort = find_port(spec.keras_port)
        self.links = self.port.links(kwargs)
        self.model = self.port.build(kwargs, dtype)
        port(self.module.state_dict(), self.model, self.links)

    def inputs(self, batch: int, length: int = 0) -> dict[str, Any]:
        rng = np.random.default_rng(batch * 100 + length)
        return draw(self.source.signature, batch, {"sequence": length}, rng)

    def error(self, inputs: dict[str, Any]) -> float:
        (expected,) = self.source.reference(inputs).values()
        (actual,) = run(self.model, inputs).values()
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        return float(np.abs(actual - expected).max())


def run(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    outputs = model({name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


@pytest.fixture(scope="module")
def fraud_pair() -> PortedPair:
    return PortedPair(FraudTransformer, FRAUD_KWARGS)


@pytest.fixture(scope="module")
def vit_pair() -> PortedPair:
    return PortedPair(VisionTransformer, VIT_KWARGS)


@pytest.fixture(params=["fraud", "vit"])
def pair(request: pytest.FixtureRequest) -> PortedPair:
    found: PortedPair = request.getfixturevalue(f"{request.param}_pair")
    return found


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_the_fraud_port_agrees_at_every_batch_and_length(
    fraud_pair: PortedPair, batch: int, length: int
) -> None:
    assert fraud_pair.error(fraud_pair.inputs(batch, length)) < 1e-6


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_the_vit_port_agrees_at_every_batch(vit_pair: PortedPair, batch: int) -> None:
    assert vit_pair.error(vit_pair.inputs(batch)) < 1e-5


@pytest.mark.parametrize(
    ("factory", "kwargs", "dtype"),
    [
        (FraudTransformer, FRAUD_KWARGS, "bfloat16"),
        (VisionTransformer, VIT_KWARGS, "float16"),
        thorough(FraudTransformer, FRAUD_KWARGS, "float16"),
        thorough(VisionTransformer, VIT_KWARGS, "bfloat16"),
    ],
)
def test_in_half_precision_weights_are_halved_and_results_are_close(
    factory: Any, kwargs: dict[str, Any], dtype: str
) -> None:
    half = PortedPair(factory, kwargs, dtype)
    assert {variable.dtype for variable in half.model.variables} == {dtype}
    assert 0 < half.error(half.inputs(8, 12)) < COARSE[dtype]


def test_what_stands_in_the_padding_makes_no_difference(fraud_pair: PortedPair) -> None:
    inputs = {"tokens": np.full((2, 9), 3), "seq_lens": np.array([4, 9])}
    other = {**inputs, "tokens": inputs["tokens"].copy()}
    other["tokens"][0, 4:] = 17
    first, second = (run(fraud_pair.model, i)["probability"] for i in (inputs, other))
    assert np.abs(first - second).max() < 1e-7
    assert (
        abs(
            run(fraud_pair.model, {**other, "seq_lens": np.array([9, 9])})["probability"][0]
            - first[0]
        )
        > 1e-3
    )
    longer = {**inputs, "tokens": np.pad(inputs["tokens"], ((0, 0), (0, 3)))}
    assert np.abs(run(fraud_pair.model, longer)["probability"] - first).max() < 1e-6


@pytest.mark.parametrize(("given", "taken"), [(0, 1), thorough(-3, 1), thorough(6, 5), (2**40, 5)])
def test_a_length_outside_of_the_sequence_is_clamped_as_in_pytorch(
    fraud_pair: PortedPair, given: int, taken: int
) -> None:
    tokens = np.arange(10).reshape(2, 5)
    inputs = {"tokens": tokens, "seq_lens": np.array([given, 3])}
    assert fraud_pair.error(inputs) < 1e-6
    clamped = run(fraud_pair.model, {"tokens": tokens, "seq_lens": np.array([taken, 3])})
    np.testing.assert_array_equal(
        run(fraud_pair.model, inputs)["probability"], clamped["probability"]
    )


def test_more_tokens_than_positions_are_an_error() -> None:
    kwargs = {**FRAUD_KWARGS, "max_positions": 1}
    lone = PortedPair(FraudTransformer, kwargs)
    with pytest.raises(tf.errors.InvalidArgumentError):  # a slice would broadcast
        run(lone.model, {"tokens": np.zeros((1, 2), np.int64), "seq_lens": np.array([2])})


def test_an_unknown_token_is_an_error(fraud_pair: PortedPair) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        run(fraud_pair.model, {"tokens": np.array([[32]]), "seq_lens": np.array([1])})


def test_gelu_is_the_exact_one(vit_pair: PortedPair) -> None:
    inputs = vit_pair.inputs(8)
    tanh = VisionTransformer(**VIT_KWARGS).eval()
    tanh.load_state_dict(vit_pair.module.state_dict())
    for block in tanh.blocks:
        block.mlp.act = nn.GELU(approximate="tanh")
    with torch.no_grad():
        approximated = tanh(torch.from_numpy(inputs["image"])).numpy()
    exact = run(vit_pair.model, inputs)["logits"]
    assert np.abs(approximated - exact).max() > 10 * vit_pair.error(inputs)


@pytest.mark.thorough
def test_layer_norm_uses_the_models_own_epsilon() -> None:
    coarse = PortedPair(VisionTransformer, {**VIT_KWARGS, "layer_norm_eps": 0.3})
    inputs = coarse.inputs(2)
    assert coarse.error(inputs) < 1e-5
    usual = coarse.port.build(VIT_KWARGS, "float32")
    port(coarse.module.state_dict(), usual, coarse.links)
    assert np.abs(run(usual, inputs)["logits"] - run(coarse.model, inputs)["logits"]).max() > 1e-3


def test_the_weight_map_goes_both_ways_bit_by_bit(pair: PortedPair) -> None:
    state = pair.module.state_dict()
    extracted = extract(pair.model, pair.links)
    assert extracted.keys() == state.keys()
    for key, value in state.items():
        np.testing.assert_array_equal(extracted[key], value.numpy())
        assert extracted[key].dtype == np.float32
    again = pair.port.build(pair.kwargs, "float32")
    port(extracted, again, pair.links)
    for first, second in zip(pair.model.variables, again.variables, strict=True):
        np.testing.assert_array_equal(first.numpy(), second.numpy())


def test_every_variable_has_one_link_and_every_layer_values_of_its_own(pair: PortedPair) -> None:
    paths = [link.keras_path for link in pair.links]
    assert sorted(paths) == sorted(variable.path for variable in pair.model.variables)
    values = [variable.numpy().tobytes() for variable in pair.model.variables]
    assert len(set(values)) == len(values)
    assert sum(v.numpy().size for v in pair.model.variables) == pair.source.parameter_count


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("fraud", "encoder.layers.0.", "encoder.layers.2."), ("vit", "blocks.0.", "blocks.2.")],
)
def test_swapped_layers_are_seen(
    request: pytest.FixtureRequest, name: str, first: str, second: str
) -> None:
    pair: PortedPair = request.getfixturevalue(f"{name}_pair")
    swapped = {}
    for key, value in pair.module.state_dict().items():
        for here, there in ((first, second), (second, first)):
            if key.startswith(here):
                key = there + key.removeprefix(here)
                break
        swapped[key] = value
    wrong = pair.port.build(pair.kwargs, "float32")
    port(swapped, wrong, pair.links)
    inputs = pair.inputs(8, 12)
    (expected,), (actual,) = pair.source.reference(inputs).values(), run(wrong, inputs).values()
    assert np.abs(expected - actual).max() > 1e-3


def test_a_bfloat16_checkpoint_keeps_its_values(fraud_pair: PortedPair) -> None:
    state = {k: v.to(torch.bfloat16) for k, v in fraud_pair.module.state_dict().items()}
    model = fraud_pair.port.build(FRAUD_KWARGS, "float32")
    port(state, model, fraud_pair.links)
    extracted = extract(model, fraud_pair.links)
    assert all(np.array_equal(extracted[k], v.float().numpy()) for k, v in state.items())


@pytest.fixture(scope="module")
def unfitting(fraud_pair: PortedPair) -> Any:
    """A Keras model that no state dict of a test fits."""
    return fraud_pair.port.build(FRAUD_KWARGS, "float32")


def _without(key: str) -> Any:
    return lambda state: {k: v for k, v in state.items() if k != key}


def _with(key: str, *shape: int) -> Any:
    return lambda state: {**state, key: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _without("encoder.layers.1.linear2.bias"),
            r"layer 'encoder\.layers\.1\.linear2'.*lacks key 'encoder\.layers\.1\.linear2\.bias'",
        ),
        (
            _without("encoder.layers.0.self_attn.in_proj_weight"),
            r"layer 'encoder\.layers\.0\.self_attn\.query'.*lacks key",
        ),
        (_with("encoder.layers.3.norm1.bias", 16), "has key 'encoder.layers.3.norm1.bias' that"),
        (
            _with("encoder.layers.2.linear1.weight", 16, 24),
            r"layer 'encoder\.layers\.2\.linear1'.*\[16, 24\] where .* model takes \[24, 16\]",
        ),
        (
            _with("encoder.layers.1.self_attn.in_proj_bias", 47),
            r"layer.*self_attn\.query'.*\[47\].*\[48\]",
        ),
        (
            _with("encoder.layers.1.self_attn.in_proj_weight", 24, 16),
            r"query'.*\[24, 16\].*\[48, 16\]",
        ),
        (_with("head.weight", 16), r"layer 'head'.*\[16\].*\[1, 16\]"),
        (_with("positions.weight"), r"layer 'positions'.*\[\]"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_by_layer(
    fraud_pair: PortedPair, unfitting: Any, change: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        port(change(fraud_pair.module.state_dict()), unfitting, fraud_pair.links)


def test_a_keras_model_of_another_architecture_is_refused(fraud_pair: PortedPair) -> None:
    shallow = fraud_pair.port.build({**FRAUD_KWARGS, "num_layers": 2}, "float32")
    with pytest.raises(UsageError, match=r"layer 'encoder\.layers\.2\.self_attn\.query'.*lacks"):
        extract(shallow, fraud_pair.links)
    deep = fraud_pair.port.build({**FRAUD_KWARGS, "num_layers": 4}, "float32")
    with pytest.raises(UsageError, match=r"encoder\.layers\.3.*and 13 more that no layer"):
        extract(deep, fraud_pair.links)


def _torch_outputs(pair: PortedPair, inputs: dict[str, Any]) -> dict[str, Any]:
    found = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            found[path] = (output[0] if isinstance(output, tuple) else output).detach().numpy()

        return hook

    handles = [m.register_forward_hook(keep(path)) for path, m in pair.module.named_modules()]
    pair.source.reference(inputs)
    for handle in handles:
        handle.remove()
    return found


def _keras_outputs(pair: PortedPair, inputs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    names = [name for _, name in pair.port.probes(pair.kwargs)]
    probe = keras.Model(pair.model.inputs, [pair.model.get_layer(n).output for n in names])
    outputs = probe([tf.constant(inputs[tensor.name]) for tensor in pair.model.inputs])
    return zip(names, (output.numpy() for output in outputs), strict=True)


def test_the_probes_pair_what_must_agree(pair: PortedPair) -> None:
    inputs = pair.inputs(2, 9)
    expected, actual = _torch_outputs(pair, inputs), dict(_keras_outputs(pair, inputs))
    probes = pair.port.probes(pair.kwargs)
    assert len(probes) > 3 * 4
    for path, name in probes:
        assert actual[name].shape == expected[path].shape, path
        np.testing.assert_allclose(actual[name], expected[path], atol=2e-5, err_msg=path)


@pytest.mark.thorough
def test_a_port_is_saved_and_loaded_in_safe_mode(pair: PortedPair, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    with warnings.catch_warnings(action="ignore"):  # Keras' own, from numpy
        pair.model.save(path)
    loaded = keras.saving.load_model(path, compile=False, safe_mode=True)
    inputs = pair.inputs(2, 5)
    (expected,), (actual,) = run(pair.model, inputs).values(), run(loaded, inputs).values()
    np.testing.assert_array_equal(actual, expected)
    extracted = extract(loaded, pair.links)
    assert all(np.array_equal(extracted[k], v.numpy()) for k, v in pair.module.state_dict().items())
