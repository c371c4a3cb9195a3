"""Entries of the compared servers; a new one is one small file here and one line in `ALL`."""

from __future__ import annotations

from benchmarks.peers.servers import (
    bare,
    bentoml,
    kserve,
    litserve,
    mlserver,
    modelport,
    ray,
    torchserve,
    triton,
)
from benchmarks.peers.servers.base import PeerServer

ALL: dict[str, PeerServer] = {
    server.name: server
    for server in (
        modelport.ALONE,
        modelport.APART,
        modelport.BATCHING,
        modelport.BATCHING_APART,
        bare.SERVER,
        triton.SERVER,
        mlserver.SERVER,
        kserve.SERVER,
        litserve.SERVER,
        torchserve.SERVER,
        bentoml.SERVER,
        ray.SERVER,
    )
}
