"""Reports as Markdown, for pull requests, job summaries and documents."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from modelport.loadtests import number_format
from modelport.loadtests.checks import CheckStatus
from modelport.loadtests.compare.result import Comparison
from modelport.loadtests.gate.decision import GateDecision
from modelport.loadtests.report import (
    gate_tables,
    matrix_text,
    text_escaping,
)
from modelport.loadtests.report.comparison_tables import Table

#: Signs that are readable without images.
SIGNS = {
    CheckStatus.PASS: "\N{WHITE HEAVY CHECK MARK} pass",
    CheckStatus.FAIL: "\N{CROSS MARK} **fail**",
    CheckStatus.INCONCLUSIVE: "\N{WHITE QUESTION MARK ORNAMENT} inconclusive",
}
#: Length of a verdict's note in a cell; the HTML report has all of it.
NOTE_LENGTH = 120
#: Characters with a meaning in a cell; names must not become markup, mentions or markers.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~$@#!&])")


def text(plain: str) -> str:
    """Escape ``plain`` as one line of text."""
    return _SPECIAL.sub(lambda match: f"&#{ord(match[1])};", text_escaping.line(plain))


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; cells must be Markdown, so foreign text goes through ``text`` first."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def of(found: Table) -> str:
    """A table of the reports; row names include the candidates' numbers."""
    lines = [
        [
            _name(row.number, row.name) + (" (disqualified)" if row.disqualified else ""),
            *map(text, row.cells),
        ]
        for row in found.rows
    ]
    return table((found.first, *map(text, found.head)), lines)


def captioned(found: Table) -> str:
    return f"{text(found.caption)}:\n\n{of(found)}"


def verdicts(comparison: Comparison) -> str:
    """The matrix."""
    lines = []
    for line in matrix_text.lines(comparison):
        margin = text(line.margin)
        if line.second is not None:
            margin += f" {_name(line.second.number, line.second.name)}"
        winner = number_format.NOTHING
        if line.winner is not None:
            winner = f"**{_name(line.winner.number, line.winner.name)}**"
            winner += f" {text(line.winner.figure)}" if line.winner.figure else ""
        note = f"; {text(text_escaping.line(line.note, NOTE_LENGTH))}" if line.note else ""
        lines.append(
            [
                f"{text(line.concern)} ({text(line.measure)})",
                winner,
                margin,
                f"{matrix_text.NOISE[line.noise]}{note}",
            ]
        )
    return table(("concern", "winner", "by how much", "certainty"), lines)


def machine(found: Comparison) -> str:
    """A sentence about the machine, the time and the method."""
    rounds = "1 round" if found.rounds == 1 else f"{found.rounds} interleaved rounds"
    rounds += f", {number_format.duration(found.seconds)} in all"
    parts = [
        _hardware(found.hardware),
        rounds,
        f"seed {found.seed}",
        text_escaping.when(found.began_at),
    ]
    sentence = "; ".join(part for part in parts if part) + "."
    return f"{sentence} Made by `{_code(found.command)}`." if found.command else sentence


def _hardware(found: Mapping[str, str]) -> str:
    """The machine's properties; values with a unit need no name."""
    units = {"cores": "cores", "memory_gib": "GiB"}
    said = []
    for name, value in found.items():
        if name in units:
            said.append(f"{text(value)} {units[name]}")
        else:
            said.append(text(value) if name in ("cpu", "os") else f"{text(name)} {text(value)}")
    return ", ".join(said)


def decision(found: GateDecision) -> str:
    """The gate's decision, as a comment on a pull request."""
    both = f"{text(found.baseline)} → {text(found.candidate)}"
    parts = [f"### {SIGNS[found.status]}: {both}", text(gate_tables.sentence(found))]
    lines = [
        [
            text(question.name),
            SIGNS[question.status],
            text(gate_tables.figure(question, question.baseline)),
            text(gate_tables.figure(question, question.candidate)),
            text(question.check.observed),
            text(question.check.bound),
            text(question.detail),
        ]
        for question in found.questions
    ]
    head = (
        "criterion",
        "verdict",
        "baseline",
        "candidate",
        "observed, with interval",
        "limit",
        "details",
    )
    parts.append(table(head, lines))
    if found.agreement is not None:
        parts.append(text(gate_tables.agreement(found.agreement)))
        if (by_label := gate_tables.labels(found.agreement)) is not None:
            parts.append(captioned(by_label))
    summaries = gate_tables.summaries(found)
    if summaries is not None:
        parts.append(f"<details><summary>Latencies</summary>\n\n{of(summaries)}\n\n</details>")
    rounds = f"{found.rounds} interleaved rounds in {number_format.duration(found.seconds)}"
    said = (_hardware(found.hardware), rounds, f"seed {found.seed}")
    where = "; ".join(part for part in said if part)
    parts.append(f"{where}." + (f" `{_code(found.command)}`" if found.command else ""))
    parts += [f"- {text(note)}" for note in found.notes]
    return "\n\n".join(parts)


def _name(number: int | None, name: str) -> str:
    return text(name) if number is None else f"{number} {text(name)}"


def _code(command: str) -> str:
    """A command in a code span that it cannot leave."""
    return text_escaping.line(command).replace("`", "'").replace("-->", "-- >")
