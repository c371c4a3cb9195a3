"""Conversion of a model to one artifact, optimised if that is asked for, and its proof."""

from __future__ import annotations

import contextlib
import gc
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from modelport.exporters import inspection
from modelport.exporters.errors import ParityError
from modelport.exporters.formats.base import ExportTarget, ParitySession
from modelport.exporters.formats.onnx_adopted import adopt
from modelport.exporters.formats.registry import Format
from modelport.exporters.loaded_model import Source
from modelport.exporters.optimization import speedup
from modelport.exporters.optimization.result import GraphOptimization
from modelport.exporters.proof import ranges
from modelport.exporters.proof.edges import ValuesDiffer
from modelport.exporters.proof.proof import Checks, Proof, convert, held_to, prove
from modelport.exporters.runtime.resource_usage import Usage, measured
from modelport.gateway.errors import ModelportError, Unsupported, first_line

#: Called with the stage's name, the amount done and the total; 0 of 0 means unknown.
Progress = Callable[[str, int, int], None]


#: Seconds on two cores: for any model, and for each million of its parameters; ``make table``
#: measures them.
CONVERSION_SECONDS: Mapping[str, tuple[float, float]] = {
    "onnx": (4, 0.085),
    "torchscript": (1, 0.04),
    "savedmodel": (3, 0.04),
    "tflite": (4, 0.2),
    "openvino": (5, 0.1),
    "pt2": (2, 0.04),
    "aoti": (15, 0.14),
    "executorch": (5, 0.1),
}
#: Operators of ONNX and TensorFlow that draw other numbers at each call.
RANDOM = re.compile(
    r"(?i)(parameterized_?)?(random|multinomial|bernoulli|truncated_?normal)"
    r"|stateful_?(random|standard|truncated|uniform)"
)
#: Formats whose graphs have only what their outputs need.
WITHOUT_UNUSED = ("onnx", "savedmodel", "tflite")


def make(
    source: Source,
    row: Format,
    target: ExportTarget,
    path: Path,
    checks: Checks,
    progress: Progress,
    adopted: Path | None = None,
) -> Proof:
    """Write the artifact to ``path`` and prove it.

    Args:
        adopted: a file to copy instead of converting.

    Raises:
        Unsupported: there is no conversion, or the runtime cannot run its result.
        ParityError: the artifact does not compute what the model computes.
    """
    progress(_stage(row.name, source), 0, 0)
    if adopted is not None:
        return _proven(source, row, target, path, checks, progress, adopt(adopted, path))
    if not row.optimizes(target):
        usage = convert(source, row, target, path, checks)
        return _proven(source, row, target, path, checks, progress, usage)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        draft = Path(folder) / path.name
        converted = convert(source, row, target.converted, draft, checks)
        gc.collect()
        progress("optimising", 0, 0)
        with measured() as usage:
            optimization = row.optimize(source, draft, path, target)
        usage.seconds += converted.seconds
        proof = _proven(source, row, target, path, checks, progress, usage, optimization)
        progress("measuring", 0, 0)
        proven = ranges.applied(source.signature, proof.report.ranges)
        source = replace(source, signature=proven)
        pair = row.open_session(draft, trusted=True), row.open_session(path, trusted=True)
        faster = speedup.measure(source, *pair, checks.seed)
        return replace(proof, optimization=replace(optimization, speedup=faster))


def _proven(
    source: Source,
    row: Format,
    target: ExportTarget,
    path: Path,
    checks: Checks,
    progress: Progress,
    usage: Usage,
    optimization: GraphOptimization | None = None,
) -> Proof:
    gc.collect()  # a converter's graphs hold a copy of the weights
    if target.quantize:
        _check_quantized(path, row, target.quantize)
    _check_draws_nothing(path, row)
    session = opened(row, path)
    precision = held_to(target, optimization)
    try:
        report, found = prove(source, session, precision, checks, progress)
    except ValuesDiffer as error:
        progress("locating the operator", 0, 0)
        raise _located(source, row, target, path, error) from error
    except ParityError as error:
        raise ParityError(f"{error}{_remedy(target)}") from error
    return Proof(report, found, usage, optimization)


def opened(row: Format, path: Path) -> ParitySession:
    """Open the artifact in the runtime that will serve it; that runtime may lack an operator."""
    try:
        return row.open_session(path, trusted=True)
    except (ModelportError, OSError):
        raise
    except Exception as error:
        raise Unsupported(
            f"the runtime of {row.name} cannot run this model ({first_line(error)}); use another "
            "--format or --dtype"
        ) from error


def _check_quantized(path: Path, row: Format, precision: str) -> None:
    """Refuse an artifact in which the converter quantised nothing: converters skip small
    tensors."""
    if not inspection.inspect(path).quantized_share:
        raise Unsupported(
            f"{row.name} leaves every tensor of this model unchanged, because they are too small "
            f"for {precision}; export it without --quantize"
        )


def _check_draws_nothing(path: Path, row: Format) -> None:
    """Refuse an artifact with operators that draw random numbers, which a proof may not meet.

    ``sources.randomness`` does so for a PyTorch model, and knows what depends on the numbers.
    """
    if row.name not in WITHOUT_UNUSED:
        return
    drawn = [name for name in inspection.inspect(path).operators or () if RANDOM.match(name)]
    if drawn:
        raise Unsupported(
            f"the model draws random numbers ({', '.join(drawn)}) and cannot be verified; remove "
            "them, or make them an input"
        )


def _located(
    source: Source, row: Format, target: ExportTarget, path: Path, error: ValuesDiffer
) -> ParityError:
    """``error`` with the operator at which the artifact parts from the model, if it is found."""
    where = ""
    if error.inputs and not target.optimize:
        with contextlib.suppress(Exception):  # the search is a courtesy
            where = row.first_difference(source, path, target, error.inputs)
    return ParityError(
        f"{error}; they first differ at {where}" if where else f"{error}{_remedy(target)}"
    )


def _remedy(target: ExportTarget) -> str:
    if target.calibration is not None:
        return (
            "; activations are quantised by their ranges on --calibrate: give inputs there that "
            "cover the model's, and held-out ones with --data"
        )
    return f"; try it without --optimize {target.optimize}" if target.optimize else ""


def _stage(format_name: str, source: Source) -> str:
    """The name of the stage, with the seconds that it usually takes where they are known."""
    if format_name not in CONVERSION_SECONDS:
        return "converting"
    whole, each = CONVERSION_SECONDS[format_name]
    return f"converting, usually {whole + each * source.parameter_count / 1e6:.0f} s"
