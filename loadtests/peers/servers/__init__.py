"""One entry per server. A further peer is one small file here and one line in `ALL`."""

from __future__ import annotations

from modelport.loadtests.peers.servers import (
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
from modelport.loadtests.peers.servers.base import Server

ALL: dict[str, Server] = {
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
