"""Triton as NVIDIA builds it, from the pytriton wheel, which brings its Python backend only."""

from __future__ import annotations

from benchmarks.peers.servers.base import Command, PeerLaunch, PeerServer
from modelport.loadtests.serving import pytriton


def command(launch: PeerLaunch) -> Command:
    return Command(
        *pytriton.command(
            launch.repository, launch.model, launch.work, launch.http, launch.grpc, launch.metrics
        )
    )


# Triton's processes share a lock in memory and abort when taking it lasts longer than 10 seconds,
# as it does while its holder is stopped. An idle Triton takes next to nothing of the core.
SERVER = PeerServer("triton", "2.51, Python backend", command, perf_analyzer=True, stoppable=False)
