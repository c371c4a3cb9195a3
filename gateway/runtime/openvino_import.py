"""OpenVINO without its telemetry; import ``openvino`` from here alone.

Its own import would fork a process that reports it to the library's makers.
"""

from __future__ import annotations

import sys
from typing import Any

_TELEMETRY = "openvino_telemetry"


def _imported() -> Any:
    known = sys.modules.get(_TELEMETRY)
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # so that it counts as not installed
    try:
        import openvino
    finally:
        if known is None:
            del sys.modules[_TELEMETRY]
        else:
            sys.modules[_TELEMETRY] = known
    return openvino


openvino = _imported()
