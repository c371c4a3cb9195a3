"""Real gateways over moto's S3 server: what is served, what is said, and what is never said."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.repository import manifest
from tests.gateway.repository.storage.moto_server import ENVIRONMENT, Moto
from tests.models import X2_CONFIG, multiply
from tests.server import START_SECONDS, Gateway, serving

SECRETS = [
    value
    for name, value in ENVIRONMENT.items()
    if name.startswith(("AWS_ACC", "AWS_SEC", "AWS_SE"))
]
pytestmark = pytest.mark.usefixtures("storage_environment")
slow = pytest.mark.skipif(
    not os.environ.get("MODELPORT_SLOW_TESTS"), reason="make storage runs this"
)


def put_version(moto: Moto, work: Path, number: int, factor: float) -> None:
    folder = work / str(number)
    multiply(folder / "model.onnx", factor)
    manifest.write(folder)
    moto.put("served/x2/config.pbtxt", X2_CONFIG.encode())
    moto.upload(folder, f"served/x2/{number}", ["model.onnx", "manifest.json"])


def ask(url: str, body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        url, data, {"content-type": "application/json"}, method="POST" if data else "GET"
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, refused.read().decode()


def infer(gateway: Gateway) -> tuple[str, list[float]]:
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    status, text = ask(f"http://{gateway.http}/v2/models/x2/infer", {"inputs": [tensor]})
    assert status == 200, text
    answer = json.loads(text)
    return answer["model_version"], answer["outputs"][0]["data"]


def index(gateway: Gateway) -> Any:
    return json.loads(ask(f"http://{gateway.http}/v2/repository/index", {})[1])


@pytest.mark.thorough
def test_versions_keep_serving_through_storage_failures_and_no_secret_is_logged(
    own_moto: Moto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Success, an access that is refused, no connection; at the highest log level, of libraries
    too, where one would set it in the environment."""
    monkeypatch.setenv("S3FS_LOGGING_LEVEL", "DEBUG")
    put_version(own_moto, tmp_path, 1, 2.0)
    flags = ["--model-control-mode", "poll", "--repository-poll-secs", "0.2", "--log-verbose", "2"]
    said = []
    with serving(own_moto.url("served"), *flags) as gateway:  # type: ignore[arg-type]
        assert infer(gateway) == ("1", [2.0, 4.0, 6.0, 8.0])
        put_version(own_moto, tmp_path, 2, 3.0)
        gateway.wait_for("model version is ready", version=2)
        assert infer(gateway) == ("2", [3.0, 6.0, 9.0, 12.0])

        # From here on moto asks who may do what: these keys may do nothing.
        ask(f"{own_moto.endpoint}/moto-api/reset-auth", 0)
        refused = gateway.wait_for("object storage cannot be read; retrying")
        assert "refuses access" in refused["reason"]
        assert infer(gateway)[0] == "2"
        lines = len(gateway.logs)
        own_moto.close()
        down = gateway.wait_for("object storage cannot be read; retrying", lines)
        assert "cannot be reached" in down["reason"]
        assert infer(gateway)[0] == "2"
        said.append(str(index(gateway)))
        said.append(ask(gateway.metrics)[1])
        said.append(ask(f"http://{gateway.http}/v2/models/x2/versions/9/ready")[1])
        said.append(ask(f"http://{gateway.http}/v2/repository/models/x2/load", {})[1])
        assert ask(f"http://{gateway.http}/v2/health/ready")[0] == 200

        back = Moto(own_moto.log, own_moto.port)
        try:
            put_version(back, tmp_path, 3, 5.0)
            gateway.wait_for("object storage is reachable again")
            gateway.wait_for("model version is ready", version=3)
            assert infer(gateway) == ("3", [5.0, 10.0, 15.0, 20.0])
        finally:
            back.close()
        assert gateway.terminate() == 0
        said.append(str(gateway.logs))
    for text in said:
        assert not [secret for secret in SECRETS if secret in text], text
    troubles = [line for line in gateway.logs if line["event"].startswith("storage cannot")]
    assert len(troubles) <= 4, troubles  # once for each kind, not once for each look


@pytest.mark.thorough
def test_a_gateway_waits_for_its_storage_live_and_not_ready(own_moto: Moto, tmp_path: Path) -> None:
    put_version(own_moto, tmp_path, 1, 2.0)
    own_moto.close()
    waits = "object storage cannot be read; retrying"
    with serving(own_moto.url("served"), wait_for=waits) as gateway:  # type: ignore[arg-type]
        assert ask(f"http://{gateway.http}/v2/health/live")[0] == 200
        assert ask(f"http://{gateway.http}/v2/health/ready")[0] != 200
        back = Moto(own_moto.log, own_moto.port)
        try:
            gateway.wait_for("started")
            assert ask(f"http://{gateway.http}/v2/health/ready")[0] == 200
        finally:
            back.close()


@slow
def test_a_gateway_ends_at_once_though_its_storage_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"s3://127.0.0.1:{silent.getsockname()[1]}/bucket"
        with serving(url, wait_for="listening") as gateway:  # type: ignore[arg-type]
            silent.accept()[0].close()  # it has begun to ask, and begins anew
            assert gateway.terminate(timeout_seconds=10.0) == 0


@slow
def test_workers_load_on_request_with_one_download_and_serve_the_same(
    own_moto: Moto, tmp_path: Path
) -> None:
    put_version(own_moto, tmp_path, 1, 2.0)
    flags = ["--workers", "2", "--model-control-mode", "explicit"]
    with serving(own_moto.url("served"), *flags) as gateway:  # type: ignore[arg-type]
        assert not [line for line in own_moto.requests() if "GET" in line and "model.onnx" in line]
        status, text = ask(f"http://{gateway.http}/v2/repository/models/x2/load", {})
        assert status == 200, text
        assert {infer(gateway)[0] for _ in range(8)} == {"1"}
        downloads = [line for line in own_moto.requests() if "GET" in line and "model.onnx" in line]
        assert len(downloads) == 1, downloads
        put_version(own_moto, tmp_path, 2, 3.0)
        assert ask(f"http://{gateway.http}/v2/repository/models/x2/load", {})[0] == 200
        assert {infer(gateway)[0] for _ in range(8)} == {"2"}
        assert [row for row in index(gateway) if row["state"] == "READY"] == [
            {"name": "x2", "version": "2", "state": "READY", "reason": ""}
        ]


@pytest.mark.parametrize(
    ("url", "code", "reason"),
    [
        ("s3://{server}/nowhere", 2, "there is no such bucket"),
        ("s3://AKIAMARKED:MARKED@bucket", 2, "must not contain credentials or a query"),
    ],
)
def test_a_repository_that_can_never_be_served_ends_the_start_in_one_line(
    own_moto: Moto, url: str, code: int, reason: str
) -> None:
    url = url.format(server=f"127.0.0.1:{own_moto.port}")
    ports = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", "0")]
    ended = subprocess.run(
        [sys.executable, "-m", "modelport", "serve", "--model-repository", url, *ports],
        capture_output=True, text=True, timeout=START_SECONDS, env={**os.environ},
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert reason in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert "MARKED" not in ended.stderr


@pytest.mark.thorough
def test_folders_are_served_without_a_library_of_storage() -> None:
    code = (
        "import modelport.gateway.server.app, modelport.gateway.cli.serve, sys; "
        "import modelport.exporters.cli.export, modelport.exporters.publishing.publish; "
        "print([m for m in ('fsspec', 's3fs', 'botocore', 'gcsfs', 'adlfs', "
        "'modelport.gateway.repository.storage.mirror') if m in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == "[]", printed.stderr
