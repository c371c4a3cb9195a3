"""modelport itself, started by its command line: plain, and with dynamic batching."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.servers.base import Command, PeerLaunch, PeerServer
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST


def executable() -> list[str]:
    """The installed command, else the module beside this Python, else a new installation."""
    local = environments.ROOT / ".venv" / "bin"
    for bin_folder in (Path(sys.executable).parent, local):
        if (bin_folder / "modelport").is_file():
            return [str(bin_folder / "modelport")]
    if (local / "python").is_file():
        return [str(local / "python"), "-m", "modelport"]
    return [str(environments.venv("modelport", "-e", str(environments.ROOT)) / "modelport")]


def command(launch: PeerLaunch) -> Command:
    ports = {"http": launch.http, "grpc": launch.grpc, "metrics": launch.metrics}
    flags = ["--model-repository", str(launch.repository), "--http-address", HOST]
    for name, port in ports.items():
        flags += [f"--{name}-port", str(port)]
    return Command([*executable(), "serve", *flags], cwd=environments.ROOT)


ALONE = PeerServer(
    "modelport",
    "one process",
    command,
    perf_analyzer=True,
)
APART = PeerServer(
    "modelport-apart",
    "its event loop on the clients' core: the server's is the model's alone",
    command,
    apart=True,
)
BATCHING = PeerServer(
    "modelport-batching",
    "dynamic batching with the preferred size told below",
    command,
    batching=True,
)
BATCHING_APART = replace(
    BATCHING,
    name="modelport-batching-apart",
    about="the same, its event loop on the clients' core",
    apart=True,
)
