"""Replay: recorded requests get the same answers again, and differences are found."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.recording.record_reader import RecordedMessage, RecordedRequest, read
from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.replay import replay as replaying
from modelport.loadtests.replay.answer_comparison import Answer, ReplayOutcome, compare
from modelport.loadtests.replay.replay import ReplayRequest, ReplayResult
from tests import models
from tests.commands import modelport
from tests.gateway.recording.test_recorded_traffic import ALL, records, traffic
from tests.gateway.telemetry.observed_gateway import ObservedGateway, repository, serving


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("replayed"))


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("records")

    async def record() -> None:
        async with serving(folder, record=ALL._replace(target=where)) as gateway:
            await traffic(gateway)

    asyncio.run(record())
    return where


def asked(gateway: ObservedGateway, **more: Any) -> ReplayRequest:
    ports = gateway.server.ports
    return ReplayRequest(
        LoadTestTarget(LoadTestProtocol.OIP_HTTP, f"127.0.0.1:{ports.http_port}", ""),
        LoadTestTarget(LoadTestProtocol.OIP_GRPC, f"127.0.0.1:{ports.grpc_port}", ""),
        **{"rate": 1000.0, "in_flight": 8, **more},
    )


def outcomes(result: ReplayResult) -> Counter[ReplayOutcome]:
    return sum(result.counts.values(), Counter())


async def replayed(gateway: ObservedGateway, where: Path, **more: Any) -> ReplayResult:
    found = records(where)
    return await asyncio.to_thread(replaying.replay, found, asked(gateway, **more))


async def test_the_same_models_give_the_same_answers_bit_by_bit(
    folder: Path, recorded: Path
) -> None:
    async with serving(folder) as gateway:
        result = await replayed(gateway, recorded)
    assert outcomes(result) == {ReplayOutcome.EQUAL: 9}
    assert result.is_same


async def test_another_model_is_found(tmp_path: Path, recorded: Path) -> None:
    other = repository(tmp_path / "other")
    models.multiply(other / "x2" / "1" / "model.onnx", 2.0001)
    async with serving(other) as gateway:
        result = await replayed(gateway, recorded)
        close = await replayed(gateway, recorded, relative=1e-3)
    assert outcomes(result) == {ReplayOutcome.EQUAL: 5, ReplayOutcome.DIFFERENT: 4}
    assert not result.is_same
    assert {each.model for each in result.examples} == {"x2"}
    assert outcomes(close) == {ReplayOutcome.EQUAL: 5, ReplayOutcome.CLOSE: 4}
    assert close.is_same


def test_a_server_that_is_down_answers_nothing(recorded: Path) -> None:
    targets = [f"--target={scheme}://127.0.0.1:1" for scheme in ("http", "grpc")]
    arguments = ["replay", str(recorded), *targets, "--rate", "1000", "--quiet"]
    done = modelport(*arguments, "--json-report", str(recorded.parent / "r.json"))
    assert done.returncode == 1, done.stderr
    found = json.loads((recorded.parent / "r.json").read_text())
    assert found["same"] is False
    assert sum(each["no answer"] for each in found["counts"]) == 9


def test_an_answer_that_never_ends_and_a_torn_one_are_no_answers(recorded: Path) -> None:
    [record] = [each for each in read(recorded, print) if each.target.startswith("/v1")]
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = LoadTestTarget(
            LoadTestProtocol.OIP_HTTP, f"127.0.0.1:{server.getsockname()[1]}", ""
        )

        def serve() -> None:
            for length in (1 << 20, 4):
                peer = server.accept()[0]
                with peer, contextlib.suppress(OSError):
                    peer.recv(1 << 16)
                    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % length)
                    for _ in range(200 if length > 4 else 0):
                        peer.sendall(b" ")
                        time.sleep(0.01)
                    peer.sendall(b"{")

        thread = threading.Thread(target=serve)
        thread.start()
        for _ in range(2):
            result = replaying.replay([record], ReplayRequest(target, None, timeout_seconds=0.2))
            assert outcomes(result) == {ReplayOutcome.FAILED: 1}
        thread.join()


async def test_binary_metadata_is_sent_again(folder: Path, recorded: Path) -> None:
    record = next(each for each in read(recorded, print) if each.protocol == "gRPC")
    headers = {**record.request.headers, "x-bin": "AAE"}
    record = replace(record, request=replace(record.request, headers=headers))
    async with serving(folder) as gateway:
        result = await asyncio.to_thread(replaying.replay, [record], asked(gateway))
    assert outcomes(result) == {ReplayOutcome.EQUAL: 1}


def test_what_cannot_be_asked_is_said_with_a_remedy(recorded: Path, tmp_path: Path) -> None:
    def refusal(*arguments: str) -> str:
        done = modelport("replay", *arguments, "--quiet", "--rate", "1000")
        assert done.returncode == 2, done.stderr
        return done.stderr

    http = "--target=http://127.0.0.1:1"
    assert "--target grpc://HOST:8001" in refusal(str(recorded), http)
    assert "two servers" in refusal(str(recorded), http, http)
    assert "is not http[s]://HOST:PORT" in refusal(str(recorded), "--target=ftp://x")
    assert "holds no records" in refusal(str(tmp_path), http)
    assert "exclude each other" in refusal(str(recorded), http, "--speed", "2")


def answered(record: RecordedRequest, body: bytes) -> Answer:
    return Answer("200", RecordedMessage(record.response.headers, body))


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        ({"predictions": [[2, 4, 6, 8]]}, ReplayOutcome.EQUAL),
        ({"predictions": [[2.0, 4.0, 6.0, 8.0]]}, ReplayOutcome.EQUAL),
        ({"predictions": [[2.001, 4, 6, 8]]}, ReplayOutcome.CLOSE),
        ({"predictions": [[2.1, 4, 6, 8]]}, ReplayOutcome.DIFFERENT),
        ({"predictions": [[2, 4, 6]]}, ReplayOutcome.DIFFERENT),
        ({"predictions": [[2, 4, 6, None]]}, ReplayOutcome.DIFFERENT),
        ({"predictions": [["2", 4, 6, 8]]}, ReplayOutcome.DIFFERENT),
        ({"outputs": [[2, 4, 6, 8]]}, ReplayOutcome.DIFFERENT),
        ([], ReplayOutcome.DIFFERENT),
    ],
)
def test_answers_are_compared_by_their_values(
    recorded: Path, body: Any, outcome: ReplayOutcome
) -> None:
    [record] = [each for each in read(recorded, print) if each.target.startswith("/v1")]
    found = compare(record, answered(record, json.dumps(body).encode()), 1e-2, 0.0)
    assert found.outcome is outcome
    assert compare(record, answered(record, b"\xff{"), 1e-2, 0.0).outcome is ReplayOutcome.DIFFERENT


def test_records_are_listed_and_pruned(recorded: Path, tmp_path: Path) -> None:
    for path in recorded.glob("*/*.jsonl"):
        copy = tmp_path / path.relative_to(recorded)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())

    def run(*arguments: str) -> str:
        done = modelport("records", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = {
        each["model"]: each["files"] for each in json.loads(run("show", str(tmp_path), "--json"))
    }
    assert listed == {"": 1, "pairs": 1, "repeat": 1, "x2": 1}
    assert "/v1/models/x2:predict" in run("show", str(tmp_path), "--limit", "9")
    assert "deleted 0 files" in run("prune", str(tmp_path), "--older-than", "1h")
    assert "deleted 4 files" in run("prune", str(tmp_path), "--max-size", "0")
    refused = modelport("records", "prune", str(tmp_path))
    assert refused.returncode == 2
    assert "give --older-than AGE" in refused.stderr
