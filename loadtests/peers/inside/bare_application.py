"""Runs inside the `bare` environment: bare_application.py MODEL HTTP_PORT GRPC_PORT."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import numpy
import onnxruntime
import orjson
import uvicorn
from tritonclient.grpc import service_pb2 as pb

HOST = "127.0.0.1"
HEADERS = [(b"content-type", b"application/json")]


def load(path: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


async def answer(send: Any, body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, length]})
    await send({"type": "http.response.body", "body": body})


def asgi(session: onnxruntime.InferenceSession) -> Any:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        if not scope["path"].endswith("/infer"):
            await answer(send, b"{}")
            return
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        tensor = orjson.loads(body)["inputs"][0]
        x = numpy.array(tensor["data"], numpy.float32).reshape(tensor["shape"])
        y = session.run(["y"], {"x": x})[0]
        output = {"name": "y", "datatype": "FP32", "shape": y.shape, "data": y.ravel()}
        reply = {"model_name": "x2", "model_version": "1", "outputs": [output]}
        await answer(send, orjson.dumps(reply, option=orjson.OPT_SERIALIZE_NUMPY))

    return application


def grpc_server(session: onnxruntime.InferenceSession, port: int) -> grpc.aio.Server:
    async def infer(request: Any, context: Any) -> Any:
        x = numpy.frombuffer(request.raw_input_contents[0], numpy.float32)
        y = session.run(["y"], {"x": x.reshape(request.inputs[0].shape)})[0]
        reply = pb.ModelInferResponse(model_name="x2", model_version="1")
        reply.outputs.add(name="y", datatype="FP32", shape=y.shape)
        reply.raw_output_contents.append(y.tobytes())
        return reply

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
    session = load(model)
    server = grpc_server(session, grpc_port)
    await server.start()
    config = uvicorn.Config(
        asgi(session), host=HOST, port=http_port, log_level="warning", access_log=False
    )
    await uvicorn.Server(config).serve()
    await server.stop(1)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
