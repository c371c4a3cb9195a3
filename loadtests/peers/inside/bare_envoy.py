"""Runs inside Envoy (pyvoy), both protocols on one port: the model of $MODEL_FILE."""

from __future__ import annotations

import os
import struct
from typing import Any

from bare import Bare, read
from tritonclient.grpc import service_pb2 as pb

FRAME = struct.Struct(">BI")  # not compressed, length
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/grpc")],
    "trailers": True,
}
TRAILERS = {"type": "http.response.trailers", "headers": [(b"grpc-status", b"0")]}
PATH = "/inference.GRPCInferenceService/ModelInfer"

bare = Bare(os.environ["MODEL_FILE"])


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    if scope["path"] != PATH:
        await bare.http(scope, receive, send)
        return
    request = pb.ModelInferRequest.FromString((await read(receive))[FRAME.size :])
    reply = bare.grpc(request).SerializeToString()
    await send(START)
    body = FRAME.pack(0, len(reply)) + reply
    await send({"type": "http.response.body", "body": body, "more_body": False})
    await send(TRAILERS)
