"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import torch

from gateway.cli import modelport

ELSEWHERE = {"--strict"}  # mypy's

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_model_exports_and_is_proven(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    (tmp_path / "mypackage").mkdir()
    (tmp_path / "mypackage" / "models.py").write_text(code[1])
    weights = {"head.weight": torch.randn(1, 16), "head.bias": torch.randn(1)}
    torch.save(weights, tmp_path / "scorer.pt")
    command = "export scorer.pt --model mypackage.models:Scorer --format onnx --name scorer"
    done = subprocess.run(
        [sys.executable, "-m", "gateway.cli", *command.split(), "--samples", "50"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "model_repository" / "scorer" / "config.pbtxt").read_text()
    assert 'string_value: "1..128"' in config


def test_every_flag_that_the_readme_names_exists() -> None:
    group = click.Context(modelport)
    commands = [modelport.get_command(group, name) for name in modelport.list_commands(group)]
    known = {
        flag
        for command in commands
        if command is not None
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for flag in parameter.opts
    }
    assert set(re.findall(r"`?(--[a-z][a-z-]+)", README)) - known == ELSEWHERE


def test_every_make_verb_that_the_readme_names_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for verb in re.findall(r"`make ([a-z-]+)", README):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
