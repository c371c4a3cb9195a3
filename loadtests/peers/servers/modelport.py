"""modelport itself, on its portable front, driven by its command line only."""

from __future__ import annotations

import sys
from pathlib import Path

from loadtests import environments
from loadtests.peers.servers.base import Command, Launch, Server
from loadtests.processes import HOST


def executable() -> list[str]:
    """The installed command, else the module beside this Python, else an installation of it."""
    local = environments.ROOT / ".venv" / "bin"
    for bin_folder in (Path(sys.executable).parent, local):
        if (bin_folder / "modelport").is_file():
            return [str(bin_folder / "modelport")]
    if (local / "python").is_file():
        return [str(local / "python"), "-m", "gateway.cli"]
    return [str(environments.venv("modelport", "-e", str(environments.ROOT)) / "modelport")]


def command(launch: Launch) -> Command:
    ports = {"http": launch.http, "grpc": launch.grpc, "metrics": launch.metrics}
    flags = ["--model-repository", str(launch.repository), "--http-address", HOST]
    for name, port in ports.items():
        flags += [f"--{name}-port", str(port)]
    return Command([*executable(), "serve", *flags], cwd=environments.ROOT)


SERVER = Server("modelport", "portable front, one process", command)
