"""The console on the metrics port: its files and their policy, and the API that it reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
import pytest_asyncio
from click.testing import CliRunner

from modelport import cli
from modelport.gateway.server.admin import console_page, metrics_port
from modelport.gateway.settings import AccessLogSettings
from tests import models
from tests.gateway.access import gateway as guarded
from tests.gateway.telemetry.observed_gateway import OIP, ObservedGateway, lines, serving
from tests.polling import until

#: References of a page, a module or a style sheet to other files.
REFERENCE = re.compile(r"""(?:href=|src=|from |import\()"([^"#]+)"|(?<!\w)url\(([^)]*)\)""")
#: Ways in which a text becomes markup, a script or a style.
SINK = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc"
    r"|setAttribute\(.style|<script>|\son\w+=\"|\sstyle=|localStorage|sessionStorage"
)
MOST_BYTES = 300_000
RULES = """
[[rules]]
principals = ["right"]
operations = "*"

[[rules]]
principals = ["other"]
operations = "*"
models = ["yours"]

[[rules]]
principals = ["reader"]
operations = ["metadata", "statistics", "metrics"]

[[quotas]]
principals = ["other"]
in_flight = 7

"""


@pytest_asyncio.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[ObservedGateway]:
    root = models.repository(tmp_path / "models")
    (root / "broken").mkdir()
    models.fake(root, "late", "FP32", "4", delay_seconds="30")
    async with serving(root, access_log=AccessLogSettings(str(tmp_path / "log"))) as found:
        found.http.base_url = f"http://127.0.0.1:{found.server.ports.metrics_port}"
        yield found


def missing(page: str, files: Mapping[str, str]) -> list[str]:
    """The references from ``page`` on, by path, that are to no file or leave the console."""
    left, seen, found = [page], set[str](), list[str]()
    while left:
        path = left.pop()
        seen.add(path)
        for match in REFERENCE.finditer(files[path]):
            reference = match[1] or match[2]
            target = urljoin(path, reference)
            if ":" in reference or reference.startswith("/") or target not in files:
                found.append(f"{path} needs {reference}")
            elif target not in seen:
                left.append(target)
    return found + [f"nothing needs {path}" for path in files if path not in seen]


async def test_the_page_needs_only_its_own_files_which_are_small_and_have_the_policy(
    gateway: ObservedGateway,
) -> None:
    names = [file.name for file in console_page.FOLDER.iterdir() if file.name != "index.html"]
    files = {}
    for path in ("/console", *(f"/console/{name}" for name in names)):
        reply = await gateway.http.get(path)
        assert reply.status_code == 200
        assert reply.headers["content-security-policy"] == console_page.POLICY.decode()
        assert reply.headers["x-content-type-options"] == "nosniff"
        files[path] = reply.text
    assert sum(map(len, files.values())) <= MOST_BYTES
    assert missing("/console", files) == []
    assert [path for path, text in files.items() if SINK.search(text)] == []
    slash = await gateway.http.get("/console/")
    assert (slash.status_code, slash.headers["location"]) == (308, "../console")
    assert (await gateway.http.post("/console")).status_code == 404


def test_the_policy_allows_no_script_or_style_within_the_page_and_no_other_server() -> None:
    directives = dict(part.split(maxsplit=1) for part in console_page.POLICY.decode().split("; "))
    assert directives["default-src"] == directives["frame-ancestors"] == "'none'"
    for name in ("script-src", "style-src", "connect-src"):
        assert directives[name] == "'self'"
    assert directives["require-trusted-types-for"] == "'script'"


@pytest.mark.parametrize(
    "bad",
    [
        '<script src="https://cdn.example/x.js"></script>', '<link href="/console/app.js">',
        'import { h } from "./absent.js";', "a { background: url(//evil.example/x) }",
    ],
)  # fmt: skip
def test_a_file_that_is_absent_or_elsewhere_is_found(bad: str) -> None:
    assert len(missing("/console", {"/console": bad})) == 1


@pytest.mark.parametrize(
    "bad",
    ["a.innerHTML = name", '<p onclick="x()">', "<p style='x'>", "localStorage.key = token"],
)
def test_code_that_makes_markup_of_text_is_found(bad: str) -> None:
    assert SINK.search(bad)


async def test_the_api_of_the_http_port_is_on_the_metrics_port_and_seen_in_the_access_log(
    gateway: ObservedGateway, tmp_path: Path
) -> None:
    reply = await gateway.infer("x2", **{"x-request-id": "mine"})
    assert reply.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
    assert (await gateway.infer("absent")).status_code == 404
    rows = (await gateway.http.post("/v2/repository/index")).json()
    assert {row["name"] for row in rows} == {"x2", "broken", "late"}
    await lines(tmp_path / "log", 2)
    kept = (await gateway.http.get("/v2/requests")).json()
    assert [row["request_id"] for row in kept["requests"]][1] == "mine"
    assert [row["status"] for row in kept["notable"]] == [404]
    assert kept["requests"][1]["request_bytes"] == len(reply.request.content)
    evil = {"origin": "https://evil.example"}
    unload = await gateway.http.post("/v2/repository/models/x2/unload", headers=evil)
    assert unload.status_code == 403


async def test_a_client_that_leaves_is_logged_as_one(
    gateway: ObservedGateway, tmp_path: Path
) -> None:
    asking = asyncio.create_task(gateway.infer("late"))
    statistics = gateway.server.manager.get("late", 0).statistics
    await until(lambda: statistics.pending)
    asking.cancel()
    (line,) = await lines(tmp_path / "log", 1)
    assert (line["status"], line["error"]) == (499, "the client has disconnected")


async def test_requests_to_slow_models_leave_connections_for_the_metrics(
    gateway: ObservedGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_port, "CONNECTIONS", 4)
    statistics = gateway.server.manager.get("late", 0).statistics
    asking = [asyncio.create_task(gateway.infer("late")) for _ in range(2)]
    await until(lambda: statistics.pending == 2)
    busy = await gateway.infer("late")
    assert (busy.status_code, busy.json()["error"]) == (429, metrics_port.BUSY)
    assert (await gateway.http.get("/metrics")).status_code == 200
    for each in asking:
        each.cancel()
    await until(lambda: not statistics.pending)
    assert (await gateway.infer("x2")).status_code == 200


async def test_metrics_of_one_model_leave_out_the_counters_of_others(
    gateway: ObservedGateway,
) -> None:
    text = (await gateway.http.get("/metrics")).text
    assert text.count('nv_inference_count{model="x2"') == 1
    one = (await gateway.http.get("/metrics?model=x2")).text
    assert text.count("_bucket") == 2 * one.count("_bucket") > 0  # there are two models
    others = (await gateway.http.get("/metrics?model=")).text
    assert "nv_inference_count{" not in others
    assert 'modelport_model_versions{model="x2"' in others


@pytest.mark.parametrize(
    ("address", "allowed", "status"),
    [("127.0.0.1", False, 404), ("0.0.0.0", None, 404), ("0.0.0.0", True, 200)],
)
async def test_without_a_console_the_metrics_port_has_neither_page_nor_api(
    tmp_path: Path, address: str, allowed: bool | None, status: int
) -> None:
    """And a network that may read the metrics gets no control that it did not have."""
    settings: Any = {"metrics_address": address, "allow_console": allowed}
    async with serving(models.repository(tmp_path), **settings) as gateway:
        gateway.http.base_url = f"http://127.0.0.1:{gateway.server.ports.metrics_port}"
        for path in ("/console", "/console/app.js", "/v2"):
            assert (await gateway.http.get(path)).status_code == status
        assert (await gateway.http.get("/metrics")).status_code == 200


async def test_the_files_need_no_credential_and_what_they_show_needs_the_right_one(
    tmp_path: Path,
) -> None:
    log = AccessLogSettings(str(tmp_path / "log"))
    callers = ("right", "other", "reader")
    async with (
        guarded.serving(tmp_path, RULES, *callers, access_log=log) as running,
        guarded.client(running.metrics_url) as http,
    ):

        async def get(path: str, caller: str) -> httpx.Response:
            return await http.get(path, headers=running.headers(caller))

        assert (await get("/console", "none")).status_code == 200
        assert (await get("/console/app.js", "none")).status_code == 200
        assert (await get("/v2/models/stats", "none")).status_code == 401
        for model in ("mine", "yours"):
            path = f"/v2/models/{model}/infer"
            await http.post(path, json=OIP, headers=running.headers("right"))
        await lines(tmp_path / "log", 2)
        seen = {
            caller: (await get("/v2/requests", caller)).json()["requests"]
            for caller in ("right", "other")
        }
        assert [row["model"] for row in seen["right"]] == ["yours", "mine"]
        assert [row["model"] for row in seen["other"]] == ["yours"]
        assert seen["right"][0]["caller"] == "right"
        assert (await get("/v2/requests", "reader")).status_code == 403
        assert [each["in_flight"] for each in (await get("/v2/quotas", "other")).json()] == [7]
        unload = "/v2/repository/models/mine/unload"
        assert (await http.post(unload, headers=running.headers("reader"))).status_code == 403


async def test_top_shows_models_with_states_and_rates_once(gateway: ObservedGateway) -> None:
    async def ask() -> None:
        while True:
            await gateway.infer("x2")

    asking = asyncio.create_task(ask())
    command = ["top", str(gateway.http.base_url), "--once", "--interval", "0.2"]
    result = await asyncio.to_thread(CliRunner().invoke, cli.modelport, command)
    asking.cancel()
    assert result.exit_code == 0, result.output
    head, titles, *rows = result.output.splitlines()
    assert "0 of 1 workers ready" in head
    assert titles.split()[:5] == ["model", "version", "state", "req/s", "errors/s"]
    first = rows[0].split()
    assert first[:3] == ["x2", "1", "READY"]
    assert float(first[3]) > 0
    assert first[6] in ("µs", "ms", "s")
    assert "broken" in rows[1]
    assert "\x1b" not in result.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["http://127.0.0.1:1", "--once"], "no gateway responds at http://127.0.0.1:1"),
        (["http://:80", "--once"], "URL 'http://:80' is not http://HOST:PORT"),
        ([], "the output is not a terminal; use --once"),
    ],
)
def test_top_says_in_one_line_what_is_wrong(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(cli.modelport, ["top", *arguments])
    assert result.exit_code != 0
    (line,) = result.output.splitlines()
    assert reason in line
