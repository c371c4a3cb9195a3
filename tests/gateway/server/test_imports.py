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


#: Python runs it at its start. The log cannot tell the order: other processes write it, too.
SITE = """
import os, sys
file = open(os.environ["IMPORTS"], "a", buffering=1)
sys.addaudithook(lambda event, args: event == "import" and file.write(args[0] + "\\n"))
"""


@pytest.fixture
def imported(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have every Python that is started write the modules that it imports to this file."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("IMPORTS", str(folder / "imported"))
    return folder / "imported"


def test_until_ready_nothing_is_imported_that_only_others_need(
    tmp_path: Path, imported: Path
) -> None:
    models.repository(tmp_path)
    with serving(tmp_path, "--workers", "1"):
        names = set(imported.read_text().split())
    assert "onnxruntime" in names
    assert names & UNNEEDED == set()


def test_the_parent_of_workers_imports_no_framework() -> None:
    """It serves the metrics port, and FastAPI takes as long to import as everything else there."""
    program = (
        "import sys\n"
        "import modelport.gateway.server.workers.coordinator\n"
        "import modelport.gateway.server.workers.supervisor\n"
        "assert not {'fastapi', 'starlette'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_once_ready_the_first_request_of_a_dialect_imports_nothing(
    tmp_path: Path, imported: Path
) -> None:
    models.repository(tmp_path)
    with serving(tmp_path, "--workers", "1") as gateway:
        before = imported.stat().st_size
        with httpx.Client(base_url=f"http://{gateway.http}") as client:
            for method, path, body in REQUESTS:
                assert client.request(method, path, content=body).status_code == 200, path
        assert httpx.get(gateway.metrics).status_code == 200
        names = set(imported.read_text()[before:].split())
    assert not {name for name in names if not name.startswith(("encodings.", "email.", "anyio."))}
