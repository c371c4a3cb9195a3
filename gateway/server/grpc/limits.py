"""Limits on what a client of one connection may cost. One that exceeds a limit gets a GOAWAY.

Work is counted only while nothing advances: every message, in either direction, every KiB of data
sent and every call that is answered pays for more frames than any client sends beside them.
"""

from __future__ import annotations

import socket

from modelport.gateway.wire.http2 import ENHANCE_YOUR_CALM
from modelport.gateway.wire.http2_reader import Broken

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
#: A call that is reset this soon, before any reply, was not meant to be answered (CVE-2023-44487).
QUICK_RESET_SECONDS = 0.1
MAX_QUICK_RESETS = 1000
QUICK_RESETS_PAID_PER_CALL = 4
QUICK_RESETS_PAID_PER_SECOND = 200
#: Frames that bring no part of a call: pings, settings, windows, empty ones. A settings frame
#: counts for more where it changes the windows of many streams.
MAX_IDLE_FRAMES = 2000
STREAMS_PER_IDLE_FRAME = 8
#: grpc-core sends up to four with a message: two windows, a ping, an acknowledgement.
IDLE_FRAMES_PAID_PER_MESSAGE = 16
#: As a power of two: so many bytes sent count as a message.
MESSAGE_BITS = 10
IDLE_FRAMES_PAID_PER_SECOND = 200
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


class AbuseLimits:
    """Counts the work that a client causes while none of its calls advances."""

    __slots__ = ("idle_frames", "quick_resets")

    def __init__(self) -> None:
        self.idle_frames = self.quick_resets = 0

    def idle_frame(self, streams: int = 0) -> None:
        """A frame that brings no part of a call; ``streams``: so many had to be looked at.

        Raises:
            Broken: it is one too many.
        """
        self.idle_frames += 1 + streams // STREAMS_PER_IDLE_FRAME
        if self.idle_frames > MAX_IDLE_FRAMES:
            raise Broken("too many frames that bring nothing", ENHANCE_YOUR_CALM)

    def reset(self, age_seconds: float) -> None:
        """A call of this age was reset before any reply, or made the server reset it.

        Raises:
            Broken: it is one too many.
        """
        if age_seconds < QUICK_RESET_SECONDS:
            self.quick_resets += 1
            if self.quick_resets > MAX_QUICK_RESETS:
                raise Broken("too many calls are reset", ENHANCE_YOUR_CALM)

    def advanced(self, messages: int = 1) -> None:
        """So many messages have come or were sent."""
        if self.idle_frames:
            paid = messages * IDLE_FRAMES_PAID_PER_MESSAGE
            self.idle_frames = max(0, self.idle_frames - paid)

    def answered(self) -> None:
        """A call was answered."""
        if self.quick_resets:
            self.quick_resets = max(0, self.quick_resets - QUICK_RESETS_PAID_PER_CALL)
        if self.idle_frames:
            self.idle_frames = max(0, self.idle_frames - IDLE_FRAMES_PAID_PER_MESSAGE)

    def second_passed(self) -> None:
        """A second has passed."""
        self.idle_frames = max(0, self.idle_frames - IDLE_FRAMES_PAID_PER_SECOND)
        self.quick_resets = max(0, self.quick_resets - QUICK_RESETS_PAID_PER_SECOND)
