"""Runs inside the `bare` environment: bare_uvicorn.py MODEL HTTP_PORT GRPC_PORT."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvicorn
import uvloop
from bare import Bare
from tritonclient.grpc import service_pb2 as pb

HOST = "127.0.0.1"


def grpc_server(bare: Bare, port: int) -> grpc.aio.Server:
    async def infer(request: Any, context: Any) -> Any:
        return bare.grpc(request)

    handler = grpc.unary_unary_rpc_method_handler(
        infer, pb.ModelInferRequest.FromString, pb.ModelInferResponse.SerializeToString
    )
    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler(
        "inference.GRPCInferenceService", {"ModelInfer": handler}
    )
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"{HOST}:{port}")
    return server


async def main(model: str, http_port: int, grpc_port: int) -> None:
    bare = Bare(model)
    server = grpc_server(bare, grpc_port)
    await server.start()
    config = uvicorn.Config(
        bare.http,
        interface="asgi3",
        host=HOST,
        port=http_port,
        log_level="warning",
        access_log=False,
    )
    await uvicorn.Server(config).serve()
    await server.stop(1)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
