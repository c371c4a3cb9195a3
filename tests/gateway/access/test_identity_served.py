"""A gateway recognises every kind of credential, alike over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from modelport.gateway.access import api_key_file
from modelport.gateway.access.jwks import JwksUrl
from modelport.gateway.server.tls.certificate import TlsFiles
from tests.certificates import TestAuthority
from tests.commands import modelport
from tests.gateway.access.gateway import AccessGateway, client, serving
from tests.gateway.access.identities import AUDIENCE, ISSUER, Issuer, key_set
from tests.gateway.access.test_every_route import OIP

INFER = "/v2/models/mine/infer"
USER = pwd.getpwuid(os.geteuid()).pw_name
TABLES = f"""
[[rules]]
principals = ["ci", "jwt:alice", "group:jwt:ds", "proxy:carol", "unix:{USER}"]
operations = ["infer"]
models = ["mine"]

[[rules]]
principals = ["authenticated"]
operations = ["metrics"]

[jwt]
issuer = "{ISSUER}"
audience = "{AUDIENCE}"
algorithms = ["EdDSA"]
jwks = "jwks.json"

[trusted_proxy]
addresses = ["127.0.0.1"]
"""


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    made = Issuer("EdDSA")
    (tmp_path / "access").mkdir()
    (tmp_path / "access" / "jwks.json").write_bytes(key_set(made))
    return made


@pytest.fixture
async def gateway(tmp_path: Path, issuer: Issuer) -> AsyncIterator[AccessGateway]:
    sockets = {"http_socket": tmp_path / "http.sock", "grpc_socket": tmp_path / "grpc.sock"}
    async with serving(tmp_path, TABLES, "ci", **sockets) as served:
        yield served


async def http_status(http: httpx.AsyncClient, headers: Any, path: str = INFER) -> int:
    return (await http.post(path, json=OIP, headers=headers)).status_code


async def grpc_status(target: str, metadata: list[tuple[str, str]]) -> grpc.StatusCode:
    request = pb.ModelInferRequest(model_name="mine", raw_input_contents=[bytes(16)])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    async with grpc.aio.insecure_channel(target) as channel:
        call = GRPCInferenceServiceStub(channel).ModelInfer(request, metadata=metadata)
        code: grpc.StatusCode = await call.code()
        return code


async def test_right_credentials_are_recognised_in_all_their_headers(
    gateway: AccessGateway, issuer: Issuer
) -> None:
    key = gateway.keys["ci"]
    sagemaker = {
        "x-amzn-sagemaker-target-model": "mine",
        "x-amzn-sagemaker-custom-attributes": f"trace=1;x-api-key={key}",
        "authorization": "AWS4-HMAC-SHA256 Credential=x",
    }
    right = [
        {"authorization": f"Bearer {key}"},
        {"x-api-key": key},
        {"x-goog-api-key": key},
        {"authorization": f"Bearer {key}", "x-api-key": key},
        {"authorization": f"Bearer {issuer.token().decode()}"},
        {"x-api-key": issuer.token(sub="bob", groups=["ds"]).decode()},
        {"x-forwarded-user": "carol"},
    ]
    async with client(gateway.http_url) as http:
        for headers in right:
            assert await http_status(http, headers) == 200, headers
            metadata = list(headers.items())
            assert await grpc_status(gateway.grpc_target, metadata) is grpc.StatusCode.OK, headers
        assert await http_status(http, sagemaker, "/invocations") == 200
        assert await http_status(http, right[0], "/vertex") == 200
        predictions = {"authorization": f"Bearer {key}"}
        data = {"data": [[1.0, 2.0, 3.0, 4.0]]}
        assert (await http.post("/predictions/mine", json=data, headers=predictions)).is_success


async def test_wrong_credentials_are_refused_in_all_their_headers(
    gateway: AccessGateway, issuer: Issuer
) -> None:
    key, token = gateway.keys["ci"], issuer.token().decode()
    stranger = Issuer("EdDSA").token().decode()
    wrong = [
        [("authorization", f"Bearer {gateway.keys['wrong']}")],
        [("authorization", f"Bearer {gateway.keys['expired']}")],
        [("authorization", f"Bearer {stranger}")],
        [("authorization", f"Bearer {issuer.token(exp=1).decode()}")],
        [("authorization", "Basic Y2k6")],
        [("authorization", f"Bearer {key}"), ("x-api-key", token)],
        [("authorization", f"Bearer {key}"), ("authorization", f"Bearer {key}")],
        [("x-api-key", key), ("x-forwarded-user", "carol")],
        [("x-forwarded-user", "carol"), ("x-forwarded-user", "root")],
        [("x-forwarded-user", "")],
        [("x-api-key", "")],
    ]
    async with client(gateway.http_url) as http:
        for headers in wrong:
            response = await http.post(INFER, json=OIP, headers=headers)
            assert response.status_code == 401, headers
            assert "invalid_token" in response.headers["www-authenticate"]
            assert key not in response.text
            code = await grpc_status(gateway.grpc_target, headers)
            assert code is grpc.StatusCode.UNAUTHENTICATED, headers
        assert await http_status(http, {"x-forwarded-user": "mallory"}) == 403
        assert await http_status(http, {"x-api-key": issuer.token(sub="bob").decode()}) == 403


async def test_the_user_of_a_unix_socket_is_recognised(
    gateway: AccessGateway, tmp_path: Path
) -> None:
    transport = httpx.AsyncHTTPTransport(uds=str(tmp_path / "http.sock"))
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as http:
        assert await http_status(http, {}) == 200
        assert await http_status(http, {"x-api-key": gateway.keys["wrong"]}) == 401
        assert await http_status(http, {"x-forwarded-user": "carol"}) == 401  # no trusted address
    assert await grpc_status(f"unix:{tmp_path / 'grpc.sock'}", []) is grpc.StatusCode.OK
    async with client(gateway.http_url) as http:
        assert await http_status(http, {}) == 401


async def test_a_client_certificate_is_recognised(tmp_path: Path) -> None:
    authority = TestAuthority()
    server = authority.write(tmp_path, "server")
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    rules = (
        '[[rules]]\nprincipals = ["cert:uri:spiffe://example.com/*"]\noperations = ["infer"]\n'
        "[certificates]\n"
    )
    tls = TlsFiles(*server, tmp_path / "ca.crt", False)
    async with serving(tmp_path, rules, "ci", tls=tls) as gateway:
        url = gateway.http_url.replace("http:", "https:")
        for names, status in (
            (("ci.example.com", "spiffe://example.com/ci"), 200),
            (("spiffe://example.org/ci",), 403),
            ((), 401),
        ):
            certificate = authority.write(tmp_path, "client", *names) if names else None
            context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
            if certificate is not None:
                context.load_cert_chain(*certificate)
            async with client(url, verify=context) as http:
                assert await http_status(http, {}) == status, names


async def test_a_new_key_with_rights_of_its_own_is_accepted_without_a_restart(
    gateway: AccessGateway, tmp_path: Path
) -> None:
    file = str(tmp_path / "access" / "keys.toml")
    done = await asyncio.to_thread(
        modelport, "key", "create", "--name", "new", "--models", "yo*", "--file", file
    )
    headers = {"x-api-key": done.stdout.strip()}
    async with client(gateway.http_url) as http:
        await until(lambda: http_status(http, headers, "/v2/models/yours/infer"), 200)
        assert await http_status(http, headers) == 404
        await asyncio.to_thread(modelport, "key", "revoke", "new", "--file", file)
        await until(lambda: http_status(http, headers, "/v2/models/yours/infer"), 401)
        assert api_key_file.read(Path(file))


async def until(status: Callable[[], Any], expected: int) -> None:
    async with asyncio.timeout(60):
        while await status() != expected:
            await asyncio.sleep(0.05)


async def test_before_the_issuer_has_answered_tokens_are_unavailable(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JwksUrl, "MIN_SECONDS", 0.0)
    rules = TABLES.replace("jwks.json", "https://127.0.0.1:1/jwks")
    headers = {"x-api-key": issuer.token().decode()}
    async with serving(tmp_path, rules, "ci") as gateway, client(gateway.http_url) as http:
        response = await http.post(INFER, json=OIP, headers=headers)
        assert response.status_code == 503
        assert "keys are not loaded" in json.dumps(response.json())
        code = await grpc_status(gateway.grpc_target, list(headers.items()))
        assert code is grpc.StatusCode.UNAVAILABLE
        async with client(gateway.metrics_url) as metrics:
            assert (await metrics.get("/metrics", headers=headers)).status_code == 503
            key = {"x-api-key": gateway.keys["ci"]}

            async def failures() -> bool:
                text = (await metrics.get("/metrics", headers=key)).text
                return "modelport_jwks_refresh_failures_total 0\n" not in text

            await until(failures, True)
