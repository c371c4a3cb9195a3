"""Texts of the verdict matrix."""

from __future__ import annotations

from dataclasses import dataclass

from modelport.loadtests import number_format
from modelport.loadtests.compare.result import Comparison, ConcernVerdict


@dataclass(frozen=True)
class Place:
    """One candidate in a ranking."""

    number: int | None
    name: str
    figure: str
    #: Factor to the winner's figure; empty for the winner.
    behind: str


@dataclass(frozen=True)
class Line:
    """One row of the matrix."""

    concern: str
    measure: str
    winner: Place | None
    #: "1.42 x better than", "level with" or "before" the second; in a tie with the first's name.
    margin: str
    second: Place | None
    #: "beyond", "within", "alone" or "nobody": also the row's class in CSS.
    noise: str
    ranking: tuple[Place, ...]
    note: str


#: Names of the kinds of certainty.
NOISE = {
    "beyond": "beyond the noise",
    "within": "no winner: within the noise",
    "alone": "nothing to compare with",
    "nobody": "no candidate qualified",
}


def lines(comparison: Comparison) -> list[Line]:
    numbers = {c.name: n for n, c in enumerate(comparison.candidates, start=1)}
    return [_line(verdict, numbers) for verdict in comparison.matrix]


def decided(comparison: Comparison) -> int:
    """The number of rows with a winner beyond the noise."""
    return sum(v.winner is not None and v.beyond_noise for v in comparison.matrix)


def _line(verdict: ConcernVerdict, numbers: dict[str, int]) -> Line:
    unit = number_format.unit_of(verdict.measure)
    best = verdict.ranking[0][1] if verdict.ranking else 0.0
    ranking = tuple(
        Place(
            numbers.get(name),
            name,
            spread or number_format.with_unit(value, unit),
            _behind(value, best) if place else "",
        )
        for place, (name, value, spread) in enumerate(verdict.ranking)
    )
    winner = next((place for place in ranking if place.name == verdict.winner), None)
    if verdict.winner is not None and winner is None:
        winner = Place(numbers.get(verdict.winner), verdict.winner, "", "")
    is_tie = winner is None and verdict.margin is not None
    second = ranking[1] if (winner is not None or is_tie) and len(ranking) > 1 else None
    return Line(
        concern=verdict.concern,
        measure=verdict.measure,
        winner=winner,
        margin=_tie(verdict, ranking[0]) if is_tie else _margin(verdict, winner, second),
        second=second,
        noise=_noise(verdict, winner, second),
        ranking=ranking,
        note=verdict.note,
    )


def _margin(verdict: ConcernVerdict, winner: Place | None, second: Place | None) -> str:
    if winner is None:
        return number_format.NOTHING
    if second is None:
        return "the only candidate with a figure"
    if verdict.margin is None:
        return "before"
    told = number_format.times(verdict.margin)
    return "level with" if told == number_format.times(1) else f"{told} better than"


def _tie(verdict: ConcernVerdict, first: Place) -> str:
    """The text before the second's name in a tie."""
    told = number_format.times(verdict.margin or 1.0)
    behind = "is level with" if told == number_format.times(1) else f"seems {told} better than"
    return f"{first.name} {behind}"


def _noise(verdict: ConcernVerdict, winner: Place | None, second: Place | None) -> str:
    if winner is None:
        return "nobody" if verdict.margin is None else "within"
    if second is None:
        return "alone"
    return "beyond" if verdict.beyond_noise else "within"


def _behind(value: float, best: float) -> str:
    """The factor to the best, at least 1."""
    low, high = sorted((abs(value), abs(best)))
    return number_format.times(high / low) if low > 0 else number_format.NOTHING
