"""Operations that rules allow. Every route and every gRPC method declares one."""

from __future__ import annotations

from enum import StrEnum


class Operation(StrEnum):
    """An operation, by its name in ``access.toml``."""

    INFER = "infer"
    METADATA = "metadata"
    HEALTH = "health"
    STATISTICS = "statistics"
    METRICS = "metrics"
    CONTROL = "control"
    SHARED_MEMORY = "shared_memory"
    ROLLOUT = "rollout"
    CONSOLE = "console"
    TRACE = "trace"
