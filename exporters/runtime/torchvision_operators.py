"""``torchvision`` beside a build of PyTorch that its compiled operators do not fit.

The package index has wheels of torchvision for CUDA. Beside PyTorch for CPU their library does not
load, and then the import of torchvision fails, and that of parts of transformers with it, because
it describes operators that are not there. Once these are declared, everything works that does not
call them.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

NAMESPACE = "torchvision"
#: The operators that the import describes.
SCHEMAS = tuple(
    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")
)
#: A declaration ends with its object.
_declared: list[Any] = []


@functools.cache
def declare() -> None:
    """Declare the missing operators if torchvision is installed and its library does not load."""
    found = importlib.util.find_spec(NAMESPACE) if NAMESPACE not in sys.modules else None
    if found is None or found.origin is None:
        return
    import torch

    for library in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
        except OSError:
            continue
    fragment: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        if not hasattr(getattr(torch.ops, NAMESPACE), schema.partition("(")[0]):
            fragment.define(schema)
    _declared.append(fragment)
