"""What a start waits for, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests import models
from tests.server import serving

INFER = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
#: Needed by a key, a file of routes or another format than ONNX; or never.
LATE = {
    *("uvicorn", "aiohttp", "grpc", "cryptography", "rich.console"),
    *("torch", "tensorflow", "onnx", "modelport.gateway.repository.signing"),
}
#: A request of each dialect, and a scrape: method, path, body.
ASKED = [
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
    assert imported & LATE == set()


def names(said: list[str]) -> set[str]:
    """The modules that Python says it imports."""
    return {line.rpartition("|")[2].strip() for line in said if line.startswith("import time:")}


def test_once_ready_the_first_request_of_a_dialect_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.repository(tmp_path)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving(tmp_path, "--workers", "1") as gateway:
        with httpx.Client(base_url=f"http://{gateway.http}") as client:
            for method, path, body in ASKED:
                assert client.request(method, path, content=body).status_code == 200, path
        assert httpx.get(gateway.metrics).status_code == 200
        gateway.terminate()
        gateway.wait_for("stopped")
        said = [str(entry["event"]) for entry in gateway.logs]
    imported = names(said[said.index("started") : said.index("draining")])
    assert not {
        name for name in imported if not name.startswith(("encodings.", "email.", "anyio."))
    }


def test_garbage_is_collected_again_once_the_server_listens(tmp_path: Path) -> None:
    code = f"""
import asyncio, gc
from pathlib import Path
from modelport.gateway.runtime.startup import hasten
hasten()
from modelport.gateway.cli import serve as serve_cli
from modelport.gateway.server.listeners import Front
from modelport.gateway.server.app import Server
async def main():
    settings = serve_cli.settings_of(["--model-repository", {str(tmp_path)!r}, "--http-port=0",
                                      "--grpc-port=0", "--metrics-port=0", "--exit-timeout-secs=0"])
    server = Server(settings, Front)
    before = gc.isenabled()
    await server.listen()
    print(before, gc.isenabled())
    await server.stop()
asyncio.run(main())
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "False True" in printed.stdout.splitlines(), printed.stderr
