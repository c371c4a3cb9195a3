"""Goes into the archive for TorchServe: the model of $MODEL_FILE."""

from __future__ import annotations

import os
from typing import Any

from plain import Plain

plain = Plain(os.environ["MODEL_FILE"])


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[Any]:
    """The answers to the rows; TorchServe calls once without any, to have the model loaded."""
    return [answer(row["body"]) for row in data or ()]


def answer(body: Any) -> Any:
    """TorchServe has parsed what came as JSON."""
    return plain.json(body) if isinstance(body, dict) else plain.binary(bytes(body))
