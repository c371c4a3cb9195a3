"""What the benchmark must know of a server: how it starts, what it is asked, what it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests import tiny_model

# Programs that run inside the peers' own environments: they import nothing from here.
INSIDE = Path(__file__).resolve().parent.parent / "inside"


@dataclass(frozen=True)
class Launch:
    """Where one server is to run."""

    repository: Path
    work: Path  # an empty folder of its own
    http: int
    grpc: int
    metrics: int


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: Path | None = None


def oip_request() -> bytes:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": list(tiny_model.VALUES)}
    return json.dumps({"inputs": [tensor]}).encode()


def oip_answer(body: Any) -> list[float]:
    return [float(value) for value in body["outputs"][0]["data"]]


@dataclass(frozen=True)
class Server:
    """A server and its dialect; the defaults are those of the Open Inference Protocol."""

    name: str
    about: str
    command: Callable[[Launch], Command]
    grpc: bool = True
    infer_path: str = f"/v2/models/{tiny_model.NAME}/infer"
    ready_path: str = f"/v2/models/{tiny_model.NAME}/ready"
    request: bytes = field(default_factory=oip_request)
    answer: Callable[[Any], list[float]] = oip_answer
