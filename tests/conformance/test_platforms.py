"""SageMaker and Vertex AI, as Triton offers their container contracts; and every route there is."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest
from PIL import Image

from modelport.gateway.cli.serve import settings_of
from tests import models
from tests.conformance import wire
from tests.conformance.repository import add
from tests.conformance.wire import HEADER_LENGTH, WireReply, json_body, json_input
from tests.server import Gateway, serving

ROW = json_body(json_input("x", "FP32", [1, 4], [1, 2, 3, 4]))
PREDICT, HEALTH = "/v1/endpoints/1/deployedModels/2:predict", "/v1/endpoints/1/deployedModels/2"
REDIRECT = "X-Vertex-Ai-Triton-Redirect"
VERTEX = {"AIP_MODE": "PREDICTION", "AIP_PREDICT_ROUTE": PREDICT, "AIP_HEALTH_ROUTE": HEALTH}


def build(root: Path) -> Path:
    models.repository(root)
    logits = 'parameters { key: "classification.y" value { string_value: "logits" } }'
    extra = models.PICTURES + logits
    text = models.config("picture", ["x FP32 3,2,2"], ["y FP32 12"], extra=extra)
    models.flatten(add(root, "picture", text))
    return root


@contextlib.contextmanager
def serving_with(environment: dict[str, str], root: Path, *flags: str) -> Iterator[Gateway]:
    with contextlib.ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            gateway = stack.enter_context(serving(root, *flags))
        yield gateway


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two models and no default; Vertex's routes, whose environment is the platform's."""
    root = build(tmp_path_factory.mktemp("platforms") / "models")
    with serving_with(VERTEX, root, "--vertex-ai-default-model", "x2") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = build(tmp_path_factory.mktemp("default") / "models")
    with serving_with({"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "x2"}, root) as gateway:
        yield gateway


def binary() -> tuple[bytes, int, bytes]:
    """A body, the size of its JSON part, and what the bytes of ``y`` are."""
    row = np.arange(4, dtype="<f4")
    head = json_body(
        json_input("x", "FP32", [1, 4], binary_data_size=row.nbytes),
        parameters={"binary_data_output": True},
    )
    return head + row.tobytes(), len(head), (2 * row).tobytes()


def outputs(reply: WireReply, prefix: str) -> bytes:
    """``y``'s bytes in a reply whose content type says where they begin."""
    kind = reply.headers["content-type"]
    assert kind.startswith(f"{prefix};json-header-size=")
    headers = {HEADER_LENGTH.lower(): kind.partition("=")[2]}
    assert headers.items() <= reply.headers.items()
    return wire.binary_outputs(WireReply(reply.status, headers, reply.body))["y"][2]


# -- SageMaker ------------------------------------------------------------------------------------


def test_invocations_takes_json_bytes_and_pictures(default: Gateway) -> None:
    def invoke(body: bytes, kind: str, path: str = "/invocations") -> WireReply:
        return wire.send(default.http, "POST", path, body, {"Content-Type": kind})

    assert invoke(ROW, "application/json").json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert invoke(b'{"instances": [[1, 2, 3, 4]]}', "application/json").json == {
        "predictions": [[2, 4, 6, 8]]
    }
    body, length, expected = binary()
    prefix = "application/vnd.sagemaker-triton.binary+json"
    reply = invoke(body, f"{prefix};json-header-size={length}")
    assert outputs(reply, prefix) == expected
    stream = io.BytesIO()
    Image.new("RGB", (2, 2), (255, 0, 0)).save(stream, "PNG")
    for kind in ("image/png", "application/x-image", "application/octet-stream"):
        found = invoke(stream.getvalue(), kind, "/models/picture/invoke")
        assert list(found.json) == ["0", "1", "2", "3", "4"]
    assert wire.send(default.http, "GET", "/ping").status == 200


def test_the_target_model_s_header_names_the_model(several: Gateway) -> None:
    for name in ("x2", "x2.tar.gz"):
        headers = {"X-Amzn-SageMaker-Target-Model": name}
        reply = wire.send(several.http, "POST", "/invocations", ROW, headers)
        assert reply.json["model_name"] == "x2"
    reply = wire.send(several.http, "POST", "/models/x2/invoke", ROW)
    assert reply.json["model_name"] == "x2"


@pytest.mark.parametrize(
    ("path", "headers", "status", "message"),
    [
        ("/invocations", {}, 400, "2 models are served; name the default one with SAGEMAKER_"),
        ("/invocations", {"X-Amzn-SageMaker-Target-Model": "nope"}, 404, "'nope' is not found"),
        ("/invocations", {"X-Amzn-SageMaker-Target-Model": "../x2"}, 404, "is not found"),
        ("/models/nope/invoke", {}, 404, "'nope' is not found"),
        ("/models/x2/invoke", {"Content-Type": "SIZE-1"}, 400, "should be in range (0, "),
        ("/models/x2/invoke", {"Content-Type": "SIZE99999"}, 400, "should be in range (0, "),
        ("/models/x2/invoke", {"Content-Type": "SIZEa"}, 400, "should be in range (0, "),
        ("/models/x2/invoke", {"Content-Type": "x; SIZE5"}, 400, "expect MIME type for binary"),
    ],
)
def test_errors_of_sagemaker(
    several: Gateway, path: str, headers: dict[str, str], status: int, message: str
) -> None:
    size = "application/vnd.sagemaker-triton.binary+json;json-header-size="
    sent = {name: value.replace("SIZE", size) for name, value in headers.items()}
    reply = wire.send(several.http, "POST", path, ROW, sent)
    assert reply.status == status
    assert message in reply.json["error"]


def test_the_only_model_is_the_default(tmp_path: Path) -> None:
    models.multiply(add(tmp_path, "x2", models.X2_CONFIG))
    with serving(tmp_path) as gateway:
        reply = wire.send(gateway.http, "POST", "/invocations", ROW)
    assert reply.json["model_name"] == "x2"


def test_sagemaker_and_vertex_are_off_where_they_are_not_allowed(tmp_path: Path) -> None:
    models.multiply(add(tmp_path, "x2", models.X2_CONFIG))
    with serving(tmp_path, "--allow-sagemaker", "false") as gateway:
        for path in ("/invocations", "/models/x2/invoke", PREDICT):
            reply = wire.send(gateway.http, "POST", path, ROW)
            assert reply.status in (400, 404, 405), path
            assert b"outputs" not in reply.body
        assert wire.send(gateway.http, "GET", HEALTH).status == 404


# -- Vertex AI ------------------------------------------------------------------------------------


def vertex(gateway: Gateway, body: bytes, kind: str = "", redirect: str = "") -> WireReply:
    headers = {"Content-Type": kind} if kind else {}
    if redirect:
        headers[REDIRECT] = redirect
    return wire.send(gateway.http, "POST", PREDICT, body, headers)


def test_vertex_routes_are_where_the_platform_says(several: Gateway) -> None:
    health = wire.send(several.http, "GET", HEALTH)
    assert (health.status, health.body) == (200, b"")
    assert wire.send(several.http, "POST", HEALTH).status == 405
    assert wire.send(several.http, "GET", PREDICT).status == 405
    assert vertex(several, ROW).json["outputs"][0]["data"] == [2, 4, 6, 8]
    assert vertex(several, b'{"instances": [[1, 2, 3, 4]], "parameters": {}}').json == {
        "predictions": [[2, 4, 6, 8]]
    }
    body, length, expected = binary()
    prefix = "application/vnd.vertex-ai-triton.binary+json"
    reply = vertex(several, body, f"{prefix};json-header-size={length}")
    assert outputs(reply, prefix) == expected
    assert vertex(several, b"{").status == 400


@pytest.mark.parametrize(
    ("redirect", "part"),
    [
        ("v2/models/x2/infer", b'"outputs"'),
        ("v2/models/x2/versions/1/infer", b'"outputs"'),
        ("v2/models/x2", b'"platform"'),
        ("v2/models/x2/config", b'"max_batch_size"'),
        ("v2/models/x2/stats", b'"model_stats"'),
        ("v2/models/stats", b'"model_stats"'),
        ("v2/models/x2/ready", b""),
        ("v2/health/live", b""),
        ("v2/health/ready", b""),
        ("v2", b'"extensions"'),
    ],
)
def test_a_redirect_reaches_what_reads_and_infers(
    several: Gateway, redirect: str, part: bytes
) -> None:
    reply = vertex(several, ROW, redirect=redirect)
    assert reply.status == 200, reply.body
    assert part in reply.body
    index = vertex(several, b"", redirect="v2/repository/index")
    assert {row["name"] for row in index.json} == {"x2", "picture"}


@pytest.mark.parametrize(
    "redirect",
    [
        "metrics",
        "v2/repository/models/x2/load",
        "v2/repository/models/x2/unload",
        "v2/logging",
        "v2/trace/setting",
        "v2/models/x2/trace/setting",
        "v2/systemsharedmemory/region/a/register",
        "v2/systemsharedmemory/status",
        "models?url=x2",
        "predictions/x2",
        "invocations",
        "openapi.json",
        "docs",
        "v2/models/../repository/models/x2/load",
        "v2/models/x2%2f..%2f..%2frepository/infer",
        "v2/models/x2/infer?x=1",
        "/v2",
        "//v2",
        "v2/",
        "http://example.com/v2",
        PREDICT[1:],
        " ",
    ],
)
def test_a_redirect_reaches_nothing_else(several: Gateway, redirect: str) -> None:
    reply = vertex(several, ROW, redirect=redirect)
    assert reply.status in (403, 404), (reply.status, reply.body)
    assert wire.send(several.http, "GET", "/v2/models/x2/ready").status == 200


def test_two_redirects_are_none(several: Gateway) -> None:
    headers = [(REDIRECT, "v2"), (REDIRECT, "v2/models/x2")]
    assert wire.send(several.http, "POST", PREDICT, ROW, headers).status == 403


def test_vertex_without_its_routes_is_one_clear_line(tmp_path: Path) -> None:
    models.repository(tmp_path)
    command = [sys.executable, "-m", "modelport", "serve", "--model-repository", str(tmp_path)]
    done = subprocess.run(
        [*command, "--allow-vertex-ai", "true"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "AIP_PREDICT_ROUTE is not a path" in done.stderr


# -- every route ----------------------------------------------------------------------------------

#: What each first segment of a path belongs to. A route that is not here has to be put here.
OWNERS = {
    "": "the description, OPTIONS only; Text Embeddings Inference",
    "api-description": "TorchServe's description",
    "docs": "the description",
    "invocations": "SageMaker",
    "models": "TorchServe's management, SageMaker's multi-model endpoints",
    "openapi.json": "the description",
    "ping": "TorchServe's and SageMaker's health",
    **dict.fromkeys(("embed", "predict", "rerank"), "Text Embeddings Inference"),
    "explanations": "TorchServe",
    "predictions": "TorchServe",
    "v1": "TensorFlow Serving",
    "v2": "the Open Inference Protocol",
}
#: Those that change what is served: everywhere but in explicit mode they refuse.
CHANGES = {
    ("POST", "/v2/repository/models/{model}/load"),
    ("POST", "/v2/repository/models/{model}/unload"),
    ("POST", "/models"),
    ("PUT", "/models/{model}/{version}/set-default"),
    ("DELETE", "/models/{model}"),
    ("DELETE", "/models/{model}/{version}"),
}


def test_every_route_is_known_and_those_that_change_anything_are_refused(several: Gateway) -> None:
    document = json.loads(wire.send(several.http, "GET", "/openapi.json").body)
    routes = {
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    }
    assert {path.split("/")[1] for _, path in routes} <= OWNERS.keys()
    assert routes >= CHANGES
    for method, path in sorted(CHANGES):
        real = path.replace("{model}", "x2").replace("{version}", "1")
        query = "?url=x2" if path == "/models" else ""
        reply = wire.send(several.http, method, real + query)
        assert reply.status in (405, 503), (method, path, reply.body)
    served = wire.send(several.http, "POST", "/v2/models/x2/infer", ROW)
    assert served.json["model_version"] == "1"


@pytest.mark.parametrize(
    ("kind", "media_type", "start"),
    [
        ("generate", "application/json", b'{"model_name":"echo","model_version":"1","y":'),
        ("generate_stream", "text/event-stream; charset=utf-8", b"data: {"),
    ],
)
def test_sagemaker_generates_where_its_variable_says_so(
    tmp_path: Path, kind: str, media_type: str, start: bytes
) -> None:
    models.fake(tmp_path, "echo", "FP32", "4")
    variables = {"SAGEMAKER_TRITON_INFERENCE_TYPE": kind}
    with serving_with(variables, tmp_path) as gateway:
        reply = wire.send(gateway.http, "POST", "/invocations", b'{"x": [1, 2, 3, 4]}')
        assert (reply.status, reply.headers["content-type"]) == (200, media_type)
        assert reply.body.startswith(start)
        invoked = wire.send(gateway.http, "POST", "/models/echo/invoke", ROW)
        assert b'"outputs"' in invoked.body  # this path is that of multi-model endpoints


def test_an_unknown_form_of_sagemaker_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAGEMAKER_TRITON_INFERENCE_TYPE", "chat")
    with pytest.raises(click.UsageError, match="is 'chat'; it must be one of: infer, generate, "):
        settings_of(["--model-repository", str(tmp_path)])


@pytest.mark.parametrize(
    ("variables", "port"),
    [
        ({}, 8000),
        ({"SAGEMAKER_TRITON_INFERENCE_TYPE": "infer"}, 8000),  # anybody may want this form
        ({"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m"}, 8080),
        ({"SAGEMAKER_MULTI_MODEL": "false"}, 8080),
        ({"SAGEMAKER_BIND_TO_PORT": "8009"}, 8009),
        ({"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "m", "SAGEMAKER_BIND_TO_PORT": "8009"}, 8009),
        (VERTEX, 8080),
        ({**VERTEX, "AIP_HTTP_PORT": "5234"}, 5234),
        ({"AIP_HTTP_PORT": "5234"}, 8000),
    ],
)
def test_the_port_is_the_platforms_unless_one_is_given(
    variables: dict[str, str], port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    repository = ["--model-repository", str(tmp_path)]
    assert settings_of(repository).http_port == port
    assert settings_of([*repository, "--http-port", "9"]).http_port == 9


def test_an_error_on_a_path_that_a_dialect_has_too_is_vertex_s(tmp_path: Path) -> None:
    """``/predict`` is one of Text Embeddings Inference, whose errors have status 413."""
    models.fake(tmp_path, "echo", "FP32", "4")
    size = "application/vnd.vertex-ai-triton.binary+json;json-header-size=99999"
    with serving_with({**VERTEX, "AIP_PREDICT_ROUTE": "/predict"}, tmp_path) as gateway:
        reply = wire.send(gateway.http, "POST", "/predict", ROW, {"Content-Type": size})
    assert reply.status == 400
    assert "should be in range (0, " in reply.json["error"]
