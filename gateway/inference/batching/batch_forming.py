"""The choice of the queued requests that run as the next batch."""

from __future__ import annotations

from collections.abc import Iterable

from modelport.gateway.inference.batching.settings import BatchingSettings


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
