"""Conversion of matplotlib figures to SVG: inline in a page with its colours, or as a file."""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Transform

from modelport.loadtests.report import colours, text_escaping

#: In points; narrow, so that text stays readable on a phone.
WIDTH = 400.0
FONT = 11.0
INK, QUIET, GRID, PAPER = (colours.role(name) for name in ("ink", "quiet", "grid", "paper"))
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text: small, searchable, in the page's own font
    "svg.hashsalt": "modelport",  # the same figures give the same file
    "text.parse_math": False,  # dollar signs in names are not formulas
    "font.size": FONT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "lines.solid_capstyle": "round",
}
#: Prefix of artist gids that become CSS classes: "mark:3:bar" is a bar of candidate 3.
_MARK = "mark"
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
#: Distances in points: between two badges, and from a badge to its dot.
_APART, _OFF_DOT = 14.5, 10.5


@dataclass(frozen=True)
class Plot:
    """A drawn plot; ``name`` is its id of letters, digits and hyphens."""

    name: str
    title: str
    #: Description below the plot, also for readers who cannot see it.
    description: str
    svg: str
    #: Numbers of the candidates in the plot.
    shown: frozenset[int] = frozenset()


def plot(
    name: str, title: str, description: str, height: float, draw: Callable[[Axes], None]
) -> Plot:
    """Draw inline SVG; ``draw`` fills axes of ``height`` points."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # The font only measures here; the browser's fonts have these glyphs.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.subplots()
        draw(axes)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    svg, shown = _inline(drawn.getvalue(), name, title, description)
    return Plot(name, title, description, svg, shown)


def mark(number: int, kind: str) -> str:
    """The gid of a candidate's artist."""
    return f"{_MARK}:{number}:{kind}"


def standalone(drawn: Plot) -> str:
    """The plot as a file with its own light colours, title and background."""
    svg = re.sub(r"var\((--[a-z0-9-]+)\)", lambda m: colours.variables(False)[m[1]], drawn.svg)
    root = _parse(svg)
    _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
    room = 26.0
    root.attrib |= {
        "viewBox": f"0 {-room:g} {width:g} {height + room:g}",
        "width": f"{width * 1.5:g}",
        "font-family": "system-ui, -apple-system, 'Segoe UI', sans-serif",
    }
    paper = {"y": f"{-room:g}", "width": "100%", "height": "100%", "fill": PAPER}
    heading = ElementTree.Element(
        f"{{{_SVG}}}text", {"x": "6", "y": "-8", "font-size": "12", "font-weight": "600"}
    )
    heading.attrib["fill"] = INK
    heading.text = drawn.title
    root.insert(2, ElementTree.Element(f"{{{_SVG}}}rect", paper))
    root.insert(3, heading)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _parse(svg: str) -> ElementTree.Element:
    ElementTree.register_namespace("", _SVG)
    return ElementTree.fromstring(svg)


def _inline(drawn: str, name: str, title: str, description: str) -> tuple[str, frozenset[int]]:
    """Remove parts that a page must not get twice or from outside: ids, styles, fonts, metadata."""
    root = _parse(drawn)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    shown: set[int] = set()
    used = set(re.findall(r'(?:url\(|xlink:href=")#([^)"]+)', drawn))
    for element in root.iter():
        _clean(element, name, used, shown)
    width, height = (root.attrib.pop(side).removesuffix("pt") for side in ("width", "height"))
    root.attrib.pop("version", None)
    root.attrib |= {
        "id": f"{name}-svg",
        "viewBox": f"0 0 {width} {height}",
        "role": "img",
        "aria-labelledby": f"{name}-title {name}-description",
        "stroke-linejoin": "round",
    }
    for place, (tag, text) in enumerate((("title", title), ("desc", description))):
        told = ElementTree.Element(f"{{{_SVG}}}{tag}")
        told.attrib["id"] = f"{name}-{'title' if tag == 'title' else 'description'}"
        told.text = text_escaping.fit(text)
        root.insert(place, told)
    text = ElementTree.tostring(root, encoding="unicode")
    for colour, variable in colours.NAMES.items():
        text = text.replace(colour, f"var({variable})")
    return text, frozenset(shown)


def _clean(element: ElementTree.Element, name: str, used: set[str], shown: set[int]) -> None:
    own = element.attrib.pop("id", "")
    if own.startswith(f"{_MARK}:"):
        _, number, kind = own.split(":")
        shown.add(int(number))
        element.attrib["class"] = f"mark s{number} {kind}"
    elif own in used:
        element.attrib["id"] = f"{name}-{own}"
    target = element.attrib.pop(f"{{{_XLINK}}}href", None)
    if target is not None:
        element.attrib["href"] = f"#{name}-{target.removeprefix('#')}"
    for attribute, value in element.attrib.items():
        if attribute == "style":
            value = re.sub(r"font-family: [^;]*;?\s*", "", value)
        elif attribute == "d":
            value = re.sub(r"(?<!\d)\d++\.\d++", lambda number: f"{float(number[0]):.5g}", value)
        element.attrib[attribute] = value.replace("url(#", f"url(#{name}-")


def badges(axes: Axes, points: Sequence[tuple[int, float, float]]) -> None:
    """Draw each candidate's number near its dots (data coordinates), without overlaps.

    Call it once the limits of the axes are final.
    """
    cast(Figure, axes.figure).draw_without_rendering()
    dots = [tuple(axes.transData.transform((x, y))) for _, x, y in points]
    box = axes.get_window_extent()
    taken: list[tuple[float, float]] = []
    for (number, x, y), dot in zip(points, dots, strict=True):
        place = _free(dot, dots, taken, (box.x0, box.y0, box.x1, box.y1))
        taken.append(place)
        shift = (place[0] - dot[0], place[1] - dot[1])
        badge(axes, number, (x, y), shift)


def badge(
    axes: Axes,
    number: int,
    point: tuple[float, float],
    shift: tuple[float, float],
    within: Transform | None = None,
) -> None:
    """Draw a disc with the candidate's number, ``shift`` points off ``point``, linked by a line.

    With other coordinates in ``within`` there is no line.
    """
    colour = colours.series(number)
    tie = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 5}
    text = axes.annotate(
        str(number),
        point,
        xycoords=within or "data",
        xytext=shift,
        textcoords="offset points",
        ha="center",
        va="center_baseline",
        color=colours.role("on-series"),
        fontsize=8,
        fontweight="bold",
        bbox={"boxstyle": "circle,pad=0.22", "facecolor": colour, "edgecolor": PAPER},
        arrowprops=None if within else tie,
        annotation_clip=False,
        zorder=6,
    )
    text.set_gid(mark(number, "badge"))
    text.set_in_layout(False)
    if text.arrow_patch is not None:
        text.arrow_patch.set_gid(mark(number, "badge"))


def _free(
    dot: tuple[float, ...],
    dots: Sequence[tuple[float, ...]],
    taken: Sequence[tuple[float, float]],
    box: tuple[float, float, float, float],
) -> tuple[float, float]:
    """The nearest place around ``dot`` where a badge covers nothing, or the least crowded one."""
    best, most = (dot[0], dot[1] + _APART), -math.inf
    for distance, turn in itertools.product((13.0, 20.0, 28.0, 38.0, 50.0), range(12)):
        angle = math.radians(60 + 30 * turn)
        place = (dot[0] + distance * math.cos(angle), dot[1] + distance * math.sin(angle))
        if not (box[0] + 6 <= place[0] <= box[2] - 6 and box[1] + 6 <= place[1] <= box[3] + 4):
            continue
        room = min(
            min((math.dist(place, other) / _APART for other in taken), default=9.0),
            min(math.dist(place, other[:2]) / _OFF_DOT for other in dots),
        )
        if room >= 1:
            return place
        if room > most:
            best, most = place, room
    return best
