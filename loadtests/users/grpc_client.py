"""Unary gRPC from prepared bytes: nothing is serialised inside the timed section."""

from __future__ import annotations

from time import perf_counter
from urllib.parse import unquote

import grpc

from modelport.loadtests.load.samples import Outcome
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.http import IDLE_SECONDS, reason
from modelport.loadtests.users.http2 import MESSAGE, GrpcUnaryConnection

CODES = {code.value[0]: code for code in grpc.StatusCode}
OUTCOMES = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Outcome.REFUSED,
    grpc.StatusCode.UNAVAILABLE: Outcome.REFUSED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Outcome.TIMED_OUT,
}
SAID_CHARACTERS = 200


class GrpcClient:
    """A client with one connection and one method; it reconnects after a loss."""

    method: str

    def __init__(self, target: LoadTestTarget, timeout_seconds: float) -> None:
        self.sent = self.first_byte = self.done = 0.0
        self._target, self._timeout_seconds = target, timeout_seconds
        self._connection: GrpcUnaryConnection | None = None

    def connect(self) -> None:
        self._connect()

    def _connect(self) -> GrpcUnaryConnection:
        try:
            made = GrpcUnaryConnection(self._target, self.method, self._timeout_seconds)
        except Exception as error:  # socket errors, and errors from a peer without HTTP/2
            raise Unanswered(Outcome.FAILED, f"cannot connect: {reason(error)}") from error
        self._connection = made
        return made

    def ask(self, request: bytes) -> tuple[bytes, int | None]:
        idle = perf_counter() - self.done > IDLE_SECONDS
        if self._connection is not None and idle and not self._connection.alive():
            self.close()
        self.sent = self.first_byte = perf_counter()
        connection, reconnected = self._connection, False
        if connection is None or connection.used_up:
            self.close()
            reconnected = True  # reconnecting counts as part of this request
            try:
                connection = self._connect()
            finally:
                self.done = self.first_byte = perf_counter()
        try:
            answer = connection.call(request)
            if not reconnected:
                self.sent = connection.sent
            self.done = connection.done
            fields = connection.decode(answer)
        except (TimeoutError, BlockingIOError) as error:
            self._lost(connection)
            raise Unanswered(
                Outcome.TIMED_OUT, f"no answer within {self._timeout_seconds:g} s"
            ) from error
        except Exception as error:  # socket errors, and errors from unreadable frames
            self._lost(connection)
            raise Unanswered(Outcome.FAILED, reason(error)) from error
        self.first_byte = connection.first_byte
        if fields.get("grpc-status") != "0":
            raise _unanswered(fields)
        compressed, size = MESSAGE.unpack_from(answer.data) if len(answer.data) >= 5 else (0, -1)
        if compressed or size != len(answer.data) - MESSAGE.size:
            raise Unanswered(Outcome.FAILED, "the answer is not one uncompressed message")
        return bytes(answer.data[MESSAGE.size :]), None

    def _lost(self, connection: GrpcUnaryConnection) -> None:
        self.done = perf_counter()
        self.first_byte = connection.first_byte or self.done
        self.close()

    def close(self) -> None:
        gone, self._connection = self._connection, None
        if gone is not None:
            gone.close()


def _unanswered(fields: dict[str, str]) -> Unanswered:
    """The error of a call, from its trailers."""
    status = fields.get("grpc-status")
    if status is None:
        return Unanswered(
            Outcome.FAILED, f"no gRPC: HTTP {fields.get(':status', 'without status')}"
        )
    code = CODES.get(int(status)) if status.isdecimal() else None
    said = " ".join(unquote(fields.get("grpc-message", "")).split())[:SAID_CHARACTERS]
    if code is None:
        return Unanswered(Outcome.FAILED, f"gRPC status {status}: {said}")
    return Unanswered(OUTCOMES.get(code, Outcome.FAILED), f"{code.name}: {said}")
