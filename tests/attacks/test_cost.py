"""No request costs more than its bytes deserve: a sample of ``cost.py``, and a decoder it catches.

``make attacks-cost`` sends all of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.attacks import cost
from tests.attacks.cost import Attack, Meter, Probe
from tests.server import serving

SITE = Path(__file__).parent / "cost_site"
#: What a decoder that parses at once, on the event loop, is caught by.
TELLING = "POST /v2/models/open/infer"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return cost.repository(tmp_path / "models")


def test_a_sample_of_every_route_and_method_keeps_the_rule(repository: Path) -> None:
    with serving(repository, "--http-max-input-size", str(cost.MAX_INPUT_BYTES)) as gateway:
        paths = {path for _, path in cost.routes(gateway)}
        assert {"/v2/models/{model}/infer", "/v1/models/{model}:predict"} <= paths
        assert {name for _, name, _ in cost.methods()} >= {"ModelInfer", "Predict", "Predictions"}
        _, found = cost.findings(gateway, 60, seed=0)
    assert found == []


def test_a_decoder_that_parses_at_once_is_caught(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SITE}{os.pathsep}{Path(__file__).parents[2]}")
    with serving(repository, "--http-max-input-size", str(cost.MAX_INPUT_BYTES)) as gateway:
        probe, meter = Probe(gateway), Meter(gateway.process.pid)
        wanted = ("oip of fractions, 8000000 bytes, identity", "oip of rows, 8000000 bytes, gzip")
        attacks: list[Attack] = [
            attack
            for attack in cost.http_attacks(gateway)
            if attack.name.startswith(TELLING) and attack.name.endswith(wanted)
        ]
        try:
            found = [cost.broken(a, cost.measured(gateway, meter, probe, a)) for a in attacks * 2]
        finally:
            probe.close()
    assert len(attacks) == 2
    assert any("everybody else waited" in each for wrong in found for each in wrong), found
    assert any("MB for" in each for wrong in found for each in wrong), found
