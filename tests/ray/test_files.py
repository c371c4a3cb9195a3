"""The files of ``deploy/ray`` are consistent. `make ray` runs them on a real cluster."""

from __future__ import annotations

import ast
import asyncio
import gzip
import json
import runpy
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import jsonschema
import kubernetes_validate
import numpy as np
import pytest
import yaml

from modelport.gateway.cli.serve import settings_of
from modelport.gateway.protocols.oip.grpc import OipGrpc
from modelport.gateway.repository import routes_file
from modelport.gateway.wire.proto import grpc_service_pb2 as pb
from tests import models
from tests.conformance import wire

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "deploy" / "ray"
MODULE = SOURCE / "modelport_serve.py"
#: The v1 schema of KubeRay 1.7 (ray.io_rayservices.yaml, Apache-2.0): descriptions and status are
#: left out, unknown keys are errors.
SCHEMA = Path(__file__).parent / "rayservice_v1.json.gz"
KUBERNETES = "1.33"


@pytest.fixture(scope="module")
def serve() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((SOURCE / "serve.yaml").read_text())
    return found


@pytest.fixture(scope="module")
def rayservice() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((SOURCE / "rayservice.yaml").read_text()))


@pytest.fixture(scope="module")
def module() -> dict[str, ast.stmt]:
    """Top-level functions, classes and constants of the application by name; Ray is not needed."""
    named: dict[str, ast.stmt] = {}
    for node in ast.parse(MODULE.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            named[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node
    return named


def methods(node: ast.stmt) -> set[str]:
    assert isinstance(node, ast.ClassDef)
    return {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}


def constant(node: ast.stmt) -> Any:
    assert isinstance(node, ast.Assign)
    return ast.literal_eval(node.value)


def wrong(manifest: dict[str, Any]) -> list[str]:
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(manifest)]


def test_the_serve_configuration_names_what_the_application_has(
    serve: dict[str, Any], module: dict[str, ast.stmt]
) -> None:
    (application,) = serve["applications"]  # one: gRPC clients need not name it
    assert application["import_path"] == f"{MODULE.stem}:application"
    (servicer,) = serve["grpc_options"]["grpc_servicer_functions"]
    assert servicer.removeprefix(f"{MODULE.stem}.") in module
    assert "application" in module
    arguments = module["Arguments"]
    assert isinstance(arguments, ast.ClassDef)
    known = {n.target.id for n in arguments.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    assert set(application["args"]) <= known
    router = constant(module["ROUTER"])
    deployments = [each["name"] for each in application["deployments"]]
    assert deployments == [router, *application["args"]["models"]]


def test_every_rpc_of_the_application_is_in_the_gateways_table_and_in_the_router(
    module: dict[str, ast.stmt],
) -> None:
    names = set(constant(module["METHODS"]))
    nothing: Any = Mock()
    (table,) = [
        rows
        for service, rows in OipGrpc(nothing).methods().items()
        if service.startswith("inference.")
    ]
    assert names <= set(table)
    assert {n for n in names if table[n].request_streams or table[n].reply_streams} == set()
    assert names <= methods(module["Router"])


def test_the_gateway_in_front_has_a_route_for_every_model_and_an_endpoint_for_every_router(
    serve: dict[str, Any],
) -> None:
    found = routes_file.load(SOURCE / "routes.toml")
    (application,) = serve["applications"]
    assert set(found) == set(application["args"]["models"])
    router = application["deployments"][0]
    for route in found.values():
        assert (route.backend, route.protocol) == ("triton", routes_file.UpstreamProtocol.GRPC)
        assert len(route.endpoints) == router["num_replicas"]
        ports = {int(endpoint.rpartition(":")[2]) for endpoint in route.endpoints}
        assert ports == {serve["grpc_options"]["port"]}


def test_flags_of_the_replicas_are_those_of_modelport_serve(tmp_path: Path) -> None:
    flags = ["--model-repository", str(tmp_path), "--model-control-mode", "explicit"]
    flags += ["--load-model", "m", "--exit-on-error", "true", "--require-manifest"]
    assert settings_of(flags).load_models == ("m",)


def test_the_ray_service_is_valid_and_serves_the_serve_configuration(
    serve: dict[str, Any], rayservice: list[dict[str, Any]]
) -> None:
    ray, *services = rayservice
    assert wrong(ray) == []
    assert yaml.safe_load(ray["spec"]["serveConfigV2"]) == serve
    cluster = ray["spec"]["rayClusterConfig"]
    groups = cluster["workerGroupSpecs"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert [s["spec"]["selector"]["ray.io/group"] for s in services] == [
        group["groupName"] for group in groups
    ]
    for template in (cluster["headGroupSpec"]["template"], *(g["template"] for g in groups)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        (container,) = template["spec"]["containers"]
        assert container["image"].rpartition(":")[2] == cluster["rayVersion"]
    for service in services:
        kubernetes_validate.validate(service, KUBERNETES, strict=True)
        (port,) = service["spec"]["ports"]
        assert port["port"] == serve["grpc_options"]["port"]


def test_a_misspelt_key_in_the_ray_service_is_found(rayservice: list[dict[str, Any]]) -> None:
    rayservice[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replica"] = 2
    assert any("replica" in message for message in wrong(rayservice[0]))


def test_the_image_holds_the_ray_that_the_project_asks_for(
    rayservice: list[dict[str, Any]],
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["optional-dependencies"]["ray"]
    (requirement,) = (one for one in requirements if one.startswith("ray"))
    version = rayservice[0]["spec"]["rayClusterConfig"]["rayVersion"]
    assert requirement.startswith(f"ray[serve]>={version.rpartition('.')[0]}")
    first = (SOURCE / "Dockerfile").read_text()
    assert f"FROM rayproject/ray:{version}-py311\n" in first
    assert MODULE.name in first


def test_a_replica_answers_by_the_gateways_own_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stand-ins for Ray's modules: its decorators return the class."""

    def decorated(*_: object, **__: object) -> Callable[[type], type]:
        return lambda actor: actor

    stand_ins = {
        "ray": {"serve": SimpleNamespace(deployment=decorated, Application=object)},
        "ray.exceptions": {"RayActorError": OSError},
        "ray.serve": {},
        "ray.serve.exceptions": {"BackPressureError": OSError},
    }
    for name, attributes in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(attributes)
    found = runpy.run_path(str(MODULE))
    models.multiply(tmp_path / "x2" / "1" / "model.onnx")

    async def answer() -> Any:
        replica = object.__new__(found["Model"])
        flags = ["--model-repository", str(tmp_path), "--model-control-mode", "explicit"]
        await replica.__init__("x2", [*flags, "--load-model", "x2"])
        data = np.ones((1, 4), np.float32).tobytes()
        request = wire.message("x2", ("x", "FP32", [1, 4]), raw=[data])
        await replica.check_health()
        messages = dict.fromkeys(found["METHODS"], b"\x0a\x02x2")  # the field of the model's name
        messages |= dict.fromkeys(("ServerLive", "ServerReady", "ServerMetadata"), b"")
        messages["ModelInfer"] = request.SerializeToString()
        answers = {name: await replica.answer(name, sent) for name, sent in messages.items()}
        assert [name for name, (code, text, _) in answers.items() if code or text] == []
        for wrong in ("ModelInfer", "ModelMetadata"):  # one waits for its turn, one does not
            code, text, _ = await replica.answer(wrong, b"\x0a\x02x3")
            assert (code, "'x3'" in text) == (grpc.StatusCode.NOT_FOUND.value[0], True)
        return answers["ModelInfer"][2]

    content = asyncio.run(answer())
    reply = pb.ModelInferResponse.FromString(content)
    assert np.frombuffer(reply.raw_output_contents[0], np.float32).tolist() == [2, 2, 2, 2]
