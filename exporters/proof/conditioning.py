"""The error that rounding alone causes in a model's answers.

A model is sensitive if its answers move by more than the tolerance when every weight moves by one
unit in the last place, or when it computes in float64. An artifact of such a model, which rounds
elsewhere, cannot be closer than that, and is held to a multiple of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from modelport.exporters.loaded_model import Source
from modelport.exporters.proof.parity_cases import ParityCase
from modelport.exporters.proof.parity_report import Conditioning, OutputError
from modelport.exporters.requests import attention_masks
from modelport.exporters.tolerance import Tolerance
from modelport.gateway.types import Array

#: An artifact rounds in other places than the variants: it may deviate this much more than they.
FACTOR = 4.0
#: Largest multiple of the tolerance. A model that needs more cannot be proven.
CAP = 100.0
#: Batches that are measured, besides the one with the largest error.
BATCHES = 12


def measure(
    source: Source, cases: Iterable[ParityCase], tolerance: Tolerance
) -> dict[str, Conditioning]:
    """The conditioning of each floating-point output; none for a framework without variants."""
    if source.diagnostics is None:
        return {}
    chosen = list(itertools.islice(cases, BATCHES + 1))
    expected = [source.reference(case.inputs) for case in chosen]
    worst = {output.name: 0.0 for output in source.signature.outputs}
    squares, counts, labels = dict(worst), dict.fromkeys(worst, 0), []
    for label, make in source.diagnostics.rounded_otherwise():
        try:
            variant = make()
            found = [variant(case.inputs) for case in chosen]
        except Exception:  # a model may insist on a datatype
            continue
        labels.append(label)
        for case, theirs, ours in zip(chosen, expected, found, strict=True):
            for name, ratio in _ratios(source, case, theirs, ours, tolerance).items():
                worst[name] = max(worst[name], float(ratio.max(initial=0.0)))
                squares[name] += float((ratio**2).sum())
                counts[name] += ratio.size
    measured = " and ".join(dict.fromkeys(labels))
    return {
        name: Conditioning(
            measured=f"{measured}, {len(chosen)} batches",
            worst=worst[name],
            typical=float(np.sqrt(squares[name] / counts[name])),
            factor=FACTOR,
            tolerance=min(FACTOR * worst[name], CAP),
            cap=CAP,
        )
        for name in worst
        if counts[name]
    }


def _ratios(
    source: Source,
    case: ParityCase,
    theirs: Mapping[str, Array],
    ours: Mapping[str, Array],
    tolerance: Tolerance,
) -> dict[str, Array]:
    """The deviations of the floating-point outputs of one case, in units of the tolerance."""
    found = {}
    for output in source.signature.outputs:
        here, there = theirs[output.name], ours[output.name]
        if here.dtype.kind != "f" or here.shape != there.shape:
            continue
        where = attention_masks.defined(
            source.signature, source.spec.masks, output, case.inputs, here.shape
        )
        ratio = (
            tolerance.ratio(here, there) if where is None else tolerance.ratio(here, there)[where]
        )
        found[output.name] = ratio[np.isfinite(ratio)]
    return found


def excuses(found: Conditioning | None, error: OutputError) -> bool:
    """Whether the model is sensitive, and the artifact's error no worse than its rounding."""
    return (
        found is not None
        and found.worst > 1
        and error.worst_ratio <= found.tolerance
        and error.typical_ratio <= found.factor * found.typical
    )
