"""A published model of four floats, certificate and manifest as an export writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from modelport.exporters.requests import sample_requests
from modelport.exporters.requests.random_inputs import draw
from modelport.gateway.repository import config, manifest
from tests import models

CONFIG = models.X2_CONFIG.replace('"x2"', '"{name}"', 1)
TOLERANCE = (5e-6, 1e-5)


def published(folder: Path, versions: int = 1, factor: float = 2.0) -> Path:
    """``y = factor * x`` in as many identical versions, in a folder of the model's name."""
    for number in range(1, versions + 1):
        version(folder, number, factor)
    return folder


def version(
    folder: Path,
    number: int,
    factor: float,
    *,
    checkpoint: str = 64 * "0",
    answers: float | None = None,
    decision: bool = False,
) -> Path:
    """Publish ``y = factor * x``.

    Args:
        checkpoint: the digest that the certificate names.
        answers: the factor of what it carries as its checkpoint's answers; None: it carries none.
        decision: it declares the argmax of ``y`` as what is decided.
    """
    path = folder / str(number)
    artifact = models.multiply(path / "model.onnx", factor)
    text = CONFIG.replace("{name}", folder.name)
    (folder / "config.pbtxt").write_text(text)
    samples = None
    if answers is not None:
        samples = sample_requests.record_version(
            path,
            config.signature(config.complete(config.parse(text), folder.name)),
            draw,
            lambda inputs: {"y": inputs["x"] * np.float32(answers)},
            TOLERANCE,
        )
    certificate = {
        "format": "modelport-certificate/1",
        "model": {"name": folder.name},
        "checkpoint": {"file": "tiny.pt", "sha256": checkpoint},
        "artifact": {
            "format": "onnx",
            "size_bytes": artifact.stat().st_size,
            "files": {artifact.name: {"sha256": manifest.sha256_of(artifact)}},
        },
        "parity": {
            "passed": True,
            "samples": 1000,
            "tolerance": dict(zip(("atol", "rtol"), TOLERANCE, strict=True)),
            "bounds": None,
            "outputs": {"y": {"max_abs_error": 0.0}},
            "decision": {"output": "y", "kind": "argmax"} if decision else None,
        },
        "samples": samples,
    }
    (path / "certificate.json").write_text(json.dumps(certificate))
    manifest.write(path)
    return path
