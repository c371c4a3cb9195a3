"""The seam between the gateway and whatever computes: a loader makes a ``Backend``.

A backend is an ``Infer`` that knows its own configuration. It gets requests that are already valid
against that signature and answers with outputs in the order asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gateway.repository.config import ModelConfig
from gateway.types import Deadline, InferRequest, InferResponse


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a loader gets.

    ``config`` may lack inputs and outputs: the artifact then tells them. ``path`` may be a copy
    that is there while it loads and no longer.
    """

    model_name: str
    version: int
    path: Path
    config: ModelConfig
    threads: int


class Backend(Protocol):
    """One loaded model version."""

    #: The model's configuration, complete: inputs and outputs are those of the artifact.
    config: ModelConfig

    async def __call__(self, request: InferRequest, deadline: Deadline) -> InferResponse: ...

    def unload(self) -> None:
        """Free everything; called once, when no request is in flight."""


class Load(Protocol):
    """Blocking, called in a thread. The backend it returns is warm.

    Raises:
        ModelportError: with a public reason why the artifact cannot be served.
    """

    def __call__(self, artifact: Artifact) -> Backend: ...
