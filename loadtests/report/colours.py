"""The colours of both schemes: ink and paper, and one for each candidate, the same in every plot.

Plots are drawn in the light scheme's; the page gives every one of them a name, so that CSS decides.
"""

from __future__ import annotations

#: Role → (light, dark). Text on paper has a contrast of at least 4.5 in both (WCAG 2, AA).
ROLES = {
    "paper": ("#fdfdfc", "#15181d"),
    "raised": ("#f4f5f3", "#1e232a"),
    "ink": ("#1c2126", "#e6e9ec"),
    "quiet": ("#59616a", "#a3adb8"),
    "grid": ("#dfe2e4", "#323a44"),
    "good": ("#14713d", "#5ad08a"),
    "bad": ("#b3261e", "#ff8f85"),
    "open": ("#8a5a00", "#edb84c"),
    #: On a badge of a candidate's colour.
    "on-series": ("#fefefe", "#14171c"),
}
#: Dark enough for white text, and told apart by most eyes; the number beside it is for all.
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
    """The colour that ``name`` is drawn with."""
    return ROLES[name][0]


def series(number: int) -> str:
    """The colour of the candidate with this number, from 1 on; it repeats after the last."""
    return SERIES[(number - 1) % len(SERIES)][0]


def variables(dark: bool) -> dict[str, str]:
    """CSS custom properties of one scheme."""
    named = {f"--{name}": pair[dark] for name, pair in ROLES.items()}
    return named | {f"--s{n}": pair[dark] for n, pair in enumerate(SERIES, start=1)}


#: What a colour of the light scheme is called in a page.
NAMES = {colour: name for name, colour in variables(dark=False).items()}
