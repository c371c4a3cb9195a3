"""The part of a version's certificate that says how its answers compare with others'."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from modelport.gateway.repository.manifest import MALFORMED
from modelport.gateway.runtime.checked_json import STRICT

#: A quantised model was proven by its decisions; its tolerance is the measured error times this.
MARGIN = 1.5
_THRESHOLD = ">= "


@dataclass(frozen=True, slots=True)
class VersionProof:
    """The proof of a version's answers, from its certificate."""

    __pydantic_config__: ClassVar = STRICT

    #: The digests of the checkpoint and of everything merged into it; empty: not known.
    checkpoint: tuple[str, ...] = ()
    #: The accepted error of an answer, or None.
    atol: float | None = None
    rtol: float | None = None
    #: The output whose decision callers take; empty: not known.
    decision_output: str = ""
    #: None: the decision is the largest class.
    decision_threshold: float | None = None


def proof_in(certificate: Mapping[str, Any]) -> VersionProof:
    """Read a certificate, whose parts may be missing or malformed."""
    try:
        origins = (certificate["checkpoint"], *certificate.get("adapters", ()))
        checkpoint = tuple(str(origin["sha256"]) for origin in origins)
    except MALFORMED:
        checkpoint = ()
    parity = certificate.get("parity")
    if not isinstance(parity, Mapping):
        return VersionProof(checkpoint)
    return VersionProof(checkpoint, *_tolerance(parity), *_decision(parity.get("decision")))


def is_retrained(*proofs: VersionProof) -> bool:
    """Whether the certificates name different checkpoints; False if one names none."""
    origins = {proof.checkpoint for proof in proofs}
    return len(origins) > 1 and () not in origins


def _tolerance(parity: Mapping[str, Any]) -> tuple[float | None, float | None]:
    try:
        atol, rtol = (float(parity["tolerance"][name]) for name in ("atol", "rtol"))
        if parity.get("bounds") is not None:
            errors = [float(output["max_abs_error"]) for output in parity["outputs"].values()]
            atol = max(atol, MARGIN * max(errors, default=0.0))
    except MALFORMED:
        return None, None
    valid = math.isfinite(atol) and math.isfinite(rtol) and min(atol, rtol) >= 0
    return (atol, rtol) if valid else (None, None)


def _decision(decision: Any) -> tuple[str, float | None]:
    try:
        output, kind = str(decision["output"]), str(decision["kind"])
        threshold = float(kind.removeprefix(_THRESHOLD)) if kind != "argmax" else None
    except MALFORMED:
        return "", None
    if threshold is not None and not math.isfinite(threshold):
        return "", None
    return output, threshold
