"""What a client may cost, on one connection. Whoever passes a bound is told so in a GOAWAY."""

from __future__ import annotations

import socket

from gateway.wire.http2 import ENHANCE_YOUR_CALM
from gateway.wire.http2_reader import Broken

#: Calls at a time.
MAX_STREAMS = 1000
#: For the preface and the settings, and for any frame or header block that has begun to come.
HEAD_SECONDS = 10.0
#: A body may take long, but not stand still for longer than this.
BODY_IDLE_SECONDS = 30.0
#: Nor may a reply wait longer for its client to make room: as long as over HTTP.
UNREAD_SECONDS = 75.0
#: A connection without a call is ended then: as over HTTP.
IDLE_SECONDS = 75.0
#: A call that is reset this soon was not meant to be answered (CVE-2023-44487). So many more of
#: them than of calls that were finished end the connection.
QUICK_RESET_SECONDS = 0.1
MAX_QUICK_RESETS = 1000
#: Frames that bring no part of a call: pings, settings, windows, empty ones. Some are forgiven with
#: every call, every frame of data that is sent, and every second.
MAX_IDLE_FRAMES = 2000
FORGIVEN_PER_CALL = 4
FORGIVEN_PER_SECOND = 200
#: Answers to pings and settings that the client leaves unread.
UNREAD_BYTES = 2**24
#: Streams that were answered before they were sent whole, and whose rest is dropped.
MAX_ABANDONED = 4 * MAX_STREAMS
#: What is sent unacknowledged for so long has no receiver.
DEAD_PEER_SECONDS = 60
LINGER_SECONDS = 1.0


def notice_dead_peers(connection: socket.socket) -> None:
    """End ``connection`` when its other end has been gone for ``DEAD_PEER_SECONDS``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            connection.setsockopt(socket.IPPROTO_TCP, option, DEAD_PEER_SECONDS // 2)
        milliseconds = DEAD_PEER_SECONDS * 1000
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


class Patience:
    """Counts what brings nothing."""

    __slots__ = ("_idle_frames", "_quick_resets")

    def __init__(self) -> None:
        self._idle_frames = self._quick_resets = 0

    def idle_frame(self) -> None:
        """A frame that brings no part of a call.

        Raises:
            Broken: one too many.
        """
        self._idle_frames += 1
        if self._idle_frames > MAX_IDLE_FRAMES:
            raise Broken("too many frames that bring nothing", ENHANCE_YOUR_CALM)

    def reset(self, age_seconds: float) -> None:
        """A call of this age was reset, or made the server reset it.

        Raises:
            Broken: one too many.
        """
        if age_seconds < QUICK_RESET_SECONDS:
            self._quick_resets += 1
            if self._quick_resets > MAX_QUICK_RESETS:
                raise Broken("too many calls are reset", ENHANCE_YOUR_CALM)

    def finished(self) -> None:
        """A call was answered."""
        if self._quick_resets:
            self._quick_resets -= 1
        if self._idle_frames:
            self.forgive(FORGIVEN_PER_CALL)

    def forgive(self, frames: int) -> None:
        self._idle_frames = max(0, self._idle_frames - frames)
