"""Imports: nothing unneeded before READY, nothing at all in the first requests after it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import models
from tests.server import serving

INFER = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
#: Needed for signatures, routes or formats other than ONNX, or never.
UNNEEDED = {
    *("uvicorn", "aiohttp", "grpc", "cryptography"),
    *("torch", "tensorflow", "onnx", "modelport.gateway.repository.signing"),
}
#: One request in each dialect: method, path, body.
REQUESTS = [
    ("GET", "/v2/models/x2", b""),
    ("POST", "/v2/models/x2/infer", INFER),
    ("GET", "/v1/models/x2", b""),
    ("POST", "/v1/models/x2:predict", b'{"instances": [[1, 2, 3, 4]]}'),
    ("POST", "/predictions/x2", INFER),
    ("GET", "/models", b""),
    ("POST", "/models/x2/invoke", INFER),
    ("GET", "/openapi.json", b""),
]


def test_until_ready_nothing_is_imported_that_only_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.repository(tmp_path)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving(tmp_path, "--workers", "1") as gateway:
        said = [str(entry["event"]) for entry in gateway.logs]
    imported = names(said[: said.index("started")])
    assert "onnxruntime" in imported
    assert imported & UNNEEDED == set()


def test_the_parent_of_workers_imports_no_framework() -> None:
    """It serves the metrics port, and FastAPI takes as long to import as everything else there."""
    program = (
        "import sys\n"
        "import modelport.gateway.server.workers.coordinator\n"
        "import modelport.gateway.server.workers.supervisor\n"
        "assert not {'fastapi', 'starlette'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def names(said: list[str]) -> set[str]:
    """Parse the modules from the output of PYTHONPROFILEIMPORTTIME."""
    return {line.rpartition("|")[2].strip() for line in said if line.startswith("import time:")}


def test_once_ready_the_first_request_of_a_dialect_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.repository(tmp_path)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving(tmp_path, "--workers", "1") as gateway:
        with httpx.Client(base_url=f"http://{gateway.http}") as client:
            for method, path, body in REQUESTS:
                assert client.request(method, path, content=body).status_code == 200, path
        assert httpx.get(gateway.metrics).status_code == 200
        gateway.terminate()
        gateway.wait_for("stopped")
        said = [str(entry["event"]) for entry in gateway.logs]
    imported = names(said[said.index("started") : said.index("draining")])
    assert not {
        name for name in imported if not name.startswith(("encodings.", "email.", "anyio."))
    }
