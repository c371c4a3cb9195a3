"""TorchServe's handler in the archive: the model of $MODEL_FILE."""

from __future__ import annotations

import os
from typing import Any

from plain import Plain

plain = Plain(os.environ["MODEL_FILE"])


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[Any]:
    """Answer the rows; TorchServe's first call has none and loads the model."""
    return [answer(row["body"]) for row in data or ()]


def answer(body: Any) -> Any:
    """Answer one row, in which TorchServe has parsed JSON already."""
    return plain.json(body) if isinstance(body, dict) else plain.binary(bytes(body))
