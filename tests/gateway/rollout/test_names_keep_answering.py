"""Each name that answered before a promotion, a rollback, an undo or a restart still answers.

A name is the default, a label, or the number of a version that the policy names. The walks start
from every combination of policies and labels, and go through real rollouts: the service, the
controller with its state in a folder, the configuration, and a model manager.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository.version_choice import VersionChoice
from modelport.gateway.rollout.controller import RolloutController
from modelport.gateway.rollout.process_group import ProcessGroup, ThisProcess
from modelport.gateway.rollout.rollout_service import RolloutService
from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.shared_state.state_store import RolloutStore
from modelport.gateway.rollout.shared_state.transitions import RolloutCommand
from modelport.gateway.rollout.traffic.participant import RolloutParticipant
from modelport.gateway.rollout.traffic.rollouts import Rollouts
from tests.gateway.models.managers import World
from tests.gateway.models.test_model_control import label

VERSIONS = (1, 2, 3, 4)
LATEST = "version_policy { latest { num_versions: %d } }"
SPECIFIC = "version_policy { specific { versions: [ %s ] } }"
POLICIES = (
    LATEST % 1,
    LATEST % 3,
    "version_policy { all {} }",
    *(SPECIFIC % each for each in ("1", "3", "1, 3", "2, 4", "1, 2, 3")),
)
LABELS: tuple[dict[str, int], ...] = (
    {}, {"stable": 1}, {"stable": 3}, {"stable": 1, "canary": 3}, {"stable": 2, "canary": 4},
    {"stable": 3, "canary": 3}, {"stable": 1, "canary": 4},
)  # fmt: skip
STARTS = tuple(itertools.product(POLICIES, LABELS))
#: Walks of the default suite, and of the known-bad variant.
WALKS, BAD_WALKS = 3, 12
#: The versions by the names that answer: the default is "", and a label begins with "@".
Names = dict[str, int]


class Walk:
    """A gateway whose model's versions are chosen by rollouts, one after the other."""

    def __init__(self, root: Path) -> None:
        self.world = World(root)

    @property
    def choice(self) -> VersionChoice:
        return VersionChoice.of_folder(self.world.root / "m")

    @property
    def text(self) -> str:
        return (self.world.root / "m/config.pbtxt").read_text()

    async def begin(self) -> None:
        """Start the gateway, or start it again."""
        self.manager = manager = ModelManager(
            self.world.settings(), self.world.find, find_versions=self.world.find_versions
        )
        participant = RolloutParticipant(manager, Rollouts(InferenceService(manager)))
        group = ProcessGroup(ThisProcess(participant), [self.world.root])
        store = RolloutStore(RolloutFiles(self.world.root, 30.0))
        self.controller = RolloutController(store, group)
        self.service = RolloutService(self.controller, group)
        await self.controller.begin()
        await manager.start()
        participant.loaded()

    async def end(self) -> None:
        await self.controller.stop()
        await self.manager.stop()

    def names(self) -> Names:
        manager = self.manager
        labels = {f"@{each}": number for each, number in manager.labels("m").items()}
        numbers = {str(number): number for number in manager.versions("m")}
        return {"": manager.get("m").number, **labels, **numbers}

    async def roll_out(
        self, candidate: int, name: str, command: RolloutCommand, **rest: Any
    ) -> None:
        """A rollout with one step, which ends by a person's command."""
        body = {"candidate": str(candidate), "label": name, "steps": [1.0], **rest}
        await self.service.start("m", orjson.dumps(body))
        await self.service.command("m", command, b"")
        for _ in range(1000):
            await self.controller.follow()
            status = self.controller.status("m")
            if status["settled"] and not self.manager.held.names():
                break
            await asyncio.sleep(0.001)
        assert (status["settled"], status["unsettled_reason"]) == (True, "")

    async def undo(self) -> None:
        """Carry out the command that the refusal of a rollback proposes."""
        with pytest.raises(InvalidArgument) as refused:
            await self.service.command("m", RolloutCommand.ROLLBACK, b"")
        (proposed,) = re.findall(r"`(modelport rollout start .*)`", str(refused.value))
        words = shlex.split(proposed)
        options = dict(zip(words[4::2], words[5::2], strict=True))
        await self.roll_out(
            int(options["--candidate"]), options.get("--label", ""), RolloutCommand.PROMOTE
        )


def expected(
    before: Names, candidate: int, name: str, command: RolloutCommand, *, follows_newest: bool
) -> Names:
    """The names that must answer after a rollout, and the versions that they must mean."""
    baseline = before[f"@{name}" if name else ""]
    promoted = command is RolloutCommand.PROMOTE
    winner, loser = (candidate, baseline) if promoted else (baseline, candidate)
    names = dict(before)
    if name:
        names[f"@{name}"] = winner
    if before[""] == baseline:
        names[""] = winner
    named = {number for each, number in names.items() if not each.isdigit()}
    for number in VERSIONS:  # a number ends with its version, and "latest" with the newest place
        gone = number == loser or (follows_newest and number > winner)
        if gone and number not in named:
            names.pop(str(number), None)
    return names


async def take(walk: Walk, policy: str, labels: Names, rng: random.Random) -> list[str]:
    """Take a walk; return its violations."""
    config = policy + "".join(label(name, version) for name, version in labels.items())
    walk.world.publish(*VERSIONS, config=config)
    await walk.begin()
    found, said = [], [f"{policy} {labels}"]

    def check(wanted: Names) -> None:
        after = walk.names()
        lost = {
            name: (version, after.get(name))
            for name, version in wanted.items()
            if after.get(name) != version
        }
        if lost:
            found.append(f"{'; '.join(said)}: {lost}")

    for _ in range(3):
        before = walk.names()
        name = rng.choice(["", *(each[1:] for each in before if each.startswith("@"))])
        baseline = before[f"@{name}" if name else ""]
        candidate = rng.choice([each for each in VERSIONS if each != baseline])
        command = rng.choice([RolloutCommand.PROMOTE, RolloutCommand.ROLLBACK])
        said.append(f"{command} {candidate} for '{name}'")
        latest = "latest" in walk.text
        await walk.roll_out(candidate, name, command)
        check(expected(before, candidate, name, command, follows_newest=latest))
        settled = walk.names()
        if command is RolloutCommand.PROMOTE and rng.random() < 0.5:
            said.append("undo")
            latest = "latest" in walk.text
            wanted = expected(settled, baseline, name, command, follows_newest=latest)
            await walk.undo()
            check(wanted)
            settled = walk.names()
        elif rng.random() < 0.3:
            number = rng.choice(VERSIONS)
            said.append(f"modelport rollback --model-version {number}")
            walk.choice.serve_only(number)
            await walk.manager.load("m")
            check({**{each: v for each, v in settled.items() if each.startswith("@")}, "": number})
            settled = walk.names()
        said.append("restart")
        await walk.end()
        await walk.begin()
        check(settled)
        if found:
            break
    await walk.end()
    return found


async def violations(root: Path, starts: Iterable[tuple[str, Names]], seed: int) -> list[str]:
    found: list[str] = []
    for number, (policy, labels) in enumerate(starts):
        walk = Walk(root / str(number))
        found += await take(walk, policy, labels, random.Random(f"{seed} {policy} {labels}"))
    return found


@pytest.mark.thorough
async def test_each_name_that_answered_before_a_rollout_still_answers(tmp_path: Path) -> None:
    assert await violations(tmp_path, random.Random(1).sample(STARTS, WALKS), 1) == []


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
async def test_each_name_answers_from_every_start(tmp_path: Path, seed: int) -> None:
    assert await violations(tmp_path, STARTS, seed) == []


@pytest.mark.thorough
async def test_a_choice_that_looks_at_no_label_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preference of earlier releases, which are known to take labels out of service."""

    def prefer(self: VersionChoice, version: int, other: int) -> None:
        allowed = self.allowed()
        if allowed[-1] != version:
            kept = {each for each in allowed if each < version and each != other}
            self._serve(kept | {version}, version)

    monkeypatch.setattr(VersionChoice, "prefer", prefer)
    found = await violations(tmp_path, random.Random(1).sample(STARTS, BAD_WALKS), 1)
    assert len(found) > BAD_WALKS / 4
