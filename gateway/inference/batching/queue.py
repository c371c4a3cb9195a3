"""The requests that wait: by priority, bounded, with their time-outs.

The event loop alone touches any of it.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Hashable, Iterator, Sequence

from modelport.gateway.errors import QueueFull
from modelport.gateway.inference.batching.settings import BatchingSettings
from modelport.gateway.types import Deadline, InferRequest, InferResponse

#: Priority level, whether its time is up and others go first, arrival.
Rank = tuple[int, bool, int]


class QueuedRequest:
    """One request, from its arrival to its answer."""

    __slots__ = (
        "batch", "bucket", "deadline", "expires_at", "outcome", "queued", "queued_at", "queued_ns",
        "rank", "reply", "request", "size",
    )  # fmt: skip

    def __init__(
        self,
        request: InferRequest,
        deadline: Deadline,
        reply: asyncio.Future[InferResponse],
        bucket: Hashable,
        size: int,
        queued_ns: int,
    ) -> None:
        self.request = request
        self.deadline = deadline
        self.reply = reply
        #: Requests of equal buckets can go together.
        self.bucket = bucket
        #: Batch elements.
        self.size = size
        self.queued_ns = queued_ns
        #: On ``time.monotonic()``'s clock, as ``expires_at``, which is infinite without a time-out.
        self.queued_at = queued_ns / 1e9
        self.expires_at = math.inf
        self.rank: Rank = (0, False, 0)
        #: Whether it is in the queue.
        self.queued = False
        #: What it runs in; None before that.
        self.batch: Batch | None = None
        #: Its answer, while those of earlier requests are not there.
        self.outcome: InferResponse | BaseException | None = None


class Batch:
    """Requests that run together.

    ``wanted``: how many of the answers somebody waits for. ``recalled``: it was taken back before
    it had begun.
    """

    __slots__ = ("members", "recalled", "task", "wanted")

    def __init__(self, members: Sequence[QueuedRequest]) -> None:
        self.members = members
        self.wanted = len(members)
        self.recalled = False
        self.task: asyncio.Task[None] | None = None


class RequestQueue:
    """Requests by bucket, each bucket in the order in which they run."""

    def __init__(self, settings: BatchingSettings) -> None:
        self._settings = settings
        self._buckets: dict[Hashable, list[QueuedRequest]] = {}
        #: How many wait in each level that has any.
        self._levels: dict[int, int] = {}
        self._arrivals = 0
        #: No request's time is up earlier.
        self.expires_at = math.inf

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def put(self, waiting: QueuedRequest) -> None:
        """Raises ``QueueFull``: so many wait in its level that no more may."""
        settings, request = self._settings, waiting.request
        level = settings.level(request)
        policy = settings.policy(level)
        count = self._levels.get(level, 0)
        if count >= policy.max_size:
            raise QueueFull
        self._levels[level] = count + 1
        self._arrivals += 1
        waiting.rank = (level, False, self._arrivals)
        timeout_seconds = policy.timeout(request)
        if timeout_seconds != math.inf:
            waiting.expires_at = waiting.queued_at + timeout_seconds
            self.expires_at = min(self.expires_at, waiting.expires_at)
        self._insert(waiting)

    def put_back(self, waiting: QueuedRequest) -> None:
        """One that was taken, in its place."""
        level = waiting.rank[0]
        self._levels[level] = self._levels.get(level, 0) + 1
        self.expires_at = min(self.expires_at, waiting.expires_at)
        self._insert(waiting)

    def _insert(self, waiting: QueuedRequest) -> None:
        waiting.queued = True
        bucket = self._buckets.setdefault(waiting.bucket, [])
        if not bucket or bucket[-1].rank < waiting.rank:
            bucket.append(waiting)
        else:
            bisect.insort(bucket, waiting, key=_rank)

    def remove(self, waiting: QueuedRequest) -> None:
        """Take out one that waits."""
        bucket = self._buckets[waiting.bucket]
        del bucket[bisect.bisect_left(bucket, waiting.rank, key=_rank)]
        self._left([waiting])

    def _left(self, gone: Sequence[QueuedRequest]) -> None:
        """``gone``, all of one bucket, wait no longer."""
        for waiting in gone:
            waiting.queued = False
            level = waiting.rank[0]
            left = self._levels.pop(level) - 1
            if left:
                self._levels[level] = left
        bucket = gone[0].bucket
        if not self._buckets[bucket]:
            del self._buckets[bucket]
        if not self._buckets:
            self.expires_at = math.inf

    def buckets(self) -> Iterator[Sequence[QueuedRequest]]:
        """Requests that can go together, in order; first those whose first one is first."""
        if len(self._buckets) == 1:
            yield from self._buckets.values()
        else:
            yield from sorted(self._buckets.values(), key=lambda bucket: bucket[0].rank)

    def take(self, bucket: Sequence[QueuedRequest], count: int) -> Sequence[QueuedRequest]:
        """The first ``count`` of ``bucket``, which wait no longer."""
        held = self._buckets[bucket[0].bucket]
        taken = held[:count]
        del held[:count]
        self._left(taken)
        return taken

    def expire(self, now: float) -> list[QueuedRequest]:
        """Take out those that are to be refused by now; those that are to be delayed move back."""
        if now < self.expires_at:
            return []
        everyone = [waiting for bucket in self._buckets.values() for waiting in bucket]
        expired = [waiting for waiting in everyone if waiting.expires_at <= now]
        refused = []
        for waiting in expired:
            self.remove(waiting)
            level, _, arrival = waiting.rank
            if self._settings.policy(level).delays:
                waiting.rank = (level, True, arrival)
                waiting.expires_at = math.inf
                self._levels[level] = self._levels.get(level, 0) + 1
                self._insert(waiting)
            else:
                refused.append(waiting)
        self.expires_at = min(
            (w.expires_at for w in everyone if w.expires_at > now), default=math.inf
        )
        return refused


def _rank(waiting: QueuedRequest) -> Rank:
    return waiting.rank
