"""``modelport rollout`` against a running gateway, with requests through HTTP and gRPC."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from modelport import cli
from modelport.gateway.cli import rollout as rollout_cli
from modelport.gateway.cli.rollout_options import request_of
from modelport.gateway.errors import Unavailable
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.version_choice import VersionChoice
from modelport.gateway.rollout.shared_state import transitions
from modelport.gateway.rollout.shared_state.transitions import Change
from modelport.loadtests.load import payloads
from tests import models
from tests.gateway.rollout.plans import plan
from tests.gateway.rollout.rollout_traffic import FACTORS, repository, traffic
from tests.polling import eventually
from tests.server import FLAGS, Gateway, serving
from tests.thorough import thorough

ONLY_1 = "version_policy { specific { versions: 1 } }\n"
#: Times of such small models say nothing on a machine with other jobs. Version 3 answers otherwise.
SLO = """
[regressions]
max_p50_regression = false
max_p99_regression = false
[rollout]
min_requests = 30
min_seconds = 0
power = false
pair = 0
"""
POLL = ("--model-control-mode", "poll", "--repository-poll-secs", "0.2")
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "x2")
WORKERS = () if FLAGS else ("--workers", "2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path / "repository", ONLY_1)


@pytest.fixture
def slo(tmp_path: Path) -> Path:
    file = tmp_path / "slo.toml"
    file.write_text(SLO)
    return file


def run(gateway: Gateway, *arguments: str) -> Result:
    url = gateway.metrics.removesuffix("/metrics")
    return CliRunner().invoke(cli.modelport, ["rollout", *arguments, "--url", url])


def start(gateway: Gateway, slo: Path, candidate: int, *flags: str) -> Result:
    arguments = ["x2", "--candidate", str(candidate), "--slo", str(slo), *flags]
    return run(gateway, "start", *arguments)


def told(result: Result, code: int = 0) -> str:
    assert result.exit_code == code, result.output
    return result.output


def status(gateway: Gateway) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(told(run(gateway, "status", "x2", "--json")))
    return document


def wrong_decisions(gateway: Gateway) -> int:
    """Count the wrong decisions that later labels have shown, in all processes."""
    return sum(each["wrong"].get("accuracy", (0, 0))[1] for each in status(gateway)["counts"])


@pytest.mark.parametrize(
    "flags",
    [(), thorough((*WORKERS, *POLL)), (*WORKERS, *EXPLICIT)],
    ids=str,
)
def test_a_good_candidate_is_promoted_and_stays_after_a_restart(
    root: Path, slo: Path, flags: tuple[str, ...]
) -> None:
    with serving(root, *flags) as gateway, traffic(gateway) as asked:
        assert set(asked.more()) == {1}
        output = told(start(gateway, slo, 2, "--shadow", "50%", "--steps", "25%,100%", "--wait"))
        assert "promoted" in output
        assert set(asked.more()) == {2}
        assert set(asked.versions) == {1, 2}
        (ended,) = json.loads(told(run(gateway, "history", "x2", "--json")))
        assert (ended["phase"], ended["settled"], ended["unsettled_reason"]) == (
            "promoted", True, "",
        )  # fmt: skip
        assert ended["counts"][0]["compared"] >= 30
        assert "promoted" in told(run(gateway, "status"))
    assert VersionChoice.of_folder(root / "x2").allowed() == [2]
    with serving(root, *flags) as gateway, traffic(gateway) as asked:
        assert set(asked.more()) == {2}


@pytest.mark.parametrize("flags", [(), thorough(WORKERS)], ids=str)
def test_disagreeing_answers_roll_a_candidate_back_before_a_client_sees_them(
    root: Path, slo: Path, flags: tuple[str, ...]
) -> None:
    with serving(root, *flags) as gateway, traffic(gateway) as asked:
        arguments = ("--shadow", "100%", "--steps", "50%,100%", "--min-requests", "100000")
        output = told(start(gateway, slo, 3, *arguments, "--wait"), 1)
        assert "disagree" in output
        asked.more()
        assert set(asked.versions) == {1}
        kept = slo.with_name("examples.json")
        told(run(gateway, "examples", "x2", "--output", str(kept)))
        requests = payloads.read(kept)
        assert requests.expected is not None
        for inputs, outputs in zip(requests.requests, requests.expected, strict=True):
            assert np.array_equal(outputs["y"], FACTORS[1] * inputs["x"])
        replay = ["infer", "x2", str(kept), "--json", "--url", gateway.http]
        answers = told(CliRunner().invoke(cli.modelport, replay)).splitlines()
        assert [json.loads(each)["y"] for each in answers] == [
            outputs["y"].tolist() for outputs in requests.expected
        ]
        view = told(run(gateway, "history", "x2"))
        assert "version 3 in place of 1: rolled back" in view
    assert (root / "x2/config.pbtxt").read_text() == models.X2_CONFIG + ONLY_1


@pytest.mark.parametrize("flags", [(), thorough(WORKERS)], ids=str)
def test_a_person_commands_a_rollout_and_no_request_reaches_the_candidate_after_a_rollback(
    root: Path, slo: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_cli, "FEEDBACK_ROWS", 1)  # each row is a request
    with serving(root, *flags) as gateway, traffic(gateway) as asked:
        told(start(gateway, slo, 3, "--steps", "50%,100%", "--manual", "--same-checkpoint"))
        asked.until(lambda versions: set(versions) == {1, 3})
        assert "paused" in told(run(gateway, "pause", "x2", "--reason", "lunch"))
        asked.until(lambda versions: set(versions) == {1, 3})
        labels = slo.with_name("labels.json")
        labels.write_text('[{"id": "a1", "label": 3}, {"id": "nobody", "label": 3}]')
        counted = told(run(gateway, "feedback", "x2", str(labels)))
        assert "1 labels counted, 1 of unknown requests, 0 already counted" in counted
        stated = {"id": "b1", "label": 2, "prediction": 3, "model_version": "3"}
        labels.write_text(json.dumps([stated]))
        assert "1 labels counted" in told(run(gateway, "feedback", "x2", str(labels)))
        assert "1 already counted" in told(run(gateway, "feedback", "x2", str(labels)))
        while not (wrong := wrong_decisions(gateway)):  # counts are collected now and then
            asked.more(10)
        assert wrong == 1
        told(run(gateway, "resume", "x2"))
        told(run(gateway, "promote", "x2"))
        asked.until(lambda versions: set(versions) == {3})
        told(run(gateway, "rollback", "x2", "--reason", "a hunch"))
        assert set(asked.more()) == {1}
        state = status(gateway)
        assert state["phase"] == "rolled back"
        events = [(event["kind"], event["reason"]) for event in state["events"]]
        assert ("paused", "lunch") in events
        assert events[-1] == ("rolled back", "a hunch")
        assert "rolled back" in told(run(gateway, "promote", "x2"), 2)  # too late


def test_a_rollout_can_be_started_right_after_another_has_ended(root: Path, slo: Path) -> None:
    with serving(root, *WORKERS) as gateway, traffic(gateway) as asked:
        for candidate, end, winner in ((3, "rollback", 1), (2, "promote", 2)):
            told(start(gateway, slo, candidate, "--steps", "50%", "--manual"))
            told(run(gateway, end, "x2"))
            told(start(gateway, slo, 3, "--steps", "50%", "--manual"))
            told(run(gateway, "rollback", "x2"))
            assert set(asked.more()) == {winner}
            assert "it has ended; start another" in told(run(gateway, "resume", "x2"), 2)


def test_a_stage_without_requests_is_undecided_after_its_longest_time(
    root: Path, slo: Path
) -> None:
    with serving(root) as gateway:
        output = told(
            start(gateway, slo, 2, "--steps", "100%", "--max-seconds", "0.5", "--wait"), 3
        )
        assert "30 more requests answered by the candidate" in output
        assert status(gateway)["phase"] == "paused"


@pytest.mark.parametrize("flags", [(), thorough(WORKERS)], ids=str)
def test_a_gateway_that_is_killed_goes_on_in_the_same_stage_with_the_same_counts(
    root: Path, slo: Path, flags: tuple[str, ...]
) -> None:
    (root / "x2/config.pbtxt").write_text(models.X2_CONFIG)  # whose policy wants version 3
    VersionChoice.of_folder(root / "x2").serve_only(1)
    with serving(root, *flags) as gateway:
        with traffic(gateway) as asked:
            told(start(gateway, slo, 2, "--steps", "50%,100%", "--manual"))
            asked.until(lambda versions: set(versions) == {1, 2})
        counts = root / ".rollouts/counts/x2"
        stored = json.loads(eventually(lambda: [*counts.glob("*.json")])[0].read_bytes())
        before = stored["stages"]["0"]["candidate"]["requests"]
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait()
    (root / "x2/config.pbtxt").write_text(models.X2_CONFIG)  # the rollout goes before the policy
    with serving(root, *flags) as gateway, traffic(gateway) as asked:
        asked.until(lambda versions: set(versions) == {1, 2})
        state = status(gateway)
        assert (state["phase"], state["stage"]) == ("running", 0)
        assert state["counts"][0]["candidate"]["requests"] >= before
        told(run(gateway, "promote", "x2"))
        told(run(gateway, "promote", "x2"))
        gateway.wait_for("model version is unloaded", version=1)
        assert set(asked.more()) == {2}
    assert VersionChoice.of_folder(root / "x2").allowed() == [2]


def test_a_rollout_whose_candidate_is_gone_after_a_restart_is_rolled_back(
    root: Path, slo: Path
) -> None:
    with serving(root) as gateway:
        told(start(gateway, slo, 2, "--steps", "50%,100%", "--manual"))
    (root / "x2/2").rename(root / "elsewhere")
    with serving(root) as gateway, traffic(gateway) as asked:
        gateway.wait_for("rollout", phase="rolled back")
        assert set(asked.more()) == {1}


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = repository(tmp_path_factory.mktemp("idle"), ONLY_1)
    other = root / "other"
    models.multiply(other / "1/model.onnx")
    (other / "config.pbtxt").write_text(
        models.X2_CONFIG.replace('"x2"', '"other"').replace(
            "max_batch_size: 8", "max_batch_size: 4"
        )
    )
    with serving(root) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody", "--candidate", "2"], "'nobody' is not found"),
        (["x2", "--candidate", "9"], "model 'x2' has no version 9; it has 1, 2, 3"),
        (["x2", "--candidate", "1"], "is the baseline already"),
        (["x2", "--candidate", "other"], "has another signature: max_batch_size 4 instead of"),
        (["x2", "--candidate", "nobody"], "'nobody' is not found"),
        (["x2", "--candidate", "2", "--steps", "50%,25%"], "steps must increase"),
        (["x2", "--candidate", "2", "--steps", "half"], "'half' is not a share"),
        (["x2", "--candidate", "2", "--label", "beta"], "has no label 'beta'; it has none"),
        (["x2", "--candidate", "2", "--sticky", "principal"], "needs authenticated requests"),
        (["../x", "--candidate", "2"], "'../x' is not a valid model name"),
        (["x2", "--candidate", "2", "--slo", "missing.toml"], "missing.toml"),
        (["x2", "--candidate", "2", "--retrained"], "--max-disagreement SHARE"),
        (["x2", "--candidate", "2", "--retrained"], "--no-disagreement-limit"),
        (["x2", "--candidate", "2", "--max-disagreement", "some"], "'some' is not a share"),
        (
            ["x2", "--candidate", "2", "--max-disagreement", "5%", "--no-disagreement-limit"],
            "exclude each other",
        ),
        (["x2", "--candidate", "2", "--power", "0.3"], "power is 0.3"),
    ],
)
def test_a_bad_request_is_one_line_and_changes_nothing(
    idle: Gateway, arguments: list[str], message: str
) -> None:
    output = told(run(idle, "start", *arguments), 2)
    assert message in output
    assert output.startswith("modelport: error: ")
    assert output.count("\n") == 1
    assert "had no rollout" in told(run(idle, "status", "x2"), 2)
    assert ready(idle) == {"1"}


def test_the_limit_of_disagreements_comes_from_the_command_the_file_or_the_report(
    tmp_path: Path,
) -> None:
    file, report = tmp_path / "slo.toml", tmp_path / "gate.json"
    report.write_text(json.dumps({"agreement": {"decisions": 10_000, "changed": 100}}))
    file.write_text("[answers]\nmax_disagreement = 0.2\n[rollout]\npower = false\npair = 0.5\n")

    def limit(slo: Path | None, report: Path | None, share: float | None, none: bool) -> object:
        return request_of(slo, report, share, none)["limits"].get("max_disagreement", "open")

    assert limit(None, None, None, False) == "open"
    assert limit(file, None, None, False) == limit(file, report, None, False) == 0.2
    assert limit(None, report, None, False) == pytest.approx(0.016, rel=0.2)
    assert limit(file, report, 0.3, False) == 0.3
    assert limit(file, report, None, True) is None
    asked = request_of(file, None, None, False, pair=None)
    assert (asked["power"], asked["pair"]) == (0.0, 0.5)
    assert request_of(file, None, None, False, pair=1.0)["pair"] == 1.0


def test_a_decision_in_slo_toml_that_no_answer_leads_to_is_refused(
    idle: Gateway, tmp_path: Path
) -> None:
    file = tmp_path / "slo.toml"
    file.write_text("[answers]\ndecision_top_k = 4")
    output = told(start(idle, file, 2, "--retrained"), 2)
    assert "'y' has 4" in output
    assert output.count("\n") == 1
    assert "had no rollout" in told(run(idle, "status", "x2"), 2)


def index(gateway: Gateway) -> list[dict[str, str]]:
    with closing(http.client.HTTPConnection("127.0.0.1", gateway.http_port)) as connection:
        connection.request("POST", "/v2/repository/index", "{}")
        rows: list[dict[str, str]] = json.loads(connection.getresponse().read())
    return rows


def test_waiting_shows_each_event_and_what_a_stage_waits_for_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    began = transitions.started(plan(shadow=0.1), None, "", Change(1e9))
    held = transitions.led(began, "", "the webhook http://hook answered 503")
    paused = transitions.paused(held, "", Change(1e9, "undecided"))
    states = [
        {**state.to_json(), "problem": state.hold_reason} for state in (began, held, held, paused)
    ]

    class StatesInTurn:
        def get(self, path: str) -> Any:
            return states.pop(0)

    monkeypatch.setattr(rollout_cli, "LOOK_SECONDS", 0.0)
    with pytest.raises(SystemExit, match="3"):
        rollout_cli._wait(StatesInTurn(), "fraud", began.plan.id, as_json=False)  # type: ignore[arg-type]
    lines = [line.partition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "started, stage 1 of 5 (shadow 10 %)",
        "waiting: the webhook http://hook answered 503",
        "paused, stage 1 of 5 (shadow 10 %), undecided",
    ]


def test_no_error_of_a_start_looks_like_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    class LostGateway:
        def __init__(self, url: str) -> None: ...

        def post(self, path: str, document: Any) -> Any:
            return transitions.started(plan(), None, "", Change(1e9)).to_json()

        def get(self, path: str) -> Any:
            raise Unavailable("no gateway responds")

    arguments = ["rollout", "start", "fraud", "--candidate", "3", "--wait"]
    result = CliRunner().invoke(cli.modelport, [*arguments, "--url", "http://127.0.0.1:1"])
    assert "no gateway responds" in told(result, rollout_cli.NOT_STARTED)
    monkeypatch.setattr(rollout_cli, "AdminClient", LostGateway)
    monkeypatch.setattr(rollout_cli, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(rollout_cli, "LOOK_SECONDS", 0.0)
    output = told(CliRunner().invoke(cli.modelport, arguments), rollout_cli.UNDECIDED)
    assert output.endswith("modelport: error: no gateway responds\n")


def ready(gateway: Gateway) -> set[str]:
    return {row["version"] for row in index(gateway) if row.get("state") == "READY"}


def test_nothing_changes_before_a_rollout_starts_or_if_its_client_leaves(root: Path) -> None:
    """A webhook hangs, while both versions are loaded already."""
    secret = root.with_name("secret")
    secret.write_text("a secret")
    webhook = ("--rollout-webhook-secret", str(secret))
    with (
        socket.create_server(("127.0.0.1", 0)) as hook,
        serving(root, *WORKERS, *webhook) as gateway,
        traffic(gateway) as asked,
    ):
        url = f"http://127.0.0.1:{hook.getsockname()[1]}/"
        request = {"candidate": "3", "baseline": 2, "webhooks": [url]}
        with closing(http.client.HTTPConnection("127.0.0.1", gateway.metrics_port)) as client:
            headers = {"content-type": "application/json"}
            client.request("POST", "/v2/rollouts/x2", json.dumps(request), headers)
            with closing(hook.accept()[0]):
                assert ready(gateway) == {"1", "2", "3"}
                assert set(asked.more()) == {1}
        eventually(lambda: ready(gateway) == {"1"})
        assert set(asked.more()) == {1}
        assert "had no rollout" in told(run(gateway, "status", "x2"), 2)


def test_a_second_rollout_of_a_model_is_refused(root: Path, slo: Path) -> None:
    with serving(root) as gateway:
        told(start(gateway, slo, 2))
        output = told(start(gateway, slo, 3), 2)
        assert "a rollout of 'x2' is running already" in output
        assert status(gateway)["plan"]["candidate"] == {"model": "x2", "version": 2}
        told(run(gateway, "rollback", "x2"))


def test_without_a_gateway_the_command_names_the_address() -> None:
    result = CliRunner().invoke(cli.modelport, ["rollout", "status", "--url", "http://127.0.0.1:1"])
    assert result.exit_code == 1
    assert "no gateway responds at http://127.0.0.1:1" in result.output
    result = CliRunner().invoke(cli.modelport, ["rollout", "status", "--url", "ftp://x"])
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/v2/rollouts", {}, 200),
        ("GET", "/v2/rollouts/nobody", {}, 404),
        ("GET", "/v2/rollouts/x2/pause", {}, 405),
        ("GET", "/v2/rollouts/x2/other", {}, 404),
        ("GET", "/v2/rollouts/..%2fx", {}, 404),
        ("DELETE", "/v2/rollouts/x2", {}, 405),
        ("POST", "/v2/rollouts/x2/pause", {}, 415),
        ("POST", "/v2/rollouts/x2", {"content-type": "text/plain"}, 415),
        ("POST", "/v2/rollouts/x2", {"content-type": "application/json"}, 400),
        (
            "POST",
            "/v2/rollouts/x2",
            {"content-type": "application/json", "origin": "http://evil.example"},
            403,
        ),
        (
            "POST",
            "/v2/rollouts/x2/rollback",
            {"content-type": "application/json", "host": "evil.example"},
            403,
        ),
    ],
)
def test_the_api_takes_commands_from_no_web_page(
    idle: Gateway, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", idle.metrics_port)) as connection:
        connection.request(method, path, "{" if method == "POST" else None, headers)
        answer = connection.getresponse()
        document = json.loads(answer.read())
    assert answer.status == status, document
    assert status == 200 or document["error"]


def test_the_policy_that_chose_the_candidate_is_changed_by_a_rollback(
    tmp_path: Path, slo: Path
) -> None:
    """The newest version serves already, and its predecessor is to be compared with it."""
    root = repository(tmp_path / "repository", "")
    with serving(root) as gateway, traffic(gateway) as asked:
        assert set(asked.more()) == {3}
        told(start(gateway, slo, 3, "--baseline", "2", "--manual", "--steps", "1%"))
        asked.more(4)
        assert {1, 3} & set(asked.more()) <= {3}
        told(run(gateway, "rollback", "x2"))
        gateway.wait_for("model version is unloaded", version=3)
        assert set(asked.more()) == {2}
    config = configuration.parse((root / "x2/config.pbtxt").read_text())
    assert list(config.version_policy.specific.versions) == [2]
