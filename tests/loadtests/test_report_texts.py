"""Numbers, JUnit, Markdown, terminal, and the block of a README."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import junitparser
import pytest
from markdown_it import MarkdownIt
from rich.console import Console

from modelport.loadtests import marked_block, number_format
from modelport.loadtests.checks import Check, CheckStatus, worst
from modelport.loadtests.compare import json_document
from modelport.loadtests.report import (
    comparison_tables,
    console,
    document_block,
    junit,
    loads,
    markdown,
    text_escaping,
)
from modelport.loadtests.system.environments import Missing
from tests.loadtests import report_subject
from tests.loadtests.report_subject import HOSTILE


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (0.0, "0"),
        (9.996, "10.0"),
        (1234.6, "1,235"),
        (0.01234, "0.0123"),
        (1.23456e-7, "1.2e-07"),
        (99.96, "100"),
        (-12.34, "-12.3"),
    ],
)
def test_a_figure_has_three_significant_digits(value: float, told: str) -> None:
    assert number_format.figure(value) == told


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (0.0123, "ms", "12.3 µs"),
        (12.3, "ms", "12.3 ms"),
        (61_000.0, "ms", "61.0 s"),
        (0.25, "s", "250 ms"),
        (1536.0, "bytes", "1.50 KiB"),
        (99.9713, "%", "99.971 %"),
        (100.0, "%", "100 %"),
        (6.0, "", "6"),
        (None, "ms", number_format.DASH),
    ],
)
def test_a_value_is_shown_in_a_readable_unit(value: float | None, unit: str, told: str) -> None:
    assert number_format.with_unit(value, unit) == told


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert number_format.spread([3.0, 1.0, 2.0], "ms") == f"2.00 ms (1.00{number_format.DASH}3.00)"
    assert number_format.spread([5.0], "ms") == "5.00 ms"
    assert number_format.spread([]) == number_format.DASH


def test_one_failure_fails_and_one_open_question_leaves_it_open() -> None:
    by_status = {status: Check("c", status, "1") for status in CheckStatus}
    assert worst(by_status.values()) is CheckStatus.FAIL
    assert (
        worst([by_status[CheckStatus.PASS], by_status[CheckStatus.INCONCLUSIVE]])
        is CheckStatus.INCONCLUSIVE
    )
    assert worst([by_status[CheckStatus.PASS]]) is CheckStatus.PASS


def test_a_curve_is_of_one_round_and_never_of_an_average() -> None:
    runs = report_subject.comparison().candidates[0].runs
    rounds = [run for run in runs if run.users == runs[0].users]
    typical = loads.typical(rounds)
    assert typical in rounds
    assert typical.latency.p99 == sorted(run.latency.p99 for run in rounds)[1]
    slower = max(rounds[:2], key=lambda run: run.latency.p99)
    assert loads.typical(rounds[:2]) is slower


def test_loads_that_few_bore_are_tabled_and_not_plotted() -> None:
    comparison = report_subject.comparison()
    every = loads.by_load(comparison.candidates)
    shown = loads.shared(every)
    assert [load.users for load in shown] == [1, 16]
    others = comparison_tables.of_others(comparison)
    assert others is not None
    assert len(others.rows) == sum(len(every[load]) for load in every if load not in shown)


def test_of_two_candidates_a_load_that_one_bore_is_not_plotted() -> None:
    two = report_subject.comparison().candidates[:2]
    assert [load.users for load in loads.shared(loads.by_load(two))] == [1, 16]


def test_a_server_without_the_common_protocol_is_compared_in_its_own() -> None:
    comparison = report_subject.comparison()
    shown = loads.shared(loads.by_load(comparison.candidates))
    for load, runs in shown.items():
        assert load.protocol == "oip-http-binary"
        assert set(runs) == set(range(1, 8))
        assert loads.other_protocols(load, runs) == {7: "torchserve-http"}
        assert (
            "TorchServe, in torchserve-http"
            in comparison_tables.of_load(comparison, load).rows[6].name
        )


def test_ci_systems_read_the_junit_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "junit.xml"
    junit.write(
        file,
        "modelport gate",
        report_subject.CHECKS,
        properties={"cpu": HOSTILE[2]},
        began_at="2026-11-21T19:40:03+00:00",
    )
    read = junitparser.JUnitXml.fromfile(str(file))
    (suite,) = list(read)
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (3, 1, 1, 0)
    assert suite.timestamp == "2026-11-21T19:40:03"
    failed, passed, undecided = list(suite)
    assert isinstance(failed.result[0], junitparser.Failure)
    assert failed.result[0].message == "86.1 ms, at most 20 ms: p99 is 4.3 times the bound"
    assert passed.is_passed
    assert isinstance(undecided.result[0], junitparser.Error)
    assert undecided.result[0].type == "inconclusive"
    assert undecided.name == HOSTILE[0]
    assert [prop.name for prop in suite.properties()] == ["cpu"]


def test_names_in_markdown_become_neither_markup_nor_columns_nor_markers() -> None:
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    text = document_block.section(report_subject.comparison(HOSTILE), {})
    rendered = parser.render(text)
    assert "<script" not in rendered
    assert "<img" not in rendered
    assert "compare: end -->" not in text
    for table in re.findall(r"<table>.*?</table>", rendered, re.DOTALL):
        widths = {
            len(re.findall(r"<t[hd]", row)) for row in re.findall(r"<tr>.*?</tr>", table, re.S)
        }
        assert len(widths) == 1
    assert "&lt;script&gt;document.title=&quot;owned&quot;&lt;/script&gt;" in rendered
    assert "12 of 8,114 answers were wrong" in rendered


def test_a_decision_is_formatted_in_markdown() -> None:
    decision = markdown.decision(report_subject.decision(HOSTILE[0]))
    assert decision.startswith("### \N{CROSS MARK} **fail**")
    for question in report_subject.decision().questions[:4]:
        assert question.name in decision
    assert "+17.0 % (+13.0 % to +21.0 %)" in decision
    assert "<script" not in decision


def test_a_terminal_gets_the_same_facts_without_their_control_characters() -> None:
    out = io.StringIO()
    terminal = Console(file=out, width=400, color_system=None)
    comparison = report_subject.comparison(HOSTILE)
    console.comparison(comparison, terminal)
    console.run(report_subject.run(1000, 10), report_subject.CHECKS, terminal)
    console.decision(report_subject.decision(), terminal)
    told = out.getvalue()
    for verdict in comparison.matrix:
        assert verdict.concern in told
    for text in (
        "12 of 8,114 answers",
        "tritonserver is not",
        "p99 latency",
        "FAIL",
        "fails: p99",
    ):
        assert text in told
    assert "\x1b" not in told
    assert "\u202e" not in told


@pytest.mark.thorough
def test_a_readme_gets_tables_plots_and_hardware_between_its_markers(tmp_path: Path) -> None:
    comparison = report_subject.comparison(HOSTILE)
    json_document.write(comparison, tmp_path / "fraud.json")
    other = dataclasses.replace(comparison, model="vit", candidates=comparison.candidates[:1])
    json_document.write(other, tmp_path / "vit.json")
    begin, end = marked_block.markers("compare")
    file = tmp_path / "README.md"
    file.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    arguments = [str(tmp_path / "fraud.json"), str(tmp_path / "vit.json")]
    folder = tmp_path / "docs" / "benchmarks"
    arguments += ["--readme", str(file), "--plots", str(folder)]
    assert document_block.main(arguments) == 0
    text = file.read_text()
    assert text.startswith(f"before\n{begin}\n")
    assert text.endswith(f"{end}\nafter\n")
    assert "\nold\n" not in text
    assert "AMD EPYC 9R14" in text
    assert "modelport compare checkpoints/fraud.pt" in text
    links = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text)
    assert {file.relative_to(tmp_path).as_posix() for file in folder.iterdir()} == set(links)
    assert {link for link in links if "vit-" in link}


def test_a_readme_without_markers_is_left_alone(tmp_path: Path) -> None:
    json_document.write(report_subject.comparison(), tmp_path / "c.json")
    file = tmp_path / "README.md"
    file.write_text("<!-- compare: end --> <!-- compare: begin -->")
    with pytest.raises(marked_block.NoMarkers, match="lacks the markers '<!-- compare: begin -->'"):
        document_block.main([str(tmp_path / "c.json"), "--readme", str(file)])
    assert file.read_text() == "<!-- compare: end --> <!-- compare: begin -->"
    with pytest.raises(Missing, match=r"nothing\.json cannot be read"):
        document_block.main([str(tmp_path / "nothing.json"), "--readme", str(file)])


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    file.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        marked_block.write(file, "half \ud800")
    assert file.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_names_are_cut_cleaned_and_slugged() -> None:
    assert text_escaping.line("a\n b\x1b", 9) == "a b\N{REPLACEMENT CHARACTER}"
    assert text_escaping.line("abcdef", 4) == "abc…"
    assert text_escaping.slug("../../etc/pass wd") == "etc-pass-wd"
    assert text_escaping.slug("../..") == "unnamed"
    assert text_escaping.when("2026-11-21T19:40:03Z") == "2026-11-21 19:40 UTC"
