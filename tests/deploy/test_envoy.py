"""The files of ``deploy/envoy``: what they say, and a real Envoy with them in front of gateways."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from modelport.gateway.access import rules_file
from modelport.gateway.server import time_limits
from tests import models
from tests.certificates import TestAuthority
from tests.deploy import envoy as proxies
from tests.deploy import thorough, tools
from tests.deploy.callers import (
    BODY,
    INFER,
    ClusterCaller,
    connection,
    forged,
    status_of_raw,
    tensor,
)
from tests.deploy.envoy import CONFIG, FILES, EnvoyProxy
from tests.gateway.access.identities import Issuer, key_set
from tests.polling import WAIT_SECONDS
from tests.server import Gateway, serving

RULES = FILES / "access.toml"


def managers() -> list[dict[str, Any]]:
    """The settings of both listeners."""
    listeners = yaml.safe_load(CONFIG.read_text())["static_resources"]["listeners"]
    return [each["filter_chains"][0]["filters"][0]["typed_config"] for each in listeners]


def test_the_gateway_reads_the_header_that_envoy_removes_and_writes() -> None:
    file = rules_file.read_access_file(RULES)
    (proxy,) = file.authenticators
    header = proxy.values["header"]
    for manager in managers():
        (early,) = manager["early_header_mutation_extensions"]
        assert early["typed_config"]["mutations"] == [{"remove": header}]
        assert manager["http_filters"][0]["name"] == "tokens"
    (filter_config,) = yaml.safe_load((FILES / "tokens.yaml").read_text())["resources"]
    tokens = filter_config["typed_config"]["providers"]["issuer"]
    assert tokens["claim_to_headers"] == [{"header_name": header, "claim_name": "sub"}]
    assert tokens["forward"] is False


def test_envoy_waits_longer_for_a_request_and_shorter_for_the_next_one_than_the_gateway() -> None:
    clusters = yaml.safe_load(CONFIG.read_text())["static_resources"]["clusters"]
    for cluster in clusters:
        (options,) = cluster["typed_extension_protocol_options"].values()
        idle = options["common_http_protocol_options"]["idle_timeout"]
        assert float(idle.removesuffix("s")) < time_limits.KEEP_ALIVE_SECONDS
    (most,) = re.findall(r"--max-request-timeout-secs (\d+)", CONFIG.read_text())[:1]
    for manager in managers():
        *_, last = manager["route_config"]["virtual_hosts"][0]["routes"]
        assert float(last["route"]["timeout"].removesuffix("s")) > float(most)


@pytest.fixture(scope="module")
def authority() -> TestAuthority:
    return TestAuthority()


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Gateway]]:
    """Two of them, with ``fraud``, ``other`` and ``slow``."""
    repository = tmp_path_factory.mktemp("models")
    for name in ("fraud", "other"):
        models.multiply(repository / name / "1" / "model.onnx")
    models.fake(repository, "slow", "FP32", "4", delay_seconds="5")
    flags = ("--access", str(RULES), "--max-request-timeout-secs", "60")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(serving(repository, *flags)) for _ in range(2)]


@pytest.fixture(scope="module")
def config(
    tmp_path_factory: pytest.TempPathFactory, authority: TestAuthority, issuer: Issuer
) -> Path:
    folder = tmp_path_factory.mktemp("envoy") / "etc"
    return proxies.install(folder, authority, key_set(issuer))


@pytest.fixture(scope="module")
def proxy(config: Path, gateways: list[Gateway]) -> Iterator[EnvoyProxy]:
    with proxies.envoy(config, gateways) as running:
        running.wait_healthy(2, 2)
        yield running


@pytest.fixture(scope="module")
def ci(
    tmp_path_factory: pytest.TempPathFactory, authority: TestAuthority, issuer: Issuer
) -> ClusterCaller:
    token = issuer.token(sub="ci").decode()
    return ClusterCaller(tmp_path_factory.mktemp("caller"), authority, token)


@pytest.fixture(scope="module")
def alice(ci: ClusterCaller, issuer: Issuer) -> ClusterCaller:
    return ci.with_token(issuer.token(sub="alice").decode())


@pytest.fixture(scope="module")
def nobody(ci: ClusterCaller) -> ClusterCaller:
    return ci.with_token("")


@thorough
def test_envoy_takes_the_files_and_no_misspelt_one(config: Path) -> None:
    validate = (proxies.program(), "--mode", "validate", "--log-level", "error", "--config-path")
    tools.check(*validate, config)
    wrong = config.with_name("wrong.yaml")
    wrong.write_text(
        proxies.replaced(config.read_text(), {"require_client_cert": "require_a_cert"})
    )
    status, said = tools.said(*validate, wrong)
    assert status != 0
    assert "require_a_cert" in said


@thorough
@pytest.mark.parametrize("http2", [False, True], ids=["HTTP/1.1", "HTTP/2"])
def test_http_is_forwarded(proxy: EnvoyProxy, ci: ClusterCaller, http2: bool) -> None:
    with ci.http(http2=http2) as client:
        answer = client.post(proxy.url + INFER % "fraud", content=BODY)
        assert answer.http_version == ("HTTP/2" if http2 else "HTTP/1.1")
        assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert client.get(f"{proxy.url}/v2/models/fraud").json()["name"] == "fraud"


@thorough
def test_unmodified_clients_infer_over_http_and_grpc(proxy: EnvoyProxy, ci: ClusterCaller) -> None:
    options = {"ca_certs": str(ci.ca), "certfile": str(ci.certificate), "keyfile": str(ci.key)}
    over_http = tritonclient.http.InferenceServerClient(
        proxy.url.removeprefix("https://"), ssl=True, ssl_options=options
    )
    answer = over_http.infer("fraud", [tensor(tritonclient.http)], headers=ci.headers)
    assert answer.as_numpy("y").tolist() == [[2, 4, 6, 8]]
    over_http.close()
    assert ci.infer_grpc(proxy) == [2, 4, 6, 8]
    with ci.grpc(proxy) as client:
        answers: list[Any] = []
        client.start_stream(
            lambda result, error: answers.append(error or result), headers=ci.headers
        )
        for _ in range(3):
            client.async_stream_infer("fraud", [tensor(tritonclient.grpc)])
        client.stop_stream()
        assert [answer.as_numpy("y").tolist() for answer in answers] == [[[2, 4, 6, 8]]] * 3


@thorough
def test_each_caller_has_the_rights_of_its_token_alone(
    proxy: EnvoyProxy, ci: ClusterCaller, alice: ClusterCaller, issuer: Issuer
) -> None:
    stranger = ci.with_token(issuer.token(sub="mallory").decode())
    for model, allowed in (("fraud", (ci, alice)), ("other", (alice,))):
        for caller in (ci, alice, stranger):
            status = caller.infer(proxy, model).status_code
            assert (status == 200) is (caller in allowed), (model, status)
            if caller in allowed:
                assert caller.infer_grpc(proxy, model) == [2, 4, 6, 8]
            else:
                assert status in (403, 404)
                with pytest.raises(InferenceServerException):
                    caller.infer_grpc(proxy, model)


@thorough
def test_a_request_without_a_good_token_is_refused(
    proxy: EnvoyProxy, nobody: ClusterCaller, ci: ClusterCaller, issuer: Issuer
) -> None:
    now = int(time.time())
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    tokens = {
        "missing": "",
        "of another issuer's key": Issuer().token(sub="ci").decode(),
        "of another issuer": issuer.token(sub="ci", iss="https://other.example.com").decode(),
        "for another audience": issuer.token(sub="ci", aud="payments").decode(),
        "for no audience": issuer.token(sub="ci", aud=None).decode(),
        "expired": issuer.token(sub="ci", exp=now - 120).decode(),
        "without an end": issuer.token(sub="ci", exp=None).decode(),
        "not valid yet": issuer.token(sub="ci", nbf=now + 600).decode(),
        "altered": forged(ci.token, sub="alice"),
        "unsigned": f"{none}.{ci.token.split('.')[1]}.",
        "no token": "fraud",
    }
    for kind, token in tokens.items():
        caller = nobody.with_token(token)
        # Envoy takes a token for somebody else as good, and of no use here.
        status, name = (
            (403, "PERMISSION_DENIED") if "audience" in kind else (401, "UNAUTHENTICATED")
        )
        answer = caller.infer(proxy)
        assert answer.status_code == status, kind
        assert status == 403 or answer.headers["www-authenticate"].startswith("Bearer"), kind
        with pytest.raises(InferenceServerException) as error:
            caller.infer_grpc(proxy)
        assert error.value.status() == f"StatusCode.{name}", kind
    assert ci.infer(proxy).status_code == 200


@thorough
def test_a_client_without_a_good_certificate_is_refused(
    proxy: EnvoyProxy, ci: ClusterCaller, tmp_path: Path
) -> None:
    def ask(context: ssl.SSLContext) -> int:
        with httpx.Client(verify=context, headers=ci.headers) as client:
            return client.post(proxy.url + INFER % "fraud", content=BODY).status_code

    assert ask(ci.tls()) == 200
    stranger = ClusterCaller(tmp_path, TestAuthority("another authority"), "")
    wrong = ci.tls(certificate=False)
    wrong.load_cert_chain(stranger.certificate, stranger.key)
    old = ci.tls()
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1 is deprecated"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    for context in (ci.tls(certificate=False), wrong, old):
        with pytest.raises(httpx.TransportError):
            ask(context)
    ci_certificate = (ci.ca.read_bytes(), None, None)
    channel = grpc.secure_channel(proxy.grpc, grpc.ssl_channel_credentials(*ci_certificate))
    with channel, pytest.raises(grpc.RpcError) as error:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@thorough
def test_a_caller_cannot_name_another_one(
    proxy: EnvoyProxy, ci: ClusterCaller, nobody: ClusterCaller
) -> None:
    for name in ("x-forwarded-user", "X-Forwarded-User"):
        assert ci.infer(proxy, "other", **{name: "alice"}).status_code in (403, 404)
        assert ci.infer(proxy, "fraud", **{name: "alice"}).status_code == 200
        assert nobody.infer(proxy, "fraud", **{name: "alice"}).status_code == 401
    with ci.http() as client:
        twice = [("x-forwarded-user", "alice"), ("x-forwarded-user", "alice")]
        answer = client.post(proxy.url + INFER % "other", content=BODY, headers=twice)
        assert answer.status_code in (403, 404)
    with pytest.raises(InferenceServerException):
        ci.infer_grpc(proxy, "other", **{"x-forwarded-user": "alice"})
    assert ci.infer_grpc(proxy, "fraud", **{"x-forwarded-user": "alice"}) == [2, 4, 6, 8]


@thorough
def test_the_name_of_a_caller_is_taken_off_where_no_token_is_asked_for(
    config: Path, gateways: list[Gateway], nobody: ClusterCaller
) -> None:
    """The access log says what the gateway is told. Envoy itself removes what it would write."""
    other = {"{header_name: x-f": "{header_name: x-other-f"}
    forgettable = {"x-forwarded-user}]": "x-other}]", "/tokens.yaml": "/forgettable.yaml", **other}
    tokens = (config.parent / "tokens.yaml").read_text()
    (config.parent / "forgettable.yaml").write_text(proxies.replaced(tokens, other))
    for changes, caller in ({}, None), (forgettable, "alice"):
        with proxies.envoy(config, gateways, changes) as proxy, nobody.http() as client:
            proxy.wait_healthy(2, 2)
            headers = {"x-forwarded-user": "alice"}
            assert client.get(f"{proxy.url}/v2/health/live", headers=headers).status_code == 200
        (entry,) = (json.loads(x) for x in proxy.log().splitlines() if "/v2/health/live" in x)
        assert entry["caller"] == caller


@thorough
def test_probes_need_no_token_and_open_nothing_else(
    proxy: EnvoyProxy, nobody: ClusterCaller
) -> None:
    with nobody.http() as client:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert client.get(proxy.url + path).status_code == 200
            forged = {"x-forwarded-user": "alice"}
            assert client.get(proxy.url + path, headers=forged).status_code == 200
        for path in ("/v2", "/v2/models", "/v2/health", "/v2/health/live/", "/docs", "/metrics"):
            assert client.get(proxy.url + path).status_code == 401, path
    # As they are: no client would send them so.
    for path in (
        "/v2/health/live/../../models/fraud",
        "/v2/health/ready/%2e%2e/%2e%2e/models/fraud",
        "/v2/health//live/../..//models/fraud",
        "/v2/models/fraud?/v2/health/live",
    ):
        assert status_of_raw(proxy, nobody, path) == 401, path
    assert status_of_raw(proxy, nobody, "/v2/health/live%2f..%2f..%2fmodels/fraud") == 400
    credentials = grpc.ssl_channel_credentials(
        nobody.ca.read_bytes(), nobody.key.read_bytes(), nobody.certificate.read_bytes()
    )
    with grpc.secure_channel(proxy.grpc, credentials) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@thorough
def test_a_certificate_that_kubernetes_renews_is_served_without_a_failed_request(
    proxy: EnvoyProxy, ci: ClusterCaller, authority: TestAuthority
) -> None:
    def served() -> str:
        with connection(proxy, ci) as stream:
            return ssl.DER_cert_to_PEM_cert(stream.getpeercert(binary_form=True) or b"")

    before = served()
    wanted = proxies.renew(proxy.folder / "tls", authority, "second").decode()
    give_up = time.monotonic() + WAIT_SECONDS
    with ci.http() as client:
        while (now := served()) != wanted:
            assert now == before
            assert client.post(proxy.url + INFER % "fraud", content=BODY).status_code == 200
            assert time.monotonic() < give_up, proxy.log()[-3000:]
        assert client.post(proxy.url + INFER % "fraud", content=BODY).status_code == 200


@thorough
def test_new_keys_of_the_issuer_are_followed_and_a_wrong_file_changes_nothing(
    proxy: EnvoyProxy, ci: ClusterCaller, nobody: ClusterCaller, issuer: Issuer
) -> None:
    later = Issuer(kid="later")
    renewed = nobody.with_token(later.token(sub="ci").decode())
    (proxy.folder / "later.json").write_bytes(key_set(issuer, later))
    file = proxy.folder / "tokens.yaml"
    text = proxies.replaced(file.read_text(), {"jwks.json": "later.json"})

    def replace(content: str) -> None:
        (proxy.folder / "new.yaml").write_text(content)
        (proxy.folder / "new.yaml").rename(file)

    assert renewed.infer(proxy).status_code == 401
    replace(text)
    give_up = time.monotonic() + WAIT_SECONDS
    while renewed.infer(proxy).status_code == 401:
        assert ci.infer(proxy).status_code == 200
        assert time.monotonic() < give_up, proxy.log()[-3000:]
    replace(proxies.replaced(text, {"clock_skew_seconds: 30": "clock_skew_seconds: thirty"}))
    while "thirty" not in proxy.log():
        assert time.monotonic() < give_up, proxy.log()[-3000:]
        time.sleep(0.05)
    for caller in (ci, renewed):
        assert caller.infer(proxy).status_code == 200
    replace(text)  # for those that start later


@thorough
def test_an_endpoint_that_fails_its_health_checks_gets_nothing(
    proxy: EnvoyProxy, gateways: list[Gateway], ci: ClusterCaller
) -> None:
    frozen = gateways[0].process
    frozen.send_signal(signal.SIGSTOP)
    try:
        proxy.wait_healthy(1, 1)
        with ci.http() as client:
            for _ in range(20):
                answer = client.post(proxy.url + INFER % "fraud", content=BODY, timeout=20)
                assert answer.status_code == 200
        for _ in range(3):
            assert ci.infer_grpc(proxy) == [2, 4, 6, 8]
    finally:
        frozen.send_signal(signal.SIGCONT)
    proxy.wait_healthy(2, 2)
    assert ci.infer(proxy).status_code == 200


@thorough
def test_requests_over_the_rate_are_refused_and_those_of_other_callers_are_not(
    config: Path, gateways: list[Gateway], ci: ClusterCaller, alice: ClusterCaller
) -> None:
    each = "token_bucket: {max_tokens: 2000, tokens_per_fill: 1000, fill_interval: 1s}"
    few = "token_bucket: {max_tokens: 5, tokens_per_fill: 5, fill_interval: 3600s}"
    with proxies.envoy(config, gateways, {each: few}) as proxy:
        proxy.wait_healthy(2, 2)
        answers = [ci.infer(proxy) for _ in range(7)]
        assert [answer.status_code for answer in answers] == [200] * 5 + [429] * 2
        assert answers[0].headers["x-ratelimit-limit"].startswith("5")
        assert [ci.infer_grpc(proxy) for _ in range(5)] == [[2, 4, 6, 8]] * 5
        with pytest.raises(InferenceServerException) as error:
            ci.infer_grpc(proxy)
        assert error.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        assert alice.infer(proxy).status_code == 200
        assert alice.infer_grpc(proxy) == [2, 4, 6, 8]
    entries = [json.loads(line) for line in proxy.log().splitlines() if line.startswith("{")]
    logged = [(entry["caller"], entry["status"]) for entry in entries if entry["method"] == "POST"]
    assert logged.count(("ci", 429)) >= 2
    assert ("alice", 200) in logged
    assert ci.token not in proxy.log()


@thorough
def test_a_gateway_that_answers_too_late_is_not_waited_for_whatever_the_client_says(
    config: Path, gateways: list[Gateway], alice: ClusterCaller
) -> None:
    with proxies.envoy(config, gateways, {"timeout: 65s": "timeout: 1s"}) as proxy:
        proxy.wait_healthy(2, 2)
        longer = {"x-envoy-upstream-rq-timeout-ms": "60000", "x-envoy-max-retries": "9"}
        answer = alice.infer(proxy, "slow", **longer)
        assert answer.status_code in (503, 504)  # the gateway's, which hears of it, or Envoy's
        with pytest.raises(InferenceServerException) as error:
            alice.infer_grpc(proxy, "slow", **longer)
        assert error.value.status() == "StatusCode.UNAVAILABLE"
        assert alice.infer(proxy).status_code == 200


@thorough
def test_no_request_fails_when_a_gateway_dies(
    config: Path, tmp_path: Path, gateways: list[Gateway], ci: ClusterCaller
) -> None:
    """Before a health check has found it: connections that fail are tried elsewhere."""
    models.multiply(tmp_path / "models" / "fraud" / "1" / "model.onnx")
    with serving(tmp_path / "models", "--access", str(RULES)) as dies:
        seldom = {"interval: 2s\n": "interval: 600s\n"}
        with proxies.envoy(config, [dies, gateways[0]], seldom) as proxy:
            proxy.wait_healthy(2, 2)
            with ci.http() as client:
                for count in range(40):
                    if count == 20:
                        dies.process.kill()
                        dies.process.wait()
                    answer = client.post(proxy.url + INFER % "fraud", content=BODY)
                    assert answer.status_code == 200, (count, answer.text)
            assert [ci.infer_grpc(proxy) for _ in range(10)] == [[2, 4, 6, 8]] * 10
            assert proxy.healthy() == {"modelport_http": 2, "modelport_grpc": 2}
