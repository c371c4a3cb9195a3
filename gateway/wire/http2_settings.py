"""The settings of an HTTP/2 peer (RFC 9113, 6.5), validated in one place for both roles."""

from __future__ import annotations

from modelport.gateway.wire.http2 import (
    DEFAULT_FRAME_BYTES,
    ENABLE_PUSH,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    INITIAL_WINDOW_SIZE,
    MAX_CONCURRENT_STREAMS,
    MAX_FRAME_SIZE,
    MAX_STREAM,
    MAX_WINDOW_BYTES,
    SETTING,
    WINDOW_BYTES,
)
from modelport.gateway.wire.http2_reader import MAX_DATA_BYTES, Broken

#: Entries of one frame, as nghttp2 has it; the RFC defines six settings.
MAX_ENTRIES = 32
_MAX_FRAME_BYTES = 2**24 - 1


class PeerSettings:
    """What the peer has announced, and RFC 9113's defaults until then."""

    __slots__ = ("initial_window", "max_frame", "max_streams")

    def __init__(self) -> None:
        #: What may be sent on a new stream.
        self.initial_window = WINDOW_BYTES
        #: The largest payload of a frame that is sent to the peer.
        self.max_frame = DEFAULT_FRAME_BYTES
        self.max_streams = MAX_STREAM

    def update(self, payload: bytes) -> int:
        """Take a SETTINGS frame's ``payload``; return by how much every stream's window changes.

        Raises:
            Broken: a value is out of its range, or there are too many.
        """
        if len(payload) > MAX_ENTRIES * SETTING.size:
            raise Broken("too many settings in a frame", ENHANCE_YOUR_CALM)
        before = self.initial_window
        for number, value in SETTING.iter_unpack(payload):
            if number == INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW_BYTES:
                    raise Broken("a window is larger than windows may be", FLOW_CONTROL_ERROR)
                self.initial_window = value
            elif number == MAX_FRAME_SIZE:
                if not DEFAULT_FRAME_BYTES <= value <= _MAX_FRAME_BYTES:
                    raise Broken("a frame size that is not allowed")
                self.max_frame = min(value, MAX_DATA_BYTES)
            elif number == MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif number == ENABLE_PUSH and value > 1:
                raise Broken("a setting is 0 or 1")
        return self.initial_window - before
