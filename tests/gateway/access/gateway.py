"""A gateway in this process with ``--access``, its keys, and models ``mine`` and ``yours``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from modelport.gateway.access import api_key_file
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.settings import ModelControlMode, Settings, VertexAi
from tests.models import multiply

CONFIG = """
name: "NAME"
backend: "onnxruntime"
max_batch_size: 8
version_policy { all {} }
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
parameters { key: "version_label.stable" value { string_value: "1" } }
parameters { key: "explainer" value { string_value: "NAME" } }
"""
KEYS = '[keys]\nfile = "keys.toml"\n'


class AccessGateway:
    """A running gateway; ``keys`` are those of callers by name, also ``wrong`` and ``expired``."""

    def __init__(self, server: GatewayServer, keys: Mapping[str, str]) -> None:
        self.server, self.keys = server, keys
        ports = server.ports
        self.http_url = f"http://127.0.0.1:{ports.http_port}"
        self.metrics_url = f"http://127.0.0.1:{ports.metrics_port}"
        self.grpc_target = f"127.0.0.1:{ports.grpc_port}"

    def headers(self, caller: str) -> dict[str, str]:
        """The credential of a caller; ``none`` has none."""
        return {} if caller == "none" else {"authorization": f"Bearer {self.keys[caller]}"}


def repository(folder: Path, versions: int = 1) -> Path:
    for name in ("mine", "yours"):
        for number in range(1, versions + 1):
            multiply(folder / name / str(number) / "model.onnx", number + 1.0)
        (folder / name / "config.pbtxt").write_text(CONFIG.replace("NAME", name))
    return folder


def write_keys(folder: Path, *names: str) -> dict[str, str]:
    """Write ``keys.toml`` with a key for each name; return the keys."""
    folder.mkdir(exist_ok=True)
    keys, entries = {}, []
    for name in names:
        keys[name], entry = api_key_file.generate(name)
        entries.append(entry)
    past = datetime.now(UTC) - timedelta(seconds=1)
    keys["expired"], entry = api_key_file.generate(names[0] + "-old", expires=past)
    keys["wrong"] = keys[names[0]][:-1] + ("A" if keys[names[0]][-1] != "A" else "B")
    with api_key_file.locked(folder / "keys.toml") as replace:
        replace([*entries, entry])
    return keys


@contextlib.asynccontextmanager
async def serving(
    folder: Path, rules: str, *callers: str, versions: int = 1, **settings: Any
) -> AsyncIterator[AccessGateway]:
    """Serve with ``rules``, which are followed by the table of keys of ``callers``."""
    keys = write_keys(folder / "access", *callers)
    path = folder / "access" / "access.toml"
    path.write_text(rules + KEYS)
    chosen = Settings(
        (repository(folder / "models", versions),),
        http_port=0, grpc_port=0, metrics_port=0, exit_timeout_seconds=1.0, access=path,
        model_control_mode=ModelControlMode.EXPLICIT, load_models=("*",),
        vertex_ai=VertexAi("/vertex", "/vertex-health", "mine"), prometheus_path="/prometheus",
    )._replace(**settings)  # fmt: skip
    server = GatewayServer(chosen)
    await server.listen()
    try:
        await server.load()
        yield AccessGateway(server, keys)
    finally:
        await server.stop()


def client(url: str, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=30, **options)


def channel(gateway: AccessGateway) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(gateway.grpc_target)
