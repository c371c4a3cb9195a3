"""The request queue of a model version, and the choice of the requests that run as a batch.

The queue is by priority, bounded, and with timeouts. Only the event loop uses it.
"""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from modelport.gateway.errors import QueueFull
from modelport.gateway.inference.batching.dynamic_batching import BatchingSettings
from modelport.gateway.types import Deadline, InferRequest, InferResponse

#: Priority level, whether the request is delayed behind others, order of arrival.
Rank = tuple[int, bool, int]
_rank = attrgetter("rank")


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request from its arrival to its response."""

    request: InferRequest
    deadline: Deadline
    reply: asyncio.Future[InferResponse]
    #: Requests of equal buckets can be joined.
    bucket: Hashable
    #: Batch elements.
    size: int
    queued_ns: int
    #: ``queued_ns`` in seconds, on ``time.monotonic()``'s clock, like ``expires_at``.
    queued_at: float
    #: Infinite: no timeout.
    expires_at: float = math.inf
    rank: Rank = (0, False, 0)
    #: Whether it is in the queue.
    queued: bool = False
    #: The batch it runs in.
    batch: Batch | None = None
    #: Its response, while an earlier request is unanswered.
    outcome: InferResponse | BaseException | None = None


@dataclass(slots=True, eq=False)
class Batch:
    """Requests that run together.

    ``wanted``: the number of requests whose client still waits. ``recalled``: withdrawn before it
    began.
    """

    members: Sequence[QueuedRequest]
    wanted: int
    recalled: bool = False
    task: asyncio.Task[None] | None = None


class RequestQueue:
    """Queued requests by bucket, each bucket in the order of execution."""

    def __init__(self, settings: BatchingSettings) -> None:
        self._settings = settings
        self._buckets: dict[Hashable, list[QueuedRequest]] = {}
        #: The number of queued requests of each priority level.
        self._levels: dict[int, int] = {}
        self._arrivals = 0
        #: The earliest timeout of any request.
        self.expires_at = math.inf

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def put(self, waiting: QueuedRequest) -> None:
        """Add a request; raises ``QueueFull`` if its priority level has no room."""
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
        """Return a taken request to its place."""
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
        """Remove a queued request."""
        bucket = self._buckets[waiting.bucket]
        del bucket[bisect.bisect_left(bucket, waiting.rank, key=_rank)]
        self._left([waiting])

    def _left(self, gone: Sequence[QueuedRequest]) -> None:
        """Update the counts for ``gone``, requests removed from one bucket."""
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
        """The buckets, by the rank of their first requests."""
        if len(self._buckets) == 1:
            yield from self._buckets.values()
        else:
            yield from sorted(self._buckets.values(), key=lambda bucket: bucket[0].rank)

    def take(self, bucket: Sequence[QueuedRequest], count: int) -> Sequence[QueuedRequest]:
        """Remove and return the first ``count`` requests of ``bucket``."""
        held = self._buckets[bucket[0].bucket]
        taken = held[:count]
        del held[:count]
        self._left(taken)
        return taken

    def expire(self, now: float) -> list[QueuedRequest]:
        """Remove and return the requests whose timeout rejects them; move delayed ones back."""
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
                self.put_back(waiting)
            else:
                refused.append(waiting)
        self.expires_at = min(
            (w.expires_at for w in everyone if w.expires_at > now), default=math.inf
        )
        return refused


def next_batch_length(
    sizes: Iterable[int], waited_seconds: float, settings: BatchingSettings
) -> int:
    """The number of queued requests to run as the next batch; 0 means wait for more.

    The rules are Triton's. Without a queue delay, take the largest preferred batch size that can be
    formed, or else every request that fits. With a delay, run a preferred size at once, and any
    other size when the oldest request has waited for the delay or the batch cannot grow.

    Args:
        sizes: the batch elements of each request that can be joined, in queue order; not empty.
        waited_seconds: the wait of the oldest request.
    """
    preferred, most = settings.preferred_sizes, max(settings.preferred_sizes)
    due = waited_seconds >= settings.delay_seconds
    count = total = best = 0
    full = False
    for size in sizes:
        if count and total + size > most and not best:
            best = count
        if count and total + size > settings.max_size:
            full = True
            break
        total += size
        count += 1
        if total in preferred:
            best = count
            if total == settings.max_size:
                break
    if best and not (due and settings.delay_seconds):
        return best
    return count if due or full or total >= most else 0
