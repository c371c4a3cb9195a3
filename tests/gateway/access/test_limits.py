"""Quotas and the audit log of a gateway, through its ports."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from modelport.gateway.repository.text_settings import TextTask
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import texts
from tests.gateway.access.gateway import (
    KEYS,
    AccessGateway,
    channel,
    client,
    repository,
    serving,
    write_keys,
)
from tests.gateway.access.test_every_route import OIP
from tests.polling import eventually
from tests.server import Gateway

RULES = """
[[rules]]
principals = ["ci", "batch", "group:team"]
operations = ["infer", "metadata", "control"]
models = ["mine"]

[[rules]]
principals = ["ci"]
operations = ["rollout"]

[[rules]]
principals = ["ops"]
operations = ["metrics"]

[groups]
team = ["alice"]

[[quotas]]
principals = ["group:team", "ci"]
models = ["mine"]
requests_per_second = 0.01
burst = 3
"""
INFER = "/v2/models/mine/infer"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def infer(gateway: AccessGateway, caller: str, http: httpx.AsyncClient) -> httpx.Response:
    return await http.post(INFER, json=OIP, headers=gateway.headers(caller))


async def test_a_used_up_quota_is_429_with_the_fields_that_say_so(tmp_path: Path) -> None:
    async with serving(tmp_path, RULES, "ci", "batch", "alice") as gateway:
        async with client(gateway.http_url) as http:
            replies = [await infer(gateway, "ci", http) for _ in range(4)]
            assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
            assert [reply.headers["ratelimit"].split(";t=")[0] for reply in replies] == [
                '"requests";r=2', '"requests";r=1', '"requests";r=0', '"requests";r=0',
            ]  # fmt: skip
            assert replies[0].headers["ratelimit-policy"] == '"requests";q=3;w=300'
            assert 90 <= int(replies[3].headers["retry-after"]) <= 100
            assert "retry-after" not in replies[0].headers
            assert "more than 0.01 requests per second" in replies[3].json()["error"]
            other = await infer(gateway, "batch", http)
            assert other.status_code == 200, "each principal has its own"
            assert "ratelimit" not in other.headers, "and this one has none"
        async with channel(gateway) as connection:
            call = connection.unary_unary(
                "/inference.GRPCInferenceService/ModelInfer",
                request_serializer=pb.ModelInferRequest.SerializeToString,
                response_deserializer=pb.ModelInferResponse.FromString,
            )
            request = pb.ModelInferRequest(model_name="mine", raw_input_contents=[bytes(16)])
            request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
            metadata = tuple(gateway.headers("alice").items())
            for left in (2, 1, 0):
                answered = call(request, metadata=metadata)
                await answered
                trailers = dict(await answered.trailing_metadata() or ())
                assert str(trailers["ratelimit"]).startswith(f'"requests";r={left};')
                assert trailers["ratelimit-policy"] == '"requests";q=3;w=300'
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            trailers = dict(refused.value.trailing_metadata() or ())
            assert 90 <= int(trailers["retry-after"]) <= 100
            assert str(trailers["ratelimit"]).startswith('"requests";r=0;')


async def test_bytes_of_inputs_count_against_the_quota_of_the_next_request(tmp_path: Path) -> None:
    rules = RULES.replace("requests_per_second = 0.01\nburst = 3", "bytes_per_second = 0.001")
    async with serving(tmp_path, rules, "ci") as gateway, client(gateway.http_url) as http:
        replies = [await infer(gateway, "ci", http) for _ in range(2)]
    assert [reply.status_code for reply in replies] == [200, 429]
    assert "more than 0.001 bytes per second" in replies[1].json()["error"]


async def test_tokens_of_texts_count_in_every_dialect(tmp_path: Path) -> None:
    """The usage of an answer is charged; token ids in place of texts count as such."""
    rules = """
[[rules]]
principals = ["ci*"]
operations = ["infer"]

[[quotas]]
principals = ["ci*"]
tokens_per_second = 0.01
"""
    own = texts.settings(TextTask.EMBEDDING, pooled="embedding_output")
    texts.publish(tmp_path / "models", "sentences", texts.table(8), own)
    text, two = "hello world", ["hello world"] * 2
    ids = [
        {"name": name, "datatype": "INT64", "shape": [1, 3], "data": [2, 7, 3]}
        for name in texts.TEXT_INPUTS
    ]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [2], "data": two}
    used = len(texts.tokenizer().encode(text).ids)
    path = "/v2/models/sentences/infer"
    requests: list[tuple[str, Any, int]] = [
        ("/v1/embeddings", {"model": "sentences", "input": text}, used),
        ("/v1/embeddings", {"model": "sentences", "input": two}, 2 * used),
        ("/embed", {"inputs": text}, used),
        (path, {"inputs": [tensor]}, 2 * used),
        (path, {"inputs": ids}, 3),
        ("/v2/models/mine/infer", OIP, 0),
    ]
    callers = [f"ci{number}" for number in range(len(requests))]
    async with serving(tmp_path, rules, *callers) as gateway, client(gateway.http_url) as http:
        for caller, (url, body, tokens) in zip(callers, requests, strict=True):
            headers = gateway.headers(caller)
            first, second = [await http.post(url, json=body, headers=headers) for _ in range(2)]
            assert first.status_code == 200, first.text
            if tokens:  # what they cost has to be waited for
                assert second.status_code == 429
                assert int(second.headers["retry-after"]) == pytest.approx(100 * tokens, abs=9)
                assert "more than 0.01 tokens per second" in second.text
            else:
                assert second.status_code == 200
            if url == "/v1/embeddings":
                assert second.json()["error"]["type"] == "tokens"


async def test_refusals_and_control_operations_are_lines_of_the_audit_log(tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    async with serving(tmp_path, RULES, "ci", "batch", audit_log=str(log)) as gateway:
        async with client(gateway.http_url) as http:
            for caller in ("none", "wrong", "expired"):
                assert (await infer(gateway, caller, http)).status_code == 401
            headers = {**gateway.headers("ci"), "x-request-id": "r-1"}
            await http.post("/v2/models/yours/infer", json=OIP, headers=headers)
            assert (await http.get("/v2/models/stats", headers=headers)).status_code == 403
            await http.post("/v2/repository/models/mine/load", headers=headers)
            await http.post("/v2/repository/models/yours/unload", headers=headers)
            await http.post(
                "/v2/repository/models/mine/load",
                json={"parameters": {"config": "no configuration"}},
                headers=headers,
            )
            for _ in range(4):
                await infer(gateway, "ci", http)
        async with client(gateway.metrics_url) as http:
            await http.post("/v2/rollouts/mine", json={"candidate": "7"}, headers=headers)
    found = lines(log)
    shown = [
        (one.get("principal", ""), one["outcome"], one.get("operation", ""),
         one.get("action", ""), one.get("model", ""))
        for one in found
    ]  # fmt: skip
    assert shown == [
        ("anonymous", "refused", "infer", "infer", ""),
        ("", "refused", "", "", ""),
        ("", "refused", "", "", ""),
        ("ci", "refused", "infer", "infer", "yours"),
        ("ci", "refused", "statistics", "statistics", ""),
        ("ci", "allowed", "control", "load", "mine"),
        ("ci", "refused", "control", "control", "yours"),
        ("ci", "failed", "control", "load", "mine"),
        ("ci", "refused", "infer", "infer", "mine"),
        ("ci", "failed", "rollout", "rollout start", "mine"),
    ]
    assert found[3]["request_id"] == "r-1"
    assert [one.get("credential", "")[:3] for one in found[:3]] == ["", "mp_", "mp_"]
    assert all(one["source"] == "127.0.0.1" for one in found)
    text = log.read_text()
    for name, key in gateway.keys.items():
        assert key not in text, name
        assert key[-20:] not in text, name


async def test_web_pages_and_redirects_that_are_refused_are_lines_of_the_audit_log(
    tmp_path: Path,
) -> None:
    log = tmp_path / "audit.log"
    page, redirect = {"origin": "https://evil.example"}, "v2/repository/models/mine/unload"
    async with serving(tmp_path, RULES, "ci", audit_log=str(log)) as gateway:
        headers = gateway.headers("ci")
        async with client(gateway.http_url, headers=headers) as http:
            for path, more in (
                ("/v2/repository/models/mine/unload", page),
                ("/vertex", {"x-vertex-ai-triton-redirect": redirect}),
            ):
                assert (await http.post(path, headers=more)).status_code == 403
        async with client(gateway.metrics_url, headers=headers) as http:
            answer = await http.post("/v2/rollouts/mine/promote", json={}, headers=page)
            assert answer.status_code == 403
    found = lines(log)
    assert [(one["principal"], one["outcome"]) for one in found] == [("ci", "refused")] * 3
    assert [one["reason"].partition(" '")[0] for one in found] == [
        "a page of origin", "the redirect is not allowed", "a page of origin",
    ]  # fmt: skip


@pytest.mark.thorough
def test_workers_share_a_quota_and_the_audit_log_and_sigusr1_ends_nothing(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "access", "ci", "ops")
    path, log = tmp_path / "access" / "access.toml", tmp_path / "audit.log"
    path.write_text(RULES.replace("burst = 3", "burst = 40") + KEYS)
    headers = {"authorization": f"Bearer {keys['ci']}"}
    flags = ("--access", str(path), "--workers", "3", "--audit-log", str(log))
    folder = repository(tmp_path / "models")
    with closing(Gateway(folder, *flags, may_fork=False)) as gateway:
        statuses = []
        for _ in range(60):  # each on a connection of its own, and so in any worker
            reply = httpx.post(f"http://{gateway.http}{INFER}", json=OIP, headers=headers)
            statuses.append(reply.status_code)
        assert statuses.count(200) == 40
        assert statuses.count(429) == 20
        eventually(lambda: len(lines(log)) == 20, "a thread of each worker has written")
        metrics = httpx.get(gateway.metrics, headers={"authorization": f"Bearer {keys['ops']}"})
        assert "modelport_audit_dropped_total 0\n" in metrics.text
        log.rename(tmp_path / "audit.log.1")
        os.kill(gateway.process.pid, signal.SIGUSR1)
        reply = httpx.post(f"http://{gateway.http}{INFER}", json=OIP, headers=headers)
        assert reply.status_code == 429
        assert gateway.terminate() == 0
    assert len(lines(tmp_path / "audit.log.1")) == 20
    assert len(lines(log)) == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("principals = ['ci']", r":2: a quota needs requests_per_second, bytes_per_second, to"),
        ("principals = ['ci']\nburst = 2\nin_flight = 1", r":4: burst needs requests_per_second"),
        ("principals = ['group:x']\nin_flight = 1", r":3: there is no group 'x'"),
        ("principals = []\nin_flight = 1", r":3: quotas.principals = \[\] must be a list of names"),
        ("principals = ['ci']\nin_flight = 0", r":4: quotas.in_flight = 0 must be a whole number"),
        ("principals = ['ci']\nrate = 1", r":4: unknown key 'rate' in \[quotas\]"),
        ("in_flight = 1", r":2: \[quotas\] needs the key 'principals'"),
    ],
)
def test_a_wrong_quota_is_refused_with_its_line(tmp_path: Path, table: str, message: str) -> None:
    from modelport.gateway.access.rules_file import read_access_file
    from modelport.gateway.errors import UsageError

    path = tmp_path / "access.toml"
    path.write_text(f"\n[[quotas]]\n{table}\n")
    with pytest.raises(UsageError, match=f"access.toml{message}"):
        read_access_file(path)
