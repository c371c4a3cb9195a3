"""Models with every name that is one safe component of a path, in every dialect."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.repository import scan
from tests.gateway.access.gateway import CONFIG, AccessGateway, channel, client, serving
from tests.gateway.access.test_every_method import CALLS, MethodCaller
from tests.gateway.access.test_every_route import CALLERS, ROUTES, RULES, RouteCaller
from tests.gateway.access.test_model_states import VERTEX, VERTEX_ROUTE, requests
from tests.models import multiply

SOME = ("a,b", "q\"'<&>{}:;@~[1]*?#!$|^`=%2e")
MORE = ("my model", "a+b", "modèle", "mode\u0300le", "-x", "3", "模" * 85)
#: Routes after which the model is served no more.
_ENDING = re.compile("DELETE .*|.*/UnregisterModel")


def publish(root: Path, name: str) -> None:
    """Publish a model that explains itself."""
    multiply(root / name / "1" / "model.onnx", 2.0)
    escaped = name.replace('"', '\\"')
    (root / name / "config.pbtxt").write_text(CONFIG.replace("NAME", escaped))


async def failures(gateway: AccessGateway, name: str) -> list[str]:
    """The requests about the model that are not answered as those about any other."""
    wrong = []
    async with client(gateway.http_url) as http, channel(gateway) as connected:
        routes, methods = RouteCaller(gateway, http), MethodCaller(gateway, connected)
        for request in requests():
            if _ENDING.fullmatch(request):
                continue
            found: Any
            if request in CALLS:
                case = CALLS[request]
                found = (await methods.call("right", request, case.message(name), name)).status
                expected: Any = case.right
            else:
                route = VERTEX if request == VERTEX_ROUTE else ROUTES[request]
                found = (await routes.send("right", request, route, name)).status_code
                expected = route.right
            if found != expected:
                wrong.append(f"{request}, {name}: {found}")
        (lines,) = [(await http.get("/prometheus", headers=gateway.headers("right"))).text]
        label = name.replace('"', '\\"')
        if f'nv_inference_request_success{{model="{label}",version="1"}}' not in lines:
            wrong.append(f"no metric of {name}")
    return wrong


async def check(folder: Path, *names: str) -> None:
    for name in names:
        publish(folder / "models", name)
    async with serving(folder, RULES, *CALLERS) as gateway:
        assert {*names} <= {row["name"] for row in gateway.server.manager.index(ready_only=True)}
        assert [wrong for name in names for wrong in await failures(gateway, name)] == []


async def test_every_dialect_has_a_model_of_an_odd_name(tmp_path: Path) -> None:
    await check(tmp_path, *SOME)


@pytest.mark.thorough
async def test_every_dialect_has_a_model_of_any_name(tmp_path: Path) -> None:
    await check(tmp_path, *MORE)


async def test_the_check_finds_a_gateway_that_passes_names_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A known-bad gateway: names are those of Python's variables."""
    monkeypatch.setattr(scan, "is_model_name", str.isidentifier)
    with pytest.raises(AssertionError):
        await check(tmp_path, SOME[0])
