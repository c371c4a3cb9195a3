"""The page of ``modelport rollout report``, from a gateway's answers with hostile texts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from modelport.cli import modelport
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.state import RolloutPhase
from modelport.gateway.rollout.shared_state.transitions import Change
from modelport.gateway.rollout.statistics.counts import Attribution, StageCounts
from modelport.gateway.rollout.statistics.evidence import criteria_of
from modelport.loadtests.report import rollout_plots, svg
from tests.gateway.rollout.plans import plan
from tests.loadtests import report_subject

EVIL = "</pre><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\x00\u202e"


def counts(disagreed: int = 0) -> StageCounts:
    found = StageCounts(compared=400, disagreed=disagreed, errors=Attribution(3, 40), sources=1)
    for side, slower in ((found.baseline, 0), (found.candidate, 4)):
        side.requests, side.errors = 1234, 20
        side.latency = {72 + slower: 900, 80 + slower: 300, 96: 34}
        side.scores = {0: 500, 10 + slower: 100, 19: 634}
    return found


def status() -> dict[str, Any]:
    """The status of a rollout that went through its shadow stage, and was rolled back."""
    wanted = plan(shadow=0.1, steps=(0.05, 1.0))
    state = transitions.started(wanted, None, "", Change(1.7e9, by=EVIL))
    state = transitions.advanced(state, "", Change(1.7e9 + 300, EVIL))
    state = transitions.rolled_back(state, "", Change(1.7e9 + 450, f"disagreement {EVIL}"))
    seen = [counts(), counts(40)]
    criteria = tuple(each.to_json() for each in criteria_of(wanted, seen))
    document = transitions.with_evidence(state, criteria, seen).to_json()
    return document | {"leads": True, "share": 0.0, "problem": EVIL}


EXAMPLE = {
    "id": EVIL, "stage": 1, "parameters": {EVIL: EVIL},
    "inputs": [{"name": EVIL, "datatype": "BYTES", "shape": [1], "data": [EVIL]}],
    "outputs": [], "candidate_outputs": None,
}  # fmt: skip


class RolloutApiServer(ThreadingHTTPServer):
    documents: dict[str, Any]


@pytest.fixture
def gateway() -> Iterator[RolloutApiServer]:
    class RolloutApiHandler(BaseHTTPRequestHandler):
        server: RolloutApiServer

        def do_GET(self) -> None:
            document = self.server.documents.get(self.path)
            body = json.dumps(document or {"error": "it has had no rollout"}).encode()
            self.send_response(404 if document is None else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with RolloutApiServer(("127.0.0.1", 0), RolloutApiHandler) as server:
        server.documents = {"/v2/rollouts/fraud": status()}
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def report(gateway: RolloutApiServer, model: str, output: Path, *more: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{gateway.server_port}"
    words = ["rollout", "report", model, "--url", url, "--output", str(output), *more]
    ended = CliRunner().invoke(modelport, words)
    return ended.exit_code, ended.output


class Page(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.figures: set[str] = set()
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag == "figure":
            self.figures.add(dict(attrs)["id"] or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_report_shows_the_verdict_the_evidence_and_the_examples(
    gateway: RolloutApiServer, tmp_path: Path
) -> None:
    gateway.documents["/v2/rollouts/fraud/examples"] = [EXAMPLE]
    code, said = report(gateway, "fraud", tmp_path / "report.html")
    assert code == 0, said
    page = Page((tmp_path / "report.html").read_text())
    assert {"share", "latency", "scores", "criterion-0"} <= page.figures
    text = " ".join(page.text.split())
    assert "fraud/3 in place of fraud/2" in text
    assert "ROLLED BACK disagreement" in text
    for shown in ("1: shadow 10 %", "2: canary 5 %", "1,234", "40 of 800", "Disagreeing answers"):
        assert shown in text, shown
    assert "disagreement: broken" in text


@pytest.mark.parametrize("ending", [RolloutPhase.PROMOTED, RolloutPhase.ROLLED_BACK])
def test_the_evidence_that_browsers_are_shown_agrees_with_the_verdict(ending: RolloutPhase) -> None:
    evidence = report_subject.rollout(ending)["evidence"]
    broken = [row["name"] for row in evidence if row["status"] == "broken"]
    assert broken == (["latency"] if ending is RolloutPhase.ROLLED_BACK else [])


def test_hostile_texts_are_shown_and_not_run(gateway: RolloutApiServer, tmp_path: Path) -> None:
    gateway.documents["/v2/rollouts/fraud/examples"] = [EXAMPLE]
    document = gateway.documents["/v2/rollouts/fraud"]
    document["evidence"][0]["name"] = EVIL
    code, said = report(gateway, "fraud", tmp_path / "report.html")
    assert code == 0, said
    content = (tmp_path / "report.html").read_text()
    page = Page(content)
    assert not page.tags & {"script", "img", "iframe", "object", "link"}
    assert not [name for name in page.attributes if name.startswith("on")]
    assert "alert(1)" in page.text
    assert "\x00" not in content
    assert "\u202e" not in content


def test_a_rollout_that_has_just_begun_has_a_report(
    gateway: RolloutApiServer, tmp_path: Path
) -> None:
    state = transitions.started(plan(), None, "", Change(1.7e9)).to_json()
    gateway.documents["/v2/rollouts/fraud"] = state | {"problem": "", "share": 0.01}
    code, said = report(gateway, "fraud", tmp_path / "report.html")
    assert code == 0, said
    assert "RUNNING" in (tmp_path / "report.html").read_text()


def test_a_rollout_of_the_history_has_a_report(gateway: RolloutApiServer, tmp_path: Path) -> None:
    gateway.documents["/v2/rollouts/fraud/examples"] = [EXAMPLE]
    older = transitions.rolled_back(
        transitions.started(plan(), None, "", Change(1.5e9)), "", Change(1.6e9, "the older one")
    )
    latest = {**gateway.documents["/v2/rollouts/fraud"]}
    gateway.documents["/v2/rollouts/fraud/history"] = [latest, older.to_json()]
    output = tmp_path / "report.html"
    for number, shown, has_examples in ((1, "disagreement", True), (2, "the older one", False)):
        code, said = report(gateway, "fraud", output, "--number", str(number))
        assert code == 0, said
        text = Page(output.read_text()).text
        assert shown in text
        assert ("Disagreeing answers" in text) is has_examples
    code, said = report(gateway, "fraud", output, "--number", "3")
    assert (code, said.count("\n")) == (2, 1)
    assert "2 rollouts of 'fraud' have ended" in said


def test_errors_are_one_line(gateway: RolloutApiServer, tmp_path: Path) -> None:
    for model, part in (("other", "no rollout"), ("../x", "not a valid model name")):
        code, said = report(gateway, model, tmp_path / "report.html")
        assert code != 0
        assert part in said
        assert "Traceback" not in said
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("upper", [None, 0.0105, 0.2, 1.0])
@pytest.mark.parametrize(("lower", "estimate"), [(None, 0.0), (0.0, 0.0002), (0.001, 0.01)])
def test_the_axis_of_a_criterion_holds_its_limit_and_its_whole_interval(
    upper: float | None, lower: float | None, estimate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An axis that ended at four times the limit cut the interval of few requests off."""
    drawn: list[Any] = []
    monkeypatch.setattr(svg, "plot", lambda *each: drawn.append(each[-1]))
    row = {
        "name": "disagreement", "status": "open", "relative": False, "limit": 0.001,
        "estimate": estimate, "lower": lower, "upper": upper,
    }  # fmt: skip
    rollout_plots._criterion(0, row)
    axes = Figure().add_subplot()
    drawn[0](axes)
    left, right = axes.get_xlim()
    places = [float(x) for line in axes.get_lines() for x in line.get_xdata()]  # type: ignore[union-attr]
    assert left <= min(places) <= max(places) <= right
    assert max(places) >= 100 * (upper or estimate)


def test_each_plot_says_what_it_shows() -> None:
    captions = {each.name: each.description for each in rollout_plots.draw(status())}
    assert "requests that were answered within a time" in captions["latency"]
    assert "scores" not in captions["latency"]
    assert "scores up to a value" in captions["scores"]
