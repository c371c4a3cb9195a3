"""Continuous integration: the workflows run the verbs that `.ci/run` runs."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def verbs(text: str) -> set[str]:
    return set(re.findall(r"^\s*(?:- run: )?make ([a-z-]+)", text, re.MULTILINE))


def test_the_workflows_run_every_verb_of_the_script() -> None:
    script = verbs((ROOT / ".ci" / "run").read_text())
    assert {"docs", "lint", "package", "test"} <= script
    assert script <= {verb for file in WORKFLOWS for verb in verbs(file.read_text())}


def test_every_verb_of_the_workflows_is_the_makefiles() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for file in WORKFLOWS:
        for verb in verbs(file.read_text()):
            assert re.search(rf"^{verb}:", makefile, re.MULTILINE), f"{file.name}: make {verb}"


def test_the_workflows_may_only_read_and_each_job_has_a_time_limit() -> None:
    assert WORKFLOWS
    for file in WORKFLOWS:
        content = yaml.safe_load(file.read_text())
        assert content["permissions"] == {"contents": "read"}
        assert all("timeout-minutes" in job for job in content["jobs"].values()), file.name


def test_all_supported_pythons_are_tried() -> None:
    content = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    supported = re.findall(r"Python :: (3\.\d+)\"", project)
    matrix = {
        job: content["jobs"][job]["strategy"]["matrix"]["python"] for job in ("test", "package")
    }
    assert matrix["package"] == supported
    assert set(supported) - set(matrix["test"]) == {"3.14"}  # TensorFlow has no wheels for it
