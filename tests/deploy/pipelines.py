"""Pipelines of GitHub Actions and GitLab CI, as far as they run without those services.

The scripts of the file are run as the service runs them (``bash -e -o pipefail``), in its order and
with its variables, each job of GitLab in a folder of its own with the artifacts of the jobs before.
What installs modelport is left out (it is installed), and so are GitHub's ``uses:``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy import tools

_EXPRESSION = re.compile(r"\$\{\{ *(.+?) *\}\}")


@dataclass(frozen=True)
class Ran:
    step: str
    status: int
    said: str


class _Loader(yaml.SafeLoader):
    """Knows GitLab's ``!reference``."""


_Loader.add_constructor("!reference", lambda loader, node: loader.construct_sequence(node))


def read(path: Path) -> dict[Any, Any]:
    document: dict[Any, Any] = yaml.load(path.read_text(), _Loader)
    return document


def _bash(script: str, folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    return tools.said("bash", "-e", "-o", "pipefail", "-c", script, cwd=folder, env=environment)


def github(
    path: Path, folder: Path, known: Mapping[str, str], environment: Mapping[str, str], event: str
) -> Iterator[Ran]:
    """The ``run:`` steps, until one fails. ``known``: what stands for an expression."""
    document = read(path)
    (job,) = document["jobs"].values()

    def value(text: Any) -> str:
        return _EXPRESSION.sub(lambda match: known[match[1]], str(text))

    for step in job["steps"]:
        if "run" not in step or step["name"] == "Install":
            continue
        condition = step.get("if", "")
        assert condition in ("", "github.event_name == 'push'") or "always()" in condition
        if condition.startswith("github") and event != "push":
            continue
        variables = {**document["env"], **step.get("env", {})}
        given = {**{name: value(text) for name, text in variables.items()}, **environment}
        status, said = _bash(step["run"], folder, given)
        yield Ran(step["name"], status, said)
        if status:
            return


def gitlab(
    path: Path, checkout: Path, work: Path, environment: Mapping[str, str], branch: str
) -> Iterator[Ran]:
    """The jobs by their stages, until one fails; ``main`` is the default branch."""
    document = read(path)
    jobs = {
        name: job
        for name, job in document.items()
        if isinstance(job, dict) and "script" in job and not name.startswith(".")
    }
    kept = work / "artifacts"
    kept.mkdir()
    for stage in document["stages"]:
        for name, job in jobs.items():
            if job["stage"] != stage or (job.get("rules") and branch != "main"):
                continue
            folder = work / name
            shutil.copytree(checkout, folder)
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            parent = document.get(job.get("extends"), {})
            given = {**document["variables"], **parent.get("variables", {})}
            given = {
                key: str(text).replace("$CI_PROJECT_DIR", str(folder))
                for key, text in given.items()
            }
            script = "\n".join(_scripts(parent.get("before_script", [])) + job["script"])
            status, said = _bash(script, folder, {**given, **environment})
            yield Ran(name, status, said)
            for artifact in job.get("artifacts", {}).get("paths", ()):
                _keep(folder / artifact, kept / artifact)
            if status:
                return


def _scripts(lines: list[Any]) -> list[str]:
    """Without what is referred to: that installs."""
    return [line for line in lines if isinstance(line, str)]


def _keep(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copy(source, target)
