"""Inputs for the models of the check, and what is wrong with an answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from modelport.exporters.loaded_model import Source
from modelport.exporters.requests.random_inputs import draw
from modelport.gateway.types import Array, TensorSpec


@dataclass
class ComparisonRow:
    """A row of the table. ``error`` is the largest, of outputs against eager."""

    what: str
    requests: int = 0
    error: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def note(self, problem: str | None, error: float = 0.0) -> None:
        self.requests += 1
        self.error = max(self.error, error)
        if problem:
            self.wrong.append(problem)


def inputs_of(source: Source, batch: int, length: int, seed: int) -> dict[str, Array]:
    """In the model's shapes; ids stay in the vocabulary although ``unchecked`` declares none."""
    sizes = {"sequence": length} if source.signature.axes else {}
    drawn = draw(source.signature, batch, sizes, np.random.default_rng(seed))
    if "tokens" in drawn:
        drawn["seq_lens"] = drawn["seq_lens"] % length + 1
    return drawn


def wire(specs: Iterable[TensorSpec], arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Arrays in the model's shapes in those of the wire."""
    return {
        spec.name: arrays[spec.name].reshape(len(arrays[spec.name]), *spec.wire_dims)
        if spec.reshape is not None
        else arrays[spec.name]
        for spec in specs
    }


def compare(
    source: Source, inputs: Mapping[str, Array], status: int, outputs: Mapping[str, Array] | str
) -> tuple[str | None, float]:
    """Compare an answer to ``inputs`` with eager PyTorch; return a fault, if any, and the error.

    Args:
        inputs: in the model's shapes.
        outputs: by name, in the shapes of the wire; an error's text where ``status`` is not 200.
    """
    if status != 200 or isinstance(outputs, str):
        return f"status {status}: {outputs}", 0.0
    worst, spec = 0.0, source.spec
    for name, expected in wire(source.signature.outputs, source.reference(inputs)).items():
        got = outputs[name]
        if got.shape != expected.shape or got.dtype != expected.dtype:
            return (
                f"'{name}' is {got.dtype} {got.shape}, not {expected.dtype} {expected.shape}",
                0.0,
            )
        error = np.abs(got - expected)
        worst = max(worst, float(error.max()))
        if not (error <= spec.atol + spec.rtol * np.abs(expected)).all():
            return f"'{name}' is off by {worst:.2e}", worst
    return None, worst
