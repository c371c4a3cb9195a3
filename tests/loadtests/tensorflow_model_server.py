"""Stands in for ``tensorflow_model_server``: its flags, modelport behind.

    python tensorflow_model_server.py --port=... --rest_api_port=... --model_config_file=...

The models' configuration is that of the published model in the folder ``STANDIN_CONFIG``.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path


def main() -> None:
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[1:])
    repository = tensorflow_models(Path(flags["model_config_file"]))
    ports = [f"--http-port={flags['rest_api_port']}", f"--grpc-port={flags['port']}"]
    command = ["serve", "--model-repository", str(repository), *ports, "--metrics-port=0"]
    os.execv(sys.executable, [sys.executable, "-m", "modelport", *command])


def tensorflow_models(file: Path) -> Path:
    """A model repository with the SavedModels that a ``ModelServerConfig`` names."""
    repository = file.parent.parent / "standin"
    shutil.rmtree(repository, ignore_errors=True)
    text = file.read_text()
    for name, base in re.findall(r'name: "([^"]+)"\s+base_path: "([^"]+)"', text):
        for version in Path(base).iterdir():
            target = repository / name / version.name / "model.savedmodel"
            shutil.copytree(version, target)
        # The configuration, and the warm-up files that it names.
        model = Path(os.environ["STANDIN_CONFIG"])
        versions = [path.name for path in model.iterdir() if path.name.isdecimal()]
        ignored = shutil.ignore_patterns(*versions)
        shutil.copytree(model, repository / name, ignore=ignored, dirs_exist_ok=True)
    return repository


if __name__ == "__main__":
    main()
