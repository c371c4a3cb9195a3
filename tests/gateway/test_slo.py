"""slo.toml is read strictly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway import slo
from modelport.gateway.cli.rollout_options import settings_of
from modelport.gateway.errors import InvalidArgument, UsageError
from modelport.gateway.rollout.plan import RolloutLimits, RolloutPlan
from modelport.loadtests.load.target import LoadTestProtocol

EXAMPLE = Path(__file__).parents[2] / "docs" / "slo.toml"


def test_an_empty_file_sets_every_default(tmp_path: Path) -> None:
    (tmp_path / "slo.toml").write_text("")
    found = slo.read(tmp_path / "slo.toml")
    assert found == slo.Slo()
    assert found.regressions.max_p99_regression == 0.05
    assert found.said == frozenset()


def test_the_example_says_every_key_and_the_defaults() -> None:
    found = slo.read(EXAMPLE)
    text = EXAMPLE.read_text()
    for section in dataclasses.fields(slo.Slo):
        if section.name == "said":
            continue
        kind: Any = section.default_factory
        for key in dataclasses.fields(kind):
            assert f"\n{key.name} =" in text or f"\n# {key.name} =" in text, key.name
            line = next(line for line in text.splitlines() if f"{key.name} =" in line)
            if "example" not in line and not line.startswith("#"):
                default = getattr(getattr(slo.Slo(), section.name), key.name)
                assert getattr(getattr(found, section.name), key.name) == default, key.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\np99 = 5", r"unknown key 'p99' in \[limits\]; its keys are p50_ms, p99_ms"),
        ("[limit]\np99_ms = 5", r"unknown table \[limit\]; there are \[limits\], \[regressions\]"),
        ("p99_ms = 5", "unknown key 'p99_ms'"),
        ("limits = 5", r"must be a table, \[limits\]"),
        ("[limits]\np99_ms = nan", "limits.p99_ms = nan must be a number above 0"),
        ("[limits]\np99_ms = inf", "limits.p99_ms = inf must be"),
        ("[limits]\np99_ms = 0", "limits.p99_ms = 0 must be a number above 0, or false"),
        ("[limits]\np99_ms = '5'", "limits.p99_ms = '5' must be"),
        ("[limits]\np99_ms = true", "limits.p99_ms = true must be"),
        ("[limits]\nmax_error_share = 1.5", "at least 0, at most 1"),
        ("[regressions]\nmax_p99_regression = -0.1", "at least 0, at most 10"),
        ("[verdict]\nconfidence = 1", "at most 0.9999"),
        ("[verdict]\nconfidence = false", "verdict.confidence = false must be"),
        ("[load]\nusers = 1.5", "a whole number of at least 1"),
        ("[load]\nusers = true", "a whole number of at least 1"),
        ("[load]\nusers = 1000000", "a whole number of at least 1, at most 10000"),
        ("[load]\nrate_per_second = 1e9", "a number above 0, at most 1e\\+06"),
        ("[load]\nprotocol = 'http'", "must be one of oip-http, oip-http2, oip-http-binary"),
        ("[certificate]\ncheckpoint_sha256 = 'abc'", "64 hexadecimal digits"),
        ("[certificate]\npublic_keys = 'a.pub'", "a list of files"),
        ("[rollout]\nmin_requests = 0", "rollout.min_requests = 0 must be a whole number"),
        ("[rollout]\nsteps = 3", "unknown key 'steps' in"),
        ("[regressions]\nmax_error_ratio = -1", "at least 0, at most 1000"),
        ("[answers]\natol = -1", "answers.atol = -1 must be"),
        ("[limits", "is not TOML"),
        ("[limits]\np99_ms = 1\np99_ms = 2", "is not TOML"),
    ],
)
def test_what_no_gate_understands_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=said) as raised:
        slo.read(path)
    assert str(path) in str(raised.value)


def test_the_protocols_of_a_load_are_those_of_the_load_tests() -> None:
    assert list(slo.LOAD_PROTOCOLS) == list(LoadTestProtocol)


def test_gate_and_rollout_read_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text(
        """
        [limits]
        p99_ms = 25
        max_error_share = 0.01
        cold_start_seconds = 20 # of the gate only
        [regressions]
        max_p50_regression = false
        max_error_ratio = 2
        [verdict]
        confidence = 0.99
        [load]
        users = 4
        [answers]
        max_disagreement = 0.05
        atol = 1e-4
        [rollout]
        min_requests = 5
        """
    )
    found = settings_of(slo.read(path))
    assert RolloutLimits(**found.pop("limits")) == RolloutLimits(
        confidence=0.99,
        p99_ms=25,
        max_error_share=0.01,
        max_p50_regression=None,
        max_error_ratio=2,
        max_disagreement=0.05,
        atol=1e-4,
    )
    assert found == {"min_requests": 5}


def test_without_a_file_a_rollout_has_its_own_defaults() -> None:
    assert settings_of(slo.Slo()) == {"limits": {}}
    known = {each.name: each.default for each in dataclasses.fields(RolloutPlan)}
    for key, value in dataclasses.asdict(slo.RolloutSettings()).items():
        assert known[key] == value, key


def test_every_limit_of_a_rollout_is_a_key_of_the_file_with_the_same_default() -> None:
    """An error share has a default in the gate only: an outage hits a rollout's baseline, too."""
    tables = (slo.AbsoluteLimits(), slo.Regressions(), slo.VerdictSettings(), slo.Answers())
    found = {key: value for each in tables for key, value in dataclasses.asdict(each).items()}
    for limit in dataclasses.fields(RolloutLimits):
        if limit.name not in ("atol", "rtol", "max_error_share"):
            assert found[limit.name] == limit.default, limit.name
        assert limit.name in found


def test_a_limit_that_no_rollout_can_test_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="max_error_share is a share"):
        RolloutLimits(**settings_of(slo.parse({"limits": {"max_error_share": 1}}))["limits"])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        slo.read(tmp_path / "none.toml")


def test_false_switches_a_criterion_off(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text("[regressions]\nmax_p99_regression = false\n[limits]\np50_ms = false")
    found = slo.read(path)
    assert found.regressions.max_p99_regression is None
    assert found.limits.p50_ms is None
    assert found.said == {"regressions.max_p99_regression", "limits.p50_ms"}


def test_keys_lie_relative_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text("[certificate]\npublic_keys = ['release.pub', '/etc/other.pub']")
    keys = slo.read(path).certificate.public_keys
    assert keys == (tmp_path / "release.pub", Path("/etc/other.pub"))


def test_numbers_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "slo.toml"
    path.write_text("[limits]\np99_ms = 25\n[load]\nprotocol = 'oip-grpc'\nrate_per_second = 50")
    found = slo.read(path)
    assert found.limits.p99_ms == 25.0
    assert math.isclose(found.load.rate_per_second or 0, 50.0)
    assert found.load.protocol == LoadTestProtocol.OIP_GRPC
