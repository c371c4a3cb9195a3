"""``make access-timing``: the time to refuse an API key does not tell how much of it is right.

The method is dudect's (Reparaz, Balasch, Verbauwhede 2017). Keys of two classes, which are right up
to some character or at random, are checked in random order, and Welch's t-test compares the times.
The same measurement must find comparisons that are known to be bad, or it would prove nothing.

Times are those of the processor, and the slowest tenth is left out: interrupts know no class.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from modelport.gateway.access import api_key_file
from modelport.gateway.access.api_key_authenticator import ApiKeyAuthenticator
from modelport.gateway.access.principal import UNKNOWN_CONNECTION
from modelport.gateway.errors import Unauthenticated
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.gateway.access.identities import table

#: dudect's limit: more is a leak. Chance exceeds it once in 150,000 measurements.
LIMIT = 4.5
#: Keys that are checked for one sample; the clock costs as much as a few of them.
BATCH = 8
KEPT = 0.9
#: The characters of a block; ``==`` of whole keys leaks less than a nanosecond on some processors.
BLOCK = 16
#: The draws of keys for a measurement.
DRAWS = 32
Check = Callable[[bytes], object]
#: Keys of both classes.
Classes = tuple[Sequence[bytes], Sequence[bytes]]


def welch_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Welch's statistic of two samples."""
    error = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    return (statistics.fmean(first) - statistics.fmean(second)) / math.sqrt(error)


def measure(check: Check, draw: Callable[[], Classes], samples: int) -> float:
    """|t| of both classes' times, over several draws of keys.

    One draw would not do: the hashes of some keys share the place of the right one in the table, by
    chance, which takes a nanosecond. More keys at a time would not stay in the processor's caches.
    """
    times: tuple[list[int], list[int]] = ([], [])
    for _ in range(DRAWS):
        _time(check, draw(), samples // DRAWS, times)
    both = sorted(times[0] + times[1])
    limit = both[int(len(both) * KEPT) - 1]
    return abs(welch_t(*([each for each in kind if each <= limit] for kind in times)))


def _time(check: Check, classes: Classes, samples: int, times: tuple[list[int], list[int]]) -> None:
    chance = random.Random()
    order = [chance.randrange(2) for _ in range(samples)]
    clock = time.thread_time_ns
    gc.collect()
    gc.disable()
    try:
        for number, kind in enumerate(order):
            keys = classes[kind]
            start = number * BATCH % (len(keys) - BATCH)
            batch = keys[start : start + BATCH]
            began = clock()
            for key in batch:
                check(key)
            times[kind].append(clock() - began)
    finally:
        gc.enable()


class Target:
    """A key file with one key, and wrong keys of several classes."""

    def __init__(self, folder: Path) -> None:
        self.text, entry = api_key_file.generate("ci")
        with api_key_file.locked(folder / "keys.toml") as replace:
            replace((entry,))
        self.keys = ApiKeyAuthenticator(table(folder, '[keys]\nfile = "keys.toml"'), FileWatcher())

    def refuse(self, key: bytes) -> None:
        """Check a key as the gateway does."""
        try:
            self.keys.authenticate({b"x-api-key": key}, UNKNOWN_CONNECTION)
        except Unauthenticated:
            return
        raise AssertionError("a wrong key was accepted")

    def wrong(self, right: int, count: int = 512) -> Classes:
        """Keys that start with the first ``right`` characters, and keys that do not.

        So many must be possible that each draw has others: see ``measure``.
        """
        start = (
            len("mp_")
            if right < len("mp_") + api_key_file.ID_LENGTH
            else self.text.index("_", 3) + 1
        )
        classes: tuple[list[bytes], list[bytes]] = ([], [])
        for _ in range(count):  # in turn, so that neither class has the better place in memory
            for each, kept in zip(classes, (right, start), strict=True):
                key = self.text
                while key[kept] == self.text[kept]:
                    key = self.text[:kept] + api_key_file.generate("x")[0][kept:]
                each.append(key.encode())
        return classes


def early_exit(ours: bytes, theirs: bytes) -> bool:
    """Known to be bad: the comparison stops at the first character that differs."""
    return all(one == other for one, other in zip(ours, theirs, strict=False))


def block_by_block(ours: bytes, theirs: bytes) -> bool:
    """Known to be bad: the comparison stops at the first block that differs."""
    starts = range(0, len(ours), BLOCK)
    return all(ours[each : each + BLOCK] == theirs[each : each + BLOCK] for each in starts)


def main(samples: int) -> int:
    """Measure, print, and return the exit status."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        right, whole = target.text.encode(), len(target.text)
        id_end = len("mp_") + api_key_file.ID_LENGTH

        def bad(compare: Callable[[bytes, bytes], bool]) -> Check:
            """The gateway's check, with a comparison of the key itself."""

            def check(key: bytes) -> None:
                compare(right, key)
                target.refuse(key)

            return check

        cases: list[tuple[str, Check, int, bool]] = [
            ("a secret that is right but for 1 character", target.refuse, whole - 1, False),
            ("a secret of which half is right", target.refuse, whole - 22, False),
            ("an ID that is right but for 3 characters", target.refuse, id_end - 3, False),
            ("known bad: character by character", bad(early_exit), whole - 1, True),
            ("known bad: block by block", bad(block_by_block), whole - 1, True),
        ]
        for name, check, length, is_bad in cases:
            draw = partial(target.wrong, length)
            t = measure(check, draw, samples)
            passed = (t > LIMIT) == is_bad
            if not passed and not is_bad:  # chance is not wrong twice
                t = min(t, measure(check, draw, samples))
                passed = t <= LIMIT
            wrong += not passed
            print(f"{'ok  ' if passed else 'FAIL'} |t| = {t:9.2f}  {name}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300_000))
