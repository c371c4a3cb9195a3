"""TorchServe's Postman collection of its management API, request by request.

The collection has one request, and one assertion: its status is the one that the row of
``management_data.json`` names, else 200. Archives are models of the repository here, of the
archives' names.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import models
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench, Suite, SuiteOutcome, SuiteVerdict, of_changed, reason_of

TORCHSERVE = PinnedSource("pytorch/serve", "62c4d6a1fdc1d071dbcf758ebd756029af20bd5e")

_POSTMAN = "test/postman"
_FILE = "management_data.json"
_SECONDS = 30.0
#: The archives that the collection registers.
_ARCHIVES = ("squeezenet1_1", "mnist", "densenet161", "resnet-18", "resnet-152-batch")
_STAGED = (
    "needs archives of trained weights, which no package index has; it passes with ONNX models of "
    "their names"
)
_HANDLERS = "handlers, which are Python code of an archive"
_DOWNLOADS = "archives are not fetched from URLs"
_WORKFLOWS = "TorchServe's workflows (graphs here are pipelines, and Triton's ensembles)"
_WEIGHTS = "needs trained weights, which are not public on any package index"
#: Their weights are in TorchServe's repository, and the answer is the handler's.
_MNIST = (10, 11)
NOT_APPLICABLE = {
    f"{_FILE}::04": _WEIGHTS,
    **{f"workflow_data.json::{row:02}": _WEIGHTS for row in (1, 3, 4, 5, 10, 11)},
    "workflow_inference_data.json": _WEIGHTS,
    **{f"inference_data.json::{row:02}": _WEIGHTS for row in range(1, 100) if row not in _MNIST},
    "kf_inference_data.json": _WEIGHTS,
    "kfv2_inference_data.json": _WEIGHTS,
    "large_model_inference_data.json": _WEIGHTS,
}
NOT_SUPPORTED = {
    **{f"{_FILE}::{row:02}": _HANDLERS for row in (*range(8, 13), 29, 30)},
    **{f"inference_data.json::{row:02}": _HANDLERS for row in _MNIST},
    "inference_stream_data.json": _HANDLERS,
    "inference_stream2_data.json": _HANDLERS,
    "explanation_data.json": _HANDLERS,
    f"{_FILE}::58": _DOWNLOADS,
    "workflow_data.json": _WORKFLOWS,
}

EXPECTED_FAILURES = {
    f"{_FILE}::68": "a served model keeps at least one worker",
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
    for name in _ARCHIVES:
        models.multiply(root / name / "1" / "model.onnx")
    with bench.gateway(root, "--model-control-mode", "explicit") as gateway:
        connection = http.client.HTTPConnection(gateway.http, timeout=_SECONDS)
        for test, row in rows(bench):
            if reason := reason_of(test, NOT_APPLICABLE):
                yield SuiteOutcome(test, SuiteVerdict.NOT_APPLICABLE, reason)
                continue
            if reason_of(test, NOT_SUPPORTED) == _HANDLERS:
                yield SuiteOutcome(test, SuiteVerdict.NOT_SUPPORTED, _HANDLERS)
                continue
            # Node's HTTP client, which Postman's runner uses, sends methods in capitals.
            connection.request(row["METHOD"].upper(), "/" + _path(row["path"]))
            response = connection.getresponse()
            said, wanted = response.read().decode(), row.get("status_code", 200)
            if response.status != wanted:
                told = f"{response.status}, not {wanted}: {said}"
                yield SuiteOutcome(test, SuiteVerdict.FAIL, told)
            elif any(name in row["path"] for name in _NAMED):
                yield SuiteOutcome(test, of_changed(_STAGED), _STAGED)
            else:
                yield SuiteOutcome(test, SuiteVerdict.PASS)
        connection.close()


#: Models of archives, under all their names, as paths have them.
_NAMED = (
    *(f"{{mar_path_{name}}}" for name in _ARCHIVES),
    *(f"models/{name}" for name in (*_ARCHIVES, "resnet152")),
)


def _path(path: str) -> str:
    for archive in _ARCHIVES:
        path = path.replace(f"{{{{mar_path_{archive}}}}}", f"{archive}.mar")
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
    not_supported=NOT_SUPPORTED,
    expected_failures=EXPECTED_FAILURES,
    declared=declared,
)
