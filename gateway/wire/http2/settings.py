"""The settings of HTTP/2 (RFC 9113, 6.5): those that a server announces, and those of a peer."""

from __future__ import annotations

from modelport.gateway.wire.http2 import frames
from modelport.gateway.wire.http2.flow_control import FlowControlError
from modelport.gateway.wire.http2.frames import SETTING, ErrorCode, ProtocolError

#: Concurrent streams of a connection that a server accepts.
MAX_STREAMS = 1000
#: The initial receive window of a stream, of a server and of a client that reads several replies.
STREAM_WINDOW_BYTES = 1024 * 1024
#: The entries of one frame, nghttp2's limit; the RFC defines six settings.
MAX_ENTRIES = 32
_MAX_FRAME_BYTES = 2**24 - 1


def server_greeting(max_header_bytes: int) -> bytes:
    """The SETTINGS frame of a server, and the window of its whole connection: no limit."""
    return frames.settings(
        (frames.MAX_CONCURRENT_STREAMS, MAX_STREAMS),
        (frames.INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
        (frames.MAX_FRAME_SIZE, frames.MAX_DATA_BYTES),
        (frames.MAX_HEADER_LIST_SIZE, max_header_bytes),
    ) + frames.window_update(0, frames.MAX_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES)


class PeerSettings:
    """The settings that the peer has announced, and RFC 9113's defaults until then."""

    __slots__ = ("initial_window", "max_frame", "max_streams")

    def __init__(self) -> None:
        #: The send window of a new stream.
        self.initial_window = frames.DEFAULT_WINDOW_BYTES
        #: The largest payload of a frame that is sent to the peer.
        self.max_frame = frames.DEFAULT_FRAME_BYTES
        self.max_streams = frames.MAX_STREAM

    def update(self, payload: bytes) -> int:
        """Apply a SETTINGS frame's ``payload``; return the change of every stream's send window.

        Raises:
            ProtocolError: a value is out of its range, or there are too many.
        """
        if len(payload) > MAX_ENTRIES * SETTING.size:
            raise ProtocolError("too many settings in a frame", ErrorCode.ENHANCE_YOUR_CALM)
        before = self.initial_window
        for number, value in SETTING.iter_unpack(payload):
            if number == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW_BYTES:
                    raise FlowControlError("a window is larger than windows may be")
                self.initial_window = value
            elif number == frames.MAX_FRAME_SIZE:
                if not frames.DEFAULT_FRAME_BYTES <= value <= _MAX_FRAME_BYTES:
                    raise ProtocolError("SETTINGS_MAX_FRAME_SIZE is out of range")
                self.max_frame = min(value, frames.MAX_DATA_BYTES)
            elif number == frames.MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif number == frames.ENABLE_PUSH and value > 1:
                raise ProtocolError("SETTINGS_ENABLE_PUSH is neither 0 nor 1")
        return self.initial_window - before
