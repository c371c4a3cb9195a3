"""Accuracy of an artifact on held-out data, compared with the checkpoint's.

The data is one ``.npz`` file with every input by name, ``[N, ...]`` in the shapes of the wire, and
with ``labels`` ``[N]`` if the true answers are known.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from modelport.exporters.errors import ParityError
from modelport.exporters.formats.base import ParitySession
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import Decision
from modelport.exporters.proof import decisions
from modelport.exporters.proof.parity import Progress
from modelport.exporters.requests import attention_masks, input_files
from modelport.exporters.tolerance import Bounds
from modelport.gateway.errors import ModelportError, UsageError, first_line
from modelport.gateway.recording import record_reader
from modelport.gateway.types import Array

LABELS = "labels"
#: Rows per batch, unless the model's largest batch is smaller.
BATCH = 8
#: Default for the loss of accuracy or AUC that is accepted.
DEFAULT_MAX_DROP = 0.01


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Held-out inputs by name in the model's shapes, ``[N, ...]``, and the labels if there are
    any."""

    name: str
    sha256: str
    inputs: Mapping[str, Array]
    labels: Array | None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Results of the checkpoint and the artifact on the same rows of ``file``.

    ``metric`` is ``accuracy`` for an argmax and ``AUC`` for a threshold; None without labels.
    """

    file: str
    sha256: str
    rows: int
    agreement: float | None
    relative_error: float
    max_drop: float
    metric: str | None = None
    reference: float | None = None
    artifact: float | None = None


def read(path: Path, source: Source) -> HeldOut:
    """Read the held-out data at ``path`` and check it against the signature.

    Raises:
        UsageError: it cannot be read, or an input is missing or has the wrong shape or datatype.
    """
    if not source.signature.max_batch_size:
        raise UsageError(f"--data needs a model that batches; '{source.spec.name}' does not")
    if record_reader.is_records(path):
        inputs, labels = _recorded(path, source), None
    else:
        arrays = input_files.read_arrays(path, "--data")
        inputs = input_files.choose(arrays, source.signature, f"--data '{path}'")
        labels = arrays.get(LABELS)
    lengths = {name: len(array) for name, array in inputs.items()}
    if labels is not None:
        _check_labels(labels, source.spec.decision, path)
        lengths[LABELS] = len(labels)
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise UsageError(f"--data '{path}': the numbers of rows differ or are 0: {lengths}")
    return HeldOut(path.name, input_files.digest(path), inputs, labels)


def _recorded(path: Path, source: Source) -> dict[str, Array]:
    """The rows of all recorded requests together."""
    parts = input_files.recorded(path, source.signature, "--data")
    try:
        return {name: np.concatenate([each[name] for each in parts]) for name in parts[0]}
    except ValueError as error:
        raise UsageError(
            f"--data '{path}': the recorded requests differ in shape; give an .npz of rows"
        ) from error


def _check_labels(labels: Array, decision: Decision | None, path: Path) -> None:
    where = f"--data '{path}': '{LABELS}'"
    if not labels.ndim or labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise UsageError(
            f"{where} must be finite numbers, one for each row; it is {labels.dtype} "
            f"{list(labels.shape)}"
        )
    if decision and decision.threshold is not None and len(np.unique(labels)) != 2:
        raise UsageError(f"{where} must hold two classes, as the model decides between two")


def evaluate(
    source: Source,
    session: ParitySession,
    data: HeldOut,
    bounds: Bounds | None,
    max_drop: float,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Run the checkpoint and the artifact on ``data`` and compare them.

    Args:
        bounds: limits for decisions or values; None for fp32, whose proof is elsewhere.
        max_drop: accepted loss of the metric, in the metric's own unit.

    Raises:
        ParityError: a bound is broken.
        UsageError: the checkpoint itself fails on a row.
    """
    decision = source.spec.decision
    name = decision.output if decision else source.signature.outputs[0].name
    expected, actual, defined = [], [], []
    step = min(BATCH, source.signature.max_batch_size)
    for start in range(0, len(data), step):
        batch = {key: array[start : start + step] for key, array in data.inputs.items()}
        where = f"fails on rows {start} and up of --data '{data.name}'"
        with _telling(UsageError, f"the checkpoint {where}", "remove rows that it does not accept"):
            values = source.reference(batch)[name]
            defined.append(_defined(source, name, batch, values))
            expected.append(_finite(values, defined[-1]))
        with _telling(ParityError, f"the artifact {where}", "keep a higher precision"):
            actual.append(_finite(session(batch)[name], defined[-1]))
        progress(min(start + step, len(data)), len(data))
    theirs, ours, whole = (np.concatenate(parts) for parts in (expected, actual, defined))
    found = _compare(decision, theirs, ours, whole, data, max_drop)
    _judge(found, bounds)
    return found


@contextlib.contextmanager
def _telling(kind: type[ModelportError], where: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        raise kind(f"{where}: {reason}; {remedy}") from error


def _defined(source: Source, name: str, inputs: Mapping[str, Array], values: Array) -> Array:
    """The ``values`` of output ``name`` that the masks leave defined, as bools."""
    signature = source.signature
    output = next(output for output in signature.outputs if output.name == name)
    masks = source.spec.masks
    found = attention_masks.defined(signature, masks, output, inputs, values.shape)
    return np.ones(values.shape, bool) if found is None else found


def _finite(values: Array, defined: Array) -> Array:
    """``values`` with 0 where they are undefined; refuse NaN and infinity, which would pass every
    bound."""
    found = np.where(defined, values, np.zeros_like(values))
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise ValueError("the values are not finite")
    return found


def _compare(
    decision: Decision | None,
    expected: Array,
    actual: Array,
    defined: Array,
    data: HeldOut,
    max_drop: float,
) -> Evaluation:
    error = actual.astype(np.float64) - expected.astype(np.float64)
    relative = _norm(error) / max(_norm(expected), 1e-300)
    found = Evaluation(data.name, data.sha256, len(expected), None, relative, max_drop)
    if decision is None:
        return found
    decided = decisions.decide(decision, expected)
    whole = decisions.defined_decisions(decision, defined)
    same = decided == decisions.decide(decision, actual)
    found = replace(found, agreement=float(same[whole].mean()))
    if data.labels is None:
        return found
    if data.labels.size != decided.size:
        raise UsageError(
            f"--data '{data.name}': '{LABELS}' is {list(data.labels.shape)}, the model's decisions "
            f"are {list(decided.shape)}; give one label for each"
        )
    labels = data.labels.reshape(decided.shape)  # [N, 1] would compare every row with every other
    before, after = (_metric(decision, values, labels, whole) for values in (expected, actual))
    metric = "accuracy" if decision.threshold is None else "AUC"
    return replace(found, metric=metric, reference=before, artifact=after)


def _norm(values: Array) -> float:
    return float(np.linalg.norm(values.astype(np.float64).ravel()))


def _metric(decision: Decision, values: Array, labels: Array, counted: Array) -> float:
    if decision.threshold is None:
        return float((decisions.decide(decision, values) == labels)[counted].mean())
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels[counted], values[counted]))


def _judge(found: Evaluation, bounds: Bounds | None) -> None:
    where = f"on {found.rows} rows of '{found.file}'"
    if found.metric and found.reference is not None and found.artifact is not None:
        drop = found.reference - found.artifact
        if drop > found.max_drop:
            raise ParityError(
                f"{found.metric} falls from {found.reference:.4f} to {found.artifact:.4f} {where}, "
                f"more than {found.max_drop:g}; raise --max-drop, or keep a "
                "higher precision"
            )
    if bounds is None:
        return
    if found.agreement is not None and found.agreement < bounds.agreement:
        raise ParityError(
            f"decisions agree on {found.agreement:.2%} {where}, below {bounds.agreement:.2%}; "
            "lower --min-agreement, or keep a higher precision"
        )
    if found.agreement is None and found.relative_error > bounds.relative_error:
        raise ParityError(
            f"values differ by {found.relative_error:.2%} (ratio of L2 norms) {where}, bound "
            f"{bounds.relative_error:.2%}; raise --max-relative-error, or "
            "keep a higher precision"
        )
