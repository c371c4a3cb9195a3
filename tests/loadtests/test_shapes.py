"""Due times of requests, and numbers of active users."""

from __future__ import annotations

import math

import numpy as np
import pytest

from modelport.loadtests.load import load_shapes
from modelport.loadtests.load.samples import LoadProfile


def test_a_constant_rate_is_evenly_spaced_through_warm_up_and_duration() -> None:
    load = LoadProfile(rate=50, duration_seconds=2, warmup_seconds=1)
    due = load_shapes.arrivals(load)
    assert len(due) == 150
    np.testing.assert_allclose(np.diff(due), 1 / 50, rtol=1e-6)


def test_a_ramp_ends_at_its_rate_and_sends_the_area_under_it() -> None:
    load = LoadProfile(shape="ramp", rate=200, duration_seconds=10, warmup_seconds=0)
    due = load_shapes.arrivals(load)
    assert len(due) == pytest.approx(200 * 10 * 0.55, abs=2)
    last = due[due > 9.5]
    assert len(last) == pytest.approx(200 * 0.5 * 0.9775, rel=0.03)


def test_a_spike_is_up_only_in_the_middle_fifth() -> None:
    load = LoadProfile(shape="spike", rate=100, duration_seconds=10, warmup_seconds=0)
    per_second = np.histogram(load_shapes.arrivals(load), bins=10, range=(0, 10))[0]
    assert per_second.tolist() == pytest.approx([20, 20, 20, 20, 100, 100, 20, 20, 20, 20], abs=1)


def test_the_shares_of_several_processes_make_the_whole_and_alternate() -> None:
    load = LoadProfile(rate=90, duration_seconds=2, warmup_seconds=0)
    parts = [load_shapes.arrivals(load, 1 / 3, n / 3) for n in range(3)]
    together = np.sort(np.concatenate(parts))
    np.testing.assert_allclose(together, load_shapes.arrivals(load), atol=1e-9)


def test_a_closed_ramp_adds_users_one_after_the_other() -> None:
    load = LoadProfile(shape="ramp", users=10, duration_seconds=10, warmup_seconds=1)
    counts = [load_shapes.active_users(load, second) for second in range(12)]
    assert counts[0] == counts[1] == 1
    assert counts == sorted(counts)
    assert counts[-1] == 10
    assert load_shapes.next_change(load, 9, 0.0) == pytest.approx(10.0, abs=0.2)


def test_users_that_a_shape_never_starts_wait_forever() -> None:
    load = LoadProfile(shape="spike", users=10, duration_seconds=10, warmup_seconds=0)
    assert load_shapes.next_change(load, 9, 0.0) == pytest.approx(4.0, abs=0.1)
    assert load_shapes.next_change(load, 9, 6.5) == math.inf


def test_an_unknown_shape_is_named() -> None:
    with pytest.raises(ValueError, match="'saw' must be one of constant, ramp, spike, soak"):
        load_shapes.level("saw", 0.5)
