"""HTTP/2's frames as bytes (RFC 9113), and header fields as literals (RFC 7541)."""

from __future__ import annotations

import struct
from collections import deque

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBI")  # length as 16 and 8 bits, type, flags, stream
FRAME_BYTES = FRAME.size
WORD = struct.Struct(">I")
SETTING = struct.Struct(">HI")
# Frame types.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE = range(6)
PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 6, 7, 8, 9
# Flags.
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, PRIORITISED = 0x4, 0x8, 0x20
# Settings.
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 1, 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6
# Error codes.
NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 5, 6, 7, 8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11
#: What a peer that says nothing else takes: in windows, and in a frame.
WINDOW_BYTES = 65_535
DEFAULT_FRAME_BYTES = 16_384
MAX_WINDOW_BYTES = 2**31 - 1
MAX_STREAM = 2**31 - 1
#: Of a block of headers, also across its frames, and of what it says.
MAX_HEADER_BYTES = 64 * 1024


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    size = len(payload)
    return FRAME.pack(size >> 8, size & 255, kind, flags, stream) + payload


def headers(stream: int, block: bytes, end: bool = False) -> bytes:
    """A block of headers, in as many frames as it takes."""
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
    """A header field that no table keeps (RFC 7541, 6.2.2), neither string compressed."""
    return b"".join((b"\0", _size(len(name)), name, _size(len(value)), value))


def _size(number: int) -> bytes:
    if number < 127:
        return bytes((number,))
    number -= 127
    parts = bytearray((127,))
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def take(waiting: deque[memoryview], limit: int) -> tuple[list[memoryview], int]:
    """At most ``limit`` bytes of the front of ``waiting``, and how many; they wait no longer."""
    taken, size = [], 0
    while waiting and size < limit:
        part = waiting[0]
        if len(part) <= limit - size:
            waiting.popleft()
        else:
            waiting[0] = part[limit - size :]
            part = part[: limit - size]
        taken.append(part)
        size += len(part)
    return taken, size
