"""The HTML reports as files: whole, closed to the network, and inert whatever names they hold.

How they look is for ``make report-browser``, which opens them in Chromium.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from modelport.loadtests.compare.result import Candidate, Comparison, ConcernVerdict
from modelport.loadtests.load.samples import SAMPLE
from modelport.loadtests.report import colours, comparison_plots, html, text_escaping
from modelport.loadtests.report import svg as canvas
from tests.loadtests import report_subject
from tests.loadtests.report_subject import HOSTILE

VOID = {"meta", "br", "input"}


class Tree(HTMLParser):
    """Elements with their attributes, the text, and whether every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return text_escaping.line(" ".join(self.texts))

    @property
    def ids(self) -> list[str]:
        return [str(attrs["id"]) for _, attrs in self.elements if "id" in attrs]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A report of each kind, with names of the worst kind."""
    folder = tmp_path_factory.mktemp("reports")
    comparison = report_subject.comparison(HOSTILE)
    html.write_comparison(comparison, folder / "new" / "comparison.html")
    html.write_run(
        report_subject.run(2000),
        folder / "new" / "run.html",
        checks=report_subject.CHECKS,
        hardware={"cpu": HOSTILE[1]},
        command=HOSTILE[0],
    )
    html.write_gate(report_subject.decision(HOSTILE[0]), folder / "new" / "gate.html")
    return {path.stem: path.read_text() for path in (folder / "new").iterdir()}


@pytest.mark.parametrize("kind", ["comparison", "run", "gate"])
def test_a_report_is_one_closed_document_that_asks_for_nothing(
    pages: dict[str, str], kind: str
) -> None:
    page = pages[kind]
    tree = Tree(page)
    assert tree.open == []
    assert len(tree.ids) == len(set(tree.ids))
    tags = {tag for tag, _ in tree.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "form", "image"}
    for tag, attrs in tree.elements:
        assert not any(name.startswith("on") for name in attrs), tag
        for name in ("href", "src"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, attrs)
    policy = [attrs["content"] for _, attrs in tree.elements if "http-equiv" in attrs]
    assert policy == [html.POLICY]
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page


@pytest.mark.parametrize("kind", ["comparison", "run", "gate"])
def test_every_plot_is_well_formed_named_and_complete(pages: dict[str, str], kind: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", pages[kind], re.DOTALL)
    assert len(drawings) >= 3
    ids = set(Tree(pages[kind]).ids)
    for drawing in drawings:
        svg = ElementTree.fromstring(drawing)
        assert svg.attrib["role"] == "img"
        for label in svg.attrib["aria-labelledby"].split():
            found = svg.find(f".//*[@id='{label}']")
            assert found is not None
            assert found.text
        for use in svg.iter(f"{{{canvas._SVG}}}use"):
            assert use.attrib["href"].removeprefix("#") in ids
        assert set(re.findall(r"url\(#([^)]*)\)", drawing)) <= ids
        assert not re.search(r"#[0-9a-f]{6}\b", drawing), "a colour that no scheme can change"
        assert "font-family" not in drawing


def test_hostile_names_are_text_wherever_they_stand(pages: dict[str, str]) -> None:
    text = Tree(pages["comparison"]).text
    for name in HOSTILE:
        assert text_escaping.line(name, 300) in text
    for kind in ("run", "gate"):
        assert HOSTILE[0] in Tree(pages[kind]).text
    assert not any("<script" in page.lower() for page in pages.values())


def test_the_matrix_shows_every_concern_with_its_winner_and_ranking(
    pages: dict[str, str],
) -> None:
    text = Tree(pages["comparison"]).text
    comparison = report_subject.comparison(HOSTILE)
    assert len(comparison.matrix) == 8
    for verdict in comparison.matrix:
        assert verdict.concern in text
        for _, _, spread in verdict.ranking:
            assert text_escaping.line(spread) in text


def test_what_is_disqualified_or_absent_is_named_with_its_reason(pages: dict[str, str]) -> None:
    text = Tree(pages["comparison"]).text
    assert "12 of 8,114 answers were wrong" in text
    assert "tritonserver is not installed" in text
    assert text.count("disqualified") >= 5  # in the summary, in plots and in tables


@pytest.mark.thorough
def test_a_candidate_has_its_number_and_colour_in_every_plot() -> None:
    comparison = report_subject.comparison()
    drawn = {plot.name: plot for plot in comparison_plots.draw(comparison)}
    everyone = set(range(1, 8))
    for name in ("latency-1", "latency-2", "throughput-1", "rate-under-slo", "cold-start"):
        assert drawn[name].shown == everyone, name
    for name in ("memory", "cpu", "cost"):
        assert drawn[name].shown == everyone, name
    assert drawn["size-error"].shown == everyone - {7}, "the seventh has no certified error"
    for plot in drawn.values():
        svg = ElementTree.fromstring(plot.svg)
        for group in svg.iter(f"{{{canvas._SVG}}}g"):
            number = re.fullmatch(r"mark s(\d+) (?:curve|bar|point|points)", group.get("class", ""))
            if number:
                used = set(re.findall(r"var\(--s(\d+)\)", ElementTree.tostring(group).decode()))
                assert used == {number[1]}


def test_a_plot_file_stands_alone_and_is_the_same_each_time() -> None:
    comparison = report_subject.comparison()
    first, second = (
        canvas.standalone(comparison_plots.cold_start(comparison)[0]) for _ in range(2)
    )
    assert first == second
    svg = ElementTree.fromstring(first)
    assert "var(" not in first
    assert colours.series(1) in first
    assert "Cold start" in [text.text for text in svg.iter(f"{{{canvas._SVG}}}text")]


def test_without_certificates_prices_or_starts_there_are_no_such_plots() -> None:
    bare = Candidate("one", "onnx", "fp32", "onnxruntime", False, 1000)
    comparison = Comparison("m", "s", "", 1.0, {}, 10.0, 1, (bare,))
    assert comparison_plots.draw(comparison) == []


def test_a_certified_speed_up_is_named_with_the_rows_it_was_measured_with(tmp_path: Path) -> None:
    plain = Candidate("plain", "onnx", "fp32", "onnxruntime", False, 1000)
    fused = dataclasses.replace(plain, name="fused", speedup=1.254, speedup_rows=8)
    html.write_comparison(
        Comparison("m", "s", "", 1.0, {}, 10.0, 1, (plain, fused)), tmp_path / "c.html"
    )
    assert "1.25x, 8 rows" in Tree((tmp_path / "c.html").read_text()).text


def test_nothing_measured_is_still_a_report(tmp_path: Path) -> None:
    html.write_comparison(Comparison("m", "s", "", 1.0, {}, 10.0, 1, ()), tmp_path / "c.html")
    assert "there are no measurements" in (tmp_path / "c.html").read_text()
    run = dataclasses.replace(report_subject.run(10, 0), samples=np.zeros(0, SAMPLE))
    html.write_run(run, tmp_path / "r.html")
    assert "so there are no plots" in (tmp_path / "r.html").read_text()


def test_a_run_that_only_failed_has_its_failures_over_time(tmp_path: Path) -> None:
    html.write_run(report_subject.run(50, 50), tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert 'id="over-time"' in page
    assert 'id="percentiles"' not in page


def test_a_saturated_or_stopped_generator_is_said_above_the_figures(tmp_path: Path) -> None:
    run = dataclasses.replace(report_subject.run(100, 0), client_cpu_share=1.0, complete=False)
    html.write_run(run, tmp_path / "r.html")
    text = Tree((tmp_path / "r.html").read_text()).text
    assert "the load generator was at the limit" in text
    assert "stopped early" in text
    assert text.index("at the limit") < text.index("Correct answers")


def test_an_undecided_winner_is_neither_hidden_nor_claimed(tmp_path: Path) -> None:
    one = Candidate("a", "onnx", "fp32", "onnxruntime", False, 1000, cold_start_seconds=(2.0,))
    ranking = (("a", 1.0, "1 ms"), ("b", 1.1, ""))
    comparison = Comparison(
        *("m", "s", "", 1.0, {}, 10.0, 1, (one,)),
        matrix=(
            ConcernVerdict("Tail latency", "p99, ms", "a", ranking, 1.1, False),
            ConcernVerdict("Memory", "bytes", None, (), None, False, "no figures"),
            ConcernVerdict("Cold start", "x, s", "a", (("a", 2.0, "2 s"),), None, False),
        ),
    )
    html.write_comparison(comparison, tmp_path / "c.html")
    page = (tmp_path / "c.html").read_text()
    for words in ("within the noise", "no candidate qualified", "nothing to compare with"):
        assert words in page
    assert "beyond the noise</span>" not in page


def test_every_scheme_has_ink_that_can_be_read() -> None:
    def luminance(colour: str) -> float:
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        parts = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    for dark in (False, True):
        named = colours.variables(dark)
        for role in ("ink", "quiet", "good", "bad", "open"):
            assert contrast(named[f"--{role}"], named["--paper"]) >= 4.5
            assert contrast(named[f"--{role}"], named["--raised"]) >= 4.5
        for number in range(1, len(colours.SERIES) + 1):
            assert contrast(named[f"--s{number}"], named["--on-series"]) >= 4.5
            assert contrast(named[f"--s{number}"], named["--paper"]) >= 4.5


def test_the_templates_are_part_of_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["modelport.loadtests.report"]
    folder = Path(html.__file__).parent
    packaged = {file for pattern in patterns for file in folder.glob(pattern)}
    assert packaged == {file for file in folder.rglob("*") if file.suffix in (".j2", ".css")}
