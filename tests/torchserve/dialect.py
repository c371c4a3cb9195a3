"""The gateway's dialect beside the real TorchServe: the same requests, the same answers.

Both serve the same TorchScript models, the gateway with ``--model-control-mode explicit``.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from modelport.exporters.loaded_model import Source
from modelport.loadtests.system.processes import HOST
from tests.server import serving
from tests.torchserve.clients import Ask, callers
from tests.torchserve.comparison import ComparisonRow, inputs_of, wire
from tests.torchserve.server import TorchServePorts

#: Method and path, to the inference or the management API: answered alike, byte for byte.
INFERENCE = (
    *(("GET", "/ping"), ("POST", "/ping"), ("GET", "/predictions")),
    *(("POST", "/predictions/"), ("POST", "/predictions/nope"), ("POST", "/predictions/nope/1")),
    *(("POST", "/predictions/fraud/9"), ("POST", "/predictions/fraud/x")),
)
MANAGEMENT = (
    *(("GET", "/models"), ("GET", "/models?limit=1"), ("GET", "/models?limit=1&next_page_token=1")),
    *(("GET", "/models?limit=x&next_page_token=y"), ("GET", "/models?limit=-1")),
    *(("GET", "/models/nope"), ("GET", "/models/nope/all"), ("GET", "/models/fraud/9")),
    *(("POST", "/models"), ("POST", "/models?url=../x.mar")),
    *(("POST", "/models?url=/x.mar"), ("POST", "/models?url=nope.mar")),
    *(("POST", "/models?url=fraud.mar"), ("PATCH", "/models/fraud"), ("DELETE", "/models/nope")),
    *(("PUT", "/models/fraud"), ("PUT", "/models/fraud?min_worker=1&synchronous=true")),
    *(("PUT", "/models/fraud/1?synchronous=true"), ("PUT", "/models/fraud/9")),
    *(("PUT", "/models/fraud?min_worker=2&max_worker=1"), ("PUT", "/models/nope")),
    *(("PUT", "/models/fraud/1/set-default"), ("PUT", "/models/nope/1/set-default")),
    *(("DELETE", "/models/vit"), ("GET", "/models/vit"), ("DELETE", "/models/vit")),
    *(("POST", "/models?url=vit.mar&initial_workers=1&synchronous=true"), ("GET", "/models")),
)
#: Members of a description that both have, and that are the same.
DESCRIBED = ("modelName", "modelVersion", "modelUrl", "minWorkers", "maxWorkers", "batchSize")
STATUSES = (("nope", "", b"{}"), ("nope", "1", b"{}"), ("fraud", "9", b"{}"))


def check_dialect(
    real: TorchServePorts, repository: Path, found: Mapping[str, Source]
) -> Iterator[ComparisonRow]:
    with serving(repository, "--model-control-mode", "explicit", "--load-model", "*") as gateway:
        http_port, grpc_port = gateway.http_port, gateway.grpc_port
        ours = TorchServePorts(http_port, http_port, grpc_port, grpc_port)
        yield _check_answers(real, ours, found)
        yield _check_statuses(real, ours)
        yield _check_descriptions(real, ours)
        yield _check_exchanges("inference", INFERENCE, real.inference, http_port)
        yield _check_exchanges("management", MANAGEMENT, real.management, http_port)


def _check_answers(
    real: TorchServePorts, ours: TorchServePorts, found: Mapping[str, Source]
) -> ComparisonRow:
    """Every way to ask both, at two sizes: equal bit for bit."""
    check = ComparisonRow("dialect: answers of both, every way of asking, equal to the bit")

    def outputs(ports: TorchServePorts) -> dict[str, Ask]:
        return callers(ports, grpc.insecure_channel(f"{HOST}:{ports.grpc}"))

    theirs, mine = outputs(real), outputs(ours)
    for name in ("fraud", "vit"):
        source = found[name]
        for batch in (1, 3):
            inputs = wire(source.signature.inputs, inputs_of(source, batch, 17, seed=batch))
            for way in theirs:
                expected, got = theirs[way](name, inputs), mine[way](name, inputs)
                check.note(*_difference(f"{name}, {way}", expected, got))
    return check


def _difference(what: str, expected: Any, got: Any) -> tuple[str | None, float]:
    if expected[0] != 200 or got[0] != 200:
        return f"{what}: {expected} and {got}", 0.0
    error = max(float(np.abs(got[1][key] - array).max()) for key, array in expected[1].items())
    same = all(np.array_equal(got[1][key], array) for key, array in expected[1].items())
    return (None if same else f"{what} is off by {error:.1e}"), error


def _check_statuses(real: TorchServePorts, ours: TorchServePorts) -> ComparisonRow:
    check = ComparisonRow("dialect: gRPC statuses and messages of predictions")
    for model, version, body in STATUSES:
        expected, got = (_status(ports, model, version, body) for ports in (real, ours))
        # TorchServe adds the name of its class in a second line.
        same = (expected[0], expected[1].splitlines()[0]) == got
        check.note(None if same else f"{model}/{version}: {expected} and {got}")
    return check


def _status(ports: TorchServePorts, model: str, version: str, body: bytes) -> tuple[str, str]:
    from modelport.gateway.wire.proto import torchserve_inference_pb2 as inference

    message = inference.PredictionsRequest(model_name=model, model_version=version)
    message.input["data"] = body
    with grpc.insecure_channel(f"{HOST}:{ports.grpc}") as channel:
        call = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
        )
        try:
            call(message.SerializeToString(), timeout=30)
        except grpc.RpcError as error:
            return error.code().name, error.details()
    return "OK", ""


def _check_descriptions(real: TorchServePorts, ours: TorchServePorts) -> ComparisonRow:
    check = ComparisonRow("dialect: descriptions")
    for path in ("/models/fraud", "/models/fraud/1", "/models/fraud/all"):
        answers = [_ask(port, "GET", path) for port in (real.management, ours.management)]
        (expected,), (got,) = (json.loads(body) for _, body in answers)
        unknown = got.keys() - expected.keys()
        check.note(f"{path}: TorchServe has no {sorted(unknown)}" if unknown else None)
        for key in DESCRIBED:
            same = got[key] == expected[key]
            check.note(None if same else f"{path}: {key} is {got[key]}, not {expected[key]}")
        workers = [list(row["workers"][0]) for row in (expected, got)]
        missing = set(workers[1]) - set(workers[0])
        check.note(f"{path}: a worker has no {missing}" if missing else None)
    return check


def _check_exchanges(
    what: str, exchanges: tuple[tuple[str, str], ...], real: int, ours: int
) -> ComparisonRow:
    check = ComparisonRow(f"dialect: {len(exchanges)} answers of the {what} API, byte for byte")
    for method, path in exchanges:
        expected, got = _ask(real, method, path), _ask(ours, method, path)
        check.note(None if expected == got else f"{method} {path}: {expected} and {got}")
    return check


def _ask(port: int, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        assert response.headers["x-request-id"], f"{method} {path}: no x-request-id"
        return response.status, body
    finally:
        connection.close()
