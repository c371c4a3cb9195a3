"""The parts of the gateway that a backend may use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Infer, InferStream


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
    """

    loop: asyncio.AbstractEventLoop
    infer: Infer
    config_of: Callable[[str, int], ModelConfig]
    stream: InferStream
    labels_of: Callable[[str, int, str], tuple[str, ...]]
