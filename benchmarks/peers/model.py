"""A model of the comparison: its inputs, and how it is measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

#: Name of the loop without a server in the tables.
LOOP_NAME = "raw"
SEED = 0


@dataclass(frozen=True)
class PeerInput:
    """A tensor of the request: random integers below ``high``, or random floats without it."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # with its batch dimension of 1
    high: int | None = None
    values: tuple[float, ...] | None = None

    def array(self, generator: np.random.Generator) -> np.ndarray:
        if self.values is not None:
            return np.array(self.values, DTYPES[self.datatype]).reshape(self.shape)
        if self.high is not None:
            return generator.integers(0, self.high, self.shape).astype(DTYPES[self.datatype])
        return generator.standard_normal(self.shape).astype(DTYPES[self.datatype])


DTYPES: Mapping[str, Any] = {"FP32": np.float32, "INT64": np.int64}


@dataclass(frozen=True)
class PeerModel:
    """A model, and the duration of its measurement.

    ``baseline``: the server that ratios refer to. ``protocols``: the protocols to measure; a server
    without one is left out of its column, and with ``one_protocol`` only the first one it speaks is
    measured. ``answers``: a run ends after this many instead of after ``seconds``, for slow models.
    ``preferred_batch_size``: the value that a user would find by trying: the best size with two
    batches are in flight at once, so that one forms while another runs.
    """

    name: str
    title: str
    inputs: tuple[PeerInput, ...]
    seconds: float
    rounds: int
    family: str = ""  # name for `modelport export --model`; empty: no export
    demo: bool = False  # `modelport demo` trains its checkpoint
    protocols: tuple[str, ...] = ("json", "grpc")
    in_flight: tuple[int, ...] = (16,)
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    preferred_batch_size: int = 1
    baseline: str = LOOP_NAME
    answers: int | None = None
    one_protocol: bool = False

    def timed(self, rounds: int | None, seconds: float | None) -> PeerModel:
        """The model with other times, and the number of answers in proportion."""
        answers = self.answers
        if answers is not None and seconds is not None:
            answers = max(max(self.in_flight), round(answers * seconds / self.seconds))
        seconds = seconds or self.seconds
        return replace(self, rounds=rounds or self.rounds, seconds=seconds, answers=answers)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(SEED)
        return {one.name: one.array(generator) for one in self.inputs}

    @property
    def datatypes(self) -> dict[str, str]:
        return {one.name: one.datatype for one in self.inputs}
