"""``modelport serve --access`` as a process, with workers, and ``modelport access check``."""

from __future__ import annotations

import json
import os
import signal
import ssl
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from modelport.cli import modelport
from modelport.gateway.access import api_key_file
from modelport.gateway.errors import UsageError
from modelport.server import Server
from tests.certificates import TestAuthority
from tests.gateway.access.gateway import KEYS, repository, write_keys
from tests.gateway.access.identities import AUDIENCE, ISSUER, Issuer, key_set
from tests.gateway.access.key_server import KeyServer, reply
from tests.gateway.access.test_every_route import OIP
from tests.gateway.server.workers.processes import workers
from tests.polling import eventually
from tests.server import Gateway

PUBLIC = """
[[rules]]
principals = ["anonymous"]
operations = ["infer"]
models = ["mine"]
"""
QUOTA = 32
ROOT = f"""
[[rules]]
principals = ["root", "ci"]
operations = "*"

[[quotas]]
principals = ["ci"]
requests_per_second = 0.001
burst = {QUOTA}
"""
WORKERS = 2


def replace(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def statuses(gateway: Gateway, headers: dict[str, str], requests: int = 8) -> set[int]:
    """The statuses of requests on connections of their own, so of all workers."""
    found = set()
    for _ in range(requests):
        with closing(HTTPConnection(gateway.http)) as connection:
            connection.request("POST", "/v2/models/mine/infer", json.dumps(OIP), headers)
            found.add(connection.getresponse().status)
    return found


def test_all_processes_follow_what_was_accepted_last_and_start_again_with_it(
    tmp_path: Path,
) -> None:
    keys = write_keys(tmp_path / "access", "root", "ci")
    path = tmp_path / "access" / "access.toml"
    path.write_text(KEYS + ROOT)
    root, ci = ({"authorization": f"Bearer {keys[name]}"} for name in ("root", "ci"))
    flags = ("--access", str(path), "--workers", str(WORKERS), "--log-verbose", "1")
    with closing(Gateway(repository(tmp_path / "models"), *flags)) as gateway:
        assert statuses(gateway, {}) == {401}
        assert statuses(gateway, root) == {200}
        assert httpx.get(gateway.metrics).status_code == 401
        metrics = httpx.get(gateway.metrics, headers=root)
        assert 'modelport_access_reload_errors_total{file="rules"} 0\n' in metrics.text
        replace(path, KEYS + ROOT + PUBLIC)
        gateway.wait_for("access rules reloaded")  # logged when every worker uses them
        assert statuses(gateway, {}) == {200}
        replace(path, "[[rule]]\n")
        replace(path.with_name("keys.toml"), "[[keys]]\n")
        os.kill(gateway.process.pid, signal.SIGHUP)  # means: look at the files
        gateway.wait_for("access rules not reloaded")
        gateway.wait_for("access keys not reloaded")
        assert statuses(gateway, ci, QUOTA // 2) == {200}
        for process in workers(gateway).values():
            before = len(gateway.logs)
            os.kill(process, signal.SIGKILL)
            gateway.wait_for("worker restarted", after=before)
        assert statuses(gateway, {}) == statuses(gateway, root) == {200}
        assert statuses(gateway, ci, QUOTA // 2) == {200}  # what the first workers had left of it
        assert statuses(gateway, ci) == {429}
        before = len(gateway.logs)
        replace(path, KEYS + ROOT)
        gateway.wait_for("access rules reloaded", after=before)
        assert statuses(gateway, {}) == {401}
        assert statuses(gateway, root) == {200}  # by the key that is not on disk any more
        events = [entry["event"] for entry in gateway.logs]
        assert events.count("access rules reloaded") == 2
        assert not any("Traceback" in event for event in events)


def test_other_addresses_need_access_or_insecure(tmp_path: Path) -> None:
    folder = repository(tmp_path / "models")
    for kind in ("http", "grpc", "metrics"):
        with pytest.raises(UsageError) as caught:
            Server(folder, **{f"{kind}_address": "0.0.0.0"})  # type: ignore[arg-type]
        message = str(caught.value)
        assert f"--{kind}-address 0.0.0.0" in message
        assert "--access FILE" in message
        assert "--insecure" in message
    Server(folder, http_address="localhost", grpc_address="127.0.0.2", metrics_address="::1")
    Server(folder, http_address="0.0.0.0", insecure=True)
    (tmp_path / "access.toml").touch()
    Server(folder, http_address="0.0.0.0", access=tmp_path / "access.toml")


def test_a_gateway_for_everybody_warns_at_the_start(tmp_path: Path) -> None:
    folder = repository(tmp_path / "models")
    with closing(Gateway(folder, "--http-address", "0.0.0.0", "--insecure")) as gateway:
        [warning] = [log for log in gateway.logs if "everyone" in log["event"]]
        assert warning["addresses"] == ["0.0.0.0"]


def test_broken_rules_end_the_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text("[[rules]]\nprincipals = ['ci']\noperations = ['x']\n")
    for more in ((), ("--workers", "2")):
        result = CliRunner().invoke(
            modelport,
            ["serve", str(repository(tmp_path / "models")), "--access",
             str(tmp_path / "access.toml"), "--http-port", "0", "--grpc-port", "0",
             "--metrics-port", "0", *more],
        )  # fmt: skip
        assert result.exit_code == 2
        assert "access.toml:3: rules.operations" in result.output


RULES = """
[groups]
team = ["alice"]

[[rules]]
principals = ["ci", "group:team", "group:jwt:staff"]
operations = ["infer"]
models = ["fraud*"]
versions = ["1"]
"""


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        ("--as ci infer fraud-2", True),
        ("--as alice infer fraud", True),
        ("--as alice infer fraud --model-version 1", True),
        ("--as alice infer fraud --model-version 2", False),
        ("--as bob infer fraud", False),
        ("--as jwt:bob --group jwt:staff infer fraud", True),
        ("--as ci metadata fraud", False),
        ("--as ci infer other", False),
        ("--as anonymous infer fraud", False),
        ("--as anonymous health", True),
        ("--as anonymous health fraud", False),
        ("--as scoped metadata other", True),
        ("--as scoped infer other", False),
    ],
)
def test_a_decision_is_explained_rule_by_rule(
    tmp_path: Path, arguments: str, allowed: bool
) -> None:
    path = tmp_path / "access.toml"
    path.write_text(RULES + KEYS)
    _, scoped = api_key_file.generate("scoped", operations=["metadata"])
    with api_key_file.locked(tmp_path / "keys.toml") as replace_keys:
        replace_keys([scoped])
    command = ["access", "check", "--access", str(path), *arguments.split()]
    result = CliRunner().invoke(modelport, command)
    assert result.exit_code == (0 if allowed else 1), result.output
    assert result.output.startswith("allowed: " if allowed else "denied: ")
    assert "access.toml:5" in result.output
    result = CliRunner().invoke(modelport, [*command, "--json"])
    document = json.loads(result.output)
    assert document["allowed"] is allowed
    assert result.exit_code == (0 if allowed else 1)
    assert document["rules"][0]["place"] == "access.toml:5"


def test_a_check_says_that_a_key_has_expired(tmp_path: Path) -> None:
    path = tmp_path / "access.toml"
    path.write_text(RULES + KEYS)
    past = datetime.now(UTC) - timedelta(seconds=1)
    _, entry = api_key_file.generate("ci", expires=past, operations=["metadata"])
    with api_key_file.locked(tmp_path / "keys.toml") as replace_keys:
        replace_keys([entry])
    command = ["access", "check", "--access", str(path), "--as"]
    result = CliRunner().invoke(modelport, [*command, "ci", "metadata", "other"])
    assert result.exit_code == 1
    assert f"key mp_{entry.id}  no         it has expired" in result.output
    result = CliRunner().invoke(modelport, [*command, "ci", "infer", "fraud"])
    assert result.exit_code == 0  # by the rules
    assert "'ci' has no valid API key, so its requests get 401" in result.stderr
    result = CliRunner().invoke(modelport, [*command, "jwt:bob", "infer", "fraud"])
    assert "API key" not in result.stderr


def test_a_check_without_a_file_names_the_option(tmp_path: Path) -> None:
    command = ["access", "check", "--access", str(tmp_path / "none"), "--as", "ci", "infer"]
    result = CliRunner().invoke(modelport, command)
    assert result.exit_code == 2
    assert "--access" in result.output


def test_a_worker_that_is_started_during_an_outage_of_the_issuer_has_its_keys(
    tmp_path: Path,
) -> None:
    issuer, authority = Issuer("EdDSA"), TestAuthority()
    certificate, key = authority.write(tmp_path, "server")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    path = tmp_path / "access.toml"
    token = {"authorization": f"Bearer {issuer.token().decode()}"}
    flags = ("--access", str(path), "--workers", str(WORKERS))
    with closing(KeyServer(context)) as server:
        server.answer = reply(key_set(issuer))
        path.write_text(
            f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\nalgorithms = ["EdDSA"]\n'
            f'jwks = "https://localhost:{server.port}/jwks"\njwks_ca = "ca.pem"\n'
            '[[rules]]\nprincipals = ["jwt:alice"]\noperations = ["infer", "metrics"]\n'
        )
        with closing(Gateway(repository(tmp_path / "models"), *flags)) as gateway:
            eventually(lambda: statuses(gateway, token) == {200}, "all workers have the keys")
            eventually(
                lambda: httpx.get(gateway.metrics, headers=token).status_code == 200,
                "the parent has the keys",
            )
            server.answer = reply(b"", "503 Service Unavailable")
            for process in workers(gateway).values():
                before = len(gateway.logs)
                os.kill(process, signal.SIGKILL)
                gateway.wait_for("worker restarted", after=before)
            assert statuses(gateway, token) == {200}
