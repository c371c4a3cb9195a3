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
    assert re.search(r"^INSTALL := .*\\\n\t--constraint constraints.txt$", makefile, re.MULTILINE)
    recipes = [line for line in makefile.splitlines() if line.startswith("\t")]
    unconstrained = [line for line in recipes if "pip install" in line]
    assert unconstrained == [  # what makes the pins, and what judges them
        "\t$(VENV)/audit/bin/python -m pip install pip-audit",
        "\t$(VENV)/constraints/bin/python -m pip install --upgrade pip uv",
        '\t$(VENV)/sbom/bin/python -m pip install "cyclonedx-bom>=7,<8"',
    ]
    stages = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().split("\nFROM ")
    constrained = {"wheel"}
    for stage in stages[1:]:
        parent, name = re.match(r"(\S+) AS (\S+)", stage).groups()  # type: ignore[union-attr]
        if parent in constrained or "ENV PIP_CONSTRAINT=" in stage:
            constrained.add(name)
        assert name in constrained or not re.search(r"pip.* install", stage), name


# -- the images -----------------------------------------------------------------------------------

REQUIREMENTS = ROOT / "deploy" / "docker" / "requirements"
#: An extra → the file of the images that has what it needs. The others are in no image.
FILES = {
    "": "onnx",
    **{"images": "onnx", "jwt": "onnx"},
    **{name: name for name in ("s3", "gcs", "azure", "gpu", "litert", "tensorflow", "torch")},
    **{name: name for name in ("huggingface", "all")},
    **dict.fromkeys(("load", "openvino", "trees"), "all"),
}


def hashed(name: str) -> dict[str, str]:
    """The pins of a file of requirements with those that it includes.

    Each has a hash, as pip asks for.
    """
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    blocks = re.findall(r"^([^\s#-].*(?:\n .*)*)", text, re.MULTILINE)
    found = {}
    for block in blocks:
        pin = re.match(r"(\S+)==(\S+)", block)
        assert pin is not None
        assert re.fullmatch(r"[^\n]+(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+", block), pin[0]
        found[canonical(pin[1])] = pin[2]
    for included in re.findall(r"^-r (\S+)\.txt$", text, re.MULTILINE):
        found |= hashed(included)
    return found


def test_the_images_have_the_pinned_versions_each_with_hashes() -> None:
    pins = {canonical(name): version for name, version in PINS.items()}
    for file in REQUIREMENTS.glob("*.txt"):
        found = hashed(file.stem)
        assert found, file.name
        assert found.items() <= pins.items(), f"{file.name}: run `make constraints`"


def test_the_images_requirements_are_those_of_their_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    for extra, name in FILES.items():
        found = hashed(name)
        for wanted in map(Requirement, extras[extra]):
            if wanted.name not in ("modelport", "torch"):
                assert canonical(wanted.name) in found, f"{name}.txt: run `make constraints`"


def test_the_images_install_nothing_without_a_hash_but_pytorch_and_the_wheel() -> None:
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    installs = [
        re.sub(r"\s+", " ", each)
        for each in re.findall(r" install (--no-cache.+?)(?:&&|;|\n)", text)
    ]
    assert len(installs) > 8
    for each in installs:
        own = "--no-deps /wheels/" in each or re.search(r"--no-deps --index-url \S+ torch==", each)
        assert own or re.search(r"--require-hashes -r \"?requirements/\S+\.txt", each), each
