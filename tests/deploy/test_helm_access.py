"""The chart's TLS and access, with a real gateway that has the files of its volumes."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import models
from tests.certificates import TestAuthority
from tests.deploy import thorough
from tests.deploy.charts import CHART, only, render
from tests.deploy.manifests import Manifest, served_with
from tests.deploy.mounts import mount
from tests.gateway.access.gateway import write_keys
from tests.polling import WAIT_SECONDS
from tests.server import serving

VALUES = CHART / "ci" / "access-values.yaml"
#: The names of the Service, which cert-manager would be asked for.
NAMES = ("demo-modelport.ml.svc", "localhost")
#: Options that ``serving`` gives, or that belong to the cluster.
NOT_HERE = ("--model-repository", "--routes", "--log-format", "--workers")
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
).encode()

pytestmark = thorough


@pytest.fixture(scope="module")
def rendered() -> list[Manifest]:
    return render(VALUES)


def pod_of(rendered: list[Manifest]) -> Manifest:
    spec: Manifest = only("Deployment", rendered)["spec"]["template"]["spec"]
    return spec


def test_rules_and_certificates_are_mounted_as_folders_that_the_group_alone_reads(
    rendered: list[Manifest],
) -> None:
    pod = pod_of(rendered)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["tls"]["secret"] == {"secretName": "modelport-tls", "defaultMode": 0o440}
    assert volumes["access"]["projected"] == {
        "defaultMode": 0o440,
        "sources": [
            {"configMap": {"name": "demo-modelport-access"}},
            {"secret": {"name": "modelport-keys"}},
        ],
    }
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    (container,) = pod["containers"]
    # The kubelet never changes what is mounted by subPath.
    assert [mount for mount in container["volumeMounts"] if "subPath" in mount] == []
    options = served_with(container["args"])
    assert not options["insecure"]
    assert str(options["audit_log"]) == "-"
    assert served_with(pod_of(render(CHART / "values.yaml"))["containers"][0]["args"])["insecure"]


def test_prometheus_verifies_the_name_of_the_service(rendered: list[Manifest]) -> None:
    (endpoint,) = only("ServiceMonitor", rendered)["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] in NAMES
    assert endpoint["authorization"] == {"credentials": {"name": "prometheus-key", "key": "token"}}


def test_new_rules_make_no_other_pods(rendered: list[Manifest]) -> None:
    """The gateway follows them."""
    other = render(VALUES, "--set", "access.rules=[health]")
    assert only("Deployment", other) == only("Deployment", rendered)
    assert only("ConfigMap", other, "demo-modelport-access") != only(
        "ConfigMap", rendered, "demo-modelport-access"
    )


class MountedFiles:
    """The files that a cluster mounts, and clients of the gateway that has them."""

    def __init__(self, folder: Path, rendered: list[Manifest]) -> None:
        self.folder, self.authority = folder, TestAuthority()
        self.rules = only("ConfigMap", rendered, "demo-modelport-access")["data"]["access.toml"]
        self.keys = write_keys(folder / "made", "ci", "prometheus")
        self.mount_rules("first", self.rules)
        self.mount_certificate("first")

    def mount_rules(self, version: str, rules: str) -> None:
        keys = (self.folder / "made" / "keys.toml").read_bytes()
        mount(self.folder / "access", version, {"access.toml": rules.encode(), "keys.toml": keys})

    def mount_certificate(self, version: str) -> bytes:
        certificate, key = self.authority.sign(*NAMES)
        files = {"tls.crt": certificate, "tls.key": key, "ca.crt": self.authority.pem}
        mount(self.folder / "tls", version, files)
        return certificate

    def flags(self, container: Manifest) -> list[str]:
        """The container's arguments, with this machine's paths."""
        assert container["args"][0] == "serve"
        arguments = [a for a in container["args"][1:] if not a.startswith(NOT_HERE)]
        audit = {"--audit-log=-": f"--audit-log={self.folder / 'audit'}"}  # for the test to read
        here = (audit.get(a, a).replace("/etc/modelport", str(self.folder)) for a in arguments)
        return [a.replace("0.0.0.0", "127.0.0.1") for a in here]

    def context(self, *certificate: str) -> ssl.SSLContext:
        made = ssl.create_default_context(cadata=self.authority.pem.decode())
        if certificate:
            made.load_cert_chain(*self.authority.write(self.folder, "client", *certificate))
        return made


def status_of(url: str, context: ssl.SSLContext, key: str = "", body: bytes | None = None) -> int:
    request = urllib.request.Request(url, body)
    if key:
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, context=context, timeout=20) as answer:
            found: int = answer.status
            return found
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def wait_for_status(status: int, url: str, context: ssl.SSLContext, key: str) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while status_of(url, context, key) != status:
        assert time.monotonic() < give_up
        time.sleep(0.05)


def wait_for_lines(file: Path, count: int) -> list[str]:
    give_up = time.monotonic() + WAIT_SECONDS
    while len(lines := file.read_text().splitlines()) < count:
        assert time.monotonic() < give_up, lines
    return lines


def test_a_gateway_with_the_mounted_files_answers_probes_and_known_callers_alone(
    rendered: list[Manifest], tmp_path: Path
) -> None:
    (container,) = pod_of(rendered)["containers"]
    files = MountedFiles(tmp_path, rendered)
    for name in ("fraud", "other"):
        models.multiply(tmp_path / "models" / name / "1" / "model.onnx")
    with serving(tmp_path / "models", *files.flags(container)) as gateway:
        root = f"https://localhost:{gateway.http_port}"
        kubelet = ssl._create_unverified_context()  # it verifies nothing, and has no certificate
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            get = container[probe]["httpGet"]
            assert get["scheme"] == "HTTPS"
            assert status_of(root + get["path"], kubelet) == 200
        client, payments = files.context(), files.context("api.payments.svc")
        infer = root + "/v2/models/%s/infer"
        assert status_of(infer % "fraud", client, files.keys["ci"], BODY) == 200
        assert status_of(infer % "fraud", payments, "", BODY) == 200
        assert status_of(infer % "fraud", client, "", BODY) in (401, 403)
        assert status_of(infer % "fraud", client, files.keys["wrong"], BODY) == 401
        for context, key in ((client, files.keys["ci"]), (payments, "")):
            assert status_of(infer % "other", context, key, BODY) == 404
        metrics = f"https://localhost:{gateway.metrics_port}/metrics"
        assert status_of(metrics, client, files.keys["prometheus"]) == 200
        assert status_of(metrics, client, files.keys["ci"]) == 403

        refusals = [json.loads(line) for line in wait_for_lines(tmp_path / "audit", 5)]
        assert {entry["outcome"] for entry in refusals} == {"refused"}
        assert {"ci", "cert:dns:api.payments.svc"} <= {entry.get("principal") for entry in refusals}
        assert files.keys["ci"] not in (tmp_path / "audit").read_text()

        files.mount_rules("second", files.rules.replace("fraud*", "*"))
        wait_for_status(200, f"{root}/v2/models/other", client, files.keys["ci"])
        wanted = ssl.PEM_cert_to_DER_cert(files.mount_certificate("second").decode())
        give_up = time.monotonic() + WAIT_SECONDS
        address = ("localhost", gateway.http_port)
        while ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(address)) != wanted:
            assert time.monotonic() < give_up
        assert status_of(infer % "fraud", client, files.keys["ci"], BODY) == 200
