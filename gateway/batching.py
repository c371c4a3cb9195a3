"""Dynamic batching: requests that wait for the same model version run as one."""

from __future__ import annotations

from gateway.repository.config import ModelConfig
from gateway.telemetry import Statistics
from gateway.types import Infer, ModelSignature


def wrap(
    infer: Infer, config: ModelConfig, signature: ModelSignature, statistics: Statistics
) -> Infer:
    """``infer`` behind a batcher, where ``config`` asks for one.

    Raises:
        InvalidArgument: ``config`` asks for what cannot be.
    """
    return infer
