"""The access log: a line for each request, whatever its client sends and however it ends."""

from __future__ import annotations

import asyncio
import json
import pickle
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio

from modelport.gateway.settings import AccessLogSettings
from modelport.gateway.telemetry.access_log import AccessLog, line
from modelport.gateway.telemetry.log_file import LogFile
from modelport.gateway.telemetry.request_record import RequestObserver, RequestRecord
from modelport.gateway.types import InferRequest, Timing
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import models
from tests.gateway.telemetry.observed_gateway import (
    STREAM,
    ObservedGateway,
    lines,
    message,
    repository,
    serving,
)
from tests.polling import eventually, until
from tests.server import serving as serving_process


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("observed"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "access.log"


@pytest_asyncio.fixture
async def gateway(folder: Path, path: Path) -> AsyncIterator[ObservedGateway]:
    async with serving(folder, access_log=AccessLogSettings(str(path))) as found:
        yield found


async def test_a_request_of_any_transport_has_a_line_and_its_id_in_the_response(
    gateway: ObservedGateway, path: Path
) -> None:
    response = await gateway.infer("x2", **{"x-request-id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    await gateway.call("x2")
    await gateway.http.get("/v2/models/x2")
    first, second, third = await lines(path, 3)
    assert first.pop("time").endswith("Z")
    durations = {first.pop(name) for name in ("duration_us", "compute_us", "queue_us")}
    assert all(type(each) is int for each in durations)
    assert first == {
        "request_id": "mine", "client": "127.0.0.1", "protocol": "HTTP/1.1", "dialect": "oip",
        "method": "POST", "path": "/v2/models/x2/infer", "status": 200, "model": "x2",
        "version": 1, "request_bytes": len(response.request.content),
        "response_bytes": len(response.content), "batch_size": 1,
    }  # fmt: skip
    assert (second["grpc_status"], second["protocol"], second["dialect"]) == ("OK", "gRPC", "oip")
    assert (second["model"], second["id"]) == ("x2", "id of x2")
    assert second["request_bytes"] == message("x2").ByteSize() + 5
    assert len(second["request_id"]) == 32
    assert "model" not in third
    assert third["path"] == "/v2/models/x2"


async def test_a_refused_request_has_a_line_with_the_reason(
    gateway: ObservedGateway, path: Path
) -> None:
    await gateway.infer("nothing")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await gateway.call("nothing", **{"x-request-id": "grpc"})
    assert ("x-request-id", "grpc") in tuple(raised.value.trailing_metadata())
    await gateway.http.get("/unknown")
    with pytest.raises(grpc.aio.AioRpcError):
        await gateway.channel.unary_unary("/a.Service/Method")(b"")
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.server.ports.http_port)
    writer.write(b"GET /v2?secret HTTP/1.1\r\n\r\n")  # without a host
    await reader.read()
    writer.close()
    found = await lines(path, 5)
    unknown = "Request for unknown model: 'nothing' is not found"
    assert [(each.get("status"), each.get("grpc_status"), each.get("error")) for each in found] == [
        (404, None, unknown),
        (None, "NOT_FOUND", unknown),
        (404, None, None),
        (None, "UNIMPLEMENTED", "Method not found!"),
        (400, None, "the request must have one valid Host header"),
    ]
    assert found[-1]["path"] == "/v2"


async def test_each_message_of_a_stream_has_a_line(gateway: ObservedGateway, path: Path) -> None:
    call = gateway.channel.stream_stream(
        STREAM,
        pb.ModelInferRequest.SerializeToString,
        pb.ModelStreamInferResponse.FromString,
    )
    sent = [message(name) for name in ("x2", "repeat", "nothing")]
    assert len([each async for each in call(iter(sent))]) >= 5
    found = {each.get("model", ""): each for each in await lines(path, 3)}
    assert found["x2"]["request_bytes"] == sent[0].ByteSize()
    assert found["repeat"]["response_bytes"] > 2 * found["x2"]["response_bytes"] // 1.5
    assert "unknown model" in found[""]["error"]


async def test_a_line_has_the_size_of_the_batch_and_the_cache_that_answered(
    gateway: ObservedGateway, path: Path
) -> None:
    await asyncio.gather(gateway.infer("pairs"), gateway.infer("pairs"))
    await gateway.infer("cached")
    await gateway.infer("cached")
    await gateway.infer("both")
    found = await lines(path, 5)
    assert [each["batch_size"] for each in found] == [2, 2, 1, 1, 1]
    assert [each.get("cache") for each in found] == [None, None, None, "hit", None]
    assert found[-1]["model"] == "both"  # and not a step's


async def test_a_client_that_goes_leaves_a_line(gateway: ObservedGateway, path: Path) -> None:
    late = gateway.server.manager.get("late", 1).statistics
    tasks = [asyncio.ensure_future(ask("late")) for ask in (gateway.infer, gateway.call)]
    await until(lambda: late.pending == 2)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    found = await lines(path, 2)
    assert {each["error"] for each in found} == {"the client has disconnected"}
    assert {each.get("status") or each["grpc_status"] for each in found} == {499, "CANCELLED"}


async def test_only_failures_and_slow_requests_have_a_line_without_samples(
    folder: Path, path: Path
) -> None:
    never = AccessLogSettings(str(path), sample=0.0, slow_seconds=3600.0)
    async with serving(folder, access_log=never) as gateway:
        await gateway.infer("x2")
        await gateway.infer("nothing")
        assert [each["status"] for each in await lines(path, 1)] == [404]
    slow = path.with_name("slow.log")
    always = never._replace(target=str(slow), slow_seconds=0.0)
    async with serving(folder, access_log=always) as gateway:
        await gateway.infer("x2")
        await lines(slow, 1)


async def test_nobody_observes_a_gateway_without_a_log(folder: Path) -> None:
    async with serving(folder) as gateway:
        response = await gateway.infer("x2", **{"x-request-id": "mine"})
        assert "x-request-id" not in response.headers


HOSTILE = (
    '"}\n{"a":1}', "\x1b[2J\x9b2J", "\u202e" * 400, "\ud800" * 400, "\x00" * 400, "\U0001f600" * 400
)  # fmt: skip


TEXTS = ("method", "path", "id", "error", "request_id", "model")


def hostile(text: str) -> RequestRecord:
    """A record whose every text is ``text``."""
    raw = text.encode("latin-1", "replace")
    made = RequestRecord(RequestObserver(), "HTTP/1.1", text, raw, {b"x-request-id": raw}, text)
    made.caller = made.error = made.side = text
    request = InferRequest(text, [], id=text, timing=Timing())
    made.infers(text, 1, request)
    made.end(200)
    return made


@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_client_sends_breaks_a_line(text: str) -> None:
    made = line(hostile(text), 3)
    assert made.endswith(b"\n")
    assert made[:-1].decode("ascii").isprintable()
    assert len(made) <= select.PIPE_BUF  # or lines of several processes would mix
    assert json.loads(made)["worker"] == 3


def test_a_record_that_waits_for_the_disk_keeps_little_of_its_request() -> None:
    kept: list[RequestRecord] = []
    observer = RequestObserver()
    observer.log(kept.append)
    long = "x" * (1 << 20)
    made = observer.begin("HTTP/1.1", long, long.encode(), {b"a": long.encode()}, "")
    assert made is not None
    made.infers("m", 1, InferRequest("m", [], id=long))
    made.failed(long)
    made.end(400)
    assert kept == [made]
    assert len(pickle.dumps([getattr(made, name) for name in TEXTS])) < 10_000
    assert made.fields == {}


def test_a_file_that_is_copied_and_truncated_goes_on_from_its_beginning(path: Path) -> None:
    log = AccessLog(AccessLogSettings(str(path)))
    log(hostile("before"))
    eventually(path.read_text, "the first line")
    path.write_text("")  # logrotate's copytruncate
    log(hostile("after"))
    log.file.close()
    assert [json.loads(each)["model"] for each in path.read_text().splitlines()] == ["after"]


def test_lines_that_wait_are_written_together(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes: list[int] = []
    write = LogFile._append

    def count(self: LogFile, lines: list[bytes]) -> bool:
        writes.append(len(lines))
        return write(self, lines)

    monkeypatch.setattr(LogFile, "_append", count)
    log = AccessLog(AccessLogSettings(str(path)))
    for _ in range(1000):
        log(hostile("x"))
    log.file.close()
    assert path.read_text().count("\n") == sum(writes) == 1000
    assert len(writes) < 50


@pytest.mark.thorough
def test_all_workers_write_to_one_file_and_follow_its_renaming(tmp_path: Path, path: Path) -> None:
    flags = ("--workers", "2", "--access-log", str(path), "--log-format", "json")
    with serving_process(models.repository(tmp_path / "models"), *flags) as gateway:

        def ask() -> None:
            for _ in range(40):
                httpx.get(f"http://{gateway.http}/v2")

        def seen(file: Path) -> list[Any]:
            return [json.loads(each)["worker"] for each in file.read_text().splitlines()]

        ask()
        eventually(lambda: len(seen(path)) == 40)
        assert set(seen(path)) == {0, 1}
        old = path.rename(tmp_path / "access.log.1")
        gateway.process.send_signal(signal.SIGHUP)
        ask()
        eventually(lambda: path.exists() and len(seen(path)) == 40)
        assert len(seen(old)) == 40
