"""Convert every operator of PyTorch to every format, and write the table of support.

    python -m tests.sweep.operators [--format NAME] [--shard I/N] [--results FILE] [--page FILE]
                                    [PATTERN ...]

Samples of PyTorch's own tests (``OpInfo``) become modules of one operator. The product converts
them, the format's runtime runs the file, and the result is compared with PyTorch's. There is no
proof, so that a wrong conversion is seen. A run goes on where an earlier one with the same results
file ended. Exits with 1 if a conversion is wrong or crashed.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import gc
import itertools
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._export import utils
from torch.onnx._internal.exporter._registration import ONNXRegistry

from tests import verb
from tests.sweep import attempts, operators_page, opinfo
from tests.sweep.__main__ import import_libraries
from tests.sweep.opinfo import NoSubject, OperatorSample

FORMATS = ("onnx", "savedmodel", "tflite")

#: Most processor time for one conversion and its run.
CPU_SECONDS = 90.0
#: Operators of one process: libraries keep what they once compiled.
AT_ONCE = 8

#: A value is wrong if ``|error| > ATOL + RTOL * |reference|``.
ATOL, RTOL = 1e-4, 1e-3

#: Operators that choose one of equal elements: another one is right, too.
TIES = frozenset(
    ("sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "aminmax", "msort")
)


@dataclass(frozen=True, slots=True)
class OperatorOutcome:
    """The end of one operator, of one datatype, in one format.

    Attributes:
        verdict: ``right``, ``refused``, ``wrong``, ``crashed``, or ``excluded`` from every format.
        right: the number of its ``samples`` that are right.
    """

    operator: str
    dtype: str
    format: str
    verdict: str
    detail: str = ""
    right: int = 0
    samples: int = 0
    seconds: float = 0.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep.operators", description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], metavar="PATTERN")
    parser.add_argument("--format", dest="formats", action="append", choices=FORMATS)
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="the I-th of N parts")
    parser.add_argument("--whole", action="store_true", help="do not try failing samples apart")
    parser.add_argument("--failed", action="store_true", help="run again what was not right")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--results", type=Path, default=Path("build/operators.jsonl"))
    parser.add_argument("--page", type=Path, help="write the table here")
    options = parser.parse_args()
    shard, of = (int(part) for part in options.shard.split("/"))
    formats = tuple(options.formats or FORMATS)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.results)
    if options.failed:
        done = {key: row for key, row in done.items() if row.verdict in ("right", "excluded")}
    # Both look at all operators each time, which takes longer than a conversion.
    utils._materialize_cpp_cia_ops = functools.cache(utils._materialize_cpp_cia_ops)
    read_once = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    ONNXRegistry.from_torchlib = read_once  # type: ignore[assignment, method-assign]
    import_libraries(tensorflow=formats != ("onnx",))
    steps = [
        (name, each, left)
        for name, info in opinfo.operators().items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns)
        for each in formats
        if (left := [t for t in opinfo.DTYPES if t in info.dtypes and _left(done, name, t, each)])
    ][shard - 1 :: of]
    print(f"{len(steps)} operators and formats, {options.jobs} at once", flush=True)
    gc.collect()
    gc.freeze()  # an export collects garbage
    for outcome in _run(steps, options.jobs, not options.whole):
        with options.results.open("a") as lines:
            lines.write(json.dumps(asdict(outcome)) + "\n")
        if outcome.verdict not in ("right", "excluded"):
            print(
                f"{outcome.verdict:<8} {outcome.operator} {outcome.dtype} {outcome.format} "
                f"{outcome.seconds:.1f} s  {outcome.detail[:160]}",
                flush=True,
            )
    results = list(read(options.results).values())
    print(operators_page.summary(results))
    if options.page is not None:
        options.page.write_text(operators_page.markdown(results))
    return int(any(row.verdict in ("wrong", "crashed") for row in results))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Outcomes = Mapping[tuple[str, str, str], OperatorOutcome]


def read(file: Path) -> Outcomes:
    """The outcomes in ``file``; the last one of a cell counts."""
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = [OperatorOutcome(**json.loads(line)) for line in lines]
    return {(row.operator, row.dtype, row.format): row for row in rows}


def _left(done: Outcomes, name: str, dtype: torch.dtype, format_name: str) -> bool:
    return not {(name, _short(dtype), each) for each in (format_name, "")} & done.keys()


#: An operator, a format, and the datatypes.
Step = tuple[str, str, Sequence[torch.dtype]]


def _run(steps: Sequence[Step], jobs: int, apart: bool) -> Iterator[OperatorOutcome]:
    groups = [steps[start : start + AT_ONCE] for start in range(0, len(steps), AT_ONCE)]
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_group, group, apart) for group in groups]):
            yield from done.result()


def _group(steps: Sequence[Step], apart: bool) -> list[OperatorOutcome]:
    """The outcomes of ``steps``; a conversion that ends its process takes no other with it."""
    outcomes: list[OperatorOutcome] = []
    left = list(steps)
    while left:
        found, ended = attempts.received(
            functools.partial(_work, left, apart), len(left), CPU_SECONDS
        )
        outcomes += itertools.chain.from_iterable(found)
        left = left[len(found) :]
        if ended and left:
            name, each, dtypes = left.pop(0)
            if len(dtypes) > 1:  # which of them it was
                left = [*((name, each, [dtype]) for dtype in dtypes), *left]
            else:
                outcomes.append(OperatorOutcome(name, _short(dtypes[0]), each, "crashed", ended))
    return outcomes


def _work(steps: Sequence[Step], apart: bool, pipe: Connection) -> None:
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for step in steps:
        pipe.send(_outcomes(*step, apart))


def _outcomes(
    name: str, format_name: str, dtypes: Sequence[torch.dtype], apart: bool
) -> list[OperatorOutcome]:
    """Try one model of all datatypes, and if it is not right, one of each."""
    started = time.process_time()
    found: list[OperatorOutcome] = []
    samples: dict[str, list[OperatorSample]] = {}
    for dtype in dtypes:
        where = ""  # excluded from every format
        try:
            chosen = opinfo.samples(name, dtype)
            if format_name == "tflite":
                where = format_name
                chosen = opinfo.without_empty_inputs(chosen)
            samples[_short(dtype)] = chosen
        except NoSubject as error:
            found.append(OperatorOutcome(name, _short(dtype), where, "excluded", str(error)))
    together = list(itertools.chain.from_iterable(samples.values()))
    right = len(samples) > 1 and _tried(name, together, format_name)[0] == "right"
    for dtype_name, chosen in samples.items():
        cell = OperatorOutcome(name, dtype_name, format_name, "right", "", 0, len(chosen))
        cell = replace(cell, right=len(chosen)) if right else _judged(cell, chosen, apart)
        seconds = round(time.process_time() - started, 2)
        started = time.process_time()
        found.append(replace(cell, seconds=seconds))
    return found


def _judged(
    cell: OperatorOutcome, samples: Sequence[OperatorSample], apart: bool
) -> OperatorOutcome:
    """Try one model of all samples, and if it is not right, one of each."""
    verdict, detail = _tried(cell.operator, samples, cell.format)
    ends = [(verdict, detail)]
    if verdict == "right":
        return replace(cell, right=len(samples))
    if len(samples) > 1 and apart:
        ends = [_tried(cell.operator, [sample], cell.format) for sample in samples]
    for worst in ("crashed", "wrong", "refused"):
        if reason := next((detail for found, detail in ends if found == worst), ""):
            verdict, detail = worst, reason
            break
    right = sum(verdict == "right" for verdict, _ in ends)
    return replace(cell, verdict=verdict, detail=detail, right=right)


def _tried(name: str, samples: Sequence[OperatorSample], format_name: str) -> tuple[str, str]:
    """Convert one model of ``samples``, run it, and compare: the verdict, and the reason."""
    try:
        return tried(name, samples, format_name)
    except Exception:
        return "crashed", traceback.format_exc(limit=-3)


def tried(name: str, samples: Sequence[OperatorSample], format_name: str) -> tuple[str, str]:
    """Convert one model of ``samples``, run it, and compare: the verdict, and the reason."""
    from modelport.exporters.artifact_conversion import opened
    from modelport.exporters.formats.base import ExportTarget
    from modelport.exporters.formats.registry import find_format
    from modelport.exporters.loaded_model import Framework
    from modelport.gateway.errors import ModelportError

    row = find_format(format_name)
    source, inputs = opinfo.source_of(name, samples)
    expected = source.reference(inputs)
    target = ExportTarget(opset=row.routes[Framework.PYTORCH].default_opset)
    with tempfile.TemporaryDirectory(prefix="operators-") as folder:
        path = Path(folder, "model")
        try:
            row.export(source, path, target)
            session = opened(row, path)
        except ModelportError as error:
            return "refused", str(error)
        try:
            actual = session(inputs)
        except Exception as error:
            return "refused", f"the artifact fails: {type(error).__name__}: {error}"
    owners = opinfo.places(samples)
    for output, want in expected.items():
        if why := _difference(name, owners[output], want, actual[output]):
            return "wrong", f"{owners[output]}: {why}"
    return "right", ""


Array = np.ndarray[Any, Any]


def _difference(name: str, sample: OperatorSample, want: Array, got: Array) -> str:
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{got.dtype}{list(got.shape)} in place of {want.dtype}{list(want.shape)}"
    if want.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            error = np.abs(want.astype(np.float64) - got.astype(np.float64))
            same = (want == got) | (np.isnan(want) & np.isnan(got))
            wrong = ~same & ~(error <= ATOL + RTOL * np.abs(want))
    else:
        wrong = want != got
    if not wrong.any():
        return ""
    if want.dtype == np.int64 and name in TIES and _ties(sample.tensors[0].numpy(), want, got):
        return ""
    return f"{got[wrong].reshape(-1)[:4]} in place of {want[wrong].reshape(-1)[:4]}"


def _ties(x: Array, want: Array, got: Array) -> bool:
    """Whether both choose equal elements along a dimension of ``x``, or of all of it."""
    flat = x.reshape(-1)
    for dim in range(x.ndim):
        keeps = want if want.ndim == x.ndim else np.expand_dims(want, dim)
        mine = got if want.ndim == x.ndim else np.expand_dims(got, dim)
        fits = keeps.ndim == x.ndim and all(
            n == m for d, (n, m) in enumerate(zip(keeps.shape, x.shape, strict=True)) if d != dim
        )
        if fits and (mine >= 0).all() and (mine < x.shape[dim]).all():
            both = [np.take_along_axis(x, index, dim) for index in (keeps, mine)]
            if np.array_equal(*both, equal_nan=x.dtype.kind == "f"):
                return True
    return x.ndim == 0 and bool(flat.size)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    verb.run(main)
