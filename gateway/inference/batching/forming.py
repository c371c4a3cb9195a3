"""How many of the requests that wait make the next batch: Triton's rules, as a pure function."""

from __future__ import annotations

from collections.abc import Iterable

from modelport.gateway.inference.batching.settings import BatchingSettings


def form(sizes: Iterable[int], waited_seconds: float, settings: BatchingSettings) -> int:
    """How many requests run now; 0: it is worth waiting for more.

    Without a delay that is the largest preferred size that can be had, else all that fit. With one,
    a preferred size runs at once, and what is none when the first has waited long enough, or when
    the batch cannot grow.

    Args:
        sizes: elements of each request that can go together, in order; at least one.
        waited_seconds: of the one that has waited longest.
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
