"""A gateway with TLS and two workers: unmodified clients, and certificates replaced under load."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tests import models
from tests.access.certificate_swap import BODY, MODEL, LoadDuringSwaps, MountedSecret, swap
from tests.certificates import TestAuthority
from tests.commands import modelport
from tests.gateway.server.workers.processes import CONNECTIONS, workers
from tests.server import Gateway, serving

INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory, authority: TestAuthority) -> MountedSecret:
    secret = MountedSecret(tmp_path_factory.mktemp("secret"), authority)
    authority.write(secret.folder, "client", "ci.example.com")
    return secret


@pytest.fixture(scope="module")
def gateway(secret: MountedSecret, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Client certificates are verified, and not required."""
    flags = ("--tls-client-ca", str(secret.folder / "ca.crt"), "--tls-client-auth", "optional")
    with serving(
        models.repository(tmp_path_factory.mktemp("repository")),
        *("--workers", "2", *secret.flags, *flags),
    ) as gateway:
        yield gateway


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("option", "version"), [("--http1.1", "1.1"), ("--http2", "2")])
def test_curl(option: str, version: str, gateway: Gateway, secret: MountedSecret) -> None:
    command = (
        *("curl", "-sS", option, "--cacert", str(secret.folder / "ca.crt")),
        *("--cert", str(secret.folder / "client.crt"), "--key", str(secret.folder / "client.key")),
        *("-d", BODY.decode(), "-w", " %{http_version}"),
    )
    url = f"https://localhost:{gateway.http_port}{INFER}"
    answer = subprocess.run([*command, url], capture_output=True, timeout=20, check=True).stdout
    assert b'"data":[2.0,4.0,6.0,8.0]' in answer
    assert answer.endswith(f" {version}".encode())


@pytest.mark.parametrize("http2", [False, True])
def test_httpx(http2: bool, gateway: Gateway, secret: MountedSecret) -> None:
    address = f"https://localhost:{gateway.http_port}"
    with httpx.Client(base_url=address, verify=secret.client(), http2=http2) as client:
        for _ in range(3):
            answer = client.post(INFER, content=BODY)
            assert answer.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
            assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")


def test_tritonclient_over_http(gateway: Gateway, secret: MountedSecret) -> None:
    client = tritonclient.http.InferenceServerClient(
        f"localhost:{gateway.http_port}", ssl=True, ssl_context_factory=secret.client
    )
    tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    assert client.infer(MODEL, [tensor]).as_numpy("y").tolist() == [[2.0] * 4]
    client.close()


def test_tritonclient_over_grpc(gateway: Gateway, secret: MountedSecret) -> None:
    client = tritonclient.grpc.InferenceServerClient(
        f"localhost:{gateway.grpc_port}",
        ssl=True,
        root_certificates=str(secret.folder / "ca.crt"),
        private_key=str(secret.folder / "client.key"),
        certificate_chain=str(secret.folder / "client.crt"),
    )
    tensor = tritonclient.grpc.InferInput("x", [1000, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1000, 4), np.float32))
    with pytest.raises(tritonclient.grpc.InferenceServerException, match="batch"):
        client.infer(MODEL, [tensor])
    tensor = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    assert client.infer(MODEL, [tensor]).as_numpy("y").tolist() == [[2.0] * 4]
    client.close()


def test_clients_that_do_not_trust_the_certificate_send_nothing(gateway: Gateway) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://localhost:{gateway.http_port}/v2", verify=ssl.create_default_context())


async def test_a_certificate_is_replaced_under_load_without_an_error(
    gateway: Gateway, secret: MountedSecret
) -> None:
    load = LoadDuringSwaps(gateway, secret, 100)
    await swap(load, 3)
    assert load.errors == []
    assert load.requests > load.connections > 0
    metrics = httpx.get(
        f"https://localhost:{gateway.metrics_port}/metrics", verify=secret.client()
    ).text
    assert "modelport_certificate_reload_errors_total 0\n" in metrics
    expiry = next(
        float(line.split()[1])
        for line in metrics.splitlines()
        if line.startswith("modelport_certificate_expiry_seconds ")
    )
    assert expiry > 1.7e9


async def test_a_bad_pair_is_not_served_and_is_named_in_the_log(
    gateway: Gateway, secret: MountedSecret
) -> None:
    (secret.folder / "..data" / "tls.crt").write_bytes(b"-----BEGIN CERT")
    entry = gateway.wait_for("access certificate not reloaded")
    assert "tls.crt is not a certificate in PEM format" in entry["reason"]
    process, logged = workers(gateway)[0], len(gateway.logs)
    os.kill(process, signal.SIGKILL)
    gateway.wait_for("worker restarted", logged)
    for _ in range(CONNECTIONS):
        httpx.get(f"https://localhost:{gateway.http_port}/v2", verify=secret.client())
    load = LoadDuringSwaps(gateway, secret, 50)
    await swap(load, 1)
    assert load.errors == []


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_certificate_that_cannot_be_served_ends_the_start(
    workers: str, tmp_path: Path, authority: TestAuthority
) -> None:
    certificate, key = authority.write(tmp_path, "server", days=-1)
    done = modelport(
        *("serve", "--model-repository", str(models.repository(tmp_path / "repository"))),
        *("--tls-cert", str(certificate), "--tls-key", str(key), "--workers", workers),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert "server.crt expired on " in line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tls-cert", "a"], "--tls-cert needs --tls-key FILE"),
        (["--tls-key", "a"], "--tls-key needs --tls-cert FILE"),
        (["--tls-client-ca", "a"], "--tls-client-ca needs --tls-cert FILE and --tls-key FILE"),
        (["--tls-client-auth", "optional"], "--tls-client-auth needs --tls-client-ca FILE"),
    ],
)
def test_options_without_the_ones_they_need_are_refused(
    flags: list[str], message: str, tmp_path: Path
) -> None:
    done = modelport("serve", "--model-repository", str(models.repository(tmp_path)), *flags)
    assert done.returncode == 2
    assert message in done.stderr
