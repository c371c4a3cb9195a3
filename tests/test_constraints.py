"""Reproducible installs: constraints.txt pins what any extra needs, and every install uses it."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = dict(line.split("==") for line in LINES if not line.startswith("#"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_requirement_of_every_extra_has_a_pin_that_satisfies_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    texts = itertools.chain(project["dependencies"], *extras)
    pins = {canonical(name): version for name, version in PINS.items()}
    for wanted in map(Requirement, texts):
        if wanted.name != "modelport":
            assert canonical(wanted.name) in pins, f"{wanted}: run `make constraints`"
            pin = pins[canonical(wanted.name)]
            assert wanted.specifier.contains(pin), f"{wanted}, not {pin}: run `make constraints`"


def test_pins_are_exact_and_name_no_place_and_no_build_for_one_device() -> None:
    for name, version in PINS.items():
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name), name
        assert re.fullmatch(r"[0-9][A-Za-z0-9.]*", version), f"{name}=={version}"


def test_the_makefile_and_the_image_install_nothing_unconstrained() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "INSTALL := $(PIP) install --constraint constraints.txt" in makefile
    recipes = [line for line in makefile.splitlines() if line.startswith("\t")]
    unconstrained = [line for line in recipes if "pip install" in line]
    assert unconstrained == [  # what makes the pins, and what judges them
        "\t$(VENV)/audit/bin/python -m pip install pip-audit",
        "\t$(VENV)/constraints/bin/python -m pip install --upgrade pip",
    ]
    stages = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().split("\nFROM ")
    constrained = {"wheel"}
    for stage in stages[1:]:
        parent, name = re.match(r"(\S+) AS (\S+)", stage).groups()  # type: ignore[union-attr]
        if parent in constrained or "ENV PIP_CONSTRAINT=" in stage:
            constrained.add(name)
        assert name in constrained or not re.search(r"pip.* install", stage), name
