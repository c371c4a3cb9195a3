"""Gateways, requests and answers for the tests of TorchServe's dialect."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from modelport.gateway.protocols.torchserve.grpc import INFERENCE_SERVICE
from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference
from tests import models
from tests.conformance import repository, wire
from tests.conformance.repository import add
from tests.conformance.wire import WireReply, json_body, json_input
from tests.server import Gateway, serving

ROW = json_body(json_input("x", "FP32", [1, 4], [1, 2, 3, 4]))
JSON = {"Content-Type": "application/json"}
LABELS = [f"label {index}" for index in range(12)]


def build(root: Path) -> Path:
    """The conformance repository, and models of pictures: ``y`` is every channel's mean."""
    repository.build(root)
    for name, extra, output in (
        ("classes", "", 'y FP32 12 label_filename: "labels.txt"'),
        (
            "chances",
            'parameters { key: "classification.y" value { string_value: "probabilities" } }',
            "y FP32 12",
        ),
        ("features", "", "y FP32 12"),
    ):
        text = models.config(name, ["x FP32 3,2,2"], [output], extra=models.PICTURES + extra)
        models.flatten(add(root, name, text))
        (root / name / "labels.txt").write_text("\n".join(LABELS))
    text = models.config(
        "lettered",
        ["x FP32 3,2,2"],
        ["y FP32 12"],
        extra='parameters { key: "image.mean" value { string_value: "no" } }',
    )
    models.flatten(add(root, "lettered", text))
    return root


@contextlib.contextmanager
def serving_all(folder: Path) -> Iterator[Gateway]:
    with serving(build(folder)) as gateway:
        yield gateway


@contextlib.contextmanager
def serving_on_request(folder: Path) -> Iterator[Gateway]:
    """``two`` and ``three``, each for one test to change."""
    root = models.repository(folder)
    for name in ("two", "three"):
        for version in (1, 2):
            models.multiply(root / name / str(version) / "model.onnx", float(version))
        (root / name / "config.pbtxt").write_text(
            models.config(name, ["x FP32 4"], ["y FP32 4"], extra="version_policy { all {} }")
        )
    text = models.config("classes", ["x FP32 3,2,2"], ["y FP32 12"], extra=models.PICTURES)
    models.flatten(add(root, "classes", text))
    with serving(root, "--model-control-mode", "explicit", "--load-model", "x2") as gateway:
        yield gateway


def ask(gateway: Gateway, method: str, path: str, body: bytes = b"", **headers: str) -> WireReply:
    """``Content_Type="a/b"`` for a header."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return wire.send(gateway.http, method, path, body, named)


def predict(gateway: Gateway, model: str, body: bytes, content_type: str = "") -> WireReply:
    headers = {"Content_Type": content_type} if content_type else {}
    return ask(gateway, "POST", f"/predictions/{model}", body, **headers)


def error(reply: WireReply) -> tuple[int, str, str]:
    document = reply.json
    assert document["code"] == reply.status
    assert list(document) == ["code", "type", "message"]
    assert reply.headers["x-request-id"]
    wire.assert_public(document["message"])
    return reply.status, document["type"], document["message"]


def curl(gateway: Gateway, *arguments: str) -> bytes:
    *options, path = arguments
    done = subprocess.run(
        [
            "curl",
            "--silent",
            "--show-error",
            "--max-time",
            "20",
            *options,
            f"http://{gateway.http}{path}",
        ],
        capture_output=True,
        check=True,
    )
    return done.stdout


def picture(seed: int = 0, size: tuple[int, int] = (2, 2), form: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


def fractions(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data)), np.float32).transpose(2, 0, 1).reshape(-1) / 255


def call(
    gateway: Gateway, method: str, model: str, body: bytes, version: str = "", key: str = "data"
) -> Any:
    message = inference.PredictionsRequest(model_name=model, model_version=version)
    message.input[key] = body
    return rpc(gateway, INFERENCE_SERVICE, method, message, inference.PredictionResponse)


def rpc(gateway: Gateway, service: str, method: str, message: Any, reply: Any) -> Any:
    with wire.channel(gateway.grpc) as channel:
        unary = channel.unary_unary(f"/{service}/{method}", response_deserializer=reply.FromString)
        return unary(message.SerializeToString(), timeout=30)
