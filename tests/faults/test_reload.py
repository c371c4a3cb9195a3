"""Reload under load: no request fails, and every answer is from exactly one version."""

from __future__ import annotations

import os
import shutil
import time
from functools import partial
from pathlib import Path

import pytest

from tests.faults import probes
from tests.faults.ledger import parameter, recorded
from tests.faults.probes import EXPLICIT, POLL, ChangingRepository
from tests.faults.traffic import RequestOutcome, TrafficClient, failures, flowing, kinds
from tests.polling import eventually
from tests.server import Gateway, serving
from tests.thorough import thorough

RELOADS = int(os.environ.get("MODELPORT_RELOADS", "10"))
FACTORS = (2.0, 3.0)


@pytest.mark.parametrize("delay", [thorough(0.0), 0.01], ids=["inline", "in flight"])
def test_reloading_in_place_under_load_fails_no_request_and_mixes_no_answer(
    delay: float, repository: ChangingRepository, tmp_path: Path
) -> None:
    """With a delay each client has a request in flight on the content that is taken away."""
    config = parameter("delay_seconds", delay) if delay else ""
    repository.version(FACTORS[0], 1, backend="ledger" if delay else "onnxruntime", config=config)
    flags = (*EXPLICIT, "--load-model", "m")
    with recorded(repository.root, tmp_path / "ledger", *flags) as (gateway, _):
        with flowing(gateway, FACTORS) as traffic:
            eventually(lambda: traffic.each_has(5), "traffic flows")
            for turn in range(1, RELOADS + 1):
                factor = FACTORS[turn % 2]
                exchange(repository, factor)
                assert probes.load(gateway).status_code == 200
                # Whoever asks after the load has answered gets the new content.
                loaded = time.monotonic()
                assert probes.answer(gateway) == ("1", factor)
                enough = partial(traffic.each_has, 1, factor, loaded)
                eventually(enough, f"answers times {factor}")
        outcomes = traffic.outcomes
        assert failures(outcomes) == []
        assert {outcome.factor for outcome in outcomes} == set(FACTORS)
        assert len(outcomes) >= 4 * RELOADS
        assert gateway.terminate() == 0
        gateway.wait_for("stopped")
        reloads = [e for e in gateway.logs if e.get("event") == "model version is ready"]
        assert len(reloads) == RELOADS + 1


def exchange(repository: ChangingRepository, factor: float) -> None:
    """Put another content in version 1's place: the folders change names, as a publisher does."""
    fresh = repository.version(factor, 1, model=".fresh")
    old = repository.root / "m" / "1"
    away = repository.root / ".old"
    old.rename(away)
    fresh.rename(old)
    shutil.rmtree(away)


def becomes(gateway: Gateway, number: int, state: str) -> None:
    eventually(lambda: probes.state(gateway, number) == state, f"version {number} {state}")


def test_new_versions_on_a_poll_under_load_fail_no_request(repository: ChangingRepository) -> None:
    repository.version(FACTORS[0], 1)
    with serving(repository.root, *POLL) as gateway:
        with flowing(gateway, FACTORS) as traffic:
            eventually(lambda: traffic.each_has(5), "traffic flows")
            for number in range(2, 10):
                factor = FACTORS[(number + 1) % 2]
                repository.version(factor, number)
                becomes(gateway, number, "READY")
                assert probes.answer(gateway) == (str(number), factor)
                if number % 3 == 0:  # and one that is bad, in between
                    bad = repository.version(5.0, 100 + number, model=".bad")
                    probes.flip(bad / "model.onnx")
                    bad.rename(repository.root / "m" / str(100 + number))
                    shutil.rmtree(repository.root / ".bad")
                    becomes(gateway, 100 + number, "UNAVAILABLE")
        assert failures(traffic.outcomes) == []
        assert {outcome.factor for outcome in traffic.outcomes} == set(FACTORS)


@pytest.mark.parametrize("protocol", ["http", thorough("grpc")])
def test_the_check_sees_the_gap_that_unload_and_load_leaves(
    protocol: str, repository: ChangingRepository
) -> None:
    """The known-bad way to change a version: clients must be seen failing."""
    repository.version(2.0, 1)
    with serving(repository.root, *EXPLICIT, "--load-model", "m") as gateway:
        with flowing(gateway, FACTORS, [protocol]) as traffic:
            eventually(lambda: traffic.each_has(5), "traffic flows")
            assert probes.unload(gateway).status_code == 200
            eventually(lambda: failures(traffic.outcomes), "failures")
            assert probes.load(gateway).status_code == 200
            done = time.monotonic()
            eventually(lambda: traffic.each_has(1, after=done), "traffic flows again")
        assert kinds(traffic.outcomes)["lost"] > 0
        assert kinds(traffic.outcomes).keys() - {"refused"} == {"answered", "lost"}


def test_the_check_sees_an_answer_of_two_versions_or_of_another_request() -> None:
    client = TrafficClient(None, "c", FACTORS, None, False)  # type: ignore[arg-type]  # asks nothing

    def judge(answered: str, data: list[float]) -> RequestOutcome:
        return client.judge("c-1", answered, 1.0, data)

    assert judge("c-1", [2.0] * 8).kind == "answered"
    assert judge("c-1", [2.0] * 4 + [3.0] * 4).kind == "wrong"
    assert judge("c-1", [5.0] * 8).kind == "wrong"
    assert judge("c-1", [2.0] * 7).kind == "wrong"
    assert judge("c-2", [2.0] * 8).kind == "wrong"
