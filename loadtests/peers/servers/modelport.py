"""modelport itself, driven by its command line only: each front, and dynamic batching."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
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


def on_front(front: str, launch: Launch) -> Command:
    chosen = command(launch)
    return replace(chosen, arguments=[*chosen.arguments, "--front", front])


PORTABLE = Server(
    "modelport-portable",
    "portable front, one process",
    functools.partial(on_front, "portable"),
    perf_analyzer=True,
)
ENVOY = Server(
    "modelport-envoy",
    "Envoy front, one process",
    functools.partial(on_front, "envoy"),
    perf_analyzer=True,
)
APART = Server(
    "modelport-apart",
    "portable front, its event loop on the clients' core: the server's is the model's alone",
    functools.partial(on_front, "portable"),
    apart=True,
)
BATCHING = Server(
    "modelport-batching",
    "portable front, dynamic batching with the preferred size told below",
    functools.partial(on_front, "portable"),
    batching=True,
)
BATCHING_APART = replace(
    BATCHING,
    name="modelport-batching-apart",
    about="the same, its event loop on the clients' core",
    apart=True,
)
