"""Real servers, compared: one is made slow, one answers wrongly, one dies, someone loses patience.

``make compare-faults`` does the same with the demo's model in every format.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from modelport.loadtests.cli.compare import print_and_write
from modelport.loadtests.compare.comparison_run import ComparisonRun, ComparisonSubject
from modelport.loadtests.compare.measured_candidate import MeasuredCandidate
from modelport.loadtests.compare.result import Comparison
from modelport.loadtests.compare.rounds import RoundSettings
from modelport.loadtests.load.run import Unwritten
from modelport.loadtests.load.samples import SAMPLE, LoadProfile, LoadRun
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.serving.gateway import MeasuredGateway
from tests.loadtests.contenders import LightBackend, contender, published
from tests.loadtests.proxy import Behind

DELAY_MS = 25.0


def light(name: str, folder: Path) -> MeasuredCandidate:
    """One of which only its process matters."""
    return contender(name, folder, LightBackend())


def settings(**changes: Any) -> RoundSettings:
    cores = sorted(os.sched_getaffinity(0))
    apart = {"server_cores": tuple(cores[:-1]), "client_core": cores[-1]} if cores[1:] else {}
    chosen = {"users": (2,), "duration_seconds": 0.4, "warmup_seconds": 0.1, "probes": 0}
    return RoundSettings(**{**chosen, **apart, **changes})


def servers() -> set[int]:
    """Processes that this one has started: other tests' fixtures have theirs.

    Without the guards that end with them.
    """
    return {child.pid for child in psutil.Process().children() if child.name() != "sh"}


def shootout(
    work: Path, *contenders: MeasuredCandidate, rounds: int, **changes: Any
) -> ComparisonRun:
    return ComparisonRun(
        subject=ComparisonSubject("x2", "y = 2x"),
        contenders=contenders,
        absent=(),
        settings=settings(**changes),
        rounds=rounds,
        work=work / "servers",
        ends_at=time.monotonic() + 3600,
    )


def canned(
    target: LoadTestTarget, load: LoadProfile, payloads: Path | None = None, **ignored: Any
) -> LoadRun:
    """A hundred answers of 1 ms, without asking: where the load is not what is tested."""
    samples = np.zeros(100, SAMPLE)
    samples["intended"] = samples["sent"] = load.warmup_seconds + np.arange(100) * 1e-3
    samples["first_byte"] = samples["done"] = samples["sent"] + 1e-3
    return LoadRun(target, load, samples)


def ranked(result: Comparison, concern: str) -> list[str]:
    verdict = next(verdict for verdict in result.matrix if verdict.concern == concern)
    return [name for name, _, _ in verdict.ranking]


@pytest.mark.thorough
def test_the_slow_one_is_ranked_last_and_the_wrong_one_not_at_all(tmp_path: Path) -> None:
    plain = contender("plain", tmp_path)
    slow = contender("slow", tmp_path, Behind(MeasuredGateway(published()), delay_ms=DELAY_MS))
    wrong = contender("wrong", tmp_path, Behind(MeasuredGateway(published()), wrong_every=8))
    compared = shootout(tmp_path, slow, wrong, plain, rounds=1)
    compared.run(lambda *step: None)
    result = compared.result()
    assert ranked(result, "Tail latency") == ["plain", "slow"]
    tail = result.matrix[0]
    assert tail.winner is None  # one round: nothing is known of the noise
    assert tail.ranking[-1][1] >= DELAY_MS
    found = {candidate.name: candidate for candidate in result.candidates}
    assert found["plain"].disqualified is None
    assert found["slow"].disqualified is None
    assert "2 of 16 answers were wrong" in (found["wrong"].disqualified or "")
    assert any("wrong is disqualified" in note for note in result.notes)
    for name in ("plain", "slow"):
        assert len(found[name].cold_first_response_seconds) == 1
        assert all(run.requests > 0 and run.wrong == 0 for run in found[name].runs)
        assert found[name].memory_bytes[0] > 20e6
        assert found[name].cpu_seconds_per_request[0] > 0


@pytest.mark.thorough
def test_a_few_wrong_answers_under_load_disqualify(tmp_path: Path) -> None:
    """More seldom than there are requests before the load: only the load meets one."""
    seldom = contender("seldom", tmp_path, Behind(MeasuredGateway(published()), wrong_every=40))
    compared = shootout(tmp_path, seldom, rounds=1, duration_seconds=1.5)
    compared.run(lambda *step: None)
    candidate = compared.result().candidates[0]
    assert "answers were wrong under 2 in flight" in (candidate.disqualified or "")
    assert candidate.runs[0].wrong > 0


def test_a_server_that_dies_under_load_is_out_and_the_others_are_measured(tmp_path: Path) -> None:
    mortal, other = light("mortal", tmp_path), light("other", tmp_path)

    def killing(*arguments: Any, **keywords: Any) -> LoadRun:
        if not killed:
            (child,) = servers() - before
            killed.append(child)
            os.kill(child, signal.SIGKILL)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        return canned(*arguments, **keywords)

    killed: list[int] = []
    before = servers()
    compared = shootout(tmp_path, mortal, other, rounds=1)
    compared.measure = killing
    compared.run(lambda *step: None)
    first, second = compared.result().candidates
    assert "its server exited with -9 under 2 in flight" in (first.disqualified or "")
    assert second.disqualified is None
    assert second.runs


def test_an_interruption_leaves_no_server_and_keeps_what_was_measured(tmp_path: Path) -> None:
    calls: list[int] = []
    before = servers()

    def impatient(*arguments: Any, **keywords: Any) -> LoadRun:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return canned(*arguments, **keywords)

    compared = shootout(tmp_path, light("a", tmp_path), light("b", tmp_path), rounds=1)
    compared.measure = impatient
    with pytest.raises(KeyboardInterrupt):
        compared.run(lambda *step: None)
    assert servers() <= before
    first, second = compared.result("interrupted").candidates
    assert (len(first.runs), len(second.runs)) == (1, 0)
    assert compared.result("interrupted").notes[-1] == "interrupted"


def test_a_full_disk_blames_no_candidate_and_measurements_are_kept(tmp_path: Path) -> None:
    calls: list[int] = []

    def filling(*arguments: Any, **keywords: Any) -> LoadRun:
        calls.append(1)
        if len(calls) == 2:
            raise Unwritten("the samples cannot be written: free space on the disk")
        return canned(*arguments, **keywords)

    compared = shootout(tmp_path, light("a", tmp_path), light("b", tmp_path), rounds=1)
    compared.measure = filling
    with pytest.raises(OSError, match="free space on the disk"):
        compared.run(lambda *step: None)
    first, second = compared.result().candidates
    assert (len(first.runs), len(second.runs)) == (1, 0)
    assert first.disqualified is second.disqualified is None


def test_a_report_that_cannot_be_written_does_not_prevent_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compared = shootout(tmp_path, light("a", tmp_path), rounds=1)
    (tmp_path / "full").symlink_to("/dev/full")
    problem = print_and_write(compared.result(), tmp_path / "c.html", tmp_path / "full")
    assert problem == f"'{tmp_path / 'full'}' cannot be written: No space left on device"
    assert (tmp_path / "c.html").is_file()
    assert "Verdict" in capsys.readouterr().out
    assert (tmp_path / "full").is_symlink()


def test_no_round_begins_that_would_not_be_over_in_time(tmp_path: Path) -> None:
    compared = shootout(tmp_path, light("a", tmp_path), rounds=5)
    compared.ends_at, compared.measure = time.monotonic(), canned
    compared.run(lambda *step: None)
    assert compared.result().rounds == 1
    assert any(note.startswith("1 of 5 rounds") for note in compared.notes)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelport", "compare", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["missing.pt"], "checkpoint 'missing.pt' does not exist"),
        (["no-such-model"], "'no-such-model' is neither a checkpoint nor a model"),
        ([str(published()), "--html", "/proc/x/report.html"], "'/proc/x/report.html' cannot be"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_status_2(arguments: list[str], named: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    told = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(told) == 1
    assert named in told[0]
    assert "Traceback" not in done.stderr


def test_an_end_by_a_signal_while_it_prepares_is_one_line_too(tmp_path: Path) -> None:
    """SIGTERM, as a pipeline sends it; the export that was under way ends with it."""
    weights = tmp_path / "fraud.pt"
    weights.write_bytes(b"0" * 1000)
    command = [sys.executable, "-m", "modelport", "compare", str(weights), "--format", "onnx"]
    command += ["--cache", str(tmp_path / "cache"), "--html", str(tmp_path / "c.html")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "exporting" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    named = [
        p for p in psutil.process_iter(["cmdline"]) if str(weights) in (p.info["cmdline"] or ())
    ]
    assert psutil.wait_procs(named, timeout=60)[1] == []
