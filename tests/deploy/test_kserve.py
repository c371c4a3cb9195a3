"""The examples for KServe."""

from __future__ import annotations

import pytest
import yaml

from tests.deploy import DEPLOY
from tests.deploy.manifests import served_with, wrong

FILES = sorted((DEPLOY / "kserve").glob("*.yaml"))
RUNTIME = yaml.safe_load((DEPLOY / "kserve" / "servingruntime.yaml").read_text())
SERVICES = [yaml.safe_load(path.read_text()) for path in FILES if "inference" in path.name]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_example_fits_the_schema_of_kserves_custom_resource(path: object) -> None:
    assert wrong(yaml.safe_load(path.read_text())) == []  # type: ignore[attr-defined]


def test_a_misspelt_key_is_found() -> None:
    service = yaml.safe_load(yaml.safe_dump(SERVICES[0]))
    service["spec"]["predictor"]["minReplica"] = 1
    assert "minReplica" in str(wrong(service))


def test_the_gateway_takes_the_runtimes_arguments_on_the_ports_that_kserve_routes_to() -> None:
    (container,) = RUNTIME["spec"]["containers"]
    assert container["name"] == "kserve-container"  # KServe looks for this one
    options = served_with(container["args"])
    assert [str(path) for path in options["model_repositories"]] == ["/mnt/models"]
    (http,) = container["ports"]
    assert http["containerPort"] == options["http_port"] == 8080
    (grpc,) = next(s for s in SERVICES if s["metadata"]["name"] == "fraud-grpc")["spec"][
        "predictor"
    ]["model"]["ports"]
    assert grpc["containerPort"] == options["grpc_port"] == 9000
    annotations = RUNTIME["metadata"]["annotations"]
    assert annotations["prometheus.kserve.io/port"] == str(options["metrics_port"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == options["http_port"]


def test_the_services_ask_for_what_the_runtime_offers() -> None:
    formats = {(f["name"], f["version"]) for f in RUNTIME["spec"]["supportedModelFormats"]}
    assert len(SERVICES) == 2
    for service in SERVICES:
        model = service["spec"]["predictor"]["model"]
        assert model["runtime"] == RUNTIME["metadata"]["name"]
        assert model["protocolVersion"] in RUNTIME["spec"]["protocolVersions"]
        assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats
