"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import click
import pytest
import yaml

from gateway import routes
from tests import models
from tests.deploy import DEPLOY, thorough, tools
from tests.deploy.manifests import Manifest, documents, served_with, wrong
from tests.server import serving

CHART = DEPLOY / "helm" / "modelport"
VALUES = [CHART / "values.yaml", *sorted((CHART / "ci").glob("*.yaml"))]
FULL = CHART / "ci" / "full-values.yaml"
#: What kubernetes-validate has no schemas for.
CUSTOM = ("ServiceMonitor", "PrometheusRule")

pytestmark = thorough


def render(values: Path, *flags: str) -> list[Manifest]:
    rendered = tools.check(
        tools.helm(), "template", "demo", CHART, "-n", "ml", "-f", values, *flags
    )
    return documents("\n".join(x for x in rendered.splitlines() if "symbolic link" not in x))


def only(kind: str, manifests: list[Manifest], name: str = "demo-modelport") -> Manifest:
    (found,) = (m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_chart_is_linted_and_what_it_renders_is_valid(values: Path, tmp_path: Path) -> None:
    tools.check(tools.helm(), "lint", "--strict", CHART, "-f", values)
    rendered = render(values)
    standard = tmp_path / "standard.yaml"
    standard.write_text(yaml.safe_dump_all([m for m in rendered if m["kind"] not in CUSTOM]))
    kubernetes_validate = shutil.which("kubernetes-validate")
    assert kubernetes_validate, "kubernetes-validate is missing: pip install kubernetes-validate"
    for version in ("1.30", "1.33", "1.36"):
        said = tools.check(
            kubernetes_validate, "--strict", "--kubernetes-version", version, standard
        )
        assert said.count(" passed for resource ") == len(documents(standard.read_text())), said
    assert [wrong(m) for m in rendered if m["kind"] in CUSTOM] == [
        [] for m in rendered if m["kind"] in CUSTOM
    ]


def test_a_misspelt_key_in_a_custom_resource_is_found() -> None:
    monitor = only("ServiceMonitor", render(FULL))
    monitor["spec"]["endpoints"][0]["intervall"] = "5s"
    assert "intervall" in str(wrong(monitor))


def test_everything_is_rendered_that_the_values_ask_for() -> None:
    kinds = sorted(m["kind"] for m in render(FULL))
    assert kinds == [
        "ConfigMap", "ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy",
        "PodDisruptionBudget", "PrometheusRule", "Service", "ServiceAccount", "ServiceMonitor",
    ]  # fmt: skip
    least = sorted(m["kind"] for m in render(CHART / "ci" / "routes-only-values.yaml"))
    assert least == ["ConfigMap", "Deployment", "Service", "ServiceAccount"]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_pods_may_do_nothing_that_they_need_not(values: Path) -> None:
    pod = only("Deployment", render(values))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    written = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert written == ["/tmp"]


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_the_gateway_takes_the_arguments_and_has_the_time_to_drain(values: Path) -> None:
    pod = only("Deployment", render(values))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = served_with(container["args"])
    sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] > sleep + options["exit_timeout_seconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {kind: options[f"{kind}_port"] for kind in ("http", "grpc", "metrics")}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for repository in options["model_repositories"]:
        assert "://" in str(repository) or ":/" in str(repository) or str(repository) in mounts


def test_an_argument_that_the_gateway_does_not_have_is_found() -> None:
    pod = only("Deployment", render(FULL, "--set", "extraArgs={--cash-config=local}"))
    with pytest.raises(click.NoSuchOption):
        served_with(pod["spec"]["template"]["spec"]["containers"][0]["args"])


def test_the_routes_are_what_the_gateway_reads(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(only("ConfigMap", render(FULL))["data"]["routes.yaml"])
    found = routes.load(file).models
    assert found["churn"].endpoints == ("tfserving.models.svc:8500",)
    assert found["vit"].management == "torchserve.models.svc:8081"


def test_other_routes_make_other_pods() -> None:
    def checksum(*flags: str) -> str:
        template = only("Deployment", render(FULL, *flags))["spec"]["template"]
        value: str = template["metadata"]["annotations"]["checksum/routes"]
        return value

    assert checksum() == checksum("--set", "workers=3")
    assert checksum() != checksum("--set", "routes.models.churn.timeout_seconds=3")


def test_the_probes_are_answered_by_the_gateway(tmp_path: Path) -> None:
    pod = only("Deployment", render(CHART / "values.yaml"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    with serving(models.repository(tmp_path)) as gateway:
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert get["port"] == "http"
            with urllib.request.urlopen(f"http://{gateway.http}{get['path']}") as answer:
                assert answer.status == 200


def test_rules_and_dashboard_are_those_of_deploy() -> None:
    rendered = render(FULL)
    rules = yaml.safe_load((DEPLOY / "prometheus" / "modelport.rules.yml").read_text())
    assert only("PrometheusRule", rendered)["spec"] == rules
    dashboard = only("ConfigMap", rendered, "demo-modelport-dashboard")["data"]["modelport.json"]
    assert json.loads(dashboard) == json.loads((DEPLOY / "grafana" / "modelport.json").read_text())


def test_a_packaged_chart_holds_what_its_links_lead_to(tmp_path: Path) -> None:
    tools.check(tools.helm(), "package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.glob("modelport-*.tgz")
    rendered = tools.check(tools.helm(), "template", "demo", archive, "-f", FULL)
    assert "ModelportErrorBudgetBurn" in rendered


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("workers=0", "workers"),
        ("image.tga=x", "tga"),
        ("modelRepository.path=models", "modelRepository.path"),
        ("routes.models.x.backend=foo", "routes.models.x"),
        ("autoscaling.minReplicas=none", "minReplicas"),
        ("modelRepository.path=", "nothing to serve"),
    ],
)
def test_values_that_cannot_be_are_refused(setting: str, names: str) -> None:
    status, said = tools.said(tools.helm(), "template", "demo", CHART, "--set", setting)
    assert status != 0
    assert names in said
