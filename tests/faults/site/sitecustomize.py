"""Python runs this at start where the folder is on ``PYTHONPATH``: it makes bad gateways.

``MODELPORT_NO_RETRIES`` makes the known-bad gateway that gives a request up at its first failure,
``MODELPORT_LEAK_BYTES`` one that keeps so many bytes of every request.
"""

from __future__ import annotations

import os

from modelport.gateway.types import InferRequest
from modelport.gateway.upstream import retries

if "MODELPORT_NO_RETRIES" in os.environ:
    retries.RESERVED_RETRIES = retries.EARNED_PER_REQUEST = 0.0
if "MODELPORT_LEAK_BYTES" in os.environ:
    from modelport.gateway.inference.validation import Validator

    _check, _kept = Validator.check, []

    def _leaking(self: Validator, request: InferRequest) -> int:
        _kept.append(os.urandom(int(os.environ["MODELPORT_LEAK_BYTES"])))
        return _check(self, request)

    Validator.check = _leaking
