"""The documentation's package that registers a model, really installed and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from modelport.exporters.cli.export import export
from modelport.exporters.models import REGISTRY, registered
from modelport.exporters.spec import find_factory
from modelport.gateway.cli.errors import UsageError
from tests.docs import pages

PAGE = pages.ROOT / "docs" / "frameworks" / "pytorch.md"


def example() -> dict[str, str]:
    """The files of the package, by name."""
    names = ("pyproject.toml", "acme_models.py")
    return {block.target: block.text for block in pages.blocks(PAGE) if block.target in names}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that pip installed the example's package into."""
    source = tmp_path_factory.mktemp("acme-models")
    for name, content in example().items():
        (source / name).write_text(content)
    target = tmp_path_factory.mktemp("site")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(target)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def plugin(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(installed)
    yield installed
    sys.modules.pop("acme_models", None)


def register(folder: Path, distribution: str, name: str, factory: str) -> None:
    """What pip leaves of a package that registers ``factory``."""
    metadata = folder / f"{distribution}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[modelport.models]\n{name} = {factory}\n")


def test_the_example_is_twenty_lines() -> None:
    files = example()
    assert set(files) == {"pyproject.toml", "acme_models.py"}
    lines = [line for content in files.values() for line in content.splitlines() if line.strip()]
    assert len(lines) <= 22


def test_an_installed_package_adds_its_names_and_is_not_imported_for_it(plugin: Path) -> None:
    assert registered() == {**REGISTRY, "scorer": "acme_models:Scorer"}
    assert "acme_models" not in sys.modules


def test_the_examples_model_is_exported_by_its_registered_name(
    plugin: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    checkpoint = tmp_path / "scorer.pt"
    torch.save(nn.Sequential(nn.Linear(16, 1), nn.Sigmoid()).state_dict(), checkpoint)
    place = ["--repository", str(tmp_path / "repository"), "--samples", "50"]
    command = [str(checkpoint), "--model", "scorer", "--format", "onnx", *place]
    done = CliRunner().invoke(export, command)
    assert done.exit_code == 0, done.output
    published = tmp_path / "repository" / "scorer" / "1" / "certificate.json"
    assert json.loads(published.read_text())["parity"]["passed"]
    assert sys.modules["acme_models"].__file__ == str(plugin / "acme_models.py")


def test_without_the_package_its_name_is_unknown() -> None:
    with pytest.raises(UsageError, match="'scorer' is not registered; use fraud, vit"):
        find_factory("scorer")


@pytest.mark.parametrize(
    ("name", "there"),
    [("vit", REGISTRY["vit"]), ("scorer", "acme_models:Scorer")],
    ids=["a built-in", "another package's"],
)
def test_a_name_that_is_registered_twice_is_refused_and_both_are_named(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, there: str
) -> None:
    register(tmp_path / "other", "other_models", name, "other_models:Model")
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises(UsageError, match=f"model '{name}' is registered twice") as caught:
        registered()
    assert there in str(caught.value)
    assert "other_models:Model" in str(caught.value)


def test_a_package_that_is_seen_twice_is_no_clash(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(tmp_path / "again", "acme_models_dev", "scorer", "acme_models:Scorer")
    monkeypatch.syspath_prepend(tmp_path / "again")
    assert registered()["scorer"] == "acme_models:Scorer"


@pytest.mark.parametrize("factory", ["no_such_module:Model", "acme_models:Missing", "acme_models"])
def test_a_registration_that_leads_nowhere_is_told_when_it_is_used(
    plugin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str
) -> None:
    register(tmp_path / "broken", "broken_models", "broken", factory)
    monkeypatch.syspath_prepend(tmp_path / "broken")
    assert callable(find_factory("scorer"))
    with pytest.raises(UsageError, match="--model 'broken'"):
        find_factory("broken")
