"""The stack of ``compose.yaml``: its references, its commands, its routes, its probes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http
import yaml

from modelport.gateway.repository import routes_file
from modelport.loadtests.system.processes import free_ports
from tests import models
from tests.deploy import DEPLOY, thorough, tools
from tests.deploy.manifests import served_with
from tests.server import serving

FOLDER = DEPLOY / "compose"
STACK = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
GATEWAY = SERVICES["gateway"]
ROUTES = (FOLDER / "routes.toml").read_text()


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Target → source."""
    pairs = (volume.split(":") for volume in service.get("volumes", []))
    return {target: source for source, target, *_ in pairs}


# -- what refers to what ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_refers_to_what_is_there_and_says_how_it_is(name: str) -> None:
    service = SERVICES[name]
    assert set(service["networks"]) <= STACK["networks"].keys()
    assert set(service.get("depends_on", ())) <= SERVICES.keys()
    for source in mounts(service).values():
        if source.startswith("./models/"):
            continue  # prepare.sh makes these
        assert source in STACK["volumes"] or (FOLDER / source).exists(), source
    assert "@" in service["image"] or not service["image"].endswith(("latest", ":"))
    assert ":" in service["image"].rpartition("/")[2]
    assert "healthcheck" in service or name == "gateway"  # the image's own
    for needed in service.get("depends_on", ()):
        assert "healthcheck" in SERVICES[needed]


def test_the_model_servers_are_reached_through_the_gateway_only() -> None:
    for name in ("torchserve", "tfserving", "triton"):
        assert SERVICES[name]["networks"] == ["back"]
        assert "ports" not in SERVICES[name]
    assert STACK["networks"]["back"]["internal"] is True


def test_the_gateway_takes_its_command_and_has_the_time_to_drain() -> None:
    options = served_with(GATEWAY["command"])
    assert [str(path) for path in options["model_repositories"]] == ["/models"]
    assert str(options["routes_file"]) in mounts(GATEWAY)
    assert float(GATEWAY["stop_grace_period"].removesuffix("s")) > options["exit_timeout_seconds"]
    published = {int(port.rpartition(":")[2]) for port in GATEWAY["ports"]}
    assert published == {options["http_port"], options["grpc_port"]}
    assert options["insecure"]
    assert all(port.startswith("127.0.0.1:") for port in GATEWAY["ports"])


def test_every_route_leads_to_a_port_of_a_service_on_the_gateways_networks() -> None:
    listening = {"torchserve": {7070, 8081}, "tfserving": {8500}, "triton": {8001}}
    for route in routes_file.load(FOLDER / "routes.toml").values():
        for address in (*route.endpoints, *filter(None, [route.management])):
            host, _, port = address.partition(":")
            assert int(port) in listening[host]
            assert set(SERVICES[host]["networks"]) & set(GATEWAY["networks"])
    assert "--port=8500" in SERVICES["tfserving"]["command"]
    assert "management_address=http://0.0.0.0:8081" in _properties()


def _properties() -> list[str]:
    return (FOLDER / "torchserve.properties").read_text().splitlines()


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert set(SERVICES["grafana"]["networks"]) & set(SERVICES["prometheus"]["networks"])
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "modelport.yaml").read_text())[
        "providers"
    ]
    where = mounts(SERVICES["grafana"])
    folder = FOLDER / where[provider["options"]["path"]]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (folder / Path(home).name).is_file()


@thorough
def test_compose_fits_the_specification(tmp_path: Path) -> None:
    judge = (tools.linter("check-jsonschema"), "--builtin-schema", "vendor.compose-spec")
    tools.check(*judge, FOLDER / "compose.yaml")
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((FOLDER / "compose.yaml").read_text().replace("read_only:", "readonly:"))
    assert tools.said(*judge, wrong)[0] != 0


# -- real gateways ---------------------------------------------------------------------------------


def test_the_gateway_asks_the_servers_that_the_routes_name(tmp_path: Path) -> None:
    """One gateway stands in for Triton and TensorFlow Serving, whose protocols it speaks."""
    repository = tmp_path / "upstream"
    for name in ("fraud-onnx", "fraud-savedmodel"):
        models.multiply(repository / name / "1" / "model.onnx")
    with serving(repository) as upstream:
        text = ROUTES
        for address in re.findall(r'"((?:triton|tfserving):\d+)"', ROUTES):
            text = text.replace(address, upstream.grpc)
        file = tmp_path / "routes.toml"
        file.write_text(text)
        (tmp_path / "none").mkdir()
        flags = ("--routes", str(file), "--strict-readiness", "false")
        with serving(tmp_path / "none", *flags) as gateway:
            client = tritonclient.http.InferenceServerClient(gateway.http)
            for name in ("fraud-triton", "fraud-savedmodel"):
                assert client.is_model_ready(name), gateway.logs
            index = {row["name"]: row for row in client.get_model_repository_index()}
            assert index["fraud-torchscript"]["state"] == "UNAVAILABLE"  # no such server here
            client.close()


def test_the_probe_of_tensorflow_serving_tells_a_server_with_its_model_from_any_other(
    tmp_path: Path,
) -> None:
    kind, *probe = SERVICES["tfserving"]["healthcheck"]["test"]
    assert kind == "CMD"
    models.multiply(tmp_path / "fraud-savedmodel" / "1" / "model.onnx")
    models.repository(tmp_path / "other")
    (free,) = free_ports(1)
    with serving(tmp_path) as right, serving(tmp_path / "other") as wrong:
        for port, answers in ((right.http_port, True), (wrong.http_port, False), (free, False)):
            words = [word.replace("8501", str(port)) for word in probe]
            done = subprocess.run(words, capture_output=True, timeout=20, check=False)
            assert (done.returncode == 0) is answers, done.stderr
