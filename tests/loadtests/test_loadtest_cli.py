"""The command: exit status, files, one line for every mistake."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from modelport.loadtests.load.samples import SAMPLE
from modelport.loadtests.loadtest import objectives
from tests.full_disk import full_disk
from tests.loadtests.oip_server import double, serving

COMMAND = [sys.executable, "-m", "modelport", "loadtest"]


def call(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def test_a_missed_objective_exits_1_and_every_file_says_so(tmp_path: Path) -> None:
    names = {
        name: tmp_path / "out" / f"run.{name}" for name in ("json", "html", "junit", "samples")
    }
    renamed = {"json": "--json-report", "samples": "--samples-file"}
    flags = [
        part for name, path in names.items() for part in (renamed.get(name, f"--{name}"), str(path))
    ]
    with serving() as server:
        done = call(
            *(server.address, "-m", "double", "--rate", "50", "--duration", "1s"),
            *(
                "--warmup",
                "200ms",
                "--objective",
                "p50=1us",
                "--objective",
                "throughput=40",
                *flags,
            ),
        )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    document = json.loads(names["json"].read_text())
    assert document["summary"]["ok"] == document["summary"]["requests"] == 50
    assert document["complete"]
    assert [check["status"] for check in document["checks"]] == ["pass", "fail", "pass"]
    suite = ElementTree.parse(names["junit"]).getroot()
    assert suite.get("failures") == "1"
    assert "<svg" in names["html"].read_text()
    samples = np.load(names["samples"])
    assert samples.dtype == SAMPLE
    assert len(samples) == 50


@pytest.mark.thorough
def test_a_server_that_dies_and_then_ctrl_c_keep_what_was_measured(tmp_path: Path) -> None:
    """The errors are counted, the command goes on; interrupted, it still tells what it saw."""
    report = tmp_path / "run.json"
    dead = threading.Event()

    def answer(number: int, x: list[float]) -> tuple[int, list[float]]:
        if number == 60:
            dead.set()
        if dead.is_set():
            raise ConnectionAbortedError  # the connection closes without an answer
        return double(number, x)

    with serving(answer) as server:
        process = subprocess.Popen(
            [
                *(*COMMAND, server.address, "-m", "double", "--duration", "60s"),
                *("--warmup", "0s", "--json-report", str(report)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert dead.wait(60)
        asked = len(server.asked)
        give_up = time.monotonic() + 30
        while len(server.asked) < asked + 8:
            assert time.monotonic() < give_up
            threading.Event().wait(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted; these are the results so far" in said
    document = json.loads(report.read_text())
    assert not document["complete"]
    assert document["summary"]["ok"] == pytest.approx(60 - 32, abs=1)
    assert document["summary"]["failed"] >= 5


def test_a_full_disk_ends_the_run_and_is_named() -> None:
    with serving() as server:
        done = subprocess.run(
            [*COMMAND, server.address, "-m", "double", "--users", "4", "--duration", "30s"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            **full_disk(12_000),
        )
    assert done.returncode == 1, done.stderr
    assert "the samples cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


def test_where_nothing_can_be_asked_there_is_one_line_and_no_report(tmp_path: Path) -> None:
    done = call("127.0.0.1:1", "-m", "x", "--json-report", str(tmp_path / "run.json"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("modelport: error: 127.0.0.1:1 cannot describe model 'x'")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["localhost:1"], "--model is missing"),
        (["localhost", "-m", "x"], "'localhost' is not HOST:PORT"),
        (
            ["httpss://localhost:1", "-m", "x"],
            "give HOST:PORT, http://HOST:PORT or https://HOST:PORT",
        ),
        (["localhost:1", "-m", "x", "--objective", "p42=1ms"], "'p42=1ms' is not an objective"),
        (["localhost:1", "-m", "x", "--duration", "soon"], "'soon' is not a duration"),
        (["localhost:1", "-m", "x", "--duration", "0s"], "duration: 0.0 is not above 0"),
        (["oip-grpc://localhost:1/m", "-m", "x"], "--model x contradicts"),
        (["grpc://localhost:1/m", "--protocol", "oip-http"], "--protocol oip-http contradicts"),
        (["http://localhost:1/v2/models"], "names no model; write"),
        (["localhost:1", "-m", "x", "--data", __file__], "--data:"),
        (["localhost:1", "-m", "x", "--users", "99999"], "number of users: 99999 is above 10,000"),
        (["localhost:1", "-m", "x", "--timeout", "999h"], "time-out of a request"),
        (["localhost:1", "-m", "x", "--rate", "1e9"], "more than 100,000,000 requests; lower it"),
        (
            ["localhost:1", "-m", "x", "--json-report", "a", "--html", "a"],
            "two reports would be written",
        ),
        (
            ["localhost:1", "-m", "x", "--json-report", "/proc/nothing/run.json"],
            "cannot be written",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from modelport.loadtests.cli.loadtest import loadtest

    with pytest.raises(SystemExit) as caught:
        loadtest(arguments)
    assert caught.value.code == 2
    shown = capsys.readouterr().err.strip()
    assert said in shown
    assert shown.count("\n") == 0


def test_objectives_are_read_with_their_units() -> None:
    bounds = {
        text: objectives.parse(text).bound
        for text in ("p99=25ms", "p99.9=1.5s", "ttfb-max=200us", "throughput=200", "errors=0.1%")
    }
    assert list(bounds.values()) == pytest.approx([25, 1500, 0.2, 200, 0.001])
    for bad in ("p99", "p99=25", "p99=fast", "throughput=5ms", "errors=7", "errors=101%"):
        with pytest.raises(ValueError, match=bad.partition("=")[0]):
            objectives.parse(bad)
