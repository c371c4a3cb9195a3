"""Uses of the public interface that ``make lint`` type-checks; the errors marked must be found.

``warn_unused_ignores`` is part of ``strict``: a signature that lost its types fails the check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

import modelport
from modelport.pytest_plugin import ServeFixture


def export(folder: Path) -> list[modelport.ExportResult]:
    results = modelport.export("net.pt", format=["onnx"], repository=folder, model_version=2)
    name: str = results[0].name
    number: int = results[0].version  # type: ignore[assignment]
    modelport.export("net.pt", formats="onnx")  # type: ignore[call-arg]
    print(name, number)
    return results


def verify(folder: Path) -> modelport.Verification:
    found = modelport.verify(folder, public_key=["key.pub"])
    print(found.checked.model, found.proved)  # type: ignore[attr-defined]
    return found


def serve(folder: Path) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
    modelport.Server(folder, http_prt=0)  # type: ignore[call-arg]
    modelport.Server(folder, http_port="eighty")  # type: ignore[arg-type]
    with modelport.Server(folder, http_port=0, load_model=["x2"]) as server:
        url: str = server.http_url
        with modelport.Client(url) as client:
            ready: bool = client.ready("x2")
            client.infer("x2", [1.0])  # type: ignore[arg-type]
            print(ready, client.metadata("x2").inputs[0].shape)
            return client.infer("x2", {"x": np.ones((1, 4), np.float32)})


async def ask(url: str) -> list[modelport.ModelStatus]:
    async with modelport.AsyncClient(url, timeout_seconds=1.0) as client:
        models: list[modelport.ModelStatus] = client.models()  # type: ignore[assignment]
        print(models)
        return await client.models()


def test_a_model(modelport_serve: ServeFixture) -> None:
    assert modelport_serve("model.onnx").ports.http_port


@modelport.model(batch=2)
def score(text: list[str]) -> Annotated[np.ndarray[Any, Any], modelport.Array["FP32", 2]]:
    modelport.model(btch=2)  # type: ignore[call-overload]
    inputs = {"x": np.ones((len(text), 4), np.float32)}
    modelport.infer("x2", inputs, version="one")  # type: ignore[arg-type]
    return modelport.infer("x2", inputs)["y"]


@modelport.model
def shout(text: str) -> str:
    score([1])  # type: ignore[list-item]
    return text.upper() + shout(1)  # type: ignore[arg-type]
