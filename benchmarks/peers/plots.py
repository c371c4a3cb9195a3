"""The plots of the report, as small SVG files with Okabe and Ito's colour-blind-safe palette."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from benchmarks.peers import models, results, runtime_limit, tables
from benchmarks.peers.results import PeerCase, PeerRow, Results, median, ratio

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#666666"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, and searchable
    "svg.hashsalt": "modelport",  # the same figures give the same file
    "font.size": 9,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "figure.facecolor": "white",  # also on a dark page
}
ABOVE: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "ncols": 4,
    "frameon": False,
}
TINY = "x2"
PROTOCOL_COLOURS = {"json": BLUE, "binary": GREEN, "grpc": ORANGE}
SHORT = {"json": "HTTP JSON", "binary": "HTTP binary", "grpc": "gRPC"}


def draw(measured: Results, folder: Path) -> dict[str, Path]:
    """Draw every plot that has figures; return files by title."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    drawers: dict[str, tuple[str, Callable[[Results], Any]]] = {
        "throughput": (f"{TINY}: requests per second, 16 in flight", throughput),
        "latency": (f"{TINY}: latency, one in flight", latency),
        "share": ("Share of raw ONNX Runtime, 16 in flight", share),
        "batching": ("Rows per second by batch size", batching),
    }
    with matplotlib.rc_context(STYLE):
        for name, (title, drawer) in drawers.items():
            figure = drawer(measured)
            if figure is not None:
                found[title] = folder / f"{name}.svg"
                figure.savefig(found[title], metadata={"Date": None}, bbox_inches="tight")
                plt.close(figure)
    return found


def _answering(rows: Mapping[str, PeerRow], cases: list[PeerCase]) -> list[str]:
    """Servers with a figure for one of the cases, the best last: bars grow upward."""
    best = {
        name: max((median(row.rates(case)) for case in cases if row.rates(case)), default=None)
        for name, row in rows.items()
    }
    return sorted((n for n, rate in best.items() if rate is not None), key=lambda n: best[n] or 0)


def _names(axes: Any, names: list[str]) -> None:
    """Label the axis with the servers' names; modelport's are highlighted."""
    axes.set_yticks(range(len(names)), names)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("modelport"):
            label.set_fontweight("bold")


def throughput(measured: Results) -> Any:
    """Bars from the median, whiskers from the lowest to the highest round."""
    rows = measured.models.get(TINY, {})
    cases = [PeerCase("json", 16), PeerCase("grpc", 16)]
    names = _answering({n: row for n, row in rows.items() if n != runtime_limit.NAME}, cases)
    if not names:
        return None
    figure, axes = plt.subplots(figsize=(7, 0.42 * len(names) + 0.9))
    for offset, case in ((0.2, cases[0]), (-0.2, cases[1])):
        shown = [(n, rates) for n, name in enumerate(names) if (rates := rows[name].rates(case))]
        middles = [median(rates) for _, rates in shown]
        low = [m - min(rates) for m, (_, rates) in zip(middles, shown, strict=True)]
        high = [max(rates) - m for m, (_, rates) in zip(middles, shown, strict=True)]
        places = [n + offset for n, _ in shown]
        axes.barh(
            places,
            middles,
            height=0.38,
            color=PROTOCOL_COLOURS[case.protocol],
            label=SHORT[case.protocol],
            xerr=[low, high],
            error_kw={"ecolor": GREY, "elinewidth": 1, "capsize": 2},
        )
        for place, middle, above in zip(places, middles, high, strict=True):
            axes.annotate(
                f" {middle:,.0f}", (middle + above, place), va="center", fontsize=7, color=GREY
            )
    _names(axes, names)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("requests per second on one core, 16 in flight (median; lowest to highest)")
    axes.legend(**ABOVE)
    return figure


def latency(measured: Results) -> Any:
    """A dot for p50, a ring for p99, a line between them."""
    rows = measured.models.get(TINY, {})
    cases = [PeerCase("json", 1), PeerCase("grpc", 1)]
    names = _answering({n: row for n, row in rows.items() if n != runtime_limit.NAME}, cases)
    if not names:
        return None
    figure, axes = plt.subplots(figsize=(7, 0.36 * len(names) + 0.9))
    for offset, case in ((0.16, cases[0]), (-0.16, cases[1])):
        colour = PROTOCOL_COLOURS[case.protocol]
        label = f"{SHORT[case.protocol]}: p50 (dot), p99 (ring)"
        for number, name in enumerate(names):
            samples = rows[name].cases.get(case, [])
            if not samples:
                continue
            p50 = median(sample.p50_ms for sample in samples)
            p99 = median(sample.p99_ms for sample in samples)
            place = number + offset
            axes.plot([p50, p99], [place, place], color=colour, linewidth=1)
            axes.plot([p50], [place], "o", color=colour, markersize=5, label=label)
            axes.plot([p99], [place], "o", color=colour, markersize=5, markerfacecolor="white")
            label = "_"  # once in the legend
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    _names(axes, names)
    axes.set_xlabel("milliseconds, one request in flight (medians of the rounds; log scale)")
    axes.legend(**ABOVE)
    return figure


def share(measured: Results) -> Any:
    """For each model that computes, every server's share of the loop's rate at batch 1."""
    shown = {
        n: rows
        for n, rows in measured.models.items()
        if models.ALL[n].baseline == runtime_limit.NAME
    }
    order = [name for name in _order(shown) if name not in (runtime_limit.NAME, *tables.BATCHING)]
    if not order:
        return None
    size = (2.4 * len(shown) + 1.6, 0.3 * len(order) + 1.1)
    figure, panels = plt.subplots(1, len(shown), figsize=size, sharey=True, squeeze=False)
    for axes, (model, rows) in zip(panels[0], shown.items(), strict=True):
        loop = rows.get(runtime_limit.NAME, PeerRow("")).rates(PeerCase(results.LOOP, 1))
        for protocol, marker in (("json", "o"), ("binary", "D"), ("grpc", "s")):
            points = []
            for number, name in enumerate(order):
                found = ratio(rows.get(name, PeerRow("")).rates(PeerCase(protocol, 16)), loop)
                if found is not None:
                    points.append((found, number))
            if points:
                x, y = zip(*points, strict=True)
                colour = PROTOCOL_COLOURS[protocol]
                axes.plot(x, y, marker, color=colour, markersize=5, label=SHORT[protocol])
        axes.axvline(1, color=GREY, linewidth=1, linestyle="--")
        axes.set_xlim(left=0)
        axes.set_title(models.ALL[model].title.partition(" (")[0], fontsize=9)
    _names(panels[0][0], order)
    panels[0][len(shown) // 2].set_xlabel(
        "requests/s ÷ raw ONNX Runtime's at batch 1; 16 in flight"
    )
    figure.tight_layout()
    _legend(figure, panels[0])
    return figure


def _legend(figure: Any, panels: Any) -> None:
    """One legend above all panels."""
    found: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), **ABOVE)


def _order(shown: Mapping[str, Mapping[str, PeerRow]]) -> list[str]:
    """The servers of all models, the fastest of the first model last."""
    names: dict[str, None] = {}
    for rows in shown.values():
        for name in _answering(rows, [PeerCase(p, 16) for p in PROTOCOL_COLOURS]):
            names.setdefault(name)
    return list(names)


def batching(measured: Results) -> Any:
    """The loop's curve over batch sizes, and lines at the rates that modelport's batcher
    reaches."""
    shown = {
        name: loops
        for name, rows in measured.models.items()
        if len(loops := results.by_hand(rows, runtime_limit.NAME)) > 1
    }
    if not shown:
        return None
    figure, panels = plt.subplots(
        1, len(shown), figsize=(2.6 * len(shown) + 0.8, 2.6), squeeze=False
    )
    for axes, (model, loops) in zip(panels[0], shown.items(), strict=True):
        sizes = list(loops)
        middles = [median(rates) for rates in loops.values()]
        low = [m - min(rates) for m, rates in zip(middles, loops.values(), strict=True)]
        high = [max(rates) - m for m, rates in zip(middles, loops.values(), strict=True)]
        axes.errorbar(
            sizes,
            middles,
            [low, high],
            fmt="o-",
            color=GREEN,
            capsize=2,
            markersize=4,
            label="raw loop, by hand",
        )
        for name, style in zip(tables.BATCHING, ("--", ":"), strict=True):
            row = measured.models[model].get(name, PeerRow(""))
            where = ", its loop apart" if style == ":" else ""
            for case in row.cases:
                axes.axhline(
                    median(row.rates(case)),
                    color=PROTOCOL_COLOURS[case.protocol],
                    linestyle=style,
                    label=f"modelport, {SHORT[case.protocol]}{where}",
                )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_ylim(bottom=0)
        axes.set_title(models.ALL[model].title.partition(" (")[0], fontsize=9)
        axes.set_xlabel("batch size by hand")
    panels[0][0].set_ylabel("rows per second")
    figure.tight_layout()
    _legend(figure, panels[0])
    return figure
