"""Requests on a bare HTTP/2 connection under gevent, from prepared bytes, one at a time.

Client libraries' own overhead is a large part of a fast model's latency, differs between them and
hides the first byte. Frames: RFC 9113.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections.abc import Mapping
from time import perf_counter

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError

from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users import authentication, sockets

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
GOAWAY, WINDOW_UPDATE, CONTINUATION = 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 1, 1, 4, 8, 32
ENABLE_PUSH, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 2, 4, 5
LARGEST_WINDOW = 2**31 - 1
DEFAULT_WINDOW, DEFAULT_FRAME = 65_535, 16_384
LAST_STREAM = 2**31 - 3
RECEIVE_BYTES = 1 << 18
FRAME = struct.Struct(">HBBBI")  # length (24 bits in two fields), type, flags, stream


class ConnectionBroken(ConnectionError):
    """The peer ended the connection or the stream, or does not speak HTTP/2."""


class Http2Answer:
    """The answer to one request; header blocks are decoded after the timed section."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []
        self.data = bytearray()
        self.ended = False
        #: Whether frames of the last header block are missing.
        self.ending = False


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 8, size & 255, kind, flags, stream) + payload


class Http2UserConnection:
    """A connection; ``call`` sends one request and waits for the end of the stream.

    All requests are a POST to ``path`` with the same header ``fields``.
    """

    def __init__(
        self, target: LoadTestTarget, path: str, fields: Mapping[str, str], timeout_seconds: float
    ) -> None:
        self.sent = self.first_byte = self.done = 0.0
        self._timeout_seconds = timeout_seconds
        tls = authentication.context(target, authentication.HTTP2)
        self._socket = sockets.connect(sockets.address(target.address), timeout_seconds, tls)
        self._buffer = bytearray()
        self._stream = -1
        self._frame_size, self._window, self._stream_window = DEFAULT_FRAME, DEFAULT_WINDOW, 0
        self._initial_window = DEFAULT_WINDOW
        self._owed = 0
        self._decoder = Decoder()
        #: Decoded header blocks that do not refer to the dynamic table.
        self._known: dict[bytes, list[tuple[str, str]]] = {}
        self._head = Encoder().encode(
            [
                (name, value, True)  # never indexed: every request's block is the same
                for name, value in (
                    (":method", "POST"),
                    (":scheme", "http" if tls is None else "https"),
                    (":path", path),
                    (":authority", target.address),
                    ("user-agent", "modelport-loadtest"),
                    *fields.items(),
                    *authentication.headers(target).items(),
                )
            ],
            huffman=False,
        )
        self._settled = False
        try:
            self._handshake()
        except BaseException:
            self.close()
            raise

    def _handshake(self) -> None:
        settings = struct.pack(">HIHI", ENABLE_PUSH, 0, INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        more = struct.pack(">I", LARGEST_WINDOW - DEFAULT_WINDOW)
        self._socket.sendall(
            PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, more)
        )
        deadline = perf_counter() + self._timeout_seconds
        while not self._settled:
            self._receive(None, deadline)

    @property
    def used_up(self) -> bool:
        return self._stream >= LAST_STREAM

    def alive(self) -> bool:
        """Whether the peer has kept an idle connection open; its pings are answered."""
        try:
            while sockets.readable(self._socket):
                self._receive(None, math.inf)
        except Exception:  # errors of the socket, and of unreadable frames
            return False
        return True

    def call(self, body: bytes) -> Http2Answer:
        """Send one request; raises ``OSError``, ``TimeoutError`` or ``ConnectionBroken``."""
        self._stream += 2
        stream, answer = self._stream, Http2Answer()
        self._stream_window = self._initial_window
        self.first_byte = 0.0
        self.sent = perf_counter()
        deadline = self.sent + self._timeout_seconds
        head = frame(HEADERS, END_HEADERS, stream, self._head)
        if len(body) <= min(self._frame_size, self._window, self._stream_window):
            self._window -= len(body)
            self._socket.sendall(head + frame(DATA, END_STREAM, stream, body))
        else:
            self._socket.sendall(head)
            self._send_parts(stream, body, answer, deadline)
        while not answer.ended:
            self._receive(answer, deadline)
        return answer

    def _send_parts(self, stream: int, body: bytes, answer: Http2Answer, deadline: float) -> None:
        """Send as the peer's flow-control windows allow."""
        position = 0
        while position < len(body) and not answer.ended:
            size = min(self._frame_size, self._window, self._stream_window, len(body) - position)
            if size <= 0:
                self._receive(answer, deadline)
                continue
            part, position = body[position : position + size], position + size
            self._window -= size
            self._stream_window -= size
            last = END_STREAM if position == len(body) else 0
            self._socket.sendall(frame(DATA, last, stream, part))

    def _receive(self, answer: Http2Answer | None, deadline: float) -> None:
        """Read once, and process the complete frames."""
        data = self._socket.recv(RECEIVE_BYTES)
        now = perf_counter()
        self.done = now
        if not data:
            raise ConnectionBroken("the server closed the connection")
        buffer = self._buffer
        buffer += data
        position = 0
        while len(buffer) - position >= FRAME.size:
            high, low, kind, flags, stream = FRAME.unpack_from(buffer, position)
            begin = position + FRAME.size
            size = high << 8 | low
            if size > DEFAULT_FRAME or not (self._settled or kind == SETTINGS):
                raise ConnectionBroken("the server violates HTTP/2; is this the right port?")
            end = begin + size
            if end > len(buffer):
                break
            self._take(kind, flags, stream, bytes(buffer[begin:end]), answer)
            position = end
        del buffer[:position]
        if now > deadline and (answer is None or not answer.ended):
            raise TimeoutError

    def _take(
        self, kind: int, flags: int, stream: int, payload: bytes, answer: Http2Answer | None
    ) -> None:
        mine = answer is not None and stream == self._stream
        if kind in (DATA, HEADERS, CONTINUATION):
            if kind != CONTINUATION:
                payload = _bare(kind, flags, payload)
            if not mine or answer is None:
                if kind != DATA:  # of an earlier stream: the header table must stay in sync
                    self._decoder.decode(payload)
                return
            self._add(kind, flags, payload, answer)
        elif kind == SETTINGS and not flags & ACK:
            self._settle(payload)
        elif kind == PING and not flags & ACK:
            self._socket.sendall(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            more = struct.unpack(">I", payload)[0] & LARGEST_WINDOW
            if stream == 0:
                self._window += more
            elif stream == self._stream:
                self._stream_window += more
        elif kind == RST_STREAM and mine:
            if self.done - self.sent >= self._timeout_seconds:
                raise TimeoutError  # the server's own deadline of the call passed
            raise ConnectionBroken(
                f"the stream was reset with error {struct.unpack('>I', payload)[0]}"
            )
        elif kind == GOAWAY:
            raise ConnectionBroken(
                f"the server sent GOAWAY: {payload[8:].decode(errors='replace')}".strip()
            )

    def _add(self, kind: int, flags: int, payload: bytes, answer: Http2Answer) -> None:
        """Process a frame of the answer."""
        self.first_byte = self.first_byte or self.done
        if kind == DATA:
            answer.data += payload
            answer.ended = bool(flags & END_STREAM)
            self._owed += len(payload)
            if self._owed > LARGEST_WINDOW // 4:  # a stream's own window is never exhausted
                self._socket.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._owed)))
                self._owed = 0
            return
        if kind == HEADERS:
            answer.blocks.append(payload)
            answer.ending = bool(flags & END_STREAM)
        else:
            answer.blocks[-1] += payload
        answer.ended = answer.ending and bool(flags & END_HEADERS)

    def _settle(self, payload: bytes) -> None:
        for number, value in struct.iter_unpack(">HI", payload):
            if number == INITIAL_WINDOW_SIZE:
                self._stream_window += value - self._initial_window
                self._initial_window = value
            elif number == MAX_FRAME_SIZE:
                self._frame_size = value
        self._socket.sendall(frame(SETTINGS, ACK, 0))
        self._settled = True

    def decode(self, answer: Http2Answer) -> dict[str, str]:
        """Decode the header fields of an answer, trailers last; once per answer, in order."""
        try:
            return {name: value for block in answer.blocks for name, value in self._fields(block)}
        except HPACKError as error:
            raise ConnectionBroken(f"unreadable header fields: {error}") from error

    def _fields(self, block: bytes) -> list[tuple[str, str]]:
        if (known := self._known.get(block)) is not None:
            return known
        found = [(str(name), str(value)) for name, value in self._decoder.decode(block)]
        if not self._decoder.header_table.dynamic_entries:
            self._known[block] = found
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()


def _bare(kind: int, flags: int, payload: bytes) -> bytes:
    """The payload without padding and priority."""
    if flags & PADDED:
        payload = payload[1 : len(payload) - payload[0]]
    return payload[5:] if kind == HEADERS and flags & PRIORITY else payload
