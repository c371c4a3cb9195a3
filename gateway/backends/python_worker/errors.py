"""Texts of a model's exceptions, in the format of Triton's stub, without absolute paths."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Mapping

import modelport
import triton_python_backend_utils
from modelport.gateway.errors import Code
from triton_python_backend_utils._errors import TritonError

from .frames import MAX_TEXT

_EMPTY = "<EMPTY MESSAGE>"
_UNAVAILABLE = "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
#: Of one exception's stack; the innermost are shown.
_MAX_FRAMES = 20
#: Folders whose frames are no model's.
_INSIDE = [
    os.path.dirname(str(file))
    for file in (
        __file__, importlib.__file__, modelport.__file__, triton_python_backend_utils.__file__
    )
]  # fmt: skip
#: The codes of modelport's errors; any other is INTERNAL.
CODES: Mapping[Code, int] = {
    Code.NOT_FOUND: TritonError.NOT_FOUND,
    Code.INVALID_ARGUMENT: TritonError.INVALID_ARG,
    Code.UNAVAILABLE: TritonError.UNAVAILABLE,
    Code.UNSUPPORTED: TritonError.UNSUPPORTED,
    Code.ALREADY_EXISTS: TritonError.ALREADY_EXISTS,
    Code.CANCELLED: TritonError.CANCELLED,
    Code.UNKNOWN: TritonError.UNKNOWN,
}


def text_of(error: BaseException, folder: str) -> str:
    """The exception and where it was raised, innermost first.

    Args:
        folder: the version's folder, which file names are relative to.
    """
    try:
        message = str(error) or _EMPTY
    except BaseException:
        message = _UNAVAILABLE
    frames = [
        f"  {_short(frame.filename, folder)}({frame.lineno}): {frame.name}\n"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if not frame.filename.startswith((*_INSIDE, "<frozen importlib"))
    ]
    place = f"\n\nAt:\n{''.join(frames[:_MAX_FRAMES])}" if frames else ""
    return f"{type(error).__name__}: {message.replace(folder + os.sep, '')}{place}"[:MAX_TEXT]


def _short(path: str, folder: str) -> str:
    for parent in (folder, os.path.dirname(folder)):
        if path.startswith(parent + os.sep):
            return path[len(parent) + 1 :]
    _, found, package = path.rpartition("site-packages" + os.sep)
    return package if found else os.path.basename(path)
