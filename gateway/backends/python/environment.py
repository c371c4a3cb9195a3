"""The interpreter and the environment of a model's workers: ``EXECUTION_ENV_PATH``, or its own."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import InvalidArgument

PARAMETER = "EXECUTION_ENV_PATH"
#: Triton's word for the model's folder.
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerEnvironment(NamedTuple):
    """Everything that a worker needs besides the model.

    Attributes:
        folder: the version's folder.
        temporary: folders to remove with the model.
    """

    interpreter: str
    variables: dict[str, str]
    folder: Path
    temporary: tuple[Path, ...]

    def remove(self) -> None:
        """Remove what was made for the workers."""
        for folder in self.temporary:
            shutil.rmtree(folder, ignore_errors=True)


def prepare(artifact: Artifact, instances: int) -> WorkerEnvironment:
    """Find the interpreter, and keep the files of a version that is a copy.

    Raises:
        InvalidArgument: the environment cannot be used.
    """
    temporary: list[Path] = []
    try:
        folder = artifact.path
        if artifact.copied:
            # Hard links outlive the copy, which goes when the model is loaded.
            home = Path(tempfile.mkdtemp(prefix="modelport-python-"))
            temporary.append(home)
            folder = home / artifact.path.parent.name / artifact.path.name
            shutil.copytree(artifact.path, folder, copy_function=os.link)
        variables = dict(os.environ)
        for name in _THREADS:
            variables.setdefault(name, str(max(1, artifact.threads // instances)))
        text = parameters.text(artifact.config, PARAMETER)
        if not text:
            return WorkerEnvironment(sys.executable, variables, folder, tuple(temporary))
        path = Path(text.replace(_MODEL_DIRECTORY, str(folder.parent)))
        environment = _unpacked(path, temporary) if path.is_file() else path
        interpreter = _interpreter(environment)
        library = str(environment / "lib")
        others = variables.get("LD_LIBRARY_PATH")
        variables["LD_LIBRARY_PATH"] = f"{library}:{others}" if others else library
        variables["PATH"] = f"{environment / 'bin'}:{variables.get('PATH', '')}"
        return WorkerEnvironment(str(interpreter), variables, folder, tuple(temporary))
    except BaseException:
        for each in temporary:
            shutil.rmtree(each, ignore_errors=True)
        raise


def _interpreter(environment: Path) -> Path:
    for name in ("python3", "python"):
        if (environment / "bin" / name).is_file():
            return environment / "bin" / name
    raise InvalidArgument(
        f"parameter '{PARAMETER}' names no environment: '{environment.name}' has no bin/python3; "
        "name a virtual environment, or a tar archive of one"
    )


def _unpacked(archive: Path, temporary: list[Path]) -> Path:
    """The environment in ``archive``, unpacked; it may lie in a folder of its own."""
    home = Path(tempfile.mkdtemp(prefix="modelport-environment-"))
    temporary.append(home)
    try:
        with tarfile.open(archive) as packed:
            # A virtual environment has a link to the interpreter, which leads outside.
            packed.extractall(home, filter="tar")
    except (OSError, tarfile.TarError) as error:
        raise InvalidArgument(
            f"parameter '{PARAMETER}': '{archive.name}' cannot be unpacked: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from error
    inside = [each for each in home.iterdir() if each.is_dir()]
    if not (home / "bin").is_dir() and len(inside) == 1:
        return inside[0]
    return home
