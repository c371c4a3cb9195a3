"""The simulated gates are loaded as the real ones are, and are no quieter than they."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from modelport.loadtests.gate.criteria import PairedRound
from tests.loadtests.gating import simulation
from tests.loadtests.gating.simulation import (
    IDENTICAL,
    ROUGH,
    SHARED,
    WRONG,
    Loading,
    Machine,
    Release,
)


def spread(rounds: list[PairedRound], q: float) -> float:
    """The standard deviation of the logarithm of one round's ratio of quantiles."""
    each = [
        np.log(np.quantile(one.candidate.latencies_ms, q))
        - np.log(np.quantile(one.baseline.latencies_ms, q))
        for one in rounds
    ]
    return float(np.std(each))


def simulated(machine: Machine, loading: Loading, count: int = 60) -> list[PairedRound]:
    stream = simulation.simulated(machine, loading, np.random.default_rng(0))
    return list(itertools.islice(stream, count))


def test_sides_take_turns_request_by_request_or_slice_by_slice() -> None:
    text = {
        (loading, number): "".join("AB"[side] for side in simulation.order(loading, 8, number))
        for loading in Loading
        for number in (0, 1)
    }
    assert text == {
        (Loading.TURNS, 0): "ABBAABBA",
        (Loading.TURNS, 1): "BAABBAAB",
        (Loading.SLICES, 0): "AABBBBAA",
        (Loading.SLICES, 1): "BBAAAABB",
    }


@pytest.mark.parametrize("machine", [SHARED, ROUGH], ids=lambda machine: machine.name)
def test_alternating_requests_share_the_noise_of_the_machine(machine: Machine) -> None:
    turns, slices = (simulated(machine, loading) for loading in (Loading.TURNS, Loading.SLICES))
    for q in (0.5, 0.99):
        assert spread(turns, q) < spread(slices, q)


@pytest.mark.parametrize("q", [0.5, 0.99])
def test_real_gates_were_no_rougher_than_the_simulated_rough_machine(q: float) -> None:
    """They ran on two cores that others used as well."""
    real = spread(list(simulation.read(simulation.RECORDED)), q)
    assert 0 < real < spread(simulated(ROUGH, Loading.TURNS), q)


def test_a_release_is_what_it_says_and_nothing_else() -> None:
    identical = simulated(SHARED, Loading.TURNS, 2)
    slower = simulation.released(identical, Release(tail=1.15, cold=1.5), seed=0)
    for before, after in zip(identical, slower, strict=True):
        assert after.baseline is before.baseline
        ratio = after.candidate.latencies_ms / before.candidate.latencies_ms
        assert sorted(set(np.round(ratio, 9))) == [1.0, 1.15]
        assert np.mean(ratio > 1) == pytest.approx(0.03, abs=0.001)
        assert after.candidate.first_response_seconds == pytest.approx(
            1.5 * (before.candidate.first_response_seconds or 0)
        )
        assert after.candidate.wrong == 0
    (wrong, *_) = simulation.released(identical, WRONG, seed=0)
    assert 0 < wrong.candidate.wrong < 0.03 * wrong.candidate.asked
    assert simulation.released(identical, IDENTICAL, seed=0)[0].candidate.wrong == 0
