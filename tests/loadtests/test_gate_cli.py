"""``modelport gate`` on the command line: what it refuses, what it fails, what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest
from click.testing import CliRunner

from modelport.gateway.repository import manifest
from modelport.loadtests.cli import gate as cli
from modelport.loadtests.gate import baseline_and_candidate
from modelport.loadtests.load.target import LoadTestProtocol, parse
from modelport.loadtests.serving.gateway import MODELPORT
from modelport.loadtests.system.environments import ROOT
from tests.full_disk import full_disk
from tests.loadtests.gating.models import published
from tests.loadtests.gating.real import proxies

SLO = "[duration]\nslice_seconds = 0.4\nwarmup_seconds = 0.1\nslices = 1\n"
LIMIT_SECONDS = 100


@dataclass(frozen=True)
class GateCall:
    """The result of one call."""

    status: int
    stdout: str
    stderr: str

    @property
    def words(self) -> str:
        """Join the words that a narrow table has split."""
        return " ".join(self.stdout.split())


def gate(*arguments: object, slo: str = SLO, tmp_path: Path) -> GateCall:
    """``modelport gate`` in this process."""
    path = tmp_path / "slo.toml"
    path.write_text(slo)
    found = CliRunner().invoke(cli.gate, [*map(str, arguments), "--slo", str(path)])
    return GateCall(found.exit_code, found.stdout, found.stderr)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with two identical versions."""
    return published(tmp_path_factory.mktemp("repository") / "tiny", versions=2)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """One to spoil."""
    return Path(shutil.copytree(model, tmp_path / "repository" / model.name))


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """A server that answers everything with ``status``."""

    class StatusHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), StatusHandler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_what_cannot_be_compared_is_a_usage_error_that_names_it(
    model: Path, tmp_path: Path
) -> None:
    with answering(404) as url:
        for baseline, candidate, said in (
            ("nowhere", model, "'nowhere' is not a folder"),
            (tmp_path, model, "no published version"),
            (model / "7", model, "'{model}/7' is not a folder"),
            (model, f"{url}/v2/models/tiny", "status 404"),
            (model, "ftp://127.0.0.1:1/v2/models/tiny", "does not begin with http://"),
            ("s3://KEY:SECRET@b/tiny/1", model, "baseline cannot be fetched: Invalid value"),
            (model, "s3://", "the s3:// URL has no bucket"),
            (model, "http://127.0.0.1:1/v1/models/tiny", "names no model"),
            (model, "http://127.0.0.1:1/v2/models/tiny", "is the server running there"),
            (f"{url}/v2/models/tiny", "grpc://127.0.0.1:1/tiny", "give two of one protocol"),
        ):
            found = gate(baseline, candidate, tmp_path=tmp_path)
            assert found.status == 2, found
            assert said.format(model=model) in found.stderr
            assert found.stderr.count("modelport: error:") == 1
            assert "Traceback" not in found.stderr
            assert "SECRET" not in found.stdout + found.stderr


@pytest.mark.parametrize(
    ("slo", "said"),
    [
        ("[limits]\np99_ms = nan", "limits.p99_ms = nan must be a number above 0"),
        ("[limit]", "unknown table [limit]"),
        ("[certificate]\npublic_keys = ['none.pub']", "none.pub' is not a file"),
        ("[duration]\nslices = 100000", "one round is 600000 s of load"),
    ],
)
def test_an_slo_that_nothing_can_be_held_against_is_refused(
    slo: str, said: str, model: Path, tmp_path: Path
) -> None:
    found = gate(model / "1", model / "2", slo=slo, tmp_path=tmp_path)
    assert (found.status, said in found.stderr) == (2, True), found.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--users", 10**6), "load.users = 1000000 must be a whole number of at least 1"),
        (("--rate", 1e12), "load.rate_per_second = 1000000000000.0 must be"),
        (("--max-duration", "1000h"), "duration.max_seconds = 3600000.0 must be"),
        (("--max-duration", "1s", "--users", 2), "one round is 1.6 s of load"),
    ],
)
def test_what_no_gate_can_do_is_refused_on_the_command_line_too(
    flags: tuple[object, ...], said: str, model: Path, tmp_path: Path
) -> None:
    slo = "[duration]\nslice_seconds = 0.8\nslices = 1"
    found = gate(model, model, *flags, slo=slo, tmp_path=tmp_path)
    assert (found.status, said in found.stderr) == (2, True), found.stderr


def test_two_reports_in_one_file_are_refused(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "gate.txt"
    found = gate(model, model, "--json-report", report, "--junit", report, tmp_path=tmp_path)
    assert found.status == 2
    assert f"--json-report and --junit name the same file '{report}'" in found.stderr


@pytest.mark.thorough
def test_a_report_on_a_full_disk_leaves_the_verdict(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "slo.toml").touch()
    (copy / "2" / "certificate.json").unlink()
    found = subprocess.run(
        [
            *(*MODELPORT, "gate", str(copy / "1"), str(copy / "2")),
            *("--slo", str(tmp_path / "slo.toml"), "--json-report", str(tmp_path / "gate.json")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT_SECONDS,
        **full_disk(512),
    )
    assert found.returncode == 1
    assert "certificate.jsonismissing" in "".join(found.stdout.split())  # the table breaks lines
    assert f"--json-report '{tmp_path / 'gate.json'}' cannot be written" in found.stderr
    assert "the verdict is fail" in found.stderr
    assert not (tmp_path / "gate.json").exists()


def test_a_start_is_not_asked_of_a_server_that_runs_already(model: Path, tmp_path: Path) -> None:
    slo = "[limits]\ncold_start_seconds = 5"
    found = gate(model, "http://127.0.0.1:1/v2/models/tiny", slo=slo, tmp_path=tmp_path)
    assert found.status == 2
    assert "limits.cold_start_seconds is set" in found.stderr


def test_a_candidate_that_is_not_what_was_published_fails_unmeasured(
    model: Path, copy: Path, tmp_path: Path
) -> None:
    for spoil, said in (
        (lambda: (copy / "2" / "model.onnx").write_bytes(b"x"), "model.onnx"),
        (lambda: (copy / "2" / "certificate.json").unlink(), "certificate.json is missing"),
    ):
        spoil()
        report = tmp_path / "gate.json"
        junit, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
        found = gate(
            *(model / "1", copy / "2", "--json-report", report),
            *("--junit", junit, "--markdown", markdown, "--html", tmp_path / "gate.html"),
            tmp_path=tmp_path,
        )
        assert found.status == 1, found
        document = json.loads(report.read_text())
        assert (document["status"], document["rounds"]) == ("fail", 0)
        assert any(said in one["detail"] for one in document["questions"])
        suite = ElementTree.parse(junit).getroot()
        assert suite.attrib["failures"] == "1"
        assert "fail" in markdown.read_text().splitlines()[0].lower()
        assert "<html" in (tmp_path / "gate.html").read_text()


def test_a_certificate_without_a_proof_or_of_another_model_fails(
    copy: Path, tmp_path: Path
) -> None:
    path = copy / "2" / "certificate.json"
    certificate = json.loads(path.read_text())
    certificate["parity"]["passed"] = False
    path.write_text(json.dumps(certificate))
    manifest.write(copy / "2")
    slo = f"{SLO}[certificate]\nmodel = 'another'\ncheckpoint_sha256 = '{64 * '0'}'"
    found = gate(copy / "1", copy / "2", slo=slo, tmp_path=tmp_path)
    assert found.status == 1
    assert "does not state that parity passed" in found.words
    for name in ("model of the certificate", "checkpoint of the certificate"):
        assert name.split()[0] in found.stdout


def test_a_candidate_that_takes_something_else_fails(
    model: Path, copy: Path, tmp_path: Path
) -> None:
    config = copy / "config.pbtxt"
    text = config.read_text()
    for old, new, said in (
        ('name: "x"', 'name: "z"', "no input 'x'"),
        ('name: "y"', 'name: "z"', "no output 'y'"),
    ):
        assert old in text
        config.write_text(text.replace(old, new, 1))
        found = gate(model / "1", copy / "2", tmp_path=tmp_path)
        assert found.status == 1, found
        assert said in found.words


@pytest.mark.thorough
def test_one_wrong_answer_in_a_hundred_of_a_real_server_fails(tmp_path: Path, model: Path) -> None:
    report = tmp_path / "gate.json"
    with proxies((), ("--wrong", "0.01"), model=model) as (right, wrong):
        found = gate(
            right, wrong, "--max-duration", "30s", "--json-report", report, tmp_path=tmp_path
        )
    assert found.status == 1, found
    document = json.loads(report.read_text())
    failed = [one["name"] for one in document["questions"] if one["status"] == "fail"]
    assert "wrong answers" in failed
    assert document["hardware"]["cpu"]
    (question,) = (one for one in document["questions"] if one["name"] == "wrong answers")
    assert 0.002 < question["change"] < 0.04


SLOW = pytest.mark.skipif("MODELPORT_SLOW_TESTS" not in os.environ, reason="slow")


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 130, marks=SLOW),
        pytest.param(signal.SIGHUP, 130, marks=SLOW),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=SLOW),
    ],
)
def test_a_gate_that_is_ended_leaves_no_process_behind(
    number: signal.Signals, status: int, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "slo.toml").write_text(SLO)
    command = [*MODELPORT, "gate", str(model / "1"), str(model / "2")]
    process = subprocess.Popen(
        [*command, "--slo", str(tmp_path / "slo.toml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        children = _servers(process.pid)
        process.send_signal(number)
        _, told = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == status
    assert ("interrupted" in told) == (status == 130)
    gone, alive = psutil.wait_procs(children, timeout=60)
    assert gone
    assert not alive


def _servers(pid: int) -> list[psutil.Process]:
    """The children of a gate, once there is a server among them."""
    give_up = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < give_up:
        children = psutil.Process(pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("serve" in child.cmdline() for child in children):
                return children
        time.sleep(0.02)
    raise AssertionError("the gate started no server")


@pytest.mark.parametrize(
    ("given", "address", "name", "version", "scheme"),
    [
        ("http://h:8000/v2/models/a%20b", "h:8000", "a b", "", "oip-http"),
        ("http://h:8000/v2/models/a/versions/3", "h:8000", "a", "3", "oip-http"),
        ("https://h:8000/v2/models/a", "h:8000", "a", "", "oip-https"),
        ("grpc://h:8001/a", "h:8001", "a", "", "oip-grpc"),
        ("grpc://h:8001/a/3", "h:8001", "a", "3", "oip-grpc"),
        ("grpcs://h:8001/a/3", "h:8001", "a", "3", "oip-grpcs"),
    ],
)
def test_urls_name_a_model_and_perhaps_a_version(
    given: str, address: str, name: str, version: str, scheme: str
) -> None:
    found = baseline_and_candidate.side(given)
    assert isinstance(found, baseline_and_candidate.Running)
    named = found.named
    assert (named.address, named.model, named.version) == (address, name, version)
    assert named.url.partition("://")[0] == scheme
    assert parse(named.url) == replace(named, credentials=None)


def test_a_folder_is_its_newest_version(model: Path) -> None:
    assert baseline_and_candidate.side(str(model)) == baseline_and_candidate.Published(
        str(model), model, "2"
    )
    assert baseline_and_candidate.side(str(model / "1")) == baseline_and_candidate.Published(
        str(model / "1"), model, "1"
    )


def test_a_url_chooses_the_protocol_unless_somebody_did() -> None:
    grpc, http = (
        baseline_and_candidate.side("grpc://h:1/a"),
        baseline_and_candidate.side("http://h:1/v2/models/a"),
    )
    default = LoadTestProtocol.OIP_HTTP_BINARY
    assert (
        baseline_and_candidate.protocol(grpc, grpc, default, said=False)
        is LoadTestProtocol.OIP_GRPC
    )
    assert baseline_and_candidate.protocol(http, http, default, said=False) is default
    assert (
        baseline_and_candidate.protocol(http, http, LoadTestProtocol.TRITON_HTTP, said=True)
        is LoadTestProtocol.TRITON_HTTP
    )
    with pytest.raises(Exception, match="cannot be tested in oip-http-binary"):
        baseline_and_candidate.protocol(grpc, grpc, default, said=True)


def test_the_help_tells_every_exit_code() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "modelport", "gate", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    for line in ("0    pass", "1    fail", "2    usage", "3    inconclusive", "130  interrupted"):
        assert line in told
