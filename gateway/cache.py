"""The response cache: answers kept by model, version and content, within a number of bytes."""

from __future__ import annotations

from gateway.repository.config import ModelConfig
from gateway.telemetry import Statistics
from gateway.types import Infer


class Store:
    """What all models' answers are kept in; at most ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.size = size


def wrap(
    infer: Infer,
    name: str,
    number: int,
    config: ModelConfig,
    statistics: Statistics,
    store: Store | None,
) -> Infer:
    """``infer`` behind ``store``, where ``config`` asks for it and the server has one."""
    return infer
