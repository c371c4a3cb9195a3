"""A gRPC call in a process of its own, as the benchmark must not hold a channel when it forks.

grpc_probe.py ADDRESS METHOD REQUEST ANSWER: one call with the framed message of the file REQUEST;
the message that comes back goes into the file ANSWER.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

FRAME_BYTES = 5
TIMEOUT_SECONDS = 120
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def main(address: str, method: str, request: Path, answer: Path) -> None:
    with grpc.insecure_channel(address, UNLIMITED) as channel:
        call = channel.unary_unary(method)
        body = request.read_bytes()[FRAME_BYTES:]
        try:
            answer.write_bytes(call(body, timeout=TIMEOUT_SECONDS, wait_for_ready=True))
        except grpc.RpcError as error:
            raise SystemExit(f"{error.code()}: {error.details()}") from error


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
