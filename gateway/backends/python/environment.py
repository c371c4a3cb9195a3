"""The interpreter and the environment of a model's workers.

It is that of ``EXECUTION_ENV_PATH``, else that of the lock file, else the gateway's own.
"""

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
from modelport.gateway.repository import lock_file
from modelport.gateway.settings import PythonModels

PARAMETER, DATA_PARAMETER = lock_file.PARAMETER, "RLIMIT_DATA"
#: Triton's word for the model's folder.
_MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerEnvironment(NamedTuple):
    """Everything that a worker needs besides the model.

    Attributes:
        folder: the version's folder.
        max_data_bytes: its RLIMIT_DATA; None: no limit.
        temporary: folders to remove with the model.
    """

    interpreter: str
    variables: dict[str, str]
    folder: Path
    max_data_bytes: int | None
    temporary: tuple[Path, ...]

    def remove(self) -> None:
        """Remove what was made for the workers."""
        for folder in self.temporary:
            shutil.rmtree(folder, ignore_errors=True)


def prepare(artifact: Artifact, instances: int, allowed: PythonModels) -> WorkerEnvironment:
    """Find the interpreter, and keep the files of a version that is a copy.

    Raises:
        InvalidArgument: the environment cannot be used.
    """
    temporary: list[Path] = []
    asked = parameters.integer(artifact.config, DATA_PARAMETER, 0)
    max_data = min(filter(None, (asked, allowed.max_data_bytes)), default=None)
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
        interpreter, environment = sys.executable, _locked(artifact, allowed.environments)
        if text := parameters.text(artifact.config, PARAMETER):
            path = Path(text.replace(_MODEL_DIRECTORY, str(folder.parent)))
            environment = _unpacked(path, temporary) if path.is_file() else path
        if environment is not None:
            interpreter = str(_interpreter(environment))
            library = str(environment / "lib")
            others = variables.get("LD_LIBRARY_PATH")
            variables["LD_LIBRARY_PATH"] = f"{library}:{others}" if others else library
            variables["PATH"] = f"{environment / 'bin'}:{variables.get('PATH', '')}"
        return WorkerEnvironment(interpreter, variables, folder, max_data, tuple(temporary))
    except BaseException:
        for each in temporary:
            shutil.rmtree(each, ignore_errors=True)
        raise


def _locked(artifact: Artifact, environments: Path | None) -> Path | None:
    """The environment that the lock file of a version pins; None: it has none that counts."""
    if PARAMETER in artifact.config.parameters or artifact.path.name != str(artifact.version):
        return None  # the model names another one, or is a file outside of a repository
    lock = lock_file.find(artifact.path)
    if lock is None:
        return None
    environment = lock.environment(environments)
    if not lock_file.is_installed(environment):
        raise InvalidArgument(
            f"the environment that '{lock.name}' pins is not installed on this machine; run "
            f"'modelport install' with the folder of model '{artifact.model_name}', as the user "
            f"and with the {lock_file.OPTION} of the gateway, and load the model again"
        )
    return environment


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
