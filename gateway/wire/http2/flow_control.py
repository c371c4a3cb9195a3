"""A basic HTTP/2 window manager (RFC 9113, section 5.2), for connections and for streams."""

from __future__ import annotations

from modelport.gateway.wire.http2.frames import MAX_WINDOW_BYTES, ErrorCode, ProtocolError


class FlowControlError(ProtocolError):
    """A window was exceeded, or made larger than windows may be."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, ErrorCode.FLOW_CONTROL_ERROR)


class FlowController:
    """The two windows: what this side may send, and what the peer may send."""

    __slots__ = ("receive_window", "send_window")

    def __init__(self, send_window: int, receive_window: int) -> None:
        self.send_window = send_window
        self.receive_window = receive_window

    def widen(self, size: int) -> None:
        """Apply a WINDOW_UPDATE, or a change of SETTINGS_INITIAL_WINDOW_SIZE.

        Raises:
            FlowControlError: the window would be larger than windows may be.
        """
        if self.send_window + size > MAX_WINDOW_BYTES:
            raise FlowControlError("a window is larger than windows may be")
        self.send_window += size

    def replenish(self, target: int) -> int:
        """Open the receive window up to ``target`` bytes; return the WINDOW_UPDATE's increment."""
        increment = max(0, min(target, MAX_WINDOW_BYTES) - self.receive_window)
        self.receive_window += increment
        return increment
