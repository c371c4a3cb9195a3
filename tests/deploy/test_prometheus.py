"""Rules, dashboard and scrape configuration, against real gateways and a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
import yaml

from modelport.loadtests.system.processes import HOST, free_ports, running
from tests import models
from tests.certificates import TestAuthority
from tests.deploy import DEPLOY, thorough, tools
from tests.polling import eventually
from tests.server import Gateway, serving
from tests.upstream import fronting, table

RULES = DEPLOY / "prometheus" / "modelport.rules.yml"
TESTS = DEPLOY / "prometheus" / "modelport.rules.test.yml"
SCRAPES = DEPLOY / "compose" / "prometheus" / "prometheus.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "modelport.json").read_text())
GROUPS = yaml.safe_load(RULES.read_text())["groups"]
ADAPTER = yaml.safe_load((DEPLOY / "helm" / "prometheus-adapter.yaml").read_text())
#: Prometheus' own, and what the rules record.
NOT_THE_GATEWAYS = {"up"} | {
    rule["record"] for g in GROUPS for rule in g["rules"] if "record" in rule
}
#: Words of PromQL that look like metrics to this test.
NAME = re.compile(r"\b(?:up|(?:nv|modelport|process|ts)_\w+|[a-z_]+:[a-z0-9_]+:[a-z0-9_]+)\b")
MATCHER = re.compile(r'\b(state|reason|phase)=~?"([A-Za-z_|]+)"')
#: What the dashboard's variables stand for here.
VARIABLES = {"$job": ".*", "$model": ".*", "$__rate_interval": "10s"}


def expressions() -> Iterator[str]:
    for group in GROUPS:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (rule["seriesQuery"] for rule in ADAPTER["rules"]["custom"])


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One that has of everything: a cache, a broken model, an ejected endpoint, a rollout."""
    folder = tmp_path_factory.mktemp("watched")
    repository = models.repository(folder / "models")
    config = repository / "x2" / "config.pbtxt"
    config.write_text(config.read_text() + "\nresponse_cache { enable: true }\n")
    shutil.copytree(repository / "x2" / "1", repository / "x2" / "2")
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with Upstream(folder / "upstream") as upstream:
        dead = f"{HOST}:{free_ports(1)[0]}"
        with fronting(
            folder / "front",
            table("there", [upstream.gateway.grpc, dead], model="x2"),
            repository=repository,
            flags=("--cache-config", "local,size=1048576"),
        ) as watched:
            start_rollout(watched)
            yield watched


def start_rollout(gateway: Gateway) -> None:
    """Give half of the requests for version 2 of ``x2`` to version 1."""
    url = gateway.metrics.replace("/metrics", "/v2/rollouts/x2")
    body = json.dumps({"candidate": "1", "steps": [0.5]}).encode()
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        assert answer.status == 200


class Upstream:
    """A second gateway with the same model."""

    def __init__(self, folder: Path) -> None:
        self.gateway = Gateway(models.repository(folder))

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_: object) -> None:
        self.gateway.close()


def ask(gateway: Gateway, value: float = 1.0, names: Sequence[str] = ("x2", "there")) -> None:
    client = tritonclient.http.InferenceServerClient(gateway.http)
    tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.full((1, 4), value, np.float32))
    for model in names:
        client.infer(model, [tensor])
    client.close()


@pytest.fixture(scope="module")
def metrics_of_access(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a gateway with TLS and rules."""
    folder = tmp_path_factory.mktemp("access")
    authority = TestAuthority()
    certificate, key = authority.write(folder, "tls")
    rules = folder / "access.toml"
    rules.write_text('[[rules]]\nprincipals = ["anonymous"]\noperations = ["metrics"]\n')
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key), "--access", str(rules))
    context = ssl.create_default_context(cadata=authority.pem.decode())
    with serving(models.repository(folder / "models"), *flags) as gateway:
        url = gateway.metrics.replace("http:", "https:")
        with urllib.request.urlopen(url, context=context) as answer:
            text: str = answer.read().decode()
    return text


def test_every_metric_of_rules_and_dashboard_is_one_of_the_gateways(
    gateway: Gateway, metrics_of_access: str
) -> None:
    ask(gateway)
    with urllib.request.urlopen(gateway.metrics) as answer:
        text = answer.read().decode() + metrics_of_access
    # By hand: prometheus_client's parser gives every counter's samples the suffix _total.
    there = NOT_THE_GATEWAYS | set(re.findall(r"^([\w:]+)(?:\{| )", text, re.MULTILINE))
    values = set(re.findall(r'(\w+)="([^"]*)"', text))
    named = {name for text in expressions() for name in NAME.findall(text)}
    assert len(named) > 20
    assert named - there == set()
    asked = {
        (label, value)
        for text in expressions()
        for label, alternatives in MATCHER.findall(text)
        for value in alternatives.split("|")
    }
    assert asked - values == set()


def test_every_panel_says_what_it_shows_and_has_its_own_place() -> None:
    taken = set()
    for panel in DASHBOARD["panels"]:
        assert all((panel["title"], panel["targets"], panel["fieldConfig"]["defaults"]["unit"]))
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_alert_is_tested_and_says_what_to_do() -> None:
    tested = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test.get("alert_rule_test", ())
        if case["exp_alerts"]
    }
    alerts = [rule for group in GROUPS for rule in group["rules"] if "alert" in rule]
    assert {rule["alert"] for rule in alerts} == tested
    for rule in alerts:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}


@thorough
def test_promtool_accepts_the_rules_and_their_unit_tests(tmp_path: Path) -> None:
    tools.check(tools.promtool(), "check", "rules", RULES)
    tools.check(tools.promtool(), "test", "rules", TESTS.name, cwd=TESTS.parent)
    for file in (RULES, TESTS):
        shutil.copy(file, tmp_path)
    altered = RULES.read_text().replace("14.4 * 0.001", "144 * 0.001")
    (tmp_path / RULES.name).write_text(altered)
    assert tools.said(tools.promtool(), "test", "rules", TESTS.name, cwd=tmp_path)[0] != 0


# -- a real Prometheus -----------------------------------------------------------------------------


class Watching:
    def __init__(self, port: int) -> None:
        self._port = port

    def get(self, path: str, **query: str) -> Any:
        url = f"http://{HOST}:{self._port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{query}: {error.read().decode()}") from error

    def result(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found


@pytest.fixture(scope="module")
def watching(gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watching]:
    """The configuration of compose.yaml, on our gateway and faster."""
    folder = tmp_path_factory.mktemp("prometheus")
    text = SCRAPES.read_text()
    for old, new in (("gateway:8002", gateway.metrics.split("/")[2]), ("15s", "1s"), ("5s", "1s")):
        assert old in text
        text = text.replace(old, new)
    (folder / "prometheus.yml").write_text(text)
    shutil.copy(RULES, folder)
    tools.check(tools.promtool(), "check", "config", folder / "prometheus.yml")
    (port,) = free_ports(1)
    command = [
        tools.prometheus(),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
    ]
    stop = threading.Event()

    def keep_asking() -> None:
        value = 0.0
        while not stop.is_set():
            ask(gateway, value)
            value += 1.0
            stop.wait(0.2)

    asking = threading.Thread(target=keep_asking)
    with running(command, log=folder / "log", ready=f"http://{HOST}:{port}/-/ready"):
        asking.start()
        try:
            yield Watching(port)
        finally:
            stop.set()
            asking.join()


@thorough
def test_prometheus_scrapes_the_gateway_and_evaluates_every_rule(watching: Watching) -> None:
    eventually(lambda: [r["value"][1] for r in watching.result('up{job="modelport"}')] == ["1"])
    eventually(lambda: watching.result("job_model:modelport_requests:rate5m > 0"))

    def healths() -> set[str]:
        groups = watching.get("rules")["groups"]
        assert sum(len(g["rules"]) for g in groups) == sum(len(g["rules"]) for g in GROUPS)
        return {rule["health"] for g in groups for rule in g["rules"]}

    eventually(lambda: healths() == {"ok"})
    eventually(
        lambda: (
            {"ModelportNotReady", "ModelportModelUnavailable", "ModelportUpstreamEjected"}
            <= {alert["labels"]["alertname"] for alert in watching.get("alerts")["alerts"]}
        )
    )


@thorough
def test_every_panel_has_data(watching: Watching) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            text = target["expr"]
            for name, value in VARIABLES.items():
                text = text.replace(name, value)
            if panel["title"] == "Failures by reason":  # nothing fails here
                assert watching.result(text) == []
            else:
                eventually(lambda text=text: watching.result(text))


def test_the_autoscaler_finds_its_metric_before_the_first_request_and_while_one_is_in_flight(
    tmp_path: Path,
) -> None:
    """Without a sample it would not scale at all; and it asks for those in flight."""
    repository = models.repository(tmp_path)
    models.fake(repository, "slow", "FP32", "4", delay_seconds="1")
    (rule,) = ADAPTER["rules"]["custom"]
    name = rule["seriesQuery"].partition("{")[0]

    def in_flight(gateway: Gateway) -> dict[str, float]:
        with urllib.request.urlopen(gateway.metrics) as answer:
            text = answer.read().decode()
        found = re.findall(rf'^{name}{{model="(\w+)",version="1"}} (\S+)$', text, re.MULTILINE)
        return {model: float(value) for model, value in found}

    with serving(repository) as gateway, ThreadPoolExecutor(3) as pool:
        assert in_flight(gateway) == {"slow": 0, "x2": 0}
        asked = [pool.submit(ask, gateway, names=("slow",)) for _ in range(3)]
        eventually(lambda: in_flight(gateway)["slow"] == 3)
        for each in asked:
            each.result()
        assert in_flight(gateway)["slow"] == 0


@thorough
def test_the_autoscalers_metric_can_be_asked_for(watching: Watching) -> None:
    """The question of prometheus-adapter; without labels of Kubernetes there are no series."""
    (rule,) = ADAPTER["rules"]["custom"]
    query = rule["metricsQuery"]
    for name, value in {
        "<<.Series>>": rule["seriesQuery"].partition("{")[0],
        "<<.LabelMatchers>>": 'job="modelport"',
        "<<.GroupBy>>": "instance",
    }.items():
        query = query.replace(name, value)
    eventually(lambda: watching.result(query))
    values = yaml.safe_load((DEPLOY / "helm" / "modelport" / "values.yaml").read_text())
    assert values["autoscaling"]["metric"] == rule["seriesQuery"].partition("{")[0]
