"""The page of operators: a table of every operator, datatype and format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.sweep.opinfo import operators
from tests.sweep.page import cell

if TYPE_CHECKING:
    from tests.sweep.operators import OperatorOutcome

FORMATS = ("onnx", "savedmodel", "tflite")
DTYPES = ("float32", "int64", "bool")

INTRODUCTION = """\
# Operators

`make sweep-operators` converts every operator of PyTorch's own test suite (`OpInfo`) that is
differentiable or about indices, and writes this page. Up to six of its samples for a datatype, from
scalars to empty and five-dimensional tensors, become one model: their tensors are its inputs, all
other arguments are constants. The format's runtime runs the file, and every output has to be within
1e-4 + 1e-3 · |reference| of PyTorch's. *yes* means that all samples are right, *3 of 6* that the
others are refused. LiteRT accepts no empty inputs, so that TFLite is asked for the other samples.
"""


def summary(outcomes: Iterable[OperatorOutcome]) -> str:
    """One line for each format."""
    rows = [row for row in outcomes if row.verdict != "excluded"]
    lines = []
    for name in FORMATS:
        counts = Counter(row.verdict for row in rows if row.format == name)
        if total := sum(counts.values()):
            words = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
            lines.append(f"{name:<12} {counts['right'] / total:6.1%} of {total}: {words}")
    return "\n".join(lines)


def markdown(outcomes: Iterable[OperatorOutcome]) -> str:
    """The whole page."""
    rows = sorted(outcomes, key=lambda row: (row.operator, DTYPES.index(row.dtype)))
    tried = [row for row in rows if row.verdict != "excluded"]
    every, seen = len(operators()), len({row.operator for row in rows})
    state = f"{seen} of {every} descriptions of operators were tried, in one format or more.\n"
    return "\n".join(
        [INTRODUCTION, state, _totals(tried), _table(tried), _reasons(tried), _excluded(rows)]
    )


def _totals(rows: list[OperatorOutcome]) -> str:
    lines = ["| format | datatype | operators | right | refused | wrong | crashed |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|")
    for name in FORMATS:
        for dtype in (*DTYPES, "all"):
            found = [r for r in rows if r.format == name and dtype in (r.dtype, "all")]
            counts = Counter(row.verdict for row in found)
            share = f"{counts['right']} ({counts['right'] / max(1, len(found)):.1%})"
            others = " | ".join(str(counts[each]) for each in ("refused", "wrong", "crashed"))
            lines.append(f"| {name} | {dtype} | {len(found)} | {share} | {others} |")
    return "\n".join(lines) + "\n"


def _table(rows: list[OperatorOutcome]) -> str:
    cells = {(row.operator, row.dtype, row.format): _shown(row) for row in rows}
    heads = [f"{each} {dtype}" for each in FORMATS for dtype in DTYPES]
    lines = ["## Every operator\n", f"| operator | {' | '.join(heads)} |"]
    lines.append("|---" * (len(heads) + 1) + "|")
    for name in dict.fromkeys(row.operator for row in rows):
        found = (cells.get((name, dtype, each), "") for each in FORMATS for dtype in DTYPES)
        lines.append(f"| `{name}` | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def _shown(row: OperatorOutcome) -> str:
    if row.verdict == "right":
        return "yes"
    if row.verdict == "refused":
        return f"{row.right} of {row.samples}" if row.right else "no"
    return f"**{row.verdict}**"


def _reasons(rows: list[OperatorOutcome]) -> str:
    lines = ["## Reasons\n", "| operator | datatype | format | reason |", "|---|---|---|---|"]
    lines += (
        f"| `{row.operator}` | {row.dtype} | {row.format} | {cell(row.detail)} |"
        for row in rows
        if row.verdict != "right"
    )
    return "\n".join(lines) + "\n"


def _excluded(rows: list[OperatorOutcome]) -> str:
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.verdict == "excluded":
            names.setdefault(row.detail, {})[f"`{row.operator}`"] = None
    lines = ["## Not asked for\n", "| reason | operators |", "|---|---|"]
    lines += (f"| {cell(why)} | {', '.join(found)} |" for why, found in sorted(names.items()))
    return "\n".join(lines) + "\n"
