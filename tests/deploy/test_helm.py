"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from modelport.gateway.repository import routes_file
from tests import models
from tests.deploy import DEPLOY, thorough, tools
from tests.deploy.charts import CHART, only, render
from tests.deploy.manifests import Manifest, documents, served_with, wrong
from tests.server import serving

VALUES = [CHART / "values.yaml", *sorted((CHART / "ci").glob("*.yaml"))]
FULL = CHART / "ci" / "full-values.yaml"
#: What kubernetes-validate has no schemas for.
CUSTOM = ("ServiceMonitor", "PrometheusRule")

pytestmark = thorough


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


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_every_volume_has_one_source_and_every_mount_a_volume(values: Path) -> None:
    """Kubernetes takes no volume with two, and the schemas do not say so."""
    pod = only("Deployment", render(values))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert [list(volume) for volume in pod["volumes"] if len(volume) != 2] == []
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    assert len({mount["mountPath"] for mount in container["volumeMounts"]}) == len(volumes)


def test_an_argument_that_the_gateway_does_not_have_is_found() -> None:
    pod = only("Deployment", render(FULL, "--set", "extraArgs={--cash-config=local}"))
    with pytest.raises(click.NoSuchOption):
        served_with(pod["spec"]["template"]["spec"]["containers"][0]["args"])


def test_the_routes_are_what_the_gateway_reads(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(only("ConfigMap", render(FULL))["data"]["routes.yaml"])
    found = routes_file.load(file)
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


@dataclass
class KubeletProbe:
    """A probe as the kubelet runs it: answers that are late, or no 2xx, are failures."""

    url: str
    timeout_seconds: float
    period_seconds: float
    failures: int
    #: In a row, now.
    failed: int = 0

    @classmethod
    def of(cls, container: Manifest, name: str, address: str) -> KubeletProbe:
        told = container[name]
        return cls(
            f"http://{address}{told['httpGet']['path']}",
            told.get("timeoutSeconds", 1),
            told.get("periodSeconds", 10),
            told["failureThreshold"],
        )

    def passes(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=self.timeout_seconds).close()
            self.failed = 0
        except OSError:
            self.failed += 1
        return not self.failed


def test_a_model_that_loads_slowly_is_neither_killed_nor_asked_too_early(tmp_path: Path) -> None:
    """A SavedModel, whose runtime alone takes seconds to import, and 256 MiB of ONNX weights."""
    repository = tmp_path / "models"
    script = Path(__file__).with_name("artifacts.py")
    tools.check(sys.executable, script, "tensorflow", repository / "own", cwd=DEPLOY.parent)
    models.weighty(repository / "large" / "1" / "model.onnx", width=2**23)
    pod = only("Deployment", render(CHART / "values.yaml"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    began = time.monotonic()
    flags = ("--strict-readiness", "true")
    with serving(repository, *flags, wait_for="listening") as gateway:
        startup, live, ready = (
            KubeletProbe.of(container, f"{name}Probe", gateway.http)
            for name in ("startup", "liveness", "readiness")
        )
        while not startup.passes():
            assert startup.failed < startup.failures
            time.sleep(startup.period_seconds)  # as the kubelet does
        started = time.monotonic() - began
        early = 0
        while not ready.passes():
            early += 1
            # More often than it would be asked: whichever moment it is, one may hit it.
            assert live.passes() or live.failed < live.failures
            time.sleep(0.1)
        took = time.monotonic() - began
        for name in ("own", "large"):
            url = f"http://{gateway.http}/v2/models/{name}/ready"
            with urllib.request.urlopen(url) as answer:
                assert answer.status == 200
    print(f"live after {started:.1f} s, ready after {took:.1f} s, {early} looks before it")
    assert early, "it was ready at once: nothing was tried"


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
        ("workers=0", "workers: Must be greater than or equal to 1"),
        ("image.tga=x", "image: Additional property tga is not allowed"),
        ("modelRepository.path=models", "'models' is neither an absolute path nor s3://"),
        ("modelRepository.path=s3://KEY:MARKED@bucket/x", "set them in envFrom"),
        ("modelRepository.volume=null", "set modelRepository.volume to the volume"),
        ("autoscaling.enabled=true,autoscaling.minReplicas=11", "autoscaling.minReplicas 11 is"),
        ("service.grpcPort=8000", "service.grpcPort and service.metricsPort are [8000 8000"),
        ("podDisruptionBudget.maxUnavailable=0", "no node could ever be drained: set 1 or more"),
        ("podDisruptionBudget.maxUnavailable=0%", "no node could ever be drained: set 1 or more"),
        ("temporary.sizeLimit=20GB", "'20GB' is not a Kubernetes quantity: write 20Gi"),
        ("routes.models.x.backend=foo", "routes.models.x"),
        ("autoscaling.minReplicas=none", "minReplicas"),
        ("modelRepository.path=", "nothing to serve"),
        ("access.rules=x,access.configMapName=y", "both set access.toml: use one of them"),
        ("tls.clientCertificates=true", "tls.clientCertificates needs tls.secretName"),
        (
            "tls.clientCertificates=true,tls.secretName=x",
            "a client without a certificate may do everything",
        ),
        ("tls.secretName=modelport/tls", "tls.secretName"),
        ("access.rules=[certificates]", "[certificates], which needs tls.clientCertificates"),
    ],
)
def test_values_that_cannot_be_are_refused(setting: str, names: str) -> None:
    status, said = tools.said(tools.helm(), "template", "demo", CHART, "--set", setting)
    assert status != 0
    assert names in said
    assert "MARKED" not in said


@pytest.mark.parametrize("replicas", [1, 2, 30])
@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_a_drain_goes_on_however_few_pods_there_are(values: Path, replicas: int) -> None:
    """The reckoning of Kubernetes: a share is rounded up; what is not ready may always go."""
    counts = ("replicaCount", "autoscaling.minReplicas", "autoscaling.maxReplicas")
    flags = ("--set", ",".join(f"{count}={replicas}" for count in counts))
    rendered = render(values, *flags, "--set", "podDisruptionBudget.enabled=true")
    spec = only("PodDisruptionBudget", rendered)["spec"]
    assert "minAvailable" not in spec
    most = str(spec["maxUnavailable"])
    share = int(most.removesuffix("%")) / 100 * replicas
    assert (math.ceil(share) if most.endswith("%") else int(most)) >= 1
    assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


NOTES = """{{ define "notes" }}%s{{ end }}
kind: Notes
apiVersion: v1
metadata: {name: notes}
text: {{ include "notes" . | quote }}
"""


def notes(folder: Path, *flags: str) -> str:
    """Render the notes that helm otherwise prints only after an installation in a cluster."""
    chart = shutil.copytree(CHART, folder / "chart", dirs_exist_ok=True)
    templates = chart / "templates"
    (templates / "notes.yaml").write_text(NOTES % (CHART / "templates" / "NOTES.txt").read_text())
    rendered = tools.check(
        *(tools.helm(), "template", "demo", chart, "-n", "ml", "-s", "templates/notes.yaml"), *flags
    )
    (document,) = documents(rendered)
    text: str = document["text"]
    return text


def test_the_notes_name_the_service_and_what_nobody_can_reach_yet(tmp_path: Path) -> None:
    assert "demo-modelport.ml.svc" in notes(tmp_path)
    assert "WARNING" not in notes(tmp_path)
    storage = ("--set", "modelRepository.path=s3://models/production")
    assert "networkPolicy.egress" in notes(tmp_path, *storage)
    assert "WARNING" not in notes(tmp_path, *storage, "--set", "networkPolicy.enabled=false")
    assert "WARNING" not in notes(tmp_path, "-f", str(FULL))


def test_keys_and_certificates_are_mounted_where_the_arguments_look() -> None:
    pod = only("Deployment", render(FULL))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (key,) = (a.partition("=")[2] for a in container["args"] if "--require-signature" in a)
    (mount,) = (m for m in container["volumeMounts"] if key.startswith(f"{m['mountPath']}/"))
    assert [v for v in pod["volumes"] if v["name"] == mount["name"]] == [
        {"name": "keys", "configMap": {"name": "release-key"}}
    ]
