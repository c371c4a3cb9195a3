"""Restricted groups of the API, and header fields as parameters of requests."""

from __future__ import annotations

from pathlib import Path

import click
import grpc
import pytest

from modelport.gateway.access.operations import Operation
from modelport.gateway.cli.serve import settings_of
from modelport.gateway.protocols import header_rules
from modelport.gateway.settings import GROUPS, HeaderRules, Restriction
from tests.gateway.access.gateway import channel, client, serving
from tests.gateway.access.test_every_method import CALLS, MethodCaller
from tests.gateway.access.test_every_route import ROUTES, RULES, VERTEX, RouteCaller

#: Each group has a field of its own.
EVERY = HeaderRules({group: Restriction(f"key-{group}", f"value of {group}") for group in GROUPS})
#: Groups by what the last part of a path says; the others are those of their operation.
NAMED = {
    "GET /v2/models/{model}/config": "model-config",
    "GET /v2/models/{model}/versions/{version}/config": "model-config",
    "POST /v2/repository/index": "model-repository",
    "POST /v2/repository/models/{model}/load": "model-repository",
    "GET /v2/health/ready": "health",
    "GET /vertex-health": "health",
    "GET /v2": "metadata",
    "GET /v2/models/stats": "statistics",
    "POST /vertex": "inference",
    "POST /invocations": "inference",
    "POST /v2/models/{model}/generate": "inference",
    "GET /v2/systemsharedmemory/status": "shared-memory",
    "DELETE /models/{model}": "model-repository",
    "inference.GRPCInferenceService/ModelConfig": "model-config",
    "inference.GRPCInferenceService/RepositoryIndex": "model-repository",
    "inference.GRPCInferenceService/ModelStreamInfer": "inference",
    "tensorflow.serving.PredictionService/Predict": "inference",
    "grpc.health.v1.Health/Check": "health",
}


def _named_group(message: str) -> str:
    """The group of the field that a refusal expects."""
    assert "is restricted, expecting header 'key-" in message, message
    return message.partition("expecting header 'key-")[2].partition("'")[0]


async def test_every_route_and_every_method_belongs_to_a_group_and_needs_its_field(
    tmp_path: Path,
) -> None:
    rules = {"http_headers": EVERY, "grpc_headers": EVERY}
    groups: dict[str, str] = {}
    async with serving(tmp_path, RULES, "right", allow_client_shm=True, **rules) as gateway:
        async with client(gateway.http_url) as http:
            caller = RouteCaller(gateway, http)
            for route, case in (ROUTES | VERTEX).items():
                if route in ("GET /prometheus", "OPTIONS /"):  # in no group
                    continue
                refused = await caller.send("right", route, case)
                assert refused.status_code == 403, route
                group = groups[route] = _named_group(refused.text)
                for value, status in ((f"not of {group}", 403), (f"value of {group}", case.right)):
                    told = case._replace(headers={**case.headers, f"key-{group}": value})
                    answer = await caller.send("right", route, told)
                    assert answer.status_code == status, (route, answer.text)
        async with channel(gateway) as connected:
            calls = MethodCaller(gateway, connected)
            for path, case in CALLS.items():
                refused = await calls.call("right", path, case.message("mine"))
                assert refused.status is grpc.StatusCode.UNAVAILABLE, path
                groups[path] = _named_group(refused.details)
    assert {path: groups[path] for path in NAMED} == NAMED


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("health", "not GROUPS:KEY=VALUE"),
        ("health:key", "not GROUPS:KEY=VALUE"),
        ("health:key=", "not GROUPS:KEY=VALUE"),
        ("health:a b=c", "not GROUPS:KEY=VALUE"),
        (":key=value", "unknown restricted {} ''"),
        ("health,model-reposit:key=value", "unknown restricted {} 'model-reposit'; use: health,"),
        ("health,health:a=b", "restricted {} 'health' can not be specified in multiple"),
    ],
)
def test_a_wrong_restriction_is_told_in_one_line(tmp_path: Path, value: str, told: str) -> None:
    for flag, kind in (
        ("--http-restricted-api", "api"),
        ("--grpc-restricted-protocol", "protocol"),
    ):
        with pytest.raises(click.BadParameter) as caught:
            settings_of(["--model-repository", str(tmp_path), flag, value])
        assert told.format(kind) in str(caught.value)


def test_options_become_rules_and_the_field_has_a_prefix_over_grpc(tmp_path: Path) -> None:
    flags = [
        *("--http-restricted-api", "health,metadata:Infer-Key=a=b"),
        *("--grpc-restricted-protocol", "inference:k=v"),
        *("--http-header-forward-pattern", "^x-"),
    ]
    settings = settings_of(["--model-repository", str(tmp_path), *flags])
    restricted = Restriction("infer-key", "a=b")
    assert settings.http_headers.restricted == {"health": restricted, "metadata": restricted}
    field = Restriction("triton-grpc-protocol-k", "v")
    assert settings.grpc_headers == HeaderRules({"inference": field})
    with pytest.raises(click.BadParameter, match="'\\(' is not a regular expression"):
        settings_of(["--model-repository", str(tmp_path), "--grpc-header-forward-pattern", "("])


def test_the_paths_of_trace_and_log_settings_are_groups_of_their_own() -> None:
    for path in ("/v2/trace/setting", "/v2/models/m/trace/setting", "/inference.S/TraceSetting"):
        assert header_rules.group_of(Operation.METADATA, path) == "trace"
    for path in ("/v2/logging", "/inference.S/LogSettings"):
        assert header_rules.group_of(Operation.CONTROL, path) == "logging"
