"""KServe's own clients of v1 and v2, unmodified, as ``inside/kserve_client.py`` calls them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from tests import models
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import INSIDE, Bench, Suite, SuiteOutcome, declared_tests

KSERVE = PinnedSource("kserve/kserve", "aaac4e294dae2c7b1aa1886447793f3aa1c30912")

_FILE = "kserve_client.py"
_EXPLAINER = 'parameters { key: "explainer" value { string_value: "x10" } }'


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    if not bench.wanted(_FILE):
        return
    root = bench.work / "models"
    models.multiply(root / "x10" / "1" / "model.onnx", factor=10.0)
    models.multiply(root / "x2" / "1" / "model.onnx")
    text = models.config("x2", ["x FP32 4"], ["y FP32 4"], extra=_EXPLAINER)
    (root / "x2" / "config.pbtxt").write_text(text)
    file = bench.work / "client" / _FILE
    file.parent.mkdir()
    shutil.copy(INSIDE / _FILE, file)
    with bench.gateway(root) as gateway:
        addresses = {"KSERVE_REST": gateway.http, "KSERVE_GRPC": gateway.grpc}
        yield from bench.pytest(file, _FILE, environment=addresses)


def declared(bench: Bench) -> Iterator[str]:
    yield from declared_tests(INSIDE / _FILE, _FILE)


SUITE = Suite(
    name="kserve",
    title="KServe's clients",
    sources=(KSERVE,),
    requirements=("kserve==0.21.0", "pytest", "pytest-timeout"),
    run=run,
    declared=declared,
    ours=True,
)
