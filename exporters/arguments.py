"""Checks and conversions that arguments of the Python functions share."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelport.gateway.errors import UsageError
from modelport.gateway.repository.storage import location
from modelport.gateway.repository.storage.location import Location

#: The largest values that a certificate may have, so that its proof can be repeated.
MOST: Mapping[str, int] = {"samples": 1_000_000, "seed": 2**64 - 1}


def check_bounds(**values: float | None) -> None:
    """Refuse negative values and no samples; a tolerance of NaN or infinity would prove nothing."""
    for name, value in values.items():
        least = 1 if name == "samples" else 0
        if value is None:
            continue
        if not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')} must be a finite number")
        if value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
        if value > MOST.get(name, value):
            raise UsageError(
                f"--{name.replace('_', '-')} must be at most {MOST[name]}, not {value}"
            )


def check_plain(kwargs: Mapping[str, Any], where: str) -> None:
    """Refuse hyper-parameters that a certificate cannot store."""
    try:
        json.dumps(kwargs, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{where} holds more than plain values ({error}); give numbers, strings, "
            "lists and dicts"
        ) from error


def path_of(value: Path | str | None) -> Path | None:
    """The path, if one is given."""
    return None if value is None else Path(value)


def place_of(value: Path | Location | str) -> Path | Location:
    """A folder, or a location in object storage where ``value`` is a URL."""
    if isinstance(value, str):
        return location.parse(value) if location.is_url(value) else Path(value)
    return value
