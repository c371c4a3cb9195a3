"""The gateway's own conditions on the metrics port, read with Prometheus' parser."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from modelport.loadtests.system.processes import free_ports
from tests import models
from tests.server import Gateway, serving
from tests.upstream import fronting, table

Samples = dict[tuple[str, ...], float]


def told(gateway: Gateway, sample: str, *labels: str) -> Samples:
    """The values of a sample, by these labels."""
    with urllib.request.urlopen(gateway.metrics) as answer:
        text = answer.read().decode()
    return {
        tuple(one.labels[label] for label in labels): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == sample
    }


def test_a_release_that_does_not_load_is_counted_and_the_gateway_is_not_ready(
    tmp_path: Path,
) -> None:
    models.repository(tmp_path)
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no model")
    with serving(tmp_path) as gateway:
        workers = told(gateway, "modelport_workers", "state")
        assert workers == {("ready",): 0, ("not_ready",): 1}
        versions = told(gateway, "modelport_model_versions", "model", "state")
        assert versions["x2", "READY"] == versions["broken", "UNAVAILABLE"] == 1
        assert versions["x2", "UNAVAILABLE"] == versions["broken", "READY"] == 0
        failures = told(gateway, "modelport_model_load_failures_total", "model")
        assert failures == {("broken",): 1, ("x2",): 0}


def test_a_model_that_was_unloaded_on_purpose_is_in_no_state(tmp_path: Path) -> None:
    flags = ("--model-control-mode", "explicit", "--load-model", "x2")
    with serving(models.repository(tmp_path), *flags) as gateway:
        assert told(gateway, "modelport_workers", "state")["ready",] == 1
        url = f"http://{gateway.http}/v2/repository/models/x2/unload"
        with urllib.request.urlopen(urllib.request.Request(url, data=b"{}", method="POST")):
            pass
        gateway.wait_for("model version is unloaded")
        assert told(gateway, "modelport_model_versions", "model", "state") == {}


def test_an_endpoint_that_is_ejected_is_named(tmp_path: Path) -> None:
    dead = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        serving(models.repository(tmp_path / "repository")) as upstream,
        fronting(tmp_path / "front", table("x2", [upstream.grpc, dead])) as gateway,
    ):
        labels = ("model", "version", "endpoint")
        ejected = told(gateway, "modelport_upstream_endpoint_ejected", *labels)
        assert ejected == {("x2", "1", upstream.grpc): 0, ("x2", "1", dead): 1}
        assert told(gateway, "modelport_workers", "state")["ready",] == 1
