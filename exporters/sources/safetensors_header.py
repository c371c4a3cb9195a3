"""Strict validation of the header of a ``.safetensors`` file.

Every reader of a valid file finds the same tensors in it.

Layout: 8 bytes with the header's length; the header,
JSON {"name": {"dtype", "shape", "data_offsets"}}; then the values of all tensors.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from modelport.gateway.errors import IntegrityError

MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"


def check(path: Path) -> None:
    """Refuse a file with duplicate names, or with values that overlap or leave gaps.

    Raises:
        IntegrityError: the message names the problem.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise ValueError("its header has no plausible length")
            header = json.loads(file.read(length), object_pairs_hook=_object)
            size = path.stat().st_size - 8 - length
        spans = [
            tuple(map(int, tensor["data_offsets"]))
            for name, tensor in header.items()
            if name != METADATA
        ]
        places = [0, *itertools.chain.from_iterable(sorted(spans)), size]
        if places[::2] != places[1::2]:
            raise ValueError("its tensors overlap or leave gaps")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(
            f"'{path.name}' is truncated or damaged, or was made to be read in two ways ({error}); "
            "save or copy it again"
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
