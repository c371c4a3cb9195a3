"""Unary gRPC from prepared bytes (grpc/doc/PROTOCOL-HTTP2.md)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from urllib.parse import unquote

import grpc

from modelport.loadtests.load.samples import Outcome
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.http2_client import Http2Client

CODES = {code.value[0]: code for code in grpc.StatusCode}
OUTCOMES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.REFUSED,
    grpc.StatusCode.UNAVAILABLE: Outcome.REFUSED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.TIMED_OUT,
}
SAID_CHARACTERS = 200
MESSAGE = struct.Struct(">BI")  # compressed, length


class GrpcClient(Http2Client):
    """A client with one connection and one method, its path."""

    def fields(self) -> Mapping[str, str]:
        return {
            "content-type": "application/grpc",
            "te": "trailers",
            "grpc-timeout": f"{max(1, round(self._timeout_seconds * 1000))}m",
        }

    def ask(self, request: bytes) -> tuple[bytes, int | None]:
        return super().ask(MESSAGE.pack(0, len(request)) + request)

    def read(self, fields: Mapping[str, str], data: bytes) -> tuple[bytes, int | None]:
        if fields.get("grpc-status") != "0":
            raise _unanswered(fields)
        compressed, size = MESSAGE.unpack_from(data) if len(data) >= MESSAGE.size else (0, -1)
        if compressed or size != len(data) - MESSAGE.size:
            raise Unanswered(Outcome.FAILED, "the response is not one uncompressed message")
        return data[MESSAGE.size :], None


def _unanswered(fields: Mapping[str, str]) -> Unanswered:
    """The error of a call, from its trailers."""
    status = fields.get("grpc-status")
    if status is None:
        return Unanswered(
            Outcome.FAILED, f"not gRPC: HTTP {fields.get(':status', 'without status')}"
        )
    code = CODES.get(int(status)) if status.isdecimal() else None
    said = " ".join(unquote(fields.get("grpc-message", "")).split())[:SAID_CHARACTERS]
    if code is None:
        return Unanswered(Outcome.FAILED, f"gRPC status {status}: {said}")
    return Unanswered(OUTCOMES.get(code, Outcome.FAILED), f"{code.name}: {said}")
