"""Pipelines of GitHub Actions and GitLab CI, as far as they run without those services.

The scripts of the file are run as the service runs them (``bash -e -o pipefail``), in its order and
with its variables, each job in a checkout of its own with the artifacts of the jobs before. What
installs modelport is left out (it is installed), and so are GitHub's ``uses:`` but for artifacts.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.deploy import tools

_EXPRESSION = re.compile(r"\$\{\{ *(.+?) *\}\}")
_HASH_FILES = re.compile(r"hashFiles\('(.+?)'\) != ''")
_ON_PUSH = "github.event_name == 'push'"


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


# -- GitHub ----------------------------------------------------------------------------------------


@dataclass
class _GithubRun:
    """A run of a workflow. ``known``: the value of each expression."""

    document: Mapping[str, Any]
    work: Path
    environment: Mapping[str, str]
    event: str
    known: dict[str, str]
    failed: set[str] = field(default_factory=set)

    def value(self, text: Any) -> str:
        return _EXPRESSION.sub(lambda match: self.known[match[1]], str(text))

    def job(self, name: str, job: Mapping[str, Any], folder: Path) -> Iterator[Ran]:
        needs = job.get("needs")
        if needs in self.failed or not self._wanted(job.get("if", ""), False, folder):
            self.failed.add(name)
            return
        broken = False
        for step in job["steps"]:
            if not self._wanted(step.get("if", ""), broken, folder):
                continue
            if "uses" in step:
                self._artifacts(step, folder)
            elif step["name"] != "Install":
                ran = self._step(step, folder)
                broken = broken or bool(ran.status)
                yield ran
        if broken:
            self.failed.add(name)
        for output, text in job.get("outputs", {}).items():
            if not broken and self.event == "push":
                self.known[f"needs.{name}.outputs.{output}"] = self.value(text)

    def _wanted(self, condition: str, broken: bool, folder: Path) -> bool:
        """Whether a job or a step runs; ``broken``: an earlier step has failed."""
        for part in condition.split(" && ") if condition else ():
            if part == "always()":
                broken = False
            elif found := _HASH_FILES.fullmatch(part):
                if not any(folder.glob(found[1])):
                    return False
            else:
                assert part == _ON_PUSH, part
                if self.event != "push":
                    return False
        return not broken

    def _step(self, step: Mapping[str, Any], folder: Path) -> Ran:
        variables = {**self.document["env"], **step.get("env", {})}
        given = {name: self.value(text) for name, text in variables.items()}
        output = self.work / "output"
        output.write_text("")
        given |= {**self.environment, "GITHUB_OUTPUT": str(output)}
        status, said = _bash(step["run"], folder, given)
        for name, _, text in (line.partition("=") for line in output.read_text().splitlines()):
            self.known[f"steps.{step['id']}.outputs.{name}"] = text
        return Ran(step["name"], status, said)

    def _artifacts(self, step: Mapping[str, Any], folder: Path) -> None:
        action, wanted = step["uses"].partition("@")[0], step.get("with", {})
        kept = self.work / "artifacts" / str(wanted.get("name", ""))
        if action == "actions/upload-artifact":
            kept.mkdir(parents=True)
            for file in folder.glob(wanted["path"]):
                shutil.copy(file, kept)
        elif action == "actions/download-artifact":
            shutil.copytree(kept, folder, dirs_exist_ok=True)


def github(
    path: Path,
    checkout: Path,
    work: Path,
    known: Mapping[str, str],
    environment: Mapping[str, str],
    event: str,
) -> Iterator[Ran]:
    """The ``run:`` steps of all jobs, the first one in ``checkout`` itself."""
    document = read(path)
    run = _GithubRun(document, work, environment, event, dict(known))
    clean = work / "clean"
    shutil.copytree(checkout, clean)
    folder = checkout
    for name, job in document["jobs"].items():
        yield from run.job(name, job, folder)
        folder = work / f"after-{name}"
        shutil.copytree(clean, folder)


# -- GitLab ----------------------------------------------------------------------------------------


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
    stated: dict[str, str] = {}
    for stage in document["stages"]:
        for name, job in jobs.items():
            if job["stage"] != stage or (job.get("rules") and branch != "main"):
                continue
            folder = work / name
            shutil.copytree(checkout, folder)
            shutil.copytree(kept, folder, dirs_exist_ok=True)
            job = {**document.get(job.get("extends"), {}), **job}
            given = {**document["variables"], **job.get("variables", {})}
            given = {
                key: str(text).replace("$CI_PROJECT_DIR", str(folder))
                for key, text in given.items()
            }
            given |= {**stated, **environment}
            script = _scripts(job.get("before_script", [])) + job["script"]
            status, said = _bash("\n".join(script), folder, given)
            yield Ran(name, status, said)
            if after := job.get("after_script"):
                yield Ran(f"after {name}", *_bash("\n".join(after), folder, given))
            artifacts = job.get("artifacts", {})
            for artifact in artifacts.get("paths", ()):
                _keep(folder / artifact, kept / artifact)
            if status:
                return
            stated |= _stated(folder, artifacts.get("reports", {}).get("dotenv"))


def _stated(folder: Path, file: str | None) -> dict[str, str]:
    """The variables of a ``dotenv`` report."""
    lines = (folder / file).read_text().splitlines() if file else []
    return dict(line.split("=", 1) for line in lines)


def _scripts(lines: list[Any]) -> list[str]:
    """Without what installs."""
    return [line for line in lines if isinstance(line, str) and not line.startswith("pip install")]


def _keep(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif source.is_file():
        shutil.copy(source, target)
