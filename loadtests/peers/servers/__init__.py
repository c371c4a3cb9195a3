"""One entry per server. A further peer is one small file here and one line in `ALL`."""

from __future__ import annotations

from loadtests.peers.servers import bare, mlserver, modelport, triton
from loadtests.peers.servers.base import Server

ALL: dict[str, Server] = {
    server.name: server
    for server in (modelport.SERVER, bare.SERVER, mlserver.SERVER, triton.SERVER)
}
DEFAULT = (modelport.SERVER.name, bare.SERVER.name, mlserver.SERVER.name)  # triton is 440 MB
