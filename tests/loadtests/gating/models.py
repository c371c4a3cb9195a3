"""A published model of four floats, certificate and manifest as an export writes them."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.repository import manifest
from tests import models

CONFIG = models.X2_CONFIG.replace('"x2"', '"{name}"', 1)


def published(folder: Path, versions: int = 1, factor: float = 2.0) -> Path:
    """``y = factor * x`` in as many identical versions, in a folder of the model's name."""
    for number in range(1, versions + 1):
        version = folder / str(number)
        artifact = models.multiply(version / "model.onnx", factor)
        certificate = {
            "format": "modelport-certificate/1",
            "model": {"name": folder.name},
            "checkpoint": {"file": "tiny.pt", "sha256": "0" * 64},
            "artifact": {
                "format": "onnx",
                "size_bytes": artifact.stat().st_size,
                "files": {artifact.name: {"sha256": manifest.sha256_of(artifact)}},
            },
            "parity": {
                "passed": True,
                "samples": 1000,
                "tolerance": {"atol": 5e-6, "rtol": 1e-5},
                "bounds": None,
                "outputs": {"y": {"max_abs_error": 0.0}},
            },
        }
        (version / "certificate.json").write_text(json.dumps(certificate))
        manifest.write(version)
    (folder / "config.pbtxt").write_text(CONFIG.replace("{name}", folder.name))
    return folder
