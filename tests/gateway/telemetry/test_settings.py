"""Triton's trace and logging extensions, by its own clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from modelport.gateway.errors import UsageError
from modelport.gateway.settings import LogFormat, TraceConfig, TraceMode
from modelport.gateway.telemetry import trace_settings
from modelport.gateway.telemetry.logs import LOGS
from tests import models
from tests.gateway.telemetry import observed_gateway
from tests.gateway.telemetry.observed_gateway import ObservedGateway, serving
from tests.polling import until
from tests.server import serving as serving_process

START = {
    "trace_level": ["TIMESTAMPS"],
    "trace_rate": "1",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_mode": "triton",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return observed_gateway.repository(tmp_path_factory.mktemp("settings"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest_asyncio.fixture
async def gateway(folder: Path, file: Path) -> AsyncIterator[ObservedGateway]:
    flags = (f"triton,file={file}", "level=TIMESTAMPS", "rate=1")
    async with serving(folder, traces=trace_settings.parse_config(flags, {})) as found:
        yield found


class SettingsClients:
    """A client over HTTP, and Triton's over gRPC, whose answers are alike here."""

    def __init__(self, gateway: ObservedGateway) -> None:
        self._http = gateway.http
        self._grpc = grpcclient.InferenceServerClient(f"127.0.0.1:{gateway.server.ports.grpc_port}")

    async def _ask(self, path: str, changes: dict[str, Any]) -> dict[str, Any]:
        response = await self._http.request("POST" if changes else "GET", path, json=changes)
        if response.status_code != 200:
            raise InferenceServerException(response.json()["error"])
        return dict(response.json())

    async def traces(self, kind: str, model: str | None = None, **changes: Any) -> dict[str, Any]:
        if kind == "http":
            of_model = f"models/{model}/" if model else ""
            return await self._ask(f"/v2/{of_model}trace/setting", changes)
        if changes:
            call, arguments = self._grpc.update_trace_settings, (model, changes)
            found = await asyncio.to_thread(call, *arguments)
        else:
            found = await asyncio.to_thread(self._grpc.get_trace_settings, model)
        values = {name: list(each.value) for name, each in found.settings.items()}
        return {k: v if k == "trace_level" else v[0] for k, v in values.items()}

    async def log(self, kind: str, **changes: Any) -> dict[str, Any]:
        if kind == "http":
            return await self._ask("/v2/logging", changes)
        call = self._grpc.update_log_settings if changes else self._grpc.get_log_settings
        found = await asyncio.to_thread(call, *((changes,) if changes else ()))
        settings = found.settings.items()
        return {name: getattr(v, v.WhichOneof("parameter_choice")) for name, v in settings}


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_settings_of_traces_change_globally_and_for_a_model(
    kind: str, gateway: ObservedGateway, file: Path
) -> None:
    clients, start = SettingsClients(gateway), {**START, "trace_file": str(file)}
    assert await clients.traces(kind) == await clients.traces(kind, "x2") == start
    changed = {**start, "trace_rate": "12", "log_frequency": "34"}
    assert await clients.traces(kind, "x2", trace_rate="12", log_frequency="34") == changed
    globally = await clients.traces(kind, trace_rate="56", trace_level=["OFF"])
    assert globally == {**start, "trace_rate": "56", "trace_level": ["OFF"]}
    assert await clients.traces(kind, "x2") == {**changed, "trace_level": ["OFF"]}
    assert await clients.traces(kind, trace_rate=None, trace_level=None) == start
    cleared = await clients.traces(kind, "x2", trace_rate=None, log_frequency=None)
    assert cleared == start
    metadata = await gateway.http.get("/v2")
    assert {"trace", "logging"} <= set(metadata.json()["extensions"])


WRONG_TRACES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"trace_file": "x"}, "trace file location can not be updated through network protocol"),
    ({"trace_rate": "often"}, "Unable to parse 'trace_rate', got: often"),
    ({"trace_rate": "-1"}, r"'trace_rate', value is out of range \[ 0, 4294967295 \], got: -1"),
    ({"trace_count": "-2"}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
    ({"trace_count": "9" * 400}, "out of range"),
    ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
    ({"trace_level": ["MAX"]}, "expected a list of OFF, TIMESTAMPS or TENSORS"),
    ({"trace_colour": "red"}, "there is no trace setting 'trace_colour'; there are: "),
)


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_a_wrong_setting_of_traces_is_refused(kind: str, gateway: ObservedGateway) -> None:
    clients = SettingsClients(gateway)
    before = await clients.traces(kind)
    for changes, reason in WRONG_TRACES:
        with pytest.raises(InferenceServerException, match=reason):
            await clients.traces(kind, **changes)
    with pytest.raises(InferenceServerException, match="unknown model : nothing"):
        await clients.traces(kind, "nothing")
    assert await clients.traces(kind) == before


async def test_traces_are_written_to_files_as_tritons_are(
    gateway: ObservedGateway, file: Path
) -> None:
    clients = SettingsClients(gateway)
    await clients.traces(
        "http", log_frequency="2", trace_rate="2", trace_level=["TIMESTAMPS", "TENSORS"]
    )
    for number in range(4):
        await (gateway.call("both") if number % 2 else gateway.infer("x2"))
    first = file.with_name(f"{file.name}.0")
    await until(first.exists)
    await until(lambda: first.read_text().endswith("]"))
    rows = json.loads(first.read_text())
    heads = [row for row in rows if "model_name" in row]
    assert [row["model_name"] for row in heads] == ["both", "x2", "cached"] * 2
    assert [row.get("parent_id") for row in heads[:3]] == [None, 1, 1]
    assert heads[0]["request_id"] == "id of both"
    times = [row["timestamps"][0] for row in rows if row["id"] == 1 and "timestamps" in row]
    names = [each["name"] for each in times]
    assert names[:3] == ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "REQUEST_START"]
    assert names[-2:] == ["GRPC_SEND_START", "GRPC_SEND_END"]
    assert [each["ns"] for each in times] == sorted(each["ns"] for each in times)
    tensors = [row for row in rows if row["id"] == 1 and "tensor" in row]
    assert [row["activity"] for row in tensors] == ["TENSOR_QUEUE_INPUT", "TENSOR_BACKEND_OUTPUT"]
    assert tensors[1]["tensor"] == {
        "name": "y", "data": "4.0,8.0,12.0,16.0", "shape": "1,4", "dtype": "FP32",
    }  # fmt: skip


async def test_as_many_traces_are_collected_as_a_model_may_have(
    gateway: ObservedGateway, file: Path
) -> None:
    clients = SettingsClients(gateway)
    await clients.traces("http", "x2", trace_count="2")
    await clients.traces("http", trace_level=["OFF"])
    await clients.traces("http", "x2", trace_level=["TIMESTAMPS"])
    for _ in range(4):
        await gateway.infer("x2")
        await gateway.infer("cached")
    assert (await clients.traces("http", "x2"))["trace_count"] == "0"
    await until(file.with_name(f"{file.name}.0").exists)
    rows = json.loads(file.with_name(f"{file.name}.0").read_text())
    assert [row["model_name"] for row in rows if "model_name" in row] == ["x2", "x2"]


WRONG_LOG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"log_file": "x"}, "log file location can not be updated through network protocol"),
    ({"log_error": "yes"}, "expect boolean for 'log_error'"),
    ({"log_format": "xml"}, "invalid argument for --log_format, got: xml"),
    ({"log_colour": True}, "there is no log setting 'log_colour'"),
)


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_settings_of_the_log_change_while_it_is_written(
    kind: str, gateway: ObservedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("info", "warning", "error", "verbose_level", "format"):
        monkeypatch.setattr(LOGS, name, getattr(LOGS, name))
    LOGS.verbose_level, LOGS.format = 0, LogFormat.DEFAULT
    clients = SettingsClients(gateway)
    start = {
        "log_file": "", "log_info": True, "log_warning": True, "log_error": True,
        "log_verbose_level": 0, "log_format": "default",
    }  # fmt: skip
    assert await clients.log(kind) == start
    changes = {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}
    assert await clients.log(kind, **changes) == {**start, **changes}
    for wrong, reason in WRONG_LOG:
        if kind == "grpc" and isinstance(wrong.get("log_error"), str):
            continue  # the client itself refuses it
        with pytest.raises(InferenceServerException, match=reason):
            await clients.log(kind, **wrong)
    assert await clients.log(kind) == {**start, **changes}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), TraceConfig()),
        (("rate=5", "count=7"), TraceConfig(rate=5, limit=7)),
        (
            ("triton,file=f", "triton,log-frequency=3", "level=TENSORS", "level=TIMESTAMPS"),
            TraceConfig(level=("TIMESTAMPS", "TENSORS"), file="f", log_frequency=3),
        ),
        (
            ("mode=opentelemetry", "opentelemetry,url=http://c:4318/v1/traces",
             "opentelemetry,resource=service.name=x", "opentelemetry,bsp_max_queue_size=9"),
            TraceConfig(
                TraceMode.OPENTELEMETRY, url="http://c:4318/v1/traces",
                resource=(("service.name", "x"),), batching=(("bsp_max_queue_size", 9),),
            ),
        ),
    ],
)  # fmt: skip
def test_flags_are_tritons(flags: tuple[str, ...], expected: TraceConfig) -> None:
    assert trace_settings.parse_config(flags, {}) == expected


@pytest.mark.parametrize(
    "flag",
    [
        "rate", "rate=", "=5", "rate=x", "rate=-1", "count=-2", "colour=red", "mode=zipkin",
        "level=MAX", "level=TIMESTAMPS", "jaeger,url=x", "triton,url=x", "opentelemetry,file=x",
        "opentelemetry,resource=x", "opentelemetry,bsp_max_queue_size=0", "triton,file=", ",",
    ],
)  # fmt: skip
def test_a_wrong_flag_is_refused_by_name(flag: str) -> None:
    with pytest.raises(UsageError, match=r"^--trace-config"):
        trace_settings.parse_config((flag,), {})


@pytest.mark.thorough
def test_all_workers_follow_a_change_and_so_does_one_that_restarts(tmp_path: Path) -> None:
    root, file = models.repository(tmp_path / "models"), tmp_path / "trace.json"
    flags = ("--workers", "2", "--trace-config", f"triton,file={file}", "--log-verbose", "1")
    with serving_process(root, *flags) as gateway:

        def asked() -> set[str]:
            """The settings that workers report; each connection has one of them."""
            found = set()
            for _ in range(20):
                with httpclient.InferenceServerClient(gateway.http) as client:
                    found.add(json.dumps([client.get_trace_settings(), client.get_log_settings()]))
            return found

        with httpclient.InferenceServerClient(gateway.http) as client:
            client.update_trace_settings(None, {"trace_level": ["TIMESTAMPS"], "trace_rate": "3"})
            client.update_trace_settings("x2", {"trace_rate": "4"})
            client.update_log_settings({"log_verbose_level": 2})
        [only] = asked()
        assert '"trace_rate": "3"' in only
        assert '"log_verbose_level": 2' in only
        children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children")
        for pid in children.read_text().split():
            if (Path("/proc") / pid / "comm").read_text().strip() == "modelport:1":
                os.kill(int(pid), signal.SIGKILL)
        gateway.wait_for("worker restarted")
        assert asked() == {only}
