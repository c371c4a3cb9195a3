"""Every HTTP route, on every port, for every kind of caller."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import pytest
from fastapi import FastAPI, Response

from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Unsupported
from modelport.gateway.models.model import VersionState
from modelport.gateway.protocols import http_operations
from modelport.gateway.protocols.http_operations import operation_of
from modelport.gateway.server import app
from tests.gateway.access.gateway import AccessGateway, client, serving
from tests.thorough import thorough

#: ``right`` may do everything, ``other`` everything with another model, ``idle`` nothing.
RULES = """
[[rules]]
principals = ["right"]
operations = "*"

[[rules]]
principals = ["other"]
operations = "*"
models = ["yours"]

"""
CALLERS = ("right", "other", "idle")
#: Names of one length, so that answers can be compared byte by byte.
MINE, UNKNOWN = "mine", "nope"
ROWS = [[1.0, 2.0, 3.0, 4.0]]
OIP = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": ROWS[0]}]}
PREDICT = {"instances": ROWS}


class RouteCase(NamedTuple):
    """A request to a route; ``right`` is the status for a caller that may do everything.

    ``{model}`` and the other parameters are replaced in the path, the query, the headers and the
    body.
    """

    right: int
    body: Any = None
    query: str = ""
    headers: Mapping[str, str] = {}


REGION = {"key": "/no/object", "byte_size": 16}
ROUTES: dict[str, RouteCase] = {
    "GET /": RouteCase(200),
    "OPTIONS /": RouteCase(200),
    "GET /api-description": RouteCase(200),
    "GET /docs": RouteCase(200),
    "GET /docs/5.35.0/swagger-ui-bundle.js": RouteCase(200),
    "GET /docs/5.35.0/swagger-ui.css": RouteCase(200),
    "GET /openapi.json": RouteCase(200),
    "GET /ping": RouteCase(200),
    "POST /ping": RouteCase(200),
    # The Open Inference Protocol
    "GET /v2": RouteCase(200),
    "GET /v2/": RouteCase(200),
    "GET /v2/health/live": RouteCase(200),
    "GET /v2/health/ready": RouteCase(200),
    "GET /v2/models": RouteCase(200),
    "GET /v2/models/stats": RouteCase(200),
    "GET /v2/trace/setting": RouteCase(200),
    "POST /v2/trace/setting": RouteCase(200),
    "GET /v2/models/{model}/trace/setting": RouteCase(200),
    "POST /v2/models/{model}/trace/setting": RouteCase(200, {"trace_rate": "9"}),
    "GET /v2/logging": RouteCase(200),
    "POST /v2/logging": RouteCase(200),
    "POST /v2/repository/index": RouteCase(200),
    "POST /v2/repository/models/{model}/load": RouteCase(200),
    "POST /v2/repository/models/{model}/unload": RouteCase(200),
    "GET /v2/systemsharedmemory/status": RouteCase(200),
    "GET /v2/systemsharedmemory/region/{region}/status": RouteCase(404),
    "POST /v2/systemsharedmemory/region/{region}/register": RouteCase(400, REGION),
    "POST /v2/systemsharedmemory/region/{region}/unregister": RouteCase(200),
    "POST /v2/systemsharedmemory/unregister": RouteCase(200),
    "GET /v2/cudasharedmemory/status": RouteCase(200),
    "GET /v2/cudasharedmemory/region/{region}/status": RouteCase(404),
    "POST /v2/cudasharedmemory/region/{region}/register": RouteCase(501),
    "POST /v2/cudasharedmemory/region/{region}/unregister": RouteCase(200),
    "POST /v2/cudasharedmemory/unregister": RouteCase(200),
    # TorchServe
    "GET /models": RouteCase(200),
    "POST /models": RouteCase(409, query="?url={model}"),
    "GET /models/{model}": RouteCase(200),
    "PUT /models/{model}": RouteCase(202, query="?min_worker=1"),
    "DELETE /models/{model}": RouteCase(200),
    "GET /models/{model}/{version}": RouteCase(200),
    "PUT /models/{model}/{version}": RouteCase(202, query="?min_worker=1"),
    "DELETE /models/{model}/{version}": RouteCase(200),
    "PUT /models/{model}/{version}/set-default": RouteCase(200),
    "OPTIONS /predictions/{model}": RouteCase(200),
    "OPTIONS /predictions/{model}/{version}": RouteCase(200),
    **{
        f"{method} /{verb}/{{model}}{version}": RouteCase(200, PREDICT)
        for method in ("POST", "PUT")
        for verb in ("predictions", "explanations")
        for version in ("", "/{version}")
    },
    # SageMaker
    "POST /invocations": RouteCase(200, OIP, headers={"x-amzn-sagemaker-target-model": "{model}"}),
    "POST /models/{model}/invoke": RouteCase(200, OIP),
    # Dialects of texts; the model takes none
    "POST /v1/embeddings": RouteCase(404, {"model": "{model}", "input": "a"}),
    **{
        f"POST /v1/{path}": RouteCase(404, {})
        for path in ("chat/completions", "completions", "responses")
    },
    **{
        f"POST {path}": RouteCase(404, {"model": "{model}", "inputs": "a"})
        for path in ("/", "/embed", "/predict")
    },
    "POST /rerank": RouteCase(404, {"model": "{model}", "query": "a", "texts": ["b"]}),
    **{
        f"POST /{api}/rerank": RouteCase(404, {"model": "{model}", "query": "a", "documents": []})
        for api in ("v1", "v2")
    },
    # TensorFlow Serving and KServe
    "GET /v1/models": RouteCase(200),
}
for _version in ("", "/versions/{version}"):
    _path = f"/v2/models/{{model}}{_version}"
    ROUTES |= {f"GET {_path}{end}": RouteCase(200) for end in ("", "/ready", "/config", "/stats")}
    ROUTES[f"GET {_path}/certificate"] = RouteCase(404)
    ROUTES |= {f"POST {_path}/{end}": RouteCase(200, OIP) for end in ("infer", "explain")}
    ROUTES |= {
        f"POST {_path}/{end}": RouteCase(200, {"x": ROWS[0]})
        for end in ("generate", "generate_stream")
    }
for _version in ("", "/versions/{version}", "/labels/{label}"):
    _path = f"/v1/models/{{model}}{_version}"
    ROUTES |= {f"GET {_path}{end}": RouteCase(200) for end in ("", "/metadata")}
    ROUTES |= {f"POST {_path}:{end}": RouteCase(200, PREDICT) for end in ("predict", "explain")}
    ROUTES |= {
        f"POST {_path}:{end}": RouteCase(400, {"examples": []}) for end in ("classify", "regress")
    }
#: Routes besides those of dialects.
VERTEX = {
    "POST /vertex": RouteCase(200, OIP),
    "GET /vertex-health": RouteCase(200),
    "GET /prometheus": RouteCase(200),
}
METRICS_PORT = {
    "GET /metrics": RouteCase(200),
    "GET /monitoring/prometheus/metrics": RouteCase(200),
    "GET /v2/requests": RouteCase(404),
    "GET /v2/quotas": RouteCase(200),
    "POST /v2/models/{model}/infer": RouteCase(200, OIP),
    "POST /v2/repository/models/{model}/unload": RouteCase(200),
    "GET /v2/rollouts": RouteCase(200),
    "POST /v2/rollouts/{model}": RouteCase(400, {}),
    "GET /v2/rollouts/{model}": RouteCase(404),
    "GET /v2/rollouts/{model}/history": RouteCase(200),
    "GET /v2/rollouts/{model}/examples": RouteCase(404),
    "POST /v2/rollouts/{model}/feedback": RouteCase(400, {}),
    **{
        f"POST /v2/rollouts/{{model}}/{command}": RouteCase(404, {})
        for command in ("pause", "resume", "promote", "rollback")
    },
}
#: Probes of the server are open; those of a model need a rule.
OPEN = frozenset(
    {
        "GET /", "GET /ping", "POST /ping", "GET /v2/health/live", "GET /v2/health/ready",
        "GET /vertex-health",
    }
)  # fmt: skip
_VARYING = {"date", "x-request-id"}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[AccessGateway]:
    async with serving(tmp_path, RULES, *CALLERS, allow_client_shm=True) as running:
        yield running


class RouteCaller:
    """Sends requests of all kinds of callers."""

    def __init__(self, gateway: AccessGateway, http: httpx.AsyncClient) -> None:
        self._gateway, self._http = gateway, http

    async def send(
        self, caller: str, route: str, case: RouteCase, model: str = MINE
    ) -> httpx.Response:
        method, path = route.split(" ")
        quoted = quote(model, safe="")
        given = {"model": quoted, "version": "1", "label": "stable", "region": "r"}
        text = path + case.query
        for name, value in given.items():
            text = text.replace(f"{{{name}}}", value)
        headers = {
            name: value.format(model=model, quoted=quoted).encode()
            for name, value in case.headers.items()
        }
        headers |= {name: value.encode() for name, value in self._gateway.headers(caller).items()}
        content = None
        if method in ("POST", "PUT"):
            content = json.dumps(case.body) if case.body is not None else ""
            content = content.replace("{model}", model)
            headers |= {"content-type": b"application/json"} if content else {}
        response = await self._http.request(method, text, content=content, headers=headers)
        if caller == "right" and method in ("POST", "DELETE") and "models" in path:
            manager = self._gateway.server.manager
            if all(state is not VersionState.READY for _, state, _ in manager.states(MINE)):
                await manager.load(MINE)
        return response


def comparable(response: httpx.Response, model: str) -> tuple[int, list[tuple[str, str]], bytes]:
    headers = [(n, v) for n, v in response.headers.multi_items() if n not in _VARYING]
    return response.status_code, headers, response.content.replace(model.encode(), b"NAME")


async def check(caller: RouteCaller, route: str, case: RouteCase) -> None:
    path = route.split(" ")[1]
    for nobody in ("none", "wrong", "expired"):
        response = await caller.send(nobody, route, case)
        opened = nobody == "none" and route in OPEN
        assert response.status_code == (case.right if opened else 401), (route, nobody)
        if not opened:
            assert response.headers["www-authenticate"].startswith("Bearer "), route
    response = await caller.send("idle", route, case)
    assert response.status_code == (case.right if route in OPEN else 403), route
    forbidden = await caller.send("other", route, case)
    if "{model}" in path + case.query + str(dict(case.headers)) + str(case.body):
        unknown = await caller.send("other", route, case, UNKNOWN)
        assert comparable(forbidden, MINE) == comparable(unknown, UNKNOWN), route
        truly_unknown = await caller.send("right", route, case, UNKNOWN)
        assert comparable(truly_unknown, UNKNOWN) == comparable(unknown, UNKNOWN), route
    elif path == "/vertex":
        assert forbidden.status_code == 404
    else:
        assert forbidden.status_code == case.right, route
        assert MINE not in forbidden.text, route
    right = await caller.send("right", route, case)
    assert right.status_code == case.right, (route, right.text)


def routes_of(gateway: AccessGateway) -> set[str]:
    return {
        f"{method} {route.path}"  # type: ignore[attr-defined]
        for route in gateway.server.dialects.application.routes
        for method in route.methods  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("version", ["HTTP/1.1", thorough("HTTP/2")])
async def test_every_route_has_exactly_the_expected_status_for_every_caller(
    gateway: AccessGateway, version: str
) -> None:
    assert routes_of(gateway) == ROUTES.keys()
    second = version == "HTTP/2"
    async with client(gateway.http_url, http1=not second, http2=second) as http:
        for route, case in (ROUTES | VERTEX).items():
            await check(RouteCaller(gateway, http), route, case)


async def test_every_route_of_the_metrics_port_has_exactly_the_expected_status(
    gateway: AccessGateway,
) -> None:
    async with client(gateway.metrics_url) as http:
        for route, case in METRICS_PORT.items():
            await check(RouteCaller(gateway, http), route, case)


async def test_an_encoded_or_redirected_path_is_no_way_around_the_rules(
    gateway: AccessGateway,
) -> None:
    aliases = {
        "POST /v2/models/%6dine/infer": RouteCase(404, OIP),
        "POST /v2/models/mine/versions/01/infer": RouteCase(404, OIP),
        "GET /v2/models/min%65/config": RouteCase(404),
        "POST /V1/MODELS/mine:predict": RouteCase(404, PREDICT),
        "POST /v1/models/%6Dine:predict": RouteCase(404, PREDICT),
        "GET /models/mine/": RouteCase(404),
        "POST /invocations": RouteCase(
            404, OIP, headers={"x-amzn-sagemaker-target-model": "mine.tar.gz"}
        ),
        "POST /vertex": RouteCase(
            404, OIP, headers={"x-vertex-ai-triton-redirect": "v2/models/mine/infer"}
        ),
    }
    async with client(gateway.http_url) as http:
        caller = RouteCaller(gateway, http)
        for route, case in aliases.items():
            assert (await caller.send("other", route, case)).status_code == case.right, route
            assert (await caller.send("none", route, case)).status_code == 401, route
            assert (await caller.send("idle", route, case)).status_code == 403, route
            assert (await caller.send("right", route, case)).status_code == 200, route


async def test_lists_hold_only_what_the_caller_may_see(gateway: AccessGateway) -> None:
    lists = {
        "POST /v2/repository/index": 200,
        "GET /v2/models": 200,
        "GET /v2/models/stats": 200,
        "GET /v1/models": 200,
        "GET /models": 200,
        "GET /prometheus": 200,
    }
    async with client(gateway.http_url) as http:
        caller = RouteCaller(gateway, http)
        for name in ("mine", "yours"):
            infer = ROUTES["POST /v2/models/{model}/infer"]
            await caller.send("right", "POST /v2/models/{model}/infer", infer, name)
        for route, status in lists.items():
            everything = await caller.send("right", route, RouteCase(status))
            assert "mine" in everything.text, route
            assert "yours" in everything.text, route
            some = await caller.send("other", route, RouteCase(status))
            assert "mine" not in some.text, route
            assert "yours" in some.text, route


async def test_a_refusal_has_the_form_of_its_dialect(gateway: AccessGateway) -> None:
    message = "'idle' may not use the operation 'infer'"
    async with client(gateway.http_url) as http:
        caller = RouteCaller(gateway, http)
        for route in ("POST /v2/models/mine/infer", "POST /v1/models/mine:predict"):
            assert (await caller.send("idle", route, RouteCase(403))).json() == {"error": message}
        for status, name, kind in ((403, "idle", "AccessDenied"), (401, "wrong", "InvalidKey")):
            answer = await caller.send(name, "POST /predictions/mine", RouteCase(status))
            document = answer.json()
            assert (document["code"], document["type"]) == (status, f"{kind}Exception")
        wrong = await caller.send("wrong", "GET /v2", RouteCase(401))
        assert wrong.headers["www-authenticate"].endswith('error="invalid_token"')


async def test_the_check_finds_a_gateway_whose_dialects_are_not_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known-bad gateway: it authenticates and knows operations, but not models."""
    monkeypatch.setattr(app, "guard", lambda parts, _: parts)
    async with serving(tmp_path, RULES, *CALLERS) as gateway, client(gateway.http_url) as http:
        for route in ("POST /v2/models/{model}/infer", "GET /models/{model}", "GET /v1/models"):
            with pytest.raises(AssertionError):
                await check(RouteCaller(gateway, http), route, ROUTES[route])


def test_a_route_without_an_operation_is_not_served() -> None:
    framework = FastAPI(openapi_url=None)

    @framework.get("/declared", dependencies=http_operations.METADATA)
    async def declared() -> Response:
        return Response()

    http_operations.check(framework.routes)
    assert operation_of(framework.routes[0]) is Operation.METADATA

    @framework.get("/new")
    async def new() -> Response:
        return Response()

    with pytest.raises(Unsupported, match="the route '/new' declares 0 operations"):
        http_operations.check(framework.routes)
