"""The status of every request about a model, by the state of the model.

``STATUSES`` is the table; ``docs/protocols/index.md`` has it too.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from modelport.gateway.backends import fake
from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import ModelportError, NotFound, Unavailable
from modelport.gateway.models.model import ModelRecord
from tests.gateway.access.gateway import CONFIG, AccessGateway, channel, client, serving
from tests.gateway.access.test_every_method import CALLS, MethodCaller
from tests.gateway.access.test_every_route import (
    CALLERS,
    ROUTES,
    RULES,
    UNKNOWN,
    RouteCaller,
    comparable,
)
from tests.polling import WAIT_SECONDS, until

PAGE = Path(__file__).parents[3] / "docs" / "protocols" / "index.md"
#: Not served and not about to be: clients must not retry.
GONE = ("late", "past", "fail")
#: About to be served, as far as is known: clients may retry.
COMING = ("slow", "wait")


class StatusRow(NamedTuple):
    """The statuses of some requests, for a model that is gone, coming, and served while the
    server ends; ``answers`` if the answer is the state of a version that has one."""

    requests: str
    pattern: str
    gone: str
    coming: str
    ending: str = ""
    answers: bool = False


STATUSES = (
    StatusRow(
        "OIP, KServe v2: `infer`, `generate`, `generate_stream`, `explain`",
        r"POST /v2/models/\{model\}.*/(infer|generate|generate_stream|explain)",
        *("404", "503", "503"),
    ),
    StatusRow(
        "OIP, KServe v2: metadata, `config`, `stats`; `certificate`",
        r"GET /v2/models/\{model\}(/versions/\{version\})?(/config|/stats|/certificate)?",
        *("404", "503"),
    ),
    StatusRow(
        "OIP, KServe v2: `ready`; Triton: `trace/setting`",
        r"GET /v2/models/.*/ready|(GET|POST) /v2/models/.*/trace/setting",
        *("400", "400"),
    ),
    StatusRow(
        "OIP gRPC: `ModelInfer`",
        "inference.GRPCInferenceService/ModelInfer",
        *("NOT_FOUND", "UNAVAILABLE", "UNAVAILABLE"),
    ),
    StatusRow(
        "OIP gRPC: `ModelStreamInfer` (the error is in the response)",
        "inference.GRPCInferenceService/ModelStreamInfer",
        *("OK", "OK", "OK or UNAVAILABLE"),
    ),
    StatusRow(
        "OIP gRPC: `ModelMetadata`, `ModelConfig`, `ModelStatistics`",
        "inference.GRPCInferenceService/Model(Metadata|Config|Statistics)",
        *("NOT_FOUND", "UNAVAILABLE"),
    ),
    StatusRow(
        "OIP gRPC: `ModelReady` (false)", "inference.GRPCInferenceService/ModelReady", "OK", "OK"
    ),
    StatusRow(
        "OIP gRPC: `TraceSetting`",
        "inference.GRPCInferenceService/TraceSetting",
        *("INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ),
    StatusRow(
        "TensorFlow Serving, KServe v1: `predict`, `explain`",
        r"POST /v1/models/\{model\}.*:(predict|explain)",
        *("404", "503", "503"),
    ),
    StatusRow(
        "TensorFlow Serving: `classify`, `regress`, metadata",
        r"POST /v1/models/\{model\}.*:(classify|regress)|GET /v1/models/\{model\}.*/metadata",
        *("404", "503"),
    ),
    StatusRow(
        "TensorFlow Serving, KServe v1: status by label",
        r"GET /v1/models/\{model\}/labels/\{label\}",
        "404",
        "503",
    ),
    StatusRow(
        "TensorFlow Serving, KServe v1: status (200 for a version that was loaded)",
        r"GET /v1/models/\{model\}(/versions/\{version\})?",
        "404",
        "404",
        answers=True,
    ),
    StatusRow(
        "TensorFlow Serving gRPC: `Predict`",
        "tensorflow.serving.PredictionService/Predict",
        *("NOT_FOUND", "UNAVAILABLE", "UNAVAILABLE"),
    ),
    StatusRow(
        "TensorFlow Serving gRPC: `Classify`, `Regress`, `MultiInference`, `GetModelMetadata`",
        "tensorflow.serving.PredictionService/(Classify|Regress|MultiInference|GetModelMetadata)",
        *("NOT_FOUND", "UNAVAILABLE"),
    ),
    StatusRow(
        "TensorFlow Serving gRPC: `GetModelStatus` (OK for a version that was loaded)",
        "tensorflow.serving.ModelService/GetModelStatus",
        "NOT_FOUND",
        "NOT_FOUND",
        answers=True,
    ),
    StatusRow(
        "TorchServe: predictions, explanations",
        r"(POST|PUT) /(predictions|explanations)/\{model\}.*",
        "404",
        "503",
        "503",
    ),
    StatusRow(
        "TorchServe: describe, scale, set the default, unregister",
        r"(GET|PUT|DELETE) /models/\{model\}.*|OPTIONS /predictions/.*",
        "404",
        "503",
    ),
    StatusRow(
        "TorchServe gRPC: `Predictions`, `StreamPredictions`",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService/(Stream)?Predictions",
        *("INTERNAL", "UNAVAILABLE", "UNAVAILABLE"),
    ),
    StatusRow(
        "TorchServe gRPC: `StreamPredictions2` (the error is in the response)",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService/StreamPredictions2",
        *("OK", "OK", "OK or UNAVAILABLE"),
    ),
    StatusRow(
        "TorchServe gRPC: describe, scale, set the default, unregister",
        ".*ManagementAPIsService/(DescribeModel|ScaleWorker|SetDefault|UnregisterModel)",
        *("NOT_FOUND", "UNAVAILABLE"),
    ),
    StatusRow("SageMaker", r"POST /(invocations|models/\{model\}/invoke)", "404", "503", "503"),
    StatusRow("Vertex AI", "POST /vertex", "404", "503", "503"),
)
VERTEX_ROUTE = "POST /vertex"
REDIRECT = {"x-vertex-ai-triton-redirect": "v2/models/{quoted}/infer"}
VERTEX = ROUTES["POST /v2/models/{model}/infer"]._replace(headers=REDIRECT)


def row_of(request: str) -> StatusRow:
    """The one row of a route or a method."""
    (row,) = (row for row in STATUSES if re.fullmatch(row.pattern, request))
    return row


def table() -> str:
    """The table of the page on protocols."""
    lines = ["| request | not served | loading or retried | while the server ends |"]
    lines.append("|---|---|---|---|")
    for row in STATUSES:
        statuses = (row.gone, row.coming, row.ending or "is answered")
        lines.append(f"| {' | '.join((row.requests, *statuses))} |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text()


@asynccontextmanager
async def states(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AccessGateway]:
    """A gateway with a model in each state; ``mine`` is served, and version 1 of ``part`` not."""
    root, gate = folder / "models", threading.Event()
    load = fake.load

    def gated(artifact: Artifact) -> fake.FakeBackend:
        assert artifact.model_name != "slow" or gate.wait(WAIT_SECONDS)
        return load(artifact)

    monkeypatch.setattr(fake, "load", gated)
    for name in ("late", "past", "slow", "fail", "wait", "part"):
        (root / name / "1").mkdir(parents=True)
        text = CONFIG.replace("NAME", name).replace("onnxruntime", "fake")
        (root / name / "config.pbtxt").write_text(text)
    (root / "part" / "2").mkdir()
    (root / "fail" / "config.pbtxt").write_text(CONFIG.replace("NAME", "fail"))
    (root / "fail" / "1" / "model.onnx").write_bytes(b"damaged")
    steps = 'ensemble_scheduling { step { model_name: "fail" model_version: -1 INPUT OUTPUT } }'
    steps = steps.replace("INPUT", 'input_map { key: "x" value: "x" }')
    steps = steps.replace("OUTPUT", 'output_map { key: "y" value: "y" }')
    ensemble = CONFIG.replace("NAME", "wait").replace(
        'backend: "onnxruntime"', f'platform: "ensemble" {steps}'
    )
    (root / "wait" / "config.pbtxt").write_text(ensemble)
    async with serving(folder, RULES, *CALLERS, load_models=("mine", "yours")) as gateway:
        manager = gateway.server.manager
        loading = asyncio.ensure_future(manager.load("slow"))
        await manager.load("past")
        await manager.unload("past")
        await manager.load("part")
        await manager.unload_version("part", 1)
        for name in ("fail", "wait"):
            with suppress(ModelportError):
                await manager.load(name)
        await until(lambda: manager.states("slow") != [])
        try:
            yield gateway
        finally:
            gate.set()
            await loading


class StatusCheck:
    """Every request of the table, and the statuses that differ from it."""

    def __init__(self, gateway: AccessGateway, routes: RouteCaller, methods: MethodCaller) -> None:
        self._routes, self._methods = routes, methods
        self._manager = gateway.server.manager
        self.wrong: list[str] = []

    async def http(self, caller: str, request: str, model: str) -> httpx.Response:
        case = VERTEX if request == VERTEX_ROUTE else ROUTES[request]
        return await self._routes.send(caller, request, case, model)

    def expect(self, request: str, model: str, status: object, expected: str) -> None:
        if str(status) not in expected.split(" or "):
            self.wrong.append(f"{request}, {model}: {status}, not {expected}")

    async def check(self, model: str, expected: str, requests: Sequence[str]) -> None:
        """Check ``requests`` for ``model``; ``expected`` is a column of the table."""
        for request in requests:
            row = row_of(request)
            status = getattr(row, expected)
            answers = row.answers and model != UNKNOWN and self._manager.states(model)
            if request in CALLS:
                message = CALLS[request].message(model)
                found = await self._methods.call("right", request, message, model)
                self.expect(request, model, found.status.name, "OK" if answers else status)
                continue
            response = await self.http("right", request, model)
            self.expect(request, model, response.status_code, "200" if answers else status)
            retried = "retry-after" in response.headers
            if retried != (response.status_code == 503):
                self.wrong.append(f"{request}, {model}: retry-after is {retried}")

    async def check_hidden(self, model: str, requests: Sequence[str]) -> None:
        """Check that a caller without a right to ``model`` cannot tell that there is one."""
        for request in requests:
            if request in CALLS:
                asked = [(CALLS[request].message(name), name) for name in (model, UNKNOWN)]
                found = [await self._methods.call("other", request, *each) for each in asked]
            else:
                names = (model, UNKNOWN)
                both = [await self.http("other", request, name) for name in names]
                found = [comparable(*each) for each in zip(both, names, strict=True)]
            if found[0] != found[1]:
                self.wrong.append(f"{request}: {model} is not hidden")


def requests() -> list[str]:
    """Every route and method about a model, except those that change what is served."""
    routes = [route for route, case in ROUTES.items() if "{model}" in f"{route}{case.headers}"]
    methods = [path for path, case in CALLS.items() if case.message("a") != case.message("b")]
    control = re.compile(r".*/(load|unload)|.*/(RepositoryModel\w+|RegisterModel)")
    return [each for each in (*routes, *methods, VERTEX_ROUTE) if not control.fullmatch(each)]


def of_versions(requests: Sequence[str]) -> list[str]:
    return [each for each in requests if "{version}" in each]


@asynccontextmanager
async def checked(gateway: AccessGateway) -> AsyncIterator[StatusCheck]:
    async with client(gateway.http_url) as http, channel(gateway) as connected:
        callers = RouteCaller(gateway, http), MethodCaller(gateway, connected)
        yield StatusCheck(gateway, *callers)


async def test_every_request_has_the_status_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = requests()
    async with states(tmp_path, monkeypatch) as gateway, checked(gateway) as check:
        for model in GONE:
            await check.check(model, "gone", every)
        for model in COMING:
            await check.check(model, "coming", every)
        await check.check_hidden("slow", every)
        # The status of a version has a row of its own, also once it is unloaded.
        await check.check("part", "gone", of_versions(every))
        assert "\n".join(check.wrong) == ""
        gateway.server.manager.closing.set()
        await check.check("mine", "ending", [each for each in every if row_of(each).ending])
        assert "\n".join(check.wrong) == ""


@pytest.mark.parametrize(
    ("bad", "said"), [(Unavailable, "503, not 404"), (NotFound, "404, not 503")]
)
async def test_the_check_finds_a_gateway_that_makes_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: type[ModelportError], said: str
) -> None:
    """Known-bad gateways: every model that is not served may be retried, or none may."""
    monkeypatch.setattr(ModelRecord, "is_coming", lambda *_: bad is Unavailable)
    async with states(tmp_path, monkeypatch) as gateway, checked(gateway) as check:
        for model, expected in (("late", "gone"), ("wait", "coming")):
            await check.check(model, expected, ["POST /v2/models/{model}/infer"])
        assert [each.rpartition(": ")[2] for each in check.wrong[:1]] == [said]
