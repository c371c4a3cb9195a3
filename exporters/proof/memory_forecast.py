"""A forecast of the memory that an artifact takes for a batch, from the smaller ones before it.

LiteRT keeps every tensor whose size depends on its inputs: an artifact may take ten times the
memory of its model, and a system ends a process that takes more than there is without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from modelport.exporters.errors import ParityError
from modelport.exporters.proof.parity_cases import ParityCase
from modelport.exporters.runtime import resource_usage

#: The share of the memory left that a batch may take: runtimes take more while they run.
MOST = 0.5


class MemoryForecast:
    """The memory that an artifact has taken, for each batch at the same sizes.

    Args:
        held: the memory of this process in bytes.
        left: the memory that it may take in addition.
    """

    def __init__(
        self,
        held: Callable[[], int] = resource_usage.resident_bytes,
        left: Callable[[], int] = resource_usage.available_bytes,
    ) -> None:
        self._held, self._left = held, left
        self._sizes: dict[Any, list[tuple[int, int]]] = {}

    def begin(self, case: ParityCase) -> None:
        """Raise ``ParityError`` before a batch that needs more memory than is left."""
        known = self._sizes.setdefault(tuple(case.sizes.items()), [(0, self._held())])
        if len(known) < 3 or case.batch <= known[-1][0]:
            return
        # What is taken only once, such as a library, is not in every step.
        row = min((b - a) / (y - x) for (x, a), (y, b) in itertools.pairwise(known))
        needed, left = row * (case.batch - known[-1][0]), self._left()
        if needed > MOST * left:
            fits = known[-1][0] + int(MOST * left / row)
            raise ParityError(
                f"the artifact takes {row / 1e9:.1f} GB for each row at {case}, and "
                f"{left / 1e9:.1f} GB are left; use --max-batch-size {fits}, shorter axes, or "
                "another --format"
            )

    def end(self, case: ParityCase) -> None:
        """Note the memory after a batch."""
        known = self._sizes[tuple(case.sizes.items())]
        if case.batch > known[-1][0]:
            known.append((case.batch, self._held()))
