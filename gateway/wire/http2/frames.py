"""HTTP/2 frames as bytes (RFC 9113, sections 4 and 6), and HPACK literals (RFC 7541)."""

from __future__ import annotations

import struct
from enum import IntEnum

from modelport.gateway.wire.protobuf import varint

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBI")  # length as 16 and 8 bits, type, flags, stream
FRAME_BYTES = FRAME.size
WORD = struct.Struct(">I")
SETTING = struct.Struct(">HI")
# Frame types. Plain numbers: a member of an enumeration takes longer to look up.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
# Flags.
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITISED = 0x4, 0x8, 0x20
# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6
#: The initial window and frame size of a peer that announces no others.
DEFAULT_WINDOW_BYTES = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW_BYTES = 2**31 - 1
MAX_STREAM = 2**31 - 1
#: The largest DATA frame that is accepted.
MAX_DATA_BYTES = 2**22


class ErrorCode(IntEnum):
    """The error codes of RST_STREAM and GOAWAY (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class ProtocolError(Exception):
    """The peer violated HTTP/2, or exceeded a limit. The connection ends with ``code``."""

    def __init__(self, reason: str, code: ErrorCode = ErrorCode.PROTOCOL_ERROR) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 8, size & 255, kind, flags, stream) + payload


def headers(stream: int, block: bytes, end: bool = False) -> bytes:
    """A header block in a HEADERS frame and as many CONTINUATION frames as it takes."""
    flags = END_STREAM if end else 0
    if len(block) <= DEFAULT_FRAME_BYTES:
        return frame(HEADERS, flags | END_HEADERS, stream, block)
    parts = [
        block[at : at + DEFAULT_FRAME_BYTES] for at in range(0, len(block), DEFAULT_FRAME_BYTES)
    ]
    frames = [frame(HEADERS, flags, stream, parts[0])]
    frames += (frame(CONTINUATION, 0, stream, part) for part in parts[1:-1])
    return b"".join((*frames, frame(CONTINUATION, END_HEADERS, stream, parts[-1])))


def settings(*pairs: tuple[int, int]) -> bytes:
    """A SETTINGS frame of (setting, value)."""
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(*pair) for pair in pairs))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, WORD.pack(size))


def reset(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, WORD.pack(code))


def go_away(last_stream: int, code: int, reason: bytes = b"") -> bytes:
    return frame(GOAWAY, 0, 0, WORD.pack(last_stream) + WORD.pack(code) + reason)


def literal(name: bytes, value: bytes) -> bytes:
    """A header field without indexing (RFC 7541, 6.2.2), neither string compressed."""
    return b"".join((b"\0", _size(len(name)), name, _size(len(value)), value))


def _size(number: int) -> bytes:
    return bytes((number,)) if number < 127 else b"\x7f" + varint(number - 127)
