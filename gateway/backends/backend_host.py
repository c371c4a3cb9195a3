"""The parts of the gateway that a backend may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Infer, InferStream, ModelFiles

#: The numbers of loads of versions, each unique in this process.
Loads = tuple[int, ...]


class ModelControl(Protocol):
    """Changes the served models; ``models.control.Control`` has further methods."""

    async def load(
        self,
        name: str,
        override: str | None = None,
        source: str = "",
        files: ModelFiles | None = None,
    ) -> None:
        """
        Args:
            files: of the model, in place of those of the repository.
        """
        ...

    async def unload(self, name: str, dependents: bool = False) -> None: ...

    async def require_ready(self, name: str, number: int = 0) -> None: ...


class Host(NamedTuple):
    """The parts of the gateway that a backend may use.

    Attributes:
        loop: the gateway's event loop. Backends are called on it, and create their clients on it.
        infer: sends a request to any READY model, with its own validation and statistics.
        stream: the same for a decoupled model.
        config_of: the completed configuration of a READY model, by name and version (0: newest);
            raises ``NotFound`` or ``Unavailable``.
        labels_of: the class labels of a READY model's output, by model, version and output; raises
            the same errors.
        control: of the whole gateway; None in tests of single backends.
        loads_of: the loads of the versions that compute the responses of a READY model, by name and
            version: its own, and those of an ensemble's steps. None: they vary by request. Raises
            the same errors.
    """

    loop: asyncio.AbstractEventLoop
    infer: Infer
    config_of: Callable[[str, int], ModelConfig]
    stream: InferStream
    labels_of: Callable[[str, int, str], tuple[str, ...]]
    control: ModelControl | None = None
    loads_of: Callable[[str, int], Loads | None] = lambda name, number: None
