"""Clients and pages of the gateway's origin may control its models; pages of others may not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from modelport.gateway.protocols.cross_site_protection import Origins
from tests import models
from tests.gateway.server.handlers import WholeBody, request_of
from tests.server import Gateway, serving

LOAD = "/v2/repository/models/x2/load"
UNLOAD = "/v2/repository/models/x2/unload"
EVIL = "http://evil.example"


def objection(address: str, path: str, allowed: tuple[str, ...] = (), **headers: str) -> str:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    request = request_of("POST", path, fields, WholeBody(b""))
    return Origins(address, allowed).objection(request)


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("127.0.0.1", {"host": "localhost:8000"}),  # tritonclient, curl
        ("127.0.0.1", {"host": "127.0.0.1:8000"}),
        ("127.0.0.1", {"host": "[::1]:8000"}),
        ("127.0.0.1", {}),  # HTTP/1.0
        ("127.0.0.1", {"host": "app.localhost:8000", "origin": "http://app.localhost:8000"}),
        ("0.0.0.0", {"host": "modelport.default.svc.cluster.local"}),  # Kubernetes, KServe
        ("0.0.0.0", {"host": "modelport:8000"}),
        ("0.0.0.0", {"host": "10.0.0.7:8000", "origin": "http://10.0.0.7:8000"}),  # /docs
        ("gpu-box", {"host": "gpu-box:8000", "origin": "http://gpu-box:8000"}),
        ("127.0.0.1", {"host": "localhost", "origin": "http://localhost",
                       "sec_fetch_site": "same-origin"}),
    ],
)  # fmt: skip
def test_clients_and_pages_of_its_own_pass(address: str, headers: dict[str, str]) -> None:
    assert objection(address, UNLOAD, **headers) == ""


@pytest.mark.parametrize(
    ("address", "headers"),
    [
        ("127.0.0.1", {"host": "localhost:8000", "origin": EVIL}),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "null"}),
        ("127.0.0.1", {"host": "localhost:8000", "origin": "http://localhost:3000"}),
        ("127.0.0.1", {"host": "localhost:8000", "sec_fetch_site": "cross-site"}),
        ("127.0.0.1", {"host": "localhost:8000", "sec_fetch_site": "same-site"}),
        ("0.0.0.0", {"host": "10.0.0.7:8000", "origin": EVIL}),
        # A name of the attacker's that leads here: page and request have the same origin.
        ("0.0.0.0", {"host": "evil.example:8000", "origin": f"{EVIL}:8000"}),
        ("127.0.0.1", {"host": "evil.example:8000", "origin": f"{EVIL}:8000"}),
        ("127.0.0.1", {"host": "evil.example:8000"}),
        ("127.0.0.1", {"host": "localhost.evil.example:8000"}),
    ],
)
@pytest.mark.parametrize("path", [UNLOAD, "/models/x", "/anything", "/v2/models/x/unknown"])
def test_pages_of_others_are_refused(address: str, headers: dict[str, str], path: str) -> None:
    assert "--allowed-host" in objection(address, path, **headers)


def test_names_that_are_allowed_pass() -> None:
    headers = {"host": "127.0.0.1:8000", "origin": "https://console.example"}
    assert objection("127.0.0.1", LOAD, ("console.example",), **headers) == ""
    assert objection("127.0.0.1", LOAD, ("*",), host="evil.example", origin=EVIL) == ""
    assert objection("127.0.0.1", LOAD, ("proxy.example",), host="Proxy.Example") == ""
    assert objection("127.0.0.1", LOAD, ("other.example",), **headers) != ""


# -- every route ----------------------------------------------------------------------------------

#: What changes nothing may be asked by any page; whether it reads the answer is the browser's rule.
HARMLESS = (
    "/infer", "/generate", "/generate_stream", ":predict", ":classify", ":regress", "/invoke",
    "/invocations", "/explain", "/embed", "/embeddings", "/predict", "/rerank",
    "/completions", "/responses", "/repository/index",
)  # fmt: skip


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root: Path = tmp_path_factory.mktemp("repository")
    models.repository(root)
    with serving(root, "--model-control-mode", "explicit", "--load-model", "*") as served:
        yield served


def test_no_route_that_changes_anything_takes_a_request_of_a_foreign_page(
    gateway: Gateway,
) -> None:
    refused = 0
    with httpx.Client(base_url=f"http://{gateway.http}") as client:
        for path, operations in client.get("/openapi.json").json()["paths"].items():
            for method in operations:
                if method.upper() in ("GET", "HEAD", "OPTIONS") or path.endswith(HARMLESS):
                    continue
                if path == "/" or path.startswith(("/predictions", "/explanations", "/v1/models")):
                    continue
                headers = {"origin": EVIL, "content-type": "text/plain"}
                reply = client.request(method, path.replace("{model}", "x2"), headers=headers)
                assert reply.status_code == 403, (method, path)
                refused += 1
        assert refused >= 8
        assert client.get("/v2/models/x2/ready").status_code == 200


def test_a_foreign_page_unloads_no_model_and_a_client_does(gateway: Gateway) -> None:
    with httpx.Client(base_url=f"http://{gateway.http}") as client:
        for headers in ({"origin": EVIL}, {"host": "evil.example"}):
            reply = client.post(UNLOAD, headers=headers)
            assert (reply.status_code, list(reply.json())) == (403, ["error"])
        assert client.get("/v2/models/x2/ready").status_code == 200
        assert client.post(UNLOAD).status_code == 200
        assert client.get("/v2/models/x2/ready").status_code == 400
        assert client.post(LOAD).status_code == 200
