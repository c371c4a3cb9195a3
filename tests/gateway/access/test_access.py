"""A running gateway with ``--access``: versions, control, shared memory, rollouts, reload."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import pytest
from structlog.testing import capture_logs

from modelport.gateway.access import access, api_key_file
from modelport.gateway.access.access_metrics import ERRORS
from modelport.gateway.access.principal import UNKNOWN_CONNECTION
from modelport.gateway.errors import MAX_MESSAGE, Unauthenticated, UsageError
from modelport.gateway.protocols.oip.http import OipHttp
from modelport.gateway.runtime import file_watcher
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.server.app import GatewayServer
from modelport.gateway.settings import Settings, TlsFiles
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests.certificates import TestAuthority
from tests.gateway.access.gateway import (
    KEYS,
    AccessGateway,
    channel,
    client,
    repository,
    serving,
)
from tests.gateway.access.test_every_route import OIP

ALL = '[[rules]]\nprincipals = ["root"]\noperations = "*"\n'


def limited(operations: str, *lines: str) -> str:
    return f'[[rules]]\nprincipals = ["ci"]\noperations = {operations}\n' + "\n".join(lines) + "\n"


async def infer(http: httpx.AsyncClient, gateway: AccessGateway, caller: str, path: str) -> object:
    """The first value of the answer, or the status of the refusal."""
    answer = await http.post(f"/v2/models/{path}/infer", json=OIP, headers=gateway.headers(caller))
    return answer.json()["outputs"][0]["data"][0] if answer.is_success else answer.status_code


async def test_a_caller_of_some_versions_sees_and_gets_only_those(tmp_path: Path) -> None:
    rules = ALL + limited('["infer", "metadata"]', 'versions = ["stable", 2]')
    async with (
        serving(tmp_path, rules, "ci", "root", versions=3) as gateway,
        client(gateway.http_url) as http,
    ):
        assert await infer(http, gateway, "root", "mine") == 4.0
        assert await infer(http, gateway, "ci", "mine") == 3.0  # the newest that it may use
        assert await infer(http, gateway, "ci", "mine/versions/1") == 2.0  # now 'stable'
        assert await infer(http, gateway, "ci", "mine/versions/3") == 404
        headers = gateway.headers("ci")
        metadata = (await http.get("/v2/models/mine", headers=headers)).json()
        assert metadata["versions"] == ["1", "2"]
        index = (await http.post("/v2/repository/index", headers=headers)).json()
        assert {row["version"] for row in index} == {"1", "2"}
        states = (await http.get("/v1/models/mine", headers=headers)).json()
        assert len(states["model_version_status"]) == 2
        forbidden = await http.get("/v2/models/mine/versions/3", headers=headers)
        unknown = await http.get("/v2/models/mine/versions/9", headers=headers)
        assert forbidden.text == unknown.text.replace("9", "3")
        assert forbidden.status_code == unknown.status_code == 404


async def test_a_model_without_an_allowed_version_is_an_unknown_one(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, limited('["infer"]', 'versions = ["9"]'), "ci") as gateway,
        client(gateway.http_url, headers=gateway.headers("ci")) as http,
    ):
        answer = await http.post("/v2/models/mine/infer", json=OIP)
        assert answer.status_code == 404
        assert answer.json()["error"] == "Request for unknown model: 'mine' is not found"


async def test_an_error_about_a_forbidden_model_is_no_longer_than_others(tmp_path: Path) -> None:
    name = "é" * MAX_MESSAGE
    async with (
        serving(
            tmp_path, ALL + limited('["infer", "control"]', 'models = ["mine"]'), "ci", "root"
        ) as gateway,
        client(gateway.http_url) as http,
        channel(gateway) as connection,
    ):
        call = connection.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=pb.ModelInferResponse.FromString,
        )
        for caller in ("root", "ci"):
            answer = await http.post(f"/v2/models/{name}/infer", headers=gateway.headers(caller))
            assert answer.status_code == 404
            assert len(answer.json()["error"]) == MAX_MESSAGE + len("...")
            request = pb.ModelInferRequest(model_name="e" * 4 * MAX_MESSAGE)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request, metadata=tuple(gateway.headers(caller).items()))
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            assert len(refused.value.details() or "") == MAX_MESSAGE + len("...")


async def test_metrics_are_of_the_models_and_versions_that_the_caller_may_see(
    tmp_path: Path,
) -> None:
    rules = ALL + limited('["metrics"]', 'models = ["mine"]', "versions = [2]")
    async with serving(tmp_path, rules, "ci", "root", versions=2) as gateway:
        async with client(gateway.http_url) as http:
            for path in ("mine/versions/1", "mine", "yours"):
                await infer(http, gateway, "root", path)
        seen = {}
        async with client(gateway.metrics_url) as http:
            for caller in ("ci", "root"):
                text = (await http.get("/metrics", headers=gateway.headers(caller))).text
                found = re.findall(r'model="(\w+)",version="(\d)"', text)
                seen[caller] = set(found)
                assert "# HELP nv_inference_request_success" in text
                samples = [line for line in text.splitlines() if not line.startswith("#")]
                shown = [line for line in samples if 'version="1"' in line or '"yours"' in line]
                assert bool(shown) == (caller == "root")
                assert "ts_inference_requests_total{" in text
    assert seen["root"] == {("mine", "1"), ("mine", "2"), ("yours", "1"), ("yours", "2")}
    assert seen["ci"] == {("mine", "2")}


async def test_a_rollout_diverts_no_request_of_a_caller_of_some_versions(tmp_path: Path) -> None:
    rules = ALL + limited('["infer"]', 'versions = ["1"]')
    async with serving(tmp_path, rules, "ci", "root", versions=2) as gateway:
        plan = {
            "candidate": "1", "baseline": 2, "shadow": 0.0, "steps": [1.0], "manual": True,
            "min_requests": 10, "min_seconds": 600, "pair": 0.0,
        }  # fmt: skip
        async with client(gateway.metrics_url) as http:
            headers = gateway.headers("root")
            started = await http.post("/v2/rollouts/mine", json=plan, headers=headers)
            assert started.status_code == 200, started.text
            assert '"by":"root"' in started.text.replace(" ", "")
        async with client(gateway.http_url) as http:
            assert await infer(http, gateway, "ci", "mine") == 2.0
            assert await infer(http, gateway, "ci", "mine/versions/2") == 404
            answer = await http.post(
                "/v2/models/mine/infer", json=OIP, headers=gateway.headers("ci")
            )
            assert "x-modelport-model-version" not in answer.headers


async def test_a_rollout_may_be_sticky_by_the_caller(tmp_path: Path) -> None:
    callers = [f"user{number}" for number in range(24)]
    rules = ALL + '[[rules]]\nprincipals = ["user*"]\noperations = ["infer"]\n'
    async with serving(tmp_path, rules, "root", *callers, versions=2) as gateway:
        plan = {
            "candidate": "2", "baseline": 1, "shadow": 0.0, "steps": [0.5, 1.0], "manual": True,
            "pair": 0.0, "min_seconds": 600, "sticky": "principal",
        }  # fmt: skip
        async with client(gateway.metrics_url) as http:
            started = await http.post(
                "/v2/rollouts/mine", json=plan, headers=gateway.headers("root")
            )
            assert started.status_code == 200, started.text
        async with client(gateway.http_url) as http:
            answers = {
                caller: [await infer(http, gateway, caller, "mine") for _ in range(4)]
                for caller in callers
            }
        assert all(len(set(values)) == 1 for values in answers.values())
        assert {values[0] for values in answers.values()} == {2.0, 3.0}


async def test_a_candidate_that_the_caller_may_not_see_is_an_unknown_one(tmp_path: Path) -> None:
    rules = limited('["rollout", "infer"]', 'models = ["mine"]')
    async with serving(tmp_path, rules, "ci") as gateway, client(gateway.metrics_url) as http:
        answers = {}
        for candidate in ("yours", "yours/1", "nobody", "nobody/1"):
            answer = await http.post(
                "/v2/rollouts/mine", json={"candidate": candidate}, headers=gateway.headers("ci")
            )
            answers[candidate] = answer.status_code, answer.text
        for end in ("", "/1"):
            status, text = answers[f"yours{end}"]
            assert (status, text.replace("yours", "nobody")) == answers[f"nobody{end}"]
            assert status >= 400


async def test_a_rollout_to_a_model_takes_the_right_to_call_it(tmp_path: Path) -> None:
    rules = limited('["rollout"]') + limited('["infer"]', 'models = ["mine"]')
    async with serving(tmp_path, rules, "ci") as gateway, client(gateway.metrics_url) as http:
        path, headers = "/v2/rollouts/mine", gateway.headers("ci")
        answer = await http.post(path, json={"candidate": "yours"}, headers=headers)
        assert answer.status_code == 403
        assert "needs the operation 'infer'" in answer.text


async def test_a_whole_model_is_changed_only_with_the_right_to_all_its_versions(
    tmp_path: Path,
) -> None:
    rules = limited('["control"]', 'versions = ["1"]')
    async with (
        serving(tmp_path, rules, "ci", versions=2) as gateway,
        client(gateway.http_url, headers=gateway.headers("ci")) as http,
    ):
        for change in ("load", "unload"):
            answer = await http.post(f"/v2/repository/models/mine/{change}")
            assert answer.status_code == 403
            assert "some versions of 'mine' only" in answer.text
        assert (await http.put("/models/mine/1/set-default")).status_code == 403
        assert (await http.put("/models/mine/2/set-default")).status_code == 404
        assert (await http.delete("/models/mine/2")).status_code == 404


def ensemble(step: str) -> str:
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    maps = {"input_map": {"x": "x"}, "output_map": {"y": "y"}}
    steps = [{"model_name": step, "model_version": -1, **maps}]
    config = {"platform": "ensemble", "max_batch_size": 8, "ensemble_scheduling": {"step": steps}}
    return json.dumps(
        config | {"input": [{"name": "x", **tensor}], "output": [{"name": "y", **tensor}]}
    )


@pytest.mark.parametrize("lacking", ["infer", "control"])
async def test_an_ensemble_has_no_step_that_its_maker_may_not_use(
    tmp_path: Path, lacking: str
) -> None:
    rules = limited('"*"', 'models = ["mine"]')
    rules += limited(json.dumps(sorted({"infer", "control"} - {lacking})), 'models = ["yours"]')
    rules += ALL
    async with (
        serving(tmp_path, rules, "ci", "root") as gateway,
        client(gateway.http_url) as http,
    ):
        texts = set()
        for step in ("yours", "nope"):
            body = {"parameters": {"config": ensemble(step)}}
            answer = await http.post(
                "/v2/repository/models/mine/load", json=body, headers=gateway.headers("ci")
            )
            assert answer.status_code == 403
            texts.add(answer.json()["error"].replace(step, "MODEL"))
        assert len(texts) == 1 or lacking == "control"
        assert await infer(http, gateway, "ci", "mine") != 403
        done = await http.post(
            "/v2/repository/models/mine/load",
            json={"parameters": {"config": ensemble("yours")}},
            headers=gateway.headers("root"),
        )
        assert done.status_code == 200, done.text
        body = {"parameters": {"unload_dependents": True}}
        path = "/v2/repository/models/mine/unload"
        answer = await http.post(path, json=body, headers=gateway.headers("ci"))
        assert answer.status_code == 403
        assert "on all models" in answer.text
        assert await infer(http, gateway, "root", "yours") == 2.0
        model = base64.b64encode((tmp_path / "models/mine/1/model.onnx").read_bytes()).decode()
        sent = {"config": '{"backend": "onnxruntime"}', "file:1/model.onnx": model}
        for caller, status in (("ci", 403), ("root", 200)):
            answer = await http.post(
                "/v2/repository/models/mine/load",
                json={"parameters": sent},
                headers=gateway.headers(caller),
            )
            assert answer.status_code == status, answer.text
            assert status == 200 or "on all models" in answer.text


@pytest.mark.parametrize("lacking", ["infer", "control", "some versions", "the new name", ""])
async def test_a_model_gets_no_other_name_from_a_caller_who_may_not_use_it(
    tmp_path: Path, lacking: str
) -> None:
    """The rules of the new name would give its answers to those whom its own rules keep out."""
    operations = json.dumps(sorted({"infer", "control"} - {lacking}))
    versions = 'versions = ["1"]' if lacking == "some versions" else ""
    rules = limited(operations, 'models = ["yours", "nope"]', versions)
    if lacking != "the new name":
        rules += limited('"*"', 'models = ["mine", "new"]')
    rules += '[[rules]]\nprincipals = ["guest"]\noperations = ["infer"]\nmodels = ["new"]\n'
    async with (
        serving(tmp_path, rules + ALL, "ci", "root", "guest") as gateway,
        client(gateway.http_url) as http,
    ):

        async def register(caller: str, source: str, name: str = "new") -> httpx.Response:
            path = f"/models?url={source}.mar&model_name={name}"
            return await http.post(path, headers=gateway.headers(caller))

        texts = set()
        for source in ("yours", "nope"):
            answer = await register("ci", source)
            if not lacking:
                assert answer.status_code == {"yours": 200, "nope": 404}[source], answer.text
                continue
            assert answer.status_code == 403
            texts.add(answer.json()["message"].replace(source, "MODEL"))
        assert len(texts) == bool(lacking), "it does not tell whether there is such a model"
        index = await http.post("/v2/repository/index", headers=gateway.headers("root"))
        assert ("new" in {row["name"] for row in index.json()}) is (not lacking)
        if lacking:
            return
        assert await infer(http, gateway, "guest", "new") == 2.0
        assert await infer(http, gateway, "guest", "yours") == 404
        assert await infer(http, gateway, "ci", "new") == 2.0


async def test_shared_memory_is_off_for_a_caller_without_the_operation(tmp_path: Path) -> None:
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 16}
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": region}
    async with (
        serving(
            tmp_path, ALL + limited('["infer"]'), "ci", "root", allow_client_shm=True
        ) as gateway,
        client(gateway.http_url) as http,
    ):
        statuses = {}
        for caller in ("ci", "root"):
            answer = await http.post(
                "/v2/models/mine/infer", json={"inputs": [tensor]}, headers=gateway.headers(caller)
            )
            statuses[caller] = answer.status_code
        assert statuses == {"ci": 501, "root": 404}  # not enabled; no such region


async def test_a_refusal_comes_before_the_body_is_read(tmp_path: Path) -> None:
    async with serving(tmp_path, ALL, "root") as gateway:
        host, port = gateway.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v2/models/mine/infer HTTP/1.1\r\nhost: localhost\r\n"
            b"content-length: 1000000\r\nexpect: 100-continue\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 401 ")
        assert b'www-authenticate: Bearer realm="modelport"\r\n' in head
        writer.close()


async def test_rules_are_followed_and_broken_ones_change_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, ALL, "root", "ci") as gateway:
        path, poll = tmp_path / "access" / "access.toml", gateway.server.watcher.poll
        async with client(gateway.http_url) as http:
            assert await infer(http, gateway, "ci", "mine") == 403
            path.write_text(ALL + limited('["infer"]', 'models = ["mine"]') + KEYS)
            await poll()
            assert await infer(http, gateway, "ci", "mine") == 2.0
            with capture_logs() as logs:
                path.write_text(ALL + limited('["inferr"]') + KEYS)
                await poll()
            assert logs[0]["event"] == "access rules not reloaded"
            assert "access.toml:" in logs[0]["reason"]
            assert "did you mean 'infer'?" in logs[0]["reason"]
            assert await infer(http, gateway, "ci", "mine") == 2.0
        async with client(gateway.metrics_url, headers=gateway.headers("root")) as http:
            metrics = (await http.get("/metrics")).text
        assert f'{ERRORS}_total{{file="rules"}} 1\n' in metrics
        async with client(gateway.http_url) as http:
            path.write_text(KEYS)
            await poll()
            assert await infer(http, gateway, "ci", "mine") == 403
            assert await infer(http, gateway, "root", "mine") == 403


async def test_rules_that_name_a_missing_file_are_used_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, ALL, "root") as gateway, client(gateway.http_url) as http:
        folder, poll = tmp_path / "access", gateway.server.watcher.poll
        rules = ALL.replace('"*"', '["metadata"]') + KEYS.replace("keys.toml", "new.toml")
        (folder / "access.toml").write_text(rules)
        with capture_logs() as logs:
            for seconds in (0.0, 0.0, 3600.0):  # each is an attempt, and the log has the first
                monkeypatch.setattr(file_watcher, "RETRY_SECONDS", seconds)
                await poll()
        assert [entry["event"] for entry in logs] == ["access rules not reloaded"]
        assert gateway.server.watcher.errors["rules"] == 1
        (folder / "new.toml").hardlink_to(folder / "keys.toml")
        await poll()
        assert await infer(http, gateway, "root", "mine") == 2.0
        gateway.server.watcher.wake()  # as SIGHUP does
        await poll()
        assert await infer(http, gateway, "root", "mine") == 403


async def test_a_key_that_is_revoked_ends_at_once_on_open_connections(tmp_path: Path) -> None:
    async with serving(tmp_path, ALL, "root") as gateway, client(gateway.http_url) as http:
        assert await infer(http, gateway, "root", "mine") == 2.0
        keys = tmp_path / "access" / "keys.toml"
        keys.write_text("")
        await gateway.server.watcher.poll()
        assert await infer(http, gateway, "root", "mine") == 401


async def test_a_credential_ends_when_it_expires_and_not_a_moment_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    for seconds in (1, 3600):  # nothing is kept of the first, and the second is used again
        text, entry = api_key_file.generate("ci", expires=now + timedelta(seconds=seconds))
        with api_key_file.locked(tmp_path / "keys.toml") as replace:
            replace([entry])
        (tmp_path / "access.toml").write_text(KEYS)
        monkeypatch.setattr("time.time", now.timestamp)
        found = access.Access(tmp_path / "access.toml", FileWatcher())
        headers = [(b"x-api-key", text.encode())]
        assert found.authenticate(headers, UNKNOWN_CONNECTION).principal.name == "ci"
        assert len(found.kept) == (seconds == 3600)
        monkeypatch.setattr("time.time", (now + timedelta(seconds=1)).timestamp)
        if seconds == 1:
            with pytest.raises(Unauthenticated, match="has expired"):
                found.authenticate(headers, UNKNOWN_CONNECTION)


async def test_certificates_that_nobody_verifies_are_no_identity(tmp_path: Path) -> None:
    no_authority = r"access\.toml:\d+: \[certificates\] identifies nobody without --tls-client-ca"
    rules = ALL + "[certificates]\n"
    with pytest.raises(UsageError, match=no_authority):
        async with serving(tmp_path, rules, "root"):
            pass
    async with serving(tmp_path, ALL, "root") as gateway:
        with capture_logs() as logs:
            (tmp_path / "access" / "access.toml").write_text(rules + KEYS)
            await gateway.server.watcher.poll()
        [line] = [log for log in logs if log["event"] == "access rules not reloaded"]
        assert re.match(no_authority, line["reason"])
        async with client(gateway.http_url) as http:
            assert await infer(http, gateway, "root", "mine") == 2.0  # the old rules
    authority = TestAuthority()
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    access.check(
        tmp_path / "access" / "access.toml",
        TlsFiles(*authority.write(tmp_path, "server"), tmp_path / "ca.crt", False),
    )


async def test_a_right_credential_is_checked_again_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "KEPT_SECONDS", 0.0)
    async with serving(tmp_path, ALL, "root") as gateway, client(gateway.http_url) as http:
        found = gateway.server._access
        assert found is not None
        checked: list[object] = []
        recognise = found._chain.authenticate
        monkeypatch.setattr(
            found._chain, "authenticate", lambda *given: checked.append(0) or recognise(*given)
        )
        for _ in range(3):
            assert await infer(http, gateway, "root", "mine") == 2.0
        assert len(checked) == 3
        monkeypatch.setattr(access, "KEPT_SECONDS", 3600.0)
        for _ in range(3):
            assert await infer(http, gateway, "root", "mine") == 2.0
        assert len(checked) == 4
        for _ in range(3):  # nothing is kept of wrong ones
            assert await infer(http, gateway, "wrong", "mine") == 401
        assert len(checked) == 7


async def test_an_authenticator_whose_table_has_not_changed_stays(tmp_path: Path) -> None:
    async with serving(tmp_path, ALL, "root") as gateway:
        found = gateway.server._access
        assert found is not None
        before = found._authenticators
        path = tmp_path / "access" / "access.toml"
        path.write_text(KEYS + ALL + limited('["infer"]'))
        await gateway.server.watcher.poll()
        assert found._authenticators == before
        path.write_text(KEYS.replace("keys.toml", "./keys.toml") + ALL)
        await gateway.server.watcher.poll()
        assert found._authenticators[0] is not before[0]
        assert len(gateway.server.watcher._watches) == 2


async def test_broken_rules_at_the_start_are_an_error_with_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text('\n[[rules]]\nprincipals = ["ci"]\n')
    settings = Settings(
        (repository(tmp_path / "models"),),
        http_port=0, grpc_port=0, metrics_port=0, access=tmp_path / "access.toml",
    )  # fmt: skip
    with pytest.raises(UsageError, match=r"access\.toml:2: \[rules\] needs the key 'operations'"):
        GatewayServer(settings)


async def test_without_access_no_object_of_it_is_on_the_path(tmp_path: Path) -> None:
    server = GatewayServer(Settings((tmp_path,), http_port=0, grpc_port=0, metrics_port=0))
    try:
        assert server._access is None
        assert server.dialects.http is server.dialects.application
        assert server.dialects.application._first.__class__ is OipHttp
        assert server.dialects.application._first._service is server.rollouts  # type: ignore[attr-defined]
        assert server.dialects.application._first._manager is server.manager  # type: ignore[attr-defined]
    finally:
        server._listeners._http.close()
        server._listeners._grpc.close()
        assert server._metrics is not None
        server._metrics.close()
