"""The tests that a wrong lowering must not pass, and ``make mutations``, which tries all."""

from __future__ import annotations

import argparse
import itertools
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from modelport.exporters.lowering.built_in import built_in_operators
from tests.exporters.lowering.mutations import MODULES, WrongLowering, wrong_lowerings
from tests.exporters.lowering.oracle import DynamicRun, OperatorCall, eager_difference
from tests.exporters.lowering.own_calls import STATIC_DIMS
from tests.exporters.lowering.programs import PROGRAMS, ProgramCase
from tests.exporters.lowering.test_operators import INTEGERS, NAMES, calls

#: Changes that change no result, by the reason.
EQUIVALENT_BY_REASON: Mapping[str, Sequence[str]] = {
    "either branch computes the same; one is faster, or what TFLite has a kernel for": (
        "activations.leaky_relu: negated: 0 <= negative_slope <= 1",
        "arithmetic.absolute: negated: x.dtype.is_integer",
        "control_flow.while_loop: negated: tf.is_tensor(result)",
        "creation.filled: negated: not is_static(dims)",
        "creation.arange: negated: values.numel() <= LONGEST_CONSTANT",
        "normalization.batch_norm_of_running_statistics: negated: not is_constant(variance)",
        "products.linear: negated: rank(x) == 2",
        "normalization._wide: negated: x.dtype in (tf.float16, tf.bfloat16)",
        "sampling._reflected: abs becomes identity",
        "padding._stacked: negated: all((is_static(pair) for pair in margins))",
        "pooling._padded: negated: all(map(is_static, pads))",
        "pooling._register_adaptive_average: negated: dims > 1",
        "shapes.squeeze: negated: sum((not isinstance(each, int) for each in kept)) <= 1",
        "sorting._first_extreme: negated: x.dtype in (tf.int64, tf.int16, tf.float64)",
    ),
    "only the shape counts": (
        "arithmetic._natural_power: Mult becomes Add: x * exponent",
        "arithmetic._same_shape: Mult becomes Add: tf.zeros_like(x) * tf.zeros_like(other)",
    ),
    "the filter is zero outside of its window": (
        "interpolation._smoothed: Add becomes Sub: centre - support * spread + 0.5",
        "interpolation._smoothed: Mult becomes Add: support * spread",
    ),
    "two dimensions, and so two changes of sign": (
        "interpolation._cubic: Add becomes Sub: total + near * _along(weight, y, dim)",
    ),
    "test_programs.py calls it by itself": (
        "control_flow._conform: negated: new.dtype == old.dtype",
        "control_flow.wrap_with_autocast: negated: enabled",
    ),
    "no call that PyTorch answers reaches it": (
        "scattering.index_put: negated: accumulate",
        "scattering.index_put: Add becomes Sub: x + cast(values, x.dtype)",
        "scattering.masked_scatter: Sub becomes Add: tf.shape(elements)[0] - 1",
    ),
}
EQUIVALENT = frozenset(itertools.chain.from_iterable(EQUIVALENT_BY_REASON.values()))
#: Such a branch has what TFLite has a kernel for, and the other one computes the same.
FOR_TFLITE = "only_built_in()"

#: Changes by which TensorFlow ends the process.
ENDING = (
    "convolution.convolution: negated: line",
    "convolution._transpose: Add becomes Sub: (size(",
)

#: A wrong lowering that takes longer, or more memory, is refused by that.
MOST_SECONDS, MOST_BYTES = 120, 16 << 30
#: TensorFlow ends the process over a tensor of 254 dimensions.
MOST_FRAMES = 200

REFUSED, PASSED, ENDED = "refused", "passed", "ended the process"


def is_refused(wrong: WrongLowering, patch: pytest.MonkeyPatch) -> bool:
    """Whether a test of operators or programs fails with ``wrong`` in place."""
    affected = wrong.affected()
    names = [name for name in affected if name in NAMES]
    programs = [program for program in PROGRAMS if program.operators & set(affected)]
    wrong.apply(patch)
    with shallow_stack():
        return (
            any(_differs(eager_difference, call) for name in names for call in calls(name))
            or any(
                _differs(_built_in_difference, call)
                for name in names
                if name in INTEGERS
                for call in calls(name)
            )
            or any(_differs(ProgramCase.differences, program) for program in programs)
            or any(_differs(_traced_differences, name) for name in names)
        )


@contextmanager
def shallow_stack() -> Iterator[None]:
    """Refuse an endless recursion before it ends the process."""
    limit = sys.getrecursionlimit()
    depth = sum(1 for _ in traceback.walk_stack(None))
    sys.setrecursionlimit(depth + MOST_FRAMES)
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def is_equivalent(wrong: WrongLowering) -> bool:
    """Whether the change is known to change no result."""
    return repr(wrong) in EQUIVALENT or FOR_TFLITE in repr(wrong)


def _built_in_difference(call: OperatorCall) -> str | None:
    with built_in_operators():
        return eager_difference(call)


def _traced_differences(name: str) -> Sequence[str]:
    found: list[OperatorCall] = calls(name)
    return [
        message
        for symbolic in (0, 1, 9)
        for message in DynamicRun(found, STATIC_DIMS.get(name, {}), symbolic).differences()
    ]


def _differs(compare: Callable[[Any], object], subject: object) -> bool:
    try:
        return bool(compare(subject))
    except Exception:  # TensorFlow refuses what the wrong lowering asks of it
        return True


def outcomes(modules: Sequence[str]) -> Iterator[tuple[WrongLowering, str]]:
    """Try all wrong lowerings of ``modules`` in processes that they may end."""
    waiting = list(enumerate(wrong_lowerings(modules)))
    while waiting:
        command = [sys.executable, "-m", __spec__.name, "--from", str(waiting[0][0]), *modules]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                yield waiting.pop(0)[1], line.strip()
        if waiting and worker.returncode:
            yield waiting.pop(0)[1], ENDED


def _work(first: int, modules: Sequence[str]) -> None:
    """Write the outcome of each wrong lowering from ``first`` on."""
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for number, wrong in enumerate(wrong_lowerings(modules)):
        if number >= first:
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            with pytest.MonkeyPatch.context() as patch:
                print(REFUSED if is_refused(wrong, patch) else PASSED, flush=True)


def main(modules: Sequence[str]) -> int:
    """Try all wrong lowerings; return 1 if one passes that is not listed as equivalent."""
    counts = dict.fromkeys((REFUSED, PASSED, ENDED), 0)
    missed = []
    for wrong, outcome in outcomes(modules):
        counts[outcome] += 1
        if outcome != REFUSED:
            print(f"{outcome}: {wrong} (line {wrong.line} of it)", flush=True)
        if outcome == PASSED and not is_equivalent(wrong):
            missed.append(wrong)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"{len(missed)} are neither refused nor listed as equivalent")
    return bool(missed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*", default=list(MODULES), help="default: all")
    parser.add_argument("--from", type=int, dest="first", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.first is not None:
        _work(arguments.first, arguments.modules)
    else:
        raise SystemExit(main(arguments.modules))
