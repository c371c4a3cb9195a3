"""``tensorflow_model_server`` as TensorFlow Serving's tests start it: a gateway with its flags.

The models that the flags or the file of ``--model_config_file`` name are copied into a repository.
With ``--model_config_file_poll_wait_seconds`` a second process keeps it as the file says.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

_CONFIG = re.compile(r'name:\s*"(?P<name>[^"]+)",?\s*base_path:\s*"(?P<path>[^"]+)"')
GRACE_SECONDS = 0.2


def main() -> None:
    options = flags()
    repository = Path(tempfile.mkdtemp(prefix="tensorflow-model-server-"))
    fill(repository, wanted(options))
    period = options.model_config_file_poll_wait_seconds
    if period:
        gateway = os.getpid()
        if not os.fork():
            follow(options, repository, period, gateway)
            return
    seconds = options.rest_api_timeout_in_ms / 1000
    command = [sys.executable, "-m", "modelport", "serve", "--model-repository", str(repository)]
    command += ["--http-port", str(options.rest_api_port), "--grpc-port", str(options.port)]
    command += ["--metrics-port", "0", "--max-request-timeout-secs", str(seconds)]
    command += ["--model-control-mode", "poll", "--repository-poll-secs", "0.5"]
    if options.monitoring_config_file:
        command += ["--monitoring-config-file", options.monitoring_config_file]
    os.execv(sys.executable, command)


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser("tensorflow_model_server")
    for name in ("port", "rest_api_port", "model_config_file_poll_wait_seconds"):
        parser.add_argument(f"--{name}", type=int, default=0)
    parser.add_argument("--rest_api_timeout_in_ms", type=int, default=30000)
    for name in ("model_config_file", "monitoring_config_file", "model_base_path"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--model_name", default="default")
    parser.add_argument("--prefer_tflite_model", default="false")
    for ignored in ("grpc_socket_path", "grpc_channel_arguments"):
        parser.add_argument(f"--{ignored}", default="")
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> dict[str, Path]:
    """Base paths by name."""
    if not options.model_config_file:
        return {options.model_name: Path(options.model_base_path)}
    found = _CONFIG.finditer(Path(options.model_config_file).read_text())
    return {each["name"]: Path(each["path"]) for each in found}


def fill(repository: Path, models: dict[str, Path]) -> None:
    """The repository holds these models and no others."""
    for name in {folder.name for folder in repository.iterdir()} - models.keys():
        shutil.rmtree(repository / name)
    for name, base in models.items():
        if (repository / name).exists():
            continue
        staged = Path(tempfile.mkdtemp(prefix="staged-"))
        for version in base.iterdir():
            if version.name.isdigit():
                into = staged / str(int(version.name))
                file = version / "model.tflite"
                into.mkdir()
                if file.exists():
                    shutil.copy(file, into / "model.tflite")
                else:
                    shutil.copytree(version, into / "model.savedmodel")
        staged.rename(repository / name)


def follow(options: argparse.Namespace, repository: Path, seconds: int, gateway: int) -> None:
    """Until the gateway ends."""
    while os.getppid() == gateway:
        time.sleep(seconds)
        models = wanted(options)
        if models:
            fill(repository, models)


if __name__ == "__main__":
    main()
