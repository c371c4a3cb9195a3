"""Requests to a running gateway, and waits for a condition with a time limit."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from modelport.gateway.repository import manifest
from tests import models
from tests.server import Gateway

Background = Callable[..., Future[Any]]
ONE = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 1, 1, 1]}]}
POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "0.05")
EXPLICIT = ("--model-control-mode", "explicit")

CONFIG = """
backend: "{backend}"
default_model_filename: "model.onnx"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_FP32 dims: 4 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
"""
SLOW = """
backend: "fake"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
parameters { key: "delay_seconds" value { string_value: "%s" } }
"""
#: 1000 turns at warm-up: too slow to be run on the event loop.
COUNT = """
backend: "onnxruntime"
input { name: "n" data_type: TYPE_INT64 dims: 1 }
output { name: "total" data_type: TYPE_INT64 dims: 1 }
parameters { key: "range.n" value { string_value: "1000.." } }
"""


@dataclass(frozen=True)
class ChangingRepository:
    """A model repository that the test changes under a gateway's eyes."""

    root: Path

    def version(
        self,
        factor: float,
        number: int = 1,
        model: str = "m",
        signed: bool = True,
        backend: str = "onnxruntime",
        config: str = "",
    ) -> Path:
        """Publish a version that multiplies by ``factor``, whole or not at all."""
        folder = self.root / model
        if not (folder / "config.pbtxt").exists():
            self.config(CONFIG.format(backend=backend) + config, model)
        staged = self.root / f".staged-{model}-{number}"
        models.multiply(staged / "model.onnx", factor)
        if signed:
            manifest.write(staged)
        return staged.rename(folder / str(number))

    def config(self, text: str, model: str = "m") -> Path:
        folder = self.root / model
        folder.mkdir(parents=True, exist_ok=True)
        staged = folder / ".config"
        staged.write_text(text)
        return staged.rename(folder / "config.pbtxt")

    def slow(self, seconds: float, model: str = "slow") -> None:
        """A fake model that answers its input after ``seconds``."""
        self.config(SLOW % seconds, model)
        (self.root / model / "1").mkdir()

    def slow_to_load(self, seconds: int, model: str) -> None:
        """A model of Triton's identity backend that loads for ``seconds``."""
        value = f'value {{ string_value: "{seconds}" }}'
        delay = f'parameters {{ key: "creation_delay_sec" {value} }}'
        tensors = ["INPUT0 FP32 4"], ["OUTPUT0 FP32 4"]
        self.config(models.config(model, *tensors, 8, "identity", delay), model)
        (self.root / model / "1").mkdir()

    def count(self, extra: str = "", model: str = "count") -> None:
        """A model whose run takes about as many microseconds as its input says."""
        self.config(COUNT + extra, model)
        models.count_up(self.root / model / "1" / "model.onnx")

    def file(self, number: int = 1, model: str = "m", name: str = "model.onnx") -> Path:
        return self.root / model / str(number) / name

    def remove(self, number: int, model: str = "m") -> None:
        """Take a version away at once, as a publisher does: renamed, then deleted."""
        gone = self.root / f".gone-{model}-{number}"
        (self.root / model / str(number)).rename(gone)
        shutil.rmtree(gone)


# -- damage ---------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link_out(path: Path) -> None:
    """Move the file out of the repository and leave a link to it, its content unchanged."""
    outside = path.parents[3] / f"outside-{path.parent.name}-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


# -- questions ------------------------------------------------------------------------------------


def post(gateway: Gateway, path: str, body: Any = None, timeout: float = 30.0) -> httpx.Response:
    return httpx.post(f"http://{gateway.http}{path}", json=body or {}, timeout=timeout)


def status(gateway: Gateway, path: str) -> int:
    return httpx.get(f"http://{gateway.http}{path}", timeout=30.0).status_code


def live(gateway: Gateway) -> bool:
    return status(gateway, "/v2/health/live") == 200


def ready(gateway: Gateway) -> bool:
    return status(gateway, "/v2/health/ready") == 200


def index(gateway: Gateway, model: str = "m") -> dict[str, tuple[str, str]]:
    """version → state and reason, as the repository index says."""
    rows = post(gateway, "/v2/repository/index").json()
    return {
        row.get("version", ""): (row.get("state", ""), row.get("reason", ""))
        for row in rows
        if row["name"] == model
    }


def state(gateway: Gateway, number: int | str = 1, model: str = "m") -> str:
    return index(gateway, model).get(str(number), ("", ""))[0]


def reason(gateway: Gateway, number: int | str = 1, model: str = "m") -> str:
    return index(gateway, model).get(str(number), ("", ""))[1]


def load(gateway: Gateway, model: str = "m", **parameters: str) -> httpx.Response:
    body = {"parameters": parameters} if parameters else None
    return post(gateway, f"/v2/repository/models/{model}/load", body)


def unload(gateway: Gateway, model: str = "m") -> httpx.Response:
    return post(gateway, f"/v2/repository/models/{model}/unload")


def ask(
    gateway: Gateway, model: str = "m", number: int | str = "", timeout: float = 30.0
) -> httpx.Response:
    version = f"/versions/{number}" if number else ""
    return post(gateway, f"/v2/models/{model}{version}/infer", ONE, timeout)


def answer(gateway: Gateway, model: str = "m", number: int | str = "") -> tuple[str, float]:
    """The version that answered, and the factor it multiplied by."""
    reply = ask(gateway, model, number)
    assert reply.status_code == 200, reply.text
    document = reply.json()
    (factor,) = set(document["outputs"][0]["data"])
    return document["model_version"], factor


def metric(gateway: Gateway, name: str, **labels: str) -> float:
    """The value of a metric of the gateway's, or of ``nv_inference_<name>``, for these labels."""
    full = name if name.startswith("modelport_") else f"nv_inference_{name}"
    for line in httpx.get(gateway.metrics).text.splitlines():
        if line.startswith(f"{full}{{") and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            return float(line.rpartition(" ")[2])
    return 0.0


def count_request(n: int, **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "n", "datatype": "INT64", "shape": [1], "data": [n]}
    return {"inputs": [tensor], "parameters": parameters}


@contextmanager
def elapsed() -> Iterator[Callable[[], float]]:
    started = time.monotonic()
    yield lambda: time.monotonic() - started
