"""Stands in for ``tritonserver`` and ``tensorflow_model_server``: their flags, modelport behind.

    python standin.py <file> --http-port=... --model-repository=...

``file`` says what it does this time: ``serve``; ``crash`` with a line of trouble; ``mute``, which
never gets ready; ``flood``, which prints 8 MB in one line and then serves; ``breed``, which starts
two more processes, one of them in a session of its own, and serves.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

FLOOD_BYTES = 8_000_000
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def main() -> None:
    mode = Path(sys.argv[1]).read_text()
    flags = dict(flag.removeprefix("--").split("=", 1) for flag in sys.argv[2:])
    if mode == "crash":
        print("I am about to begin", flush=True)
        print(
            "error: creating server: /opt/somewhere/lib.so is broken", file=sys.stderr, flush=True
        )
        print("so long", flush=True)
        sys.exit(3)
    if mode == "mute":
        time.sleep(600)
    if mode == "flood":
        sys.stdout.write("x" * FLOOD_BYTES)
        sys.stdout.flush()
    if mode == "breed":
        subprocess.Popen(SLEEP)
        subprocess.Popen(SLEEP, start_new_session=True)
    ports = ["--metrics-port=0"]
    if "model_config_file" in flags:
        repository = tensorflow_models(Path(flags["model_config_file"]))
        ports += [f"--http-port={flags['rest_api_port']}", f"--grpc-port={flags['port']}"]
    else:
        repository = Path(flags["model-repository"])
        ports += [f"--{name}={flags[name]}" for name in ("http-port", "grpc-port")]
    command = [*("serve", "--model-repository", str(repository)), *ports]
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
