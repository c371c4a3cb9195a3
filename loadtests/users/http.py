"""A minimal HTTP/1.1 client: prepared bytes, one socket, llhttp, and the clock.

Times are taken directly at the system calls, so later processing of an answer does not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from time import perf_counter
from typing import Any
from urllib.parse import quote

from geventhttpclient.response import HTTPResponse

from modelport.loadtests.load.samples import Outcome
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import authentication, sockets
from modelport.loadtests.users.client import Unanswered

RECEIVE_BYTES = 1 << 18
#: A connection idle for this long may have been closed.
IDLE_SECONDS = 1.0
BINARY_SIZE = "inference-header-content-length"
REFUSED_STATUSES = (429, 503)
#: Bytes of an error's body in its message.
SAID_BYTES = 200


def request(target: LoadTestTarget, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """Head and body of a POST, ready for the socket."""
    lines = [f"POST {path} HTTP/1.1", f"host: {target.address}", f"content-length: {len(body)}"]
    given = {**headers, **authentication.headers(target)}
    lines += [f"{name}: {value}" for name, value in given.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def segment(text: str) -> str:
    """Escape a name as a segment of a path."""
    return quote(text, safe="")


class HttpClient:
    """A client with one connection; it reconnects if the server closed it."""

    def __init__(self, target: LoadTestTarget, timeout_seconds: float) -> None:
        self.sent = self.first_byte = self.done = 0.0
        self._address = sockets.address(target.address)
        self._timeout_seconds = timeout_seconds
        self._tls = authentication.context(target)
        self._socket: Any = None

    def connect(self) -> None:
        try:
            self._socket = sockets.connect(self._address, self._timeout_seconds, self._tls)
        except OSError as error:
            raise Unanswered(Outcome.FAILED, f"cannot connect: {reason(error)}") from error

    def ask(self, request: bytes) -> tuple[bytes, int | None]:
        idle = perf_counter() - self.done > IDLE_SECONDS
        if self._socket is not None and idle and sockets.readable(self._socket):
            self.close()  # the server may have closed the idle connection
        self.sent = perf_counter()
        if self._socket is None:
            try:
                self.connect()
            except Unanswered:
                self.first_byte = self.done = perf_counter()
                raise
        try:
            answer = self._exchange(request)
        except (TimeoutError, BlockingIOError) as error:
            self._lost()
            raise Unanswered(
                Outcome.TIMED_OUT, f"no response within {self._timeout_seconds:g} s"
            ) from error
        except Exception as error:  # errors of the socket and of the parser
            self._lost()
            raise Unanswered(Outcome.FAILED, reason(error)) from error
        if answer.should_close():
            self.close()
        return answered(answer.get_code(), bytes(answer._body_buffer), answer.get(BINARY_SIZE))

    def _exchange(self, request: bytes) -> HTTPResponse:
        assert self._socket is not None
        receive = self._socket.recv
        answer = HTTPResponse("POST")
        self.first_byte = 0.0
        self._socket.sendall(request)
        while True:
            data = receive(RECEIVE_BYTES)
            now = perf_counter()
            if not self.first_byte:
                self.first_byte = now
            self.done = now
            if not data:
                answer.feed(b"")  # the end of an answer without a length
                if answer.message_complete:
                    return answer
                raise ConnectionResetError("the server closed the connection")
            answer.feed(data)
            if answer.message_complete and answer.get_code() >= 200:
                return answer
            if now - self.sent > self._timeout_seconds:
                raise TimeoutError

    def _lost(self) -> None:
        self.done = perf_counter()
        self.first_byte = self.first_byte or self.done
        self.close()

    def close(self) -> None:
        gone, self._socket = self._socket, None
        if gone is not None:
            with contextlib.suppress(OSError):
                gone.close()


def answered(status: int, body: bytes, size: object) -> tuple[bytes, int | None]:
    """Return an answer's body, and the size of its JSON part, which ``size`` states.

    Raises:
        Unanswered: It is an error.
    """
    if status != 200:
        said = " ".join(body[:SAID_BYTES].decode(errors="replace").split())
        outcome = Outcome.REFUSED if status in REFUSED_STATUSES else Outcome.FAILED
        raise Unanswered(outcome, f"HTTP {status}: {said}")
    try:
        return body, None if size is None else int(str(size))
    except ValueError as error:
        raise Unanswered(Outcome.FAILED, f"{BINARY_SIZE}: '{size}' is not a number") from error


def reason(error: Exception) -> str:
    """The message of a system or library error."""
    said = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(said).strip()
