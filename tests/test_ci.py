"""Continuous integration: the workflows run the verbs of `.ci/run`, with pinned actions."""

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


# -- pins -----------------------------------------------------------------------------------------

#: Images of registries, by tag alone: their digests cannot be looked up where this was written, and
#: one that is copied from elsewhere may be old. A digest in `PYTHON` and `CUDA` pins the builds'.
UNKNOWN_DIGESTS = {
    "docker.io/library/python:3.11-slim-bookworm",
    "docker.io/nvidia/cuda:12.8.1-cudnn-runtime-ubuntu24.04",
    "grafana/grafana:11.5.2",
    "nvcr.io/nvidia/tritonserver:24.10-py3",
    "prom/prometheus:v2.55.1",
    "python:3.11-slim-bookworm",
    "pytorch/torchserve:0.12.0-cpu",
    "rayproject/ray:2.60.0-py311",
    "tensorflow/serving:2.19.0",
}
#: Images that are built here.
OWN = re.compile(r"(registry\.example\.com/\S+/)?modelport(-ray)?(:\S+)?")
_USES = re.compile(
    r"^[ -]*(uses|image|FROM|ARG [A-Z]+)(?:[:=] *| )[\"']?([\w.$][^\s#\"']*)", re.MULTILINE
)


def unpinned(text: str) -> set[str]:
    """The actions and images in a workflow, a manifest or a Dockerfile that a tag alone names."""
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", text, re.MULTILINE))
    found = set()
    for key, name in _USES.findall(text):
        if key.startswith("ARG") and not re.search(r"/.*:", name):
            continue  # not an image
        if key == "uses":
            pinned = re.search(r"@[0-9a-f]{40}$", name) or name.startswith("./")
        else:
            pinned = re.search(r"@sha256:[0-9a-f]{64}$", name) or name in stages
        if not pinned and "$" not in name and not OWN.fullmatch(name):
            found.add(name)
    return found


def test_actions_are_pinned_by_commit_and_images_by_digest_where_one_is_known() -> None:
    found = set()
    for folder in (".github", "deploy"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".yml", ".yaml") or file.name == "Dockerfile":
                found |= unpinned(file.read_text())
    assert found == UNKNOWN_DIGESTS


def test_what_a_tag_alone_names_is_found() -> None:
    assert unpinned("      - uses: actions/checkout@v4\n") == {"actions/checkout@v4"}
    assert unpinned("- uses: a/b@main # c0ffee") == {"a/b@main"}
    assert unpinned("    image: 'nginx:1.29'\n") == {"nginx:1.29"}
    assert unpinned("FROM debian\n") == {"debian"}
    assert unpinned("ARG BASE=docker.io/library/debian:13\nFROM ${BASE} AS x\nFROM x AS y") == {
        "docker.io/library/debian:13"
    }
    assert unpinned(f"FROM debian@sha256:{'0' * 64} AS base\nuses: a/b@{'1' * 40} # v1") == set()
