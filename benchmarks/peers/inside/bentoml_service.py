"""Runs inside the `bentoml` environment: a service around the model of $MODEL_FILE."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import bentoml
from plain import Plain


@bentoml.service(workers=1, traffic={"timeout": 300}, logging={"access": {"enabled": False}})
class BentoMLService:
    """The service."""

    def __init__(self) -> None:
        self._plain = Plain(os.environ["MODEL_FILE"])

    @bentoml.api(route="/predict")
    def predict(self, inputs: dict[str, Any], /) -> dict[str, Any]:
        return self._plain.json(inputs)

    @bentoml.api(route="/predict_file")
    def predict_file(self, file: Path, /) -> dict[str, Any]:
        return {name: y.tolist() for name, y in self._plain.array(file).items()}
