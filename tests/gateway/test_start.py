"""What a start does not wait for, and that it is there when it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.front.grpc.service import Service
from gateway.protocols.grpc_method import Method, Rows
from tests import models
from tests.server import serving

#: First needed by a request of another dialect, a scrape, a key, a file of routes; or never.
LATE = {
    *("fastapi", "starlette", "pydantic", "uvicorn", "PIL", "python_multipart"),
    *("prometheus_client", "http.server", "email", "aiohttp", "grpc", "cryptography"),
    *("rich.console", "tomllib", "yaml", "torch", "tensorflow", "onnx"),
    *("gateway.protocols.dialects", "gateway.protocols.prediction", "gateway.images"),
    *("gateway.protocols.tfserving.grpc", "gateway.protocols.torchserve.grpc"),
    *("gateway.repository.signing", "gateway.telemetry.registry", "gateway.wire.proto"),
}


def test_until_ready_nothing_is_imported_that_only_others_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.repository(tmp_path)
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with serving(tmp_path, "--workers", "1") as gateway:
        said = [str(entry["event"]) for entry in gateway.logs]
    imported = {
        line.rpartition("|")[2].strip()
        for line in said[: said.index("started")]
        if line.startswith("import time:")
    }
    assert "onnxruntime" in imported
    assert imported & LATE == set()


def test_garbage_is_collected_again_once_the_server_listens(tmp_path: Path) -> None:
    code = f"""
import asyncio, gc
from pathlib import Path
from gateway.haste import hasten
hasten()
from gateway import serve_cli
from gateway.front.front import Front
from gateway.server import Server
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


def test_the_methods_of_a_service_are_made_once_when_the_first_call_to_it_comes() -> None:
    made = []

    async def handler(message: Any, _: Any) -> Any:
        return message

    def make() -> Rows:
        made.append("late")
        return {"Echo": Method(None, None, handler)}

    service = Service({"a.Early": {"Echo": Method(None, None, handler)}, "a.Late": make}, 1000)
    assert service.target(b"/a.Early/Echo", {}).method is not None
    assert service.target(b"/a.Later/Echo", {}).method is None
    assert service.target(b"nothing", {}).method is None
    assert made == []
    assert service.target(b"/a.Late/Other", {}).method is None
    assert service.target(b"/a.Late/Echo", {}).method is not None
    assert made == ["late"]
