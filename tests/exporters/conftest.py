"""Tiny models whose layers all differ, their checkpoints, and ways to look at a repository."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.export import export
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from tests.exporters.economy import _economy

__all__ = ["_economy"]
ROOT = Path(__file__).resolve().parents[2]

FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 2,
    "num_layers": 2,
    "dim_feedforward": 24,
    "max_positions": 12,
}
VIT_KWARGS: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "in_channels": 1,
    "num_classes": 5,
    "dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_dim": 24,
}


def _distinct(module: nn.Module, seed: int = 0) -> nn.Module:
    """A fresh ``nn.TransformerEncoder`` clones one layer, which would hide swapped layers."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


@pytest.fixture
def fraud() -> nn.Module:
    torch.manual_seed(0)
    return _distinct(FraudTransformer(**FRAUD_KWARGS))


@pytest.fixture
def vit() -> nn.Module:
    torch.manual_seed(0)
    return _distinct(VisionTransformer(**VIT_KWARGS))


@pytest.fixture
def fraud_checkpoint(fraud: nn.Module, tmp_path: Path) -> Path:
    """A training checkpoint."""
    path = tmp_path / "fraud.pt"
    torch.save({"model_state_dict": fraud.state_dict(), "model_kwargs": FRAUD_KWARGS}, path)
    return path


@pytest.fixture
def vit_checkpoint(vit: nn.Module, tmp_path: Path) -> Path:
    """A bare state dict."""
    path = tmp_path / "vit.pth"
    torch.save(vit.state_dict(), path)
    return path


@pytest.fixture
def invoke(tmp_path: Path) -> Callable[..., Result]:
    """``modelport export`` in this process; publishes into ``tmp_path/repository``."""

    def run(checkpoint: Path, *arguments: str, model: str = "fraud") -> Result:
        fixed = ["--model", model]
        if "--format" not in arguments:
            fixed += ["--format", "onnx"]
        # Errors are one line on stderr; on a busy machine there would be some of progress, too.
        place = ["--repository", str(tmp_path / "repository"), "--samples", "40", "--quiet"]
        return CliRunner().invoke(export, [str(checkpoint), *fixed, *place, *arguments])

    return run


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A Python of its own, in ``tmp_path``, that can import the project."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=100,
        )

    return run


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, str]]:
    """Every path below a folder with the digest of what is there."""

    def take(folder: Path) -> dict[str, str]:
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            if path.is_file()
            else "folder"
            for path in sorted(folder.rglob("*"))
        }

    return take
