"""The Open Inference Protocol's own REST document and proto."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from tests import models
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import INSIDE, Bench, Suite, SuiteOutcome

OIP = PinnedSource("kserve/open-inference-protocol", "d49cc23f89d709d87b210ef9449e273ae243984e")
_PYTEST = ("pytest", "pytest-timeout")


def _repository(bench: Bench) -> Path:
    root = bench.work / "models"
    models.repository(root)
    return root


def run(bench: Bench) -> Iterator[SuiteOutcome]:
    file = Path(shutil.copy(INSIDE / "oip_specification.py", bench.work))
    documents = bench.source(OIP) / "specification" / "protocol"
    with bench.gateway(_repository(bench)):
        yield from bench.pytest(file, "specification", environment={"OIP": str(documents)})


SUITE = Suite(
    name="oip",
    title="Open Inference Protocol: its REST document and proto",
    sources=(OIP,),
    requirements=("grpcio-tools==1.76.0", "jsonschema", "pyyaml", "requests", *_PYTEST),
    run=run,
    ours=True,
)
