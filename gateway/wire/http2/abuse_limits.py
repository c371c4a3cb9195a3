"""Limits on the work that a peer may cause on one connection while no stream advances.

Every message, in either direction, every KiB of data sent and every completed stream pays for more
frames than any real peer sends beside them. A peer that exceeds a limit gets a GOAWAY.
"""

from __future__ import annotations

from collections.abc import Callable

from modelport.gateway.wire.http2.frames import ErrorCode, ProtocolError
from modelport.gateway.wire.http2.settings import MAX_STREAMS

#: Streams that were closed early, and whose remaining frames are dropped.
MAX_ABANDONED = 4 * MAX_STREAMS
#: Answers to pings and settings that the peer leaves unread.
UNREAD_BYTES = 2**24
#: The age of a stream whose reset counts: the peer never meant it to complete (CVE-2023-44487).
QUICK_RESET_SECONDS = 0.1
MAX_QUICK_RESETS = 1000
QUICK_RESETS_PAID_PER_STREAM = 4
QUICK_RESETS_PAID_PER_SECOND = 200
#: Frames that carry no part of a message: pings, settings, windows, empty ones. A settings frame
#: counts for more if it changes the windows of many streams.
MAX_IDLE_FRAMES = 2000
STREAMS_PER_IDLE_FRAME = 8
#: grpc-core sends up to four with a message: two windows, a ping, an acknowledgement.
IDLE_FRAMES_PAID_PER_MESSAGE = 16
IDLE_FRAMES_PAID_PER_SECOND = 200
#: A power of two: the bytes sent that count as a message.
MESSAGE_BITS = 10


class AbuseLimits:
    """Counters of one connection. Passing time pays, too: it is looked at when a limit is hit."""

    __slots__ = ("_clock", "_paid_at", "idle_frames", "quick_resets")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._paid_at = clock, clock()
        self.idle_frames = self.quick_resets = 0

    def idle_frame(self, streams: int = 0) -> None:
        """Count a frame that carries no part of a message, and that concerned ``streams``.

        Raises:
            ProtocolError: it is one too many.
        """
        self.idle_frames += 1 + streams // STREAMS_PER_IDLE_FRAME
        if self.idle_frames > MAX_IDLE_FRAMES:
            self.pay()
            if self.idle_frames > MAX_IDLE_FRAMES:
                raise ProtocolError("too many frames without data", ErrorCode.ENHANCE_YOUR_CALM)

    def reset(self, age_seconds: float) -> None:
        """Count the early reset of a stream of this age, whichever side had to send it.

        Raises:
            ProtocolError: it is one too many.
        """
        if age_seconds < QUICK_RESET_SECONDS:
            self.quick_resets += 1
            if self.quick_resets > MAX_QUICK_RESETS:
                self.pay()
                if self.quick_resets > MAX_QUICK_RESETS:
                    raise ProtocolError("too many streams are reset", ErrorCode.ENHANCE_YOUR_CALM)

    def advanced(self, messages: int = 1) -> None:
        """Credit messages that were received or sent."""
        if self.idle_frames:
            paid = messages * IDLE_FRAMES_PAID_PER_MESSAGE
            self.idle_frames = max(0, self.idle_frames - paid)

    def completed(self) -> None:
        """Credit a stream that was completed."""
        if self.quick_resets:
            self.quick_resets = max(0, self.quick_resets - QUICK_RESETS_PAID_PER_STREAM)
        if self.idle_frames:
            self.idle_frames = max(0, self.idle_frames - IDLE_FRAMES_PAID_PER_MESSAGE)

    def pay(self) -> None:
        """Credit the time since the last payment."""
        now = self._clock()
        seconds, self._paid_at = now - self._paid_at, now
        paid = int(seconds * IDLE_FRAMES_PAID_PER_SECOND)
        self.idle_frames = max(0, self.idle_frames - paid)
        paid = int(seconds * QUICK_RESETS_PAID_PER_SECOND)
        self.quick_resets = max(0, self.quick_resets - paid)
