"""TorchServe's Postman collection of its management API, request by request.

The collection has one request, and one assertion: its status is the one that the row of
``management_data.json`` names, else 200. Archives are models of the repository here, under the
names that the collection registers them by.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import models
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench, Suite, SuiteOutcome, SuiteVerdict, reason_of

TORCHSERVE = PinnedSource("pytorch/serve", "62c4d6a1fdc1d071dbcf758ebd756029af20bd5e")

_POSTMAN = "test/postman"
_FILE = "management_data.json"
_SECONDS = 30.0
#: What the collection registers, by the name of its archive.
_MODELS = {
    "squeezenet1_1": "squeezenet1_1",
    "mnist": "mnist",
    "densenet161": "densenet161",
    "resnet-18": "resnet-18",
    "resnet-152-batch": "resnet152",
}
_HANDLERS = "handlers are Python of an archive: none is run"
_DOWNLOADS = "archives are never fetched: models come from the repository"
_WORKERS = "the number of workers is a model's instance_group, which no request changes"
NOT_APPLICABLE = {
    f"{_FILE}::04": _DOWNLOADS,
    f"{_FILE}::11": _HANDLERS,
    "inference_data.json": "torchvision's trained weights, which are downloaded",
    "kf_inference_data.json": "weights of its examples; tests/conformance/test_kserve_v1.py",
    "kfv2_inference_data.json": "weights of its examples, and a handler's own names of inputs",
    f"{_FILE}::58": _DOWNLOADS,
    "inference_stream_data.json": "a handler's own stream of text",
    "inference_stream2_data.json": "a handler's own stream of text",
    "large_model_inference_data.json": "torchvision's trained weights, which are downloaded",
    "explanation_data.json": "Captum in a handler; here the parameter 'explainer' names a model",
    "workflow_data.json": "workflows are ensembles here",
    "workflow_inference_data.json": "workflows are ensembles here",
}

EXPECTED_FAILURES = {
    f"{_FILE}::57": "the method 'post' is refused: methods are in capitals (RFC 9110, 9.1)",
    f"{_FILE}::68": f"{_WORKERS}, and not to 0 of a model that serves",
    f"{_FILE}::69": "an error of the client is 400 here, not 500",
}


def rows(bench: Bench) -> list[tuple[str, dict[str, Any]]]:
    """Every request with the id of its test: its place, and its name."""
    found: list[dict[str, Any]] = json.loads(
        (bench.source(TORCHSERVE) / _POSTMAN / _FILE).read_text()
    )
    return [(f"{_FILE}::{place:02} {row['test']}", row) for place, row in enumerate(found, 1)]


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted(_FILE):
        return
    root = bench.work / "models"
    for name in _MODELS.values():
        models.multiply(root / name / "1" / "model.onnx")
    with bench.gateway(root, "--model-control-mode", "explicit") as gateway:
        connection = http.client.HTTPConnection(gateway.http, timeout=_SECONDS)
        for test, row in rows(bench):
            reason = reason_of(test, NOT_APPLICABLE)
            if reason:
                yield SuiteOutcome(test, SuiteVerdict.NOT_APPLICABLE, reason)
                continue
            connection.request(row["METHOD"], "/" + _path(row["path"]))
            response = connection.getresponse()
            said, wanted = response.read().decode(), row.get("status_code", 200)
            passed = response.status == wanted
            told = f"{response.status}, not {wanted}: {said}"
            yield SuiteOutcome(
                test, *((SuiteVerdict.PASS,) if passed else (SuiteVerdict.FAIL, told))
            )
        connection.close()


def _path(path: str) -> str:
    for archive, name in _MODELS.items():
        path = path.replace(f"{{{{mar_path_{archive}}}}}", f"{name}.mar")
    return path


def declared(bench: Bench) -> Iterator[str]:
    yield from (test for test, _ in rows(bench))
    for file in sorted((bench.source(TORCHSERVE) / _POSTMAN).glob("*_data.json")):
        if file.name != _FILE:
            yield from _others(file)


def _others(file: Path) -> Iterator[str]:
    for place, row in enumerate(json.loads(file.read_text()), 1):
        yield f"{file.name}::{place:02} {row.get('model_name') or row.get('test', '')}".strip()


SUITE = Suite(
    name="torchserve",
    title="TorchServe's Postman collections",
    sources=(TORCHSERVE,),
    requirements=("pip",),
    run=run,
    not_applicable=NOT_APPLICABLE,
    expected_failures=EXPECTED_FAILURES,
    declared=declared,
)
