"""Clients over HTTP/2 from prepared bytes: nothing is serialised inside the timed section."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from time import perf_counter
from typing import Any

from modelport.loadtests.load.samples import Outcome
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.http import BINARY_SIZE, IDLE_SECONDS, answered, reason
from modelport.loadtests.users.http2 import Http2UserConnection


class Http2Client(ABC):
    """A client with one connection, whose requests have one path; it reconnects after a loss."""

    def __init__(self, path: str, target: LoadTestTarget, timeout_seconds: float) -> None:
        self.sent = self.first_byte = self.done = 0.0
        self._path, self._target, self._timeout_seconds = path, target, timeout_seconds
        self._connection: Http2UserConnection | None = None

    @abstractmethod
    def fields(self) -> Mapping[str, str]:
        """Return the header fields of all requests."""

    @abstractmethod
    def read(self, fields: Mapping[str, str], data: bytes) -> tuple[Any, int | None]:
        """Return what ``ask`` does, of the header fields and the data of an answer.

        Raises:
            Unanswered: It is an error.
        """

    def connect(self) -> None:
        self._connect()

    def _connect(self) -> Http2UserConnection:
        try:
            made = Http2UserConnection(
                self._target, self._path, self.fields(), self._timeout_seconds
            )
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
                Outcome.TIMED_OUT, f"no response within {self._timeout_seconds:g} s"
            ) from error
        except Exception as error:  # socket errors, and errors from unreadable frames
            self._lost(connection)
            raise Unanswered(Outcome.FAILED, reason(error)) from error
        self.first_byte = connection.first_byte
        return self.read(fields, bytes(answer.data))

    def _lost(self, connection: Http2UserConnection) -> None:
        self.done = perf_counter()
        self.first_byte = connection.first_byte or self.done
        self.close()

    def close(self) -> None:
        gone, self._connection = self._connection, None
        if gone is not None:
            gone.close()


class JsonOverHttp2(Http2Client):
    """A client of JSON over HTTP/2: with prior knowledge in clear text, by ALPN over TLS."""

    def fields(self) -> Mapping[str, str]:
        return {"content-type": "application/json"}

    def read(self, fields: Mapping[str, str], data: bytes) -> tuple[bytes, int | None]:
        status = fields.get(":status", "")
        if not status.isdecimal():
            raise Unanswered(Outcome.FAILED, "the response has no status")
        return answered(int(status), data, fields.get(BINARY_SIZE))
