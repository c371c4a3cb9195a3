"""Responses of TorchServe's ``image_classifier``: the five likeliest classes, by label."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.classification import largest
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.types import Array, Datatype
from modelport.gateway.wire import json_text

TOP = 5
#: Prefix of the configuration parameter with the kind of an output's values.
PARAMETER = "classification."
LOGITS, PROBABILITIES = "logits", "probabilities"
_FLOATS = (Datatype.FP16, Datatype.FP32, Datatype.FP64)
#: Tolerance of a sum of probabilities.
_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class TopClasses:
    """Converts the values of an output, one for each class, to the likeliest classes.

    If ``kind`` is empty, values from 0 that sum to 1 are probabilities, others logits.
    """

    output: str
    labels: tuple[str, ...]
    kind: str

    def __call__(self, values: Array) -> dict[str, float | None]:
        """Map labels (or indices) to probabilities, the likeliest first."""
        wide = values.astype(np.float64)
        if not self._are_probabilities(wide):
            with np.errstate(all="ignore"):
                powers = np.exp(wide - wide.max())
                wide = powers / powers.sum()
        top = largest(wide, min(TOP, len(wide)))
        chances = wide.astype(np.float32)
        return {self._label(int(index)): json_text.number(float(chances[index])) for index in top}

    def _are_probabilities(self, values: Array) -> bool:
        if self.kind:
            return self.kind == PROBABILITIES
        return bool(values.min() >= 0) and abs(float(values.sum()) - 1) <= _TOLERANCE

    def _label(self, index: int) -> str:
        return self.labels[index] if index < len(self.labels) else str(index)


def top_classes(served: ServedVersion) -> TopClasses | None:
    """Find the only output with a value for each class; return None if there is not just one.

    An output of floats with one dimension has classes if it has labels, the configuration parameter
    ``PARAMETER``, or the name ``logits`` or ``probabilities``.

    Raises:
        InvalidArgument: The parameter is neither ``logits`` nor ``probabilities``.
    """
    found = []
    for spec in served.signature.outputs:
        key = PARAMETER + spec.name
        kind = served.config.parameters[key].string_value if key in served.config.parameters else ""
        if kind not in ("", LOGITS, PROBABILITIES):
            raise InvalidArgument(f"parameter '{key}' must be '{LOGITS}' or '{PROBABILITIES}'")
        if not kind and spec.name in (LOGITS, PROBABILITIES):
            kind = spec.name
        labels = served.labels.get(spec.name, ())
        fits = spec.datatype in _FLOATS and len(spec.dims) == 1
        if fits and (kind or labels):
            found.append(TopClasses(spec.name, labels, kind))
    return found[0] if len(found) == 1 else None
