"""Runs inside the `probe` environment: grpc_probe.py ADDRESS FRAME_FILE.

Makes one ModelInfer call, checks its status and its tensor, leaves the framed request for h2load
and prints the size of a correct framed response.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import grpc
from tritonclient.grpc import service_pb2 as pb

METHOD = "/inference.GRPCInferenceService/ModelInfer"
VALUES = (1.0, 2.0, 3.0, 4.0)
FRAME_HEADER = struct.Struct(">BI")  # not compressed, length


def main(address: str, frame: Path) -> None:
    request = pb.ModelInferRequest(model_name="x2")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(struct.pack("<4f", *VALUES))
    body = request.SerializeToString()
    frame.write_bytes(FRAME_HEADER.pack(0, len(body)) + body)
    with grpc.insecure_channel(address) as channel:
        raw: bytes = channel.unary_unary(METHOD)(body, timeout=10, wait_for_ready=True)
    reply = pb.ModelInferResponse.FromString(raw)
    if reply.raw_output_contents:
        got = struct.unpack("<4f", reply.raw_output_contents[0])
    else:
        got = tuple(reply.outputs[0].contents.fp32_contents)
    if got != tuple(2 * value for value in VALUES) or list(reply.outputs[0].shape) != [1, 4]:
        raise SystemExit(f"wrong answer: {reply}")
    print(FRAME_HEADER.size + len(raw))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
