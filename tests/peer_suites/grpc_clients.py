"""gRPC's own client of server reflection, as ``inside/grpc_reflection_client.py`` calls it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from tests import models
from tests.peer_suites.suite import INSIDE, Bench, Suite, SuiteOutcome, declared_tests

_FILE = "grpc_reflection_client.py"


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted(_FILE):
        return
    root = bench.work / "models"
    models.multiply(root / "x2" / "1" / "model.onnx")
    (root / "x2" / "config.pbtxt").write_text(models.config("x2", ["x FP32 4"], ["y FP32 4"]))
    file = bench.work / "client" / _FILE
    file.parent.mkdir()
    shutil.copy(INSIDE / _FILE, file)
    with bench.gateway(root) as gateway:
        yield from bench.pytest(file, _FILE, environment={"GATEWAY_GRPC": gateway.grpc})


def declared(bench: Bench) -> Iterator[str]:
    yield from declared_tests(INSIDE / _FILE, _FILE)


SUITE = Suite(
    name="grpc",
    title="gRPC's client of server reflection",
    sources=(),
    requirements=("grpcio-reflection==1.81.1", "pytest", "pytest-timeout"),
    run=run,
    declared=declared,
    ours=True,
)
