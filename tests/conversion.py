"""``modelport convert`` as its tests call it, and a fraud transformer to convert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.convert import convert
from modelport.exporters.models.fraud import FraudTransformer

FRAUD_KWARGS: dict[str, Any] = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 2,
    "num_layers": 3,
    "dim_feedforward": 16,  # square: a transposed matrix still fits
    "max_positions": 12,
}
State = dict[str, torch.Tensor]


def distinct(module: nn.Module) -> nn.Module:
    """No two layers alike, as after training."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return module.eval()


def run(*arguments: object, model: str = "fraud", samples: int = 24) -> Result:
    fixed = ["--model", model, "--samples", str(samples)]
    return CliRunner().invoke(convert, [*map(str, arguments), *fixed])


def failed(result: Result, code: int) -> str:
    assert result.exit_code == code, result.output
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout
    return result.stderr.removeprefix("modelport: error: ").strip()


def done(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return result.stdout


def report_of(target: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(target.with_name(target.name + ".report.json").read_text())
    return content


def save(state: State, path: Path, kwargs: dict[str, Any] = FRAUD_KWARGS) -> Path:
    torch.save({"model_state_dict": state, "model_kwargs": kwargs}, path)
    return path


def fraud() -> nn.Module:
    """Its scores move little, so that a fault in its weights hardly shows in them."""
    torch.manual_seed(0)
    module = distinct(FraudTransformer(**FRAUD_KWARGS))
    with torch.no_grad():
        module.get_parameter("head.weight").mul_(0.1)
    return module
