"""Colours of the light and the dark scheme: ink, paper, and one colour for each candidate.

Plots are drawn in the light scheme; the page gives each colour a name for CSS.
"""

from __future__ import annotations

#: (light, dark) by role. Text on paper has a contrast of at least 4.5 in both (WCAG 2, AA).
ROLES = {
    "paper": ("#fdfdfc", "#15181d"),
    "raised": ("#f4f5f3", "#1e232a"),
    "ink": ("#1c2126", "#e6e9ec"),
    "quiet": ("#59616a", "#a3adb8"),
    "grid": ("#dfe2e4", "#323a44"),
    "good": ("#14713d", "#5ad08a"),
    "bad": ("#b3261e", "#ff8f85"),
    "open": ("#8a5a00", "#edb84c"),
    #: Text on a badge in a candidate's colour.
    "on-series": ("#fefefe", "#14171c"),
}
#: Dark enough for white text; the number beside each serves readers who cannot tell them apart.
SERIES = (
    ("#0062ad", "#62b4ff"),
    ("#b84a08", "#ffa15f"),
    ("#00785a", "#3fd0a4"),
    ("#9c1f6b", "#f283c8"),
    ("#7d6200", "#e2c44a"),
    ("#5048c4", "#a7a1ff"),
    ("#ae1f38", "#ff8a9c"),
    ("#0b7285", "#55d1e6"),
    ("#567200", "#add85a"),
    ("#7a4b24", "#d9aa7f"),
    ("#5c6672", "#b4bdc8"),
    ("#7a22b5", "#d29bff"),
)


def role(name: str) -> str:
    """The colour of ``name``."""
    return ROLES[name][0]


def series(number: int) -> str:
    """The colour of a candidate by its number, from 1; colours repeat after the last."""
    return SERIES[(number - 1) % len(SERIES)][0]


def variables(dark: bool) -> dict[str, str]:
    """CSS custom properties of one scheme."""
    named = {f"--{name}": pair[dark] for name, pair in ROLES.items()}
    return named | {f"--s{n}": pair[dark] for n, pair in enumerate(SERIES, start=1)}


#: Names of the light scheme's colours in a page.
NAMES = {colour: name for name, colour in variables(dark=False).items()}
