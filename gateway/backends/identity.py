"""Triton's ``identity`` backend: ``OUTPUT<i>`` is ``INPUT<i>``.

It reads Triton's parameters: ``execute_delay_ms`` delays each execution, and
``creation_delay_sec`` the load. An optional input that a request lacks is zeros in its output.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded.embedded_backend import Compute, EmbeddedBackend
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, TensorSpec

INPUT, OUTPUT = "INPUT", "OUTPUT"
EXECUTE_DELAY, CREATION_DELAY = "execute_delay_ms", "creation_delay_sec"
MAX_SECONDS = 600


def load(artifact: Artifact) -> EmbeddedBackend:
    """Load the model from its configuration alone.

    Raises:
        InvalidArgument: the tensors are not pairs of ``INPUT<i>`` and ``OUTPUT<i>``, or a delay is
            invalid.
    """
    session = IdentitySession(artifact)
    time.sleep(_delay_seconds(artifact, CREATION_DELAY, 1))
    # Not warmed: there is nothing to warm, and each run takes as long as its delay.
    return EmbeddedBackend(artifact, session, artifact.config)


class IdentitySession:
    """A ``ModelSession`` whose run waits and returns its inputs."""

    bounded, state, random = True, "", False

    def __init__(self, artifact: Artifact) -> None:
        signature = configuration.signature(artifact.config)
        self._batched = signature.max_batch_size > 0
        self._delay_seconds = _delay_seconds(artifact, EXECUTE_DELAY, 1000)
        self._outputs = {spec.name: spec for spec in signature.outputs}
        inputs = {spec.name: spec for spec in signature.inputs}
        for name, spec in self._outputs.items():
            given = inputs.pop(_input_of(name), None)
            if given is None or given.datatype is not spec.datatype:
                raise InvalidArgument(
                    f"output '{name}' of backend 'identity' needs an input "
                    f"'{_input_of(name) or 'INPUT<i>'}' of {spec.datatype}: tensors are pairs of "
                    "INPUT<i> and OUTPUT<i>"
                )
        if inputs:
            raise InvalidArgument(
                f"input '{next(iter(inputs))}' of backend 'identity' has no output: tensors are "
                "pairs of INPUT<i> and OUTPUT<i>"
            )
        self.inputs: Sequence[ArtifactTensor] = ()
        self.outputs: Sequence[ArtifactTensor] = ()
        self.run: Compute = self._run

    def _run(self, names: Sequence[str], feed: dict[str, Array]) -> Sequence[Array]:
        time.sleep(self._delay_seconds)
        batch = next(iter(feed.values())).shape[:1] if self._batched and feed else ()
        found = (feed.get(_input_of(name)) for name in names)
        return [
            _zeros(self._outputs[name], batch) if array is None else array
            for name, array in zip(names, found, strict=True)
        ]

    def close(self) -> None:
        """Nothing to free."""


def _delay_seconds(artifact: Artifact, key: str, units: int) -> float:
    """The delay that the parameter ``key`` has in ``units`` of a second."""
    delay = parameters.integer(artifact.config, key, 0)
    if delay > MAX_SECONDS * units:
        raise InvalidArgument(f"parameter '{key}' is at most {MAX_SECONDS * units}")
    return delay / units


def _input_of(output: str) -> str:
    return INPUT + output.removeprefix(OUTPUT) if output.startswith(OUTPUT) else ""


def _zeros(spec: TensorSpec, batch: tuple[int, ...]) -> Array:
    zero = b"" if spec.datatype is Datatype.BYTES else 0
    shape = (*batch, *(max(1, size) for size in spec.model_dims))
    return np.full(shape, zero, NUMPY_DTYPES[spec.datatype])
