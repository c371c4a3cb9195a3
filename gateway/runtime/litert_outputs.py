"""Outputs of a run of LiteRT, also those without elements, which it does not copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from modelport.gateway.types import Array

#: LiteRT's words for an output without elements, which it copies once it has run.
_EMPTY = ("Invalid tensor size", "Tensor data is null")


def run(interpreter: Any, runner: Any, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Call ``runner``, which is one of ``interpreter``'s signatures; outputs by name.

    Raises:
        ValueError: an input does not fit.
    """
    try:
        results: dict[str, Array] = runner(**inputs)
    except ValueError as error:
        # Else nothing has run, and the tensors are those of another call.
        if not str(error).startswith(_EMPTY):
            raise
        details: Mapping[str, Mapping[str, Any]] = runner.get_output_details()
        return {
            name: interpreter.get_tensor(each["index"])
            if each["shape"].all()
            else np.zeros(each["shape"], each["dtype"])
            for name, each in details.items()
        }
    return results
