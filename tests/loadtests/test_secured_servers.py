"""Load tests of a server with mutual TLS and tokens, and what becomes of the token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from modelport.gateway.cli.server_credentials import ServerCredentials
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import Payloads
from modelport.loadtests.load.run import NotMeasured, measure_mix
from modelport.loadtests.load.samples import LoadProfile
from modelport.loadtests.load.summary import summarise
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.users import signature
from tests.certificates import TestAuthority
from tests.commands import modelport
from tests.gateway.access.gateway import KEYS, write_keys
from tests.models import repository
from tests.server import Gateway
from tests.server import serving as gateway_serving

RULES = """
[[rules]]
principals = ["ci"]
operations = ["infer", "metadata"]
"""


class SecuredServer(NamedTuple):
    """A gateway with mutual TLS and keys, and the files that its clients have."""

    gateway: Gateway
    files: ServerCredentials
    key: str

    @property
    def flags(self) -> tuple[str, ...]:
        named = self.files._asdict().items()
        return tuple(part for name, path in named for part in (f"--{name.replace('_', '-')}", path))

    def target(self, protocol: LoadTestProtocol) -> LoadTestTarget:
        address = self.gateway.grpc if protocol.is_grpc else self.gateway.http
        return LoadTestTarget(protocol, address, "x2", tls=True, credentials=self.files)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredServer]:
    folder, authority = tmp_path_factory.mktemp("secured"), TestAuthority()
    (folder / "ca.crt").write_bytes(authority.pem)
    authority.write(folder, "server")
    authority.write(folder, "client", "load.example.com")
    key = write_keys(folder / "access", "ci")["ci"]
    (folder / "access" / "access.toml").write_text(RULES + KEYS)
    (folder / "key").write_text(key)
    names = ("key", "ca.crt", "client.crt", "client.key")
    with gateway_serving(
        repository(folder / "repository"),
        *("--tls-cert", str(folder / "server.crt"), "--tls-key", str(folder / "server.key")),
        *("--tls-client-ca", str(folder / "ca.crt")),
        *("--access", str(folder / "access" / "access.toml")),
    ) as gateway:
        yield SecuredServer(gateway, ServerCredentials(*(folder / name for name in names)), key)


@pytest.mark.thorough
def test_every_protocol_over_tls_with_a_token(server: SecuredServer, tmp_path: Path) -> None:
    x = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]])
    payloads.write(Payloads(({"x": x},), {"x": "FP32"}, ({"y": 2 * x},)), tmp_path / "data.json")
    targets = [(server.target(protocol), 1) for protocol in LoadTestProtocol]
    load = LoadProfile(users=len(targets), rate=90, duration_seconds=1, warmup_seconds=0.2)
    for one in measure_mix(targets, load, [tmp_path / "data.json"]):
        summary = summarise(one)
        assert (summary.ok, summary.bad) == (summary.requests, 0), (one.target, summary.errors)


@pytest.mark.thorough
def test_a_single_user_waits_in_the_kernel_over_tls_too(
    server: SecuredServer, tmp_path: Path
) -> None:
    both = [LoadTestProtocol.OIP_HTTP, LoadTestProtocol.OIP_GRPC]
    targets = [(server.target(protocol), 1) for protocol in both]
    for one in measure_mix(targets, LoadProfile(duration_seconds=0.5, warmup_seconds=0)):
        summary = summarise(one)
        assert summary.bad == 0, summary.errors
        assert summary.ok > 10


@pytest.mark.thorough
def test_the_token_is_in_no_report_no_output_and_no_command_line(
    server: SecuredServer, tmp_path: Path
) -> None:
    """The command runs in a process of its own, so that its children's arguments can be read."""
    flags = ("--json-report", "--html", "--junit")
    reports = [tmp_path / f"run.{flag[2:]}" for flag in flags]
    written = [part for pair in zip(flags, map(str, reports), strict=True) for part in pair]
    url = f"https://{server.gateway.http}/v2/models/x2"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "modelport", "loadtest", url, *server.flags, *written),
            *("--duration", "1s", "--warmup", "0s"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "MODELPORT_TOKEN": "not-this-one"},
    )
    seen: set[str] = set()
    while process.poll() is None:
        for child in [*psutil.Process().children(recursive=True)]:
            try:
                seen.update(child.cmdline())
            except psutil.Error:
                continue
    output, _ = process.communicate()
    assert process.returncode == 0, output.decode()
    assert any("locust" in part for part in seen)
    everything = [output.decode(), *seen, *(path.read_text() for path in reports)]
    assert json.loads(reports[0].read_text())["target"]["url"].startswith("oip-https://")
    for text in everything:
        assert server.key not in text
        assert server.key[-20:] not in text


@pytest.mark.thorough
def test_a_gate_of_two_secured_servers(server: SecuredServer, tmp_path: Path) -> None:
    undecided = ("p50", "p99", "first_response")  # by what time decides
    slo = ["[duration]", "slices = 1", "slice_seconds = 0.5", "[limits]", "max_error_share = 0.5"]
    slo += ["[regressions]", *(f"max_{name}_regression = false" for name in undecided)]
    (tmp_path / "slo.toml").write_text("\n".join(slo))
    url = f"grpcs://{server.gateway.grpc}/x2"
    done = modelport(
        *("gate", url, url, "--slo", str(tmp_path / "slo.toml"), "--max-duration", "10s", "-q"),
        *("--json-report", str(tmp_path / "gate.json"), *map(str, server.flags)),
    )
    assert done.returncode in (0, 3), done.stderr
    document = (tmp_path / "gate.json").read_text()
    runs = [run for side in json.loads(document)["runs"].values() for run in side]
    assert {run["target"].partition("://")[0] for run in runs} == {"oip-grpcs"}
    assert sum(run["ok"] for run in runs) == sum(run["requests"] for run in runs) > 100
    assert server.key not in document + done.stdout + done.stderr


@pytest.mark.thorough
def test_without_a_token_or_a_certificate_the_reason_is_told(server: SecuredServer) -> None:
    target = server.target(LoadTestProtocol.OIP_HTTP)
    for name, reason in (("token_file", "token with --token-file"), ("ca_file", "with --ca-file")):
        lacking = replace(target, credentials=server.files._replace(**{name: None}))
        with pytest.raises(NotMeasured, match=reason):
            measure_mix([(lacking, 1)], LoadProfile(duration_seconds=0.2))
    grpc = replace(
        server.target(LoadTestProtocol.OIP_GRPC),
        credentials=server.files._replace(token_file=None),
    )
    with pytest.raises(NotMeasured, match=r"the request has no credential.*--token-file"):
        measure_mix([(grpc, 1)], LoadProfile(duration_seconds=0.2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://h:1", "--ca-file", "ca"], "'http://h:1' is clear text"),
        (["https://h:1", "--ca-file", "ca"], "ca cannot be used as authorities"),
        (["https://h:1", "--ca-file", "none.crt"], "'--ca-file': Path 'none.crt' does not exist"),
        (["h:1", "--token-file", "none"], "'--token-file': Path 'none' does not exist"),
        (["https://h:1", "--client-cert", "ca"], "--client-cert and --client-key belong together"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ca").touch()
    done = modelport("loadtest", *arguments, "-m", "x2")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert message in line.replace(f"{tmp_path}/", "")


class Redirecting(BaseHTTPRequestHandler):
    """Sends every request to another path, and keeps the credentials that come."""

    seen: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["authorization"]))
        self.send_response(302 if self.path != "/elsewhere" else 404)
        self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_token_does_not_follow_a_redirect(tmp_path: Path) -> None:
    Redirecting.seen = []
    (tmp_path / "token").write_text("secret")
    with HTTPServer(("127.0.0.1", 0), Redirecting) as redirecting:
        thread = threading.Thread(target=redirecting.serve_forever)
        thread.start()
        address = f"127.0.0.1:{redirecting.server_port}"
        credentials = ServerCredentials(tmp_path / "token")
        target = LoadTestTarget(LoadTestProtocol.OIP_HTTP, address, "m", credentials=credentials)
        with pytest.raises(signature.SignatureUnknown):
            signature.ask(target)
        redirecting.shutdown()
        thread.join()
    assert ("/v2/models/m/config", "Bearer secret") in Redirecting.seen
    assert {token for path, token in Redirecting.seen if path == "/elsewhere"} == {None}
