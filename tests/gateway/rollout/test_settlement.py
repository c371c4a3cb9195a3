"""The outcome of a rollout in the model's configuration, in folders and in object storage."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelport.gateway.errors import Unavailable
from modelport.gateway.repository import config_file
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.version_choice import VersionChoice
from modelport.gateway.rollout import settlement
from modelport.gateway.rollout.plan import RolloutPlan, RolloutSide
from modelport.gateway.rollout.shared_state.state import RolloutPhase, RolloutState
from tests.gateway.models.test_model_control import label
from tests.gateway.repository.storage.moto_server import ENVIRONMENT, Moto

ONLY_1 = "version_policy { specific { versions: 1 } }\n"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moto]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        server = Moto(tmp_path_factory.mktemp("moto") / "log")
        try:
            patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            yield server
        finally:
            server.close()


def folder(root: Path, config: str) -> Path:
    for version in (1, 2):
        (root / f"m/{version}").mkdir(parents=True)
    (root / "m/config.pbtxt").write_text(config)
    return root


def storage(moto: Moto, prefix: str, config: str) -> Location:
    for version in (1, 2):
        moto.put(f"{prefix}/m/{version}/model.onnx", b"x")
    moto.put(f"{prefix}/m/config.pbtxt", config.encode())
    return moto.location(prefix)


def settle(
    repository: Path | Location, phase: RolloutPhase, candidate: str = "m", name: str = ""
) -> str:
    plan = RolloutPlan("0" * 32, "m", RolloutSide("m", 1), RolloutSide(candidate, 2), label=name)
    return settlement.settle([repository], RolloutState(1, plan, "", phase))


def choice(repository: Path | Location) -> VersionChoice:
    found = settlement.find([repository], "m")
    assert found is not None
    return found


@pytest.mark.parametrize("place", ["folder", "object storage"])
def test_a_promotion_moves_the_policy_and_the_label_and_a_rollback_neither(
    tmp_path: Path, moto: Moto, place: str
) -> None:
    config = ONLY_1 + label("stable", 1)
    inside = place == "folder"
    repository = folder(tmp_path, config) if inside else storage(moto, "settled", config)
    assert settle(repository, RolloutPhase.ROLLED_BACK, name="stable") == ""
    assert (choice(repository).allowed(), choice(repository).labels) == ([1], {"stable": "1"})
    for _ in range(2):  # another gateway may do the same
        assert settle(repository, RolloutPhase.PROMOTED, name="stable") == ""
        assert (choice(repository).allowed(), choice(repository).labels) == ([2], {"stable": "2"})


def test_a_rollback_changes_a_policy_that_chooses_the_candidate(tmp_path: Path) -> None:
    repository = folder(tmp_path, "")
    assert settle(repository, RolloutPhase.ROLLED_BACK) == ""
    assert choice(repository).allowed() == [1]


@pytest.mark.parametrize("candidate", ["m", "other"])
def test_a_rollback_keeps_a_baseline_that_the_policy_did_not_choose(
    tmp_path: Path, candidate: str
) -> None:
    """``--baseline`` made it the default, or a newer version was published during the rollout."""
    repository = folder(tmp_path, "")
    (repository / "m/3").mkdir()
    assert choice(repository).allowed() == [3]
    assert settle(repository, RolloutPhase.ROLLED_BACK, candidate) == ""
    assert choice(repository).allowed() == [1]


def test_a_change_of_policy_and_default_is_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two, a gateway that polls would serve the version of the label by default."""
    repository = folder(tmp_path, label("canary", 2))
    written: list[str] = []
    monkeypatch.setattr(config_file, "_write", lambda file, text: written.append(text))
    assert settle(repository, RolloutPhase.ROLLED_BACK) == ""
    assert [("default_version" in text, "1, 2" in text) for text in written] == [(True, True)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_an_outcome_is_settled_later_if_the_disk_is_full_and_never_if_it_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    repository = folder(tmp_path, "")

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(config_file, "_write", fail)
    if number == errno.ENOSPC:
        with pytest.raises(Unavailable, match="cannot be written: no space left"):
            settle(repository, RolloutPhase.ROLLED_BACK)
    else:
        assert "read-only" in settle(repository, RolloutPhase.ROLLED_BACK)
    monkeypatch.undo()
    assert settle(repository, RolloutPhase.ROLLED_BACK) == ""


def test_a_rollback_from_another_model_to_a_route_has_nothing_to_change(tmp_path: Path) -> None:
    assert settle(tmp_path, RolloutPhase.ROLLED_BACK, "other") == ""


def test_what_no_configuration_can_say_stays_unsettled_with_the_reason(tmp_path: Path) -> None:
    repository = folder(tmp_path, ONLY_1)
    assert "another model, 'other'" in settle(repository, RolloutPhase.PROMOTED, "other")
    assert settle(repository, RolloutPhase.ROLLED_BACK, "other") == ""
    assert "no model repository holds 'm'" in settle(tmp_path / "m", RolloutPhase.PROMOTED)
    (repository / "m/config.pbtxt").write_text("version_policy { latest { num_versions: 0x1 } } {")
    assert settle(repository, RolloutPhase.PROMOTED) != ""
