"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from modelport.cli import modelport
from modelport.gateway.repository import routes

#: mypy's, perf_analyzer's and pip's.
ELSEWHERE = {"--strict", "--service-kind", "--shared-memory", "--constraint"}

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
        [sys.executable, "-m", "modelport", *command.split(), "--samples", "50"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "model_repository" / "scorer" / "config.pbtxt").read_text()
    assert 'string_value: "1..128"' in config


def flags(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            yield from parameter.opts
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from flags(found)


def test_every_flag_that_the_readme_names_exists() -> None:
    assert set(re.findall(r"`?(--[a-z][a-z-]+)", README)) - set(flags(modelport)) == ELSEWHERE


def test_the_example_routes_are_routes(tmp_path: Path) -> None:
    text = next(
        text for text in re.findall(r"```toml\n(.*?)```", README, re.DOTALL) if "[models." in text
    )
    (tmp_path / "modelport.toml").write_text(text)
    found = routes.load(tmp_path / "modelport.toml")
    assert list(found.models) == ["fraud", "churn", "vit"]
    assert found.models["vit"].managed


def test_every_make_verb_that_the_readme_names_exists() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for verb in re.findall(r"`make ([a-z-]+)", README):
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb
