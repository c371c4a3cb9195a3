"""Bounds on a model that an unsigned certificate describes, by the size of its checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelport.exporters.runtime.memory_limit import more_memory
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import manifest

#: Sizes that any model may have; a larger one needs a byte of the checkpoint for each unit.
FREE_SIZE = 100_000
#: Memory that any model may take, and more for each byte of the checkpoint.
FREE_BYTES, MEMORY_PER_BYTE = 4 << 30, 16


@contextlib.contextmanager
def in_proportion(model_kwargs: Mapping[str, Any], checkpoint: Path) -> Iterator[None]:
    """Refuse a model that the block makes, for example one with a billion layers.

    Raises:
        IntegrityError: its sizes, or its memory, are out of proportion to the checkpoint.
    """
    files = [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*")
    size = sum(file.stat().st_size for file in files if file.is_file())
    left: list[Any] = [model_kwargs]
    while left:
        value = left.pop()
        if isinstance(value, dict | list | tuple):
            left += value.values() if isinstance(value, dict) else value
        elif isinstance(value, int) and value > max(FREE_SIZE, size):
            raise _out_of_proportion(f"has the size {value}", size)
    try:
        with more_memory(FREE_BYTES + MEMORY_PER_BYTE * size):
            yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise _out_of_proportion("needs more memory than is allowed", size) from error


def _out_of_proportion(what: str, size: int) -> IntegrityError:
    return IntegrityError(
        f"the model of the unsigned {manifest.CERTIFICATE} {what}, for a checkpoint of {size} "
        "bytes; give --trust if you trust it, or check the signature with --public-key"
    )
