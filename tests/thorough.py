"""Parameters that `make test` leaves to `make test-thorough`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thorough(*values: Any, id: str | None = None) -> Any:
    """Return the parameters of one case, of a class whose first members the default suite tries."""
    return pytest.param(*values, id=id, marks=pytest.mark.thorough)


def sampled(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Return ``cases``, all but those in ``quick`` marked as thorough."""
    every = list(cases)
    assert not [case for case in quick if case not in every], "a quick case that does not exist"
    return [case if case in quick else thorough(case) for case in every]
