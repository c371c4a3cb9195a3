"""Comparison of two models' outputs and activations on the same random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.requests.random_inputs import name_axes, sampler, sizes_of
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources.torch_eager import TorchEager
from modelport.gateway.types import Array, ModelSignature

BATCH = 16
WATCHED = 2  # samples whose activations are compared; all are kept in memory at once

#: Mean absolute error of an output above which a conversion is refused, and the expected one.
BOUND = 0.01
EXPECTED = 1e-4

#: Activations diverge if they differ by this share of the largest.
DIVERGENCE = 1e-4

#: Called with the number of samples done.
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class OutputRow:
    """Differences of one output over all samples."""

    name: str
    mean_abs_error: float
    max_abs_error: float


@dataclass(frozen=True, slots=True)
class ProbeRow:
    """Difference of activations at one place of both models, relative to the largest in PyTorch."""

    layer: str
    relative_error: float

    @property
    def diverges(self) -> bool:
        return not self.relative_error <= DIVERGENCE


def compare_outputs(
    module: nn.Module,
    keras_model: Any,
    spec: ModelSpec,
    *,
    samples: int,
    seed: int,
    progress: Progress = lambda done: None,
) -> list[OutputRow]:
    """Run both models on ``samples`` seeded inputs, in batches of random axis sizes."""
    signature = name_axes(spec.signature(module, BATCH))
    reference = TorchEager(module, signature)
    totals = {output.name: [0.0, 0.0, 0] for output in signature.outputs}
    done = 0
    for inputs in _batches(signature, spec, samples, seed):
        ours, theirs = reference(inputs), _call(keras_model, inputs)
        for name, total in totals.items():
            error = np.abs(ours[name].astype(np.float64) - theirs[name])
            total[0] += float(error.sum())
            total[1] = _larger(total[1], float(error.max()))
            total[2] += error.size
        done += len(next(iter(inputs.values())))
        progress(done)
    return [OutputRow(name, sum_ / count, worst) for name, (sum_, worst, count) in totals.items()]


def _larger(a: float, b: float) -> float:
    """``max``, except that NaN is larger than anything."""
    return a if math.isnan(a) or a > b else b


def _batches(
    signature: ModelSignature, spec: ModelSpec, samples: int, seed: int
) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(seed)
    sample = sampler(spec)
    for start in range(0, samples, BATCH):
        sizes = {
            name: int(rng.integers(axis.minimum, sizes_of(axis)[-1], endpoint=True))
            for name, axis in signature.axes.items()
        }
        yield sample(signature, min(BATCH, samples - start), sizes, rng)


def _call(keras_model: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
    with quiet():
        tensors = {name: tf.constant(value) for name, value in inputs.items()}
        results = keras_model(tensors, training=False)
    return {name: value.numpy() for name, value in results.items()}


def compare_activations(
    module: nn.Module,
    keras_model: Any,
    spec: ModelSpec,
    probes: Sequence[tuple[str, str]],
    *,
    seed: int,
) -> list[ProbeRow]:
    """Compare the activations of a few samples at every probe, in the order of computation."""
    signature = name_axes(spec.signature(module, BATCH))
    inputs = next(_batches(signature, spec, WATCHED, seed))
    seen: dict[str, Array] = {}

    def observer(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def observe(_: nn.Module, __: Any, result: Any) -> None:
            value = result[0] if isinstance(result, tuple) else result
            seen[path] = value.detach().numpy()

        return observe

    handles = [
        module.get_submodule(path).register_forward_hook(observer(path)) for path, _ in probes
    ]
    try:
        TorchEager(module, signature)(inputs)
    finally:
        for handle in handles:
            handle.remove()
    with quiet():
        outputs = {name: keras_model.get_layer(name).output for _, name in probes}
        watched = keras.Model(keras_model.input, outputs)
    there = _call(watched, inputs)
    return [ProbeRow(name, _relative(seen[path], there[name])) for path, name in probes]


def _relative(ours: Array, theirs: Array) -> float:
    """The relative difference; infinite if the shapes differ."""
    if ours.size != theirs.size:
        return float("inf")
    error = np.abs(ours.astype(np.float64) - theirs.reshape(ours.shape))
    return float(error.max(initial=0.0) / max(1.0, float(np.abs(ours).max(initial=0.0))))
