"""``make report-browser``: open the reports in headless Chromium, and look at them.

    python -m tests.loadtests.report_browser [COMPARISON.json ...] [--screenshots FOLDER]

Seeded reports of every kind are opened, with names of the worst kind too, and those of the real
comparisons that are named. Every one is opened wide and narrow, light and dark. A plot without size
or without marks for a candidate, a concern that the matrix lacks, a console message, a request
that wants to leave, text that hardly stands out or overlaps, a page wider than its window, or
markup that came out of a name: each is a failure, and one ends this with 1. That these are seen is
proven first, on a page that has them all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Route, sync_playwright
from rich.console import Console
from rich.table import Table

from benchmarks import programs
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.loadtests.compare import json_document
from modelport.loadtests.compare.result import Candidate, Comparison
from modelport.loadtests.report import html, text_escaping
from modelport.loadtests.system import environments
from tests import verb
from tests.loadtests import report_subject

ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDTHS, SCHEMES = (1280, 380), ("light", "dark")
#: WCAG 2, AA, of text; pixels of a plot's letters on a telephone.
LEAST_CONTRAST, LEAST_LETTERS = 4.5, 7.5
LOOK = Path(__file__).with_name("report_page.js").read_text()


@dataclass(frozen=True)
class Subject:
    """A page, and what must be found on it."""

    name: str
    path: Path
    #: Start of a figure's id → numbers that must have marks in it.
    drawn: dict[str, set[int]]
    concerns: tuple[str, ...] = ()
    #: Literally in its text.
    texts: tuple[str, ...] = ()


def of_comparison(name: str, comparison: Comparison, path: Path) -> Subject:
    """The report of ``comparison`` at ``path``; expectations come from the data alone."""
    html.write_comparison(comparison, path)
    has: dict[str, Callable[[Candidate], bool]] = {
        "latency-": lambda c: any(run.curve for run in c.runs),
        "throughput-": lambda c: bool(c.runs),
        "rate-under-slo": lambda c: bool(c.rate_under_slo),
        "cold-start": lambda c: bool(c.cold_start_seconds),
        "size-error": lambda c: c.max_abs_error is not None,
        "memory": lambda c: bool(c.memory_bytes),
        "cpu": lambda c: bool(c.cpu_seconds_per_request),
    }
    numbered = list(enumerate(comparison.candidates, start=1))
    drawn = {figure: {n for n, c in numbered if test(c)} for figure, test in has.items()}
    texts = [*(c.name for c in comparison.candidates), comparison.command]
    texts += [c.disqualified for c in comparison.candidates if c.disqualified]
    texts += [part for absent in comparison.absent for part in (absent.name, absent.why)]
    return Subject(
        name,
        path,
        {figure: numbers for figure, numbers in drawn.items() if numbers},
        tuple(verdict.concern for verdict in comparison.matrix),
        tuple(text_escaping.line(text, 300) for text in texts),
    )


def subjects(folder: Path, comparisons: list[Path]) -> list[Subject]:
    """Every page, written into ``folder``."""
    hostile = report_subject.comparison(report_subject.HOSTILE)
    found = [
        of_comparison("comparison", report_subject.comparison(), folder / "comparison.html"),
        of_comparison("hostile names", hostile, folder / "hostile.html"),
    ]
    run, dots = report_subject.run(), report_subject.run(300, 9, None)
    run_plots = {name: {1} for name in ("percentiles", "histogram", "over-time", "throughput")}
    run_texts = tuple(
        text_escaping.line(text, 300) for text in (*run.errors, *report_subject.HOSTILE[:3])
    )
    html.write_run(run, folder / "run.html", checks=report_subject.CHECKS, hardware={"cpu": "x"})
    html.write_run(dots, folder / "dots.html")
    found.append(Subject("run", folder / "run.html", run_plots, (), run_texts))
    found.append(Subject("short run", folder / "dots.html", run_plots))
    decision = report_subject.decision(report_subject.HOSTILE[0])
    html.write_gate(decision, folder / "gate.html")
    gate_plots = {"changes": {2}, "limits": {2}, "latency": {1, 2}}
    texts = tuple(question.name for question in decision.questions)
    found.append(Subject("gate", folder / "gate.html", gate_plots, (), texts))
    found += _rollouts(folder)
    for number, path in enumerate(comparisons):
        try:
            comparison = json_document.read(path)
        except json_document.BadDocument as error:
            raise environments.Missing(str(error)) from error
        found.append(of_comparison(path.name, comparison, folder / f"real-{number}.html"))
    return found


def _rollouts(folder: Path) -> Iterator[Subject]:
    hostile = report_subject.HOSTILE[0]
    for name, phase, text, examples in (
        ("promotion", RolloutPhase.PROMOTED, "no harm was found", []),
        ("rollback", RolloutPhase.ROLLED_BACK, hostile, [report_subject.EXAMPLE]),
    ):
        state = report_subject.rollout(phase, text)
        html.write_rollout(state, examples, folder / f"{name}.html")
        drawn = {"share": {2}, "latency": {1, 2}, "scores": {1, 2}, "criterion-": {2}}
        texts = (text, *(row["name"] for row in state["evidence"]))
        yield Subject(name, folder / f"{name}.html", drawn, (), texts)


def faults(browser: Browser, subject: Subject, width: int, scheme: Any, picture: Path) -> list[str]:
    """The faults of a page for one reader."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.extend(_complaint(message)))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.route("**/*", lambda route: _gate(route, subject.path, said))
    page.goto(subject.path.as_uri(), wait_until="load")
    seen = page.evaluate(LOOK)
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=picture, full_page=True)
    found = [*said, *_drawn(subject, seen), *_readable(seen), *_inert(subject, seen)]
    shown = {text_escaping.line(text.splitlines()[0]) for text in seen["concerns"]}
    found += [f"the matrix lacks '{c}'" for c in subject.concerns if c not in shown]
    if page.locator("#show-1").count():
        found += _taken_out(page)
    page.close()
    return found


def _complaint(message: ConsoleMessage) -> list[str]:
    """Anything is one: the reports have nothing to say there."""
    return [f"console {message.type}: {message.text}"]


def _gate(route: Route, path: Path, said: list[str]) -> None:
    """Only the page itself may be had."""
    if route.request.url == path.as_uri():
        route.continue_()
        return
    said.append(f"request: {route.request.url}")
    route.abort()


def _drawn(subject: Subject, seen: dict[str, Any]) -> list[str]:
    found = []
    for start, numbers in subject.drawn.items():
        figures = {name: fig for name, fig in seen["figures"].items() if name.startswith(start)}
        if not figures:
            found.append(f"no plot '{start}'")
        for name, figure in figures.items():
            if min(figure["width"], figure["height"]) < 40:
                found.append(f"plot '{name}' is {figure['width']} x {figure['height']}")
            found += [
                f"plot '{name}' draws nothing for candidate {number}"
                for number in numbers
                if not figure["drawn"].get(str(number))
            ]
    return found


def _readable(seen: dict[str, Any]) -> list[str]:
    found = [f"texts overlap: {pair}" for pair in seen["overlaps"]]
    for what, key, least in (
        ("contrast in plots", "faintest", LEAST_CONTRAST),
        ("contrast of text", "inkOnPaper", LEAST_CONTRAST),
        ("letters in plots, pixels", "smallest", LEAST_LETTERS),
    ):
        if seen[key] < least:
            found.append(f"{what}: {seen[key]:.2f}, less than {least}")
    if seen["wide"] > 0:
        found.append(f"the page is {seen['wide']} pixels wider than its window")
    return found


def _inert(subject: Subject, seen: dict[str, Any]) -> list[str]:
    found = [f"markup: {element}" for element in seen["bad"]]
    found += [f"id twice: {name}" for name in seen["twice"]]
    found += [f"nothing has the id {name}" for name in seen["dangling"]]
    found += ["a script ran"] if seen["title"] == "owned" else []
    text = text_escaping.line(seen["text"])
    return found + [
        f"lacks the text {t!r}" for t in subject.texts if text_escaping.line(t) not in text
    ]


def _taken_out(page: Page) -> list[str]:
    """A candidate without its tick is in no plot; with it, it is back."""
    page.locator("#show-1").uncheck()
    left = page.locator(".mark.s1:visible").count()
    page.locator("#show-1").check()
    back = page.locator(".mark.s1:visible").count()
    found = [f"{left} marks of an unticked candidate are left"] if left else []
    return found if back else [*found, "a ticked candidate has no marks"]


#: Everything that must be seen: each line of ``EXPECTED`` is the start of one complaint.
FAULTY = """<!doctype html><title>x</title><body style="background: #fff; color: #eee">
<script>document.title = "owned"; console.error("ouch"); fetch("https://example.org/")</script>
<img src=x.png><p id=a style="width: 5000px">wide</p><p id=a></p>
<figure id=latency-1><svg viewBox="0 0 400 100" width=20 height=5>
<g class="mark s1 label"><text x=0 y=10 font-size=9 fill="#eee">one</text></g>
<g class="mark s2 label"><text x=0 y=10 font-size=9 fill="#eee">other</text></g>
<use href="#gone"/></svg></figure>"""
EXPECTED = (
    "console error: ouch",
    "request: https://example.org/",
    "plot 'latency-1' is 20 x 5",
    "plot 'latency-1' draws nothing for candidate 3",
    "no plot 'memory'",
    "contrast in plots",
    "contrast of text",
    "letters in plots",
    "the page is",
    "markup: <script>",
    "markup: <img",
    "id twice: a",
    "nothing has the id gone",
    "a script ran",
    "lacks the text 'candidate'",
    "the matrix lacks 'Memory'",
)


def blind(browser: Browser, folder: Path) -> list[str]:
    """The faults of a page with all of them that ``faults`` misses."""
    page = folder / "faulty.html"
    page.write_text(FAULTY)
    subject = Subject(
        "faulty", page, {"latency-": {1, 3}, "memory": {1}}, ("Memory",), ("candidate",)
    )
    found = faults(browser, subject, 380, "light", folder / "faulty.png")
    return [text for text in EXPECTED if not any(f.startswith(text) for f in found)]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.loadtests.report_browser",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("comparisons", nargs="*", type=Path, metavar="COMPARISON.json")
    parser.add_argument("--screenshots", type=Path, metavar="FOLDER", help="keep them there")
    options = parser.parse_args()
    console, wrong = Console(), {}
    chromium = programs.debian_program("chromium", "chromium")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        folder = Path(temporary)
        pictures = options.screenshots or folder
        browser = playwright.chromium.launch(executable_path=chromium, args=list(ARGUMENTS))
        unseen = blind(browser, folder)
        if unseen:
            sys.exit(f"these faults go unseen, so that a pass says nothing: {json.dumps(unseen)}")
        grid = Table("report", *(f"{width} {scheme}" for width in WIDTHS for scheme in SCHEMES))
        for subject in subjects(folder, options.comparisons):
            cells = []
            for width in WIDTHS:
                for scheme in SCHEMES:
                    picture = pictures / f"{text_escaping.slug(subject.name)}-{width}-{scheme}.png"
                    found = faults(browser, subject, width, scheme, picture)
                    wrong |= {(subject.name, width, scheme): found} if found else {}
                    cells.append(f"[red]{len(found)} faults[/]" if found else "[green]good[/]")
            grid.add_row(subject.name, *cells)
        browser.close()
    console.print(grid)
    for (name, width, scheme), found in wrong.items():
        for fault in found:
            console.print(f"{name}, {width} {scheme}: {fault}", markup=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    verb.run(main)
