"""The states of rollouts in a repository, which several gateways may share.

    .rollouts/state/<model>/<revision>.json              the latest revision is the state
    .rollouts/counts/<model>/<rollout id>.<replica>.json  written by one life of one gateway
    .rollouts/history/<model>/<start>-<rollout id>.json   the last revision of an ended rollout

A revision is created exclusively and never changed: of two gateways that write the next one, one
loses. Old revisions are deleted. A gateway that was stopped for long may create such a number
again; so nothing is written as long as a higher revision exists, which is looked up *afterwards*.

Anyone who can write to the repository may have written these files: they are read with limits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import structlog

from modelport.gateway.errors import InvalidArgument, NotFound
from modelport.gateway.repository.scan import is_model_name
from modelport.gateway.rollout.plan import MAX_STEPS
from modelport.gateway.rollout.shared_state.state import MAX_STATE_BYTES, RolloutState, read_state
from modelport.gateway.rollout.shared_state.state_files import RolloutFiles
from modelport.gateway.rollout.statistics.counts import StageCounts
from modelport.gateway.runtime import checked_json

log = structlog.get_logger("modelport.rollout")

MAX_COUNTS_BYTES = 4 * 1024 * 1024
#: Most files of counts of a rollout that are read; more mean that a gateway is in a crash loop.
MAX_COUNTS_FILES = 10_000
#: Old revisions are deleted from the second number on, up to the first.
KEPT_REVISIONS, MOST_REVISIONS = 8, 24
MAX_HISTORY = 100
_REVISION = re.compile(r"([0-9]{10})\.json\Z")
_COUNTS = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{32})\.json\Z")
_HISTORY = re.compile(r"[0-9]{10}-[0-9a-f]{32}\.json\Z")

#: The counts of each stage, by its index.
StagesCounts = Mapping[int, StageCounts]


class RolloutStore:
    """The states, counts and history of the rollouts in one repository."""

    def __init__(self, files: RolloutFiles) -> None:
        self._files = files
        #: Counts files that were read: by key, what the listing said, and their content.
        self._counts: dict[str, tuple[str, StagesCounts]] = {}
        #: The states that were reported as ignored.
        self._ignored: set[str] = set()

    @property
    def is_quick(self) -> bool:
        """Whether the files are in a folder, where a look costs next to nothing."""
        return self._files.is_quick

    # -- states -----------------------------------------------------------------------------------

    async def look(self) -> dict[str, int]:
        """The revision of each model's state."""
        found: dict[str, list[int]] = {}
        for key in await self._files.listing("state"):
            model, _, name = key.partition("/")
            match = _REVISION.match(name)
            if match and is_model_name(model):
                found.setdefault(model, []).append(int(match[1]))
        latest = {model: latest_of(revisions) for model, revisions in found.items()}
        for model, revisions in found.items():
            self._report_ignored(model, max(revisions), latest[model])
        return latest

    def _report_ignored(self, model: str, highest: int, latest: int) -> None:
        key = _state_key(model, highest)
        if highest != latest and key not in self._ignored:
            self._ignored.add(key)
            log.error(
                "the state of a rollout is ignored, because no gateway wrote the revisions before "
                "it; remove the file",
                file=f".rollouts/{key}",
            )  # fmt: skip

    async def read(self, model: str, revision: int) -> RolloutState:
        """The state.

        Raises:
            NotFound: it has been deleted, because there are newer ones.
            InvalidArgument: it is malformed, or that of a newer release.
        """
        key = _state_key(model, revision)
        try:
            return read_state(await self._read(key, MAX_STATE_BYTES), model, revision)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"'.rollouts/{key}' is not the state of a rollout, or is from a newer release: "
                f"{error}; remove '.rollouts/state/{model}' to forget the rollout"
            ) from error

    async def _read(self, key: str, most: int) -> bytes:
        content = await self._files.read(key, most + 1)
        if len(content) > most:
            raise InvalidArgument(f"it is larger than {most} bytes")
        return content

    async def write(self, state: RolloutState) -> bool:
        """Write a new revision; whether it is the state now, and no other gateway's.

        Raises:
            Unavailable: the answer was lost; it may be the state, now or later.
        """
        model, content = state.plan.model, checked_json.write(state)
        if len(content) > MAX_STATE_BYTES:
            raise InvalidArgument(f"the state of the rollout exceeds {MAX_STATE_BYTES} bytes")
        if not await self._files.create(_state_key(model, state.revision), content):
            return False
        names = await self._files.listing(f"state/{model}")
        revisions = sorted(int(match[1]) for name in names if (match := _REVISION.match(name)))
        latest = latest_of(revisions) if revisions else 0
        if latest > state.revision:
            return False
        written = [each for each in revisions if each <= latest]
        if len(written) > MOST_REVISIONS:
            old = written[:-KEPT_REVISIONS]
            await self._files.delete([_state_key(model, revision) for revision in old])
        return True

    # -- counts -----------------------------------------------------------------------------------

    async def write_counts(
        self, model: str, rollout: str, replica: str, stages: Mapping[str, Any]
    ) -> None:
        """Write the counts of one life of a gateway: ``StageCounts`` as JSON values, by index."""
        await self._files.replace(
            f"counts/{model}/{rollout}.{replica}.json", orjson.dumps({"stages": stages})
        )

    async def read_counts(self, model: str, rollout: str, replica: str) -> dict[int, StageCounts]:
        """The counts of all gateways and of their earlier lives, but for ``replica``."""
        found: dict[str, tuple[str, StagesCounts]] = {}
        for name, tag in (await self._files.listing(f"counts/{model}")).items():
            match = _COUNTS.match(name)
            if match and match[1] == rollout and match[2] != replica:
                key = f"counts/{model}/{name}"
                known = self._counts.get(key)
                if known is None or known[0] != tag:
                    known = tag, await self._read_counts(key)
                found[key] = known
                if len(found) == MAX_COUNTS_FILES:
                    log.warning("too many counts of a rollout; some are ignored", model=model)
                    break
        beside = f"counts/{model}/"
        others = {key: each for key, each in self._counts.items() if not key.startswith(beside)}
        self._counts = others | found
        return merged(counts for _, counts in found.values())

    async def _read_counts(self, key: str) -> StagesCounts:
        try:
            return _stages(await self._read(key, MAX_COUNTS_BYTES))
        except NotFound:
            return {}
        except InvalidArgument as error:
            log.warning("counts of a rollout are ignored", file=key, reason=str(error))
            return {}

    async def forget_counts(self, model: str, keep: str) -> None:
        """Delete the counts of all rollouts of ``model`` but ``keep``."""
        names = await self._files.listing(f"counts/{model}")
        old = [name for name in names if (found := _COUNTS.match(name)) and found[1] != keep]
        await self._files.delete([f"counts/{model}/{name}" for name in old])

    # -- history ----------------------------------------------------------------------------------

    async def archive(self, state: RolloutState) -> None:
        """Add an ended rollout to the history; again, it is replaced."""
        model, began = state.plan.model, state.events[0].time if state.events else 0.0
        name = f"{int(min(max(began, 0), 9_999_999_999)):010d}-{state.plan.id}.json"
        await self._files.replace(f"history/{model}/{name}", checked_json.write(state))
        names = await self._history(model)
        await self._files.delete([f"history/{model}/{each}" for each in names[:-MAX_HISTORY]])

    async def history(self, model: str) -> list[RolloutState]:
        """The rollouts of ``model`` that have ended, latest first."""
        found = []
        for name in reversed((await self._history(model))[-MAX_HISTORY:]):
            try:
                content = await self._read(f"history/{model}/{name}", MAX_STATE_BYTES)
                state = checked_json.read(RolloutState, content)
                if state.plan.model != model:
                    raise InvalidArgument(f"it belongs to '{state.plan.model}'")
                found.append(state)
            except NotFound:
                continue
            except InvalidArgument as error:
                log.warning("a file of the history is ignored", file=name, reason=str(error))
        return found

    async def _history(self, model: str) -> list[str]:
        if not is_model_name(model):
            return []
        names = await self._files.listing(f"history/{model}")
        return sorted(name for name in names if _HISTORY.match(name))


def latest_of(revisions: Iterable[int]) -> int:
    """The highest revision that gateways have written.

    They count by ones from 1, and keep the last ``KEPT_REVISIONS`` at least. So a number far beyond
    the others is not theirs, unless as many precede it.
    """
    runs: list[list[int]] = []
    for each in sorted(revisions):
        if not runs or each - runs[-1][-1] > MOST_REVISIONS:
            runs.append([])
        runs[-1].append(each)
    genuine = [run for run in runs if run[0] == 1 or len(run) >= KEPT_REVISIONS]
    return (genuine[-1] if genuine else max(runs, key=len))[-1]


def merged(counts: Iterable[StagesCounts]) -> dict[int, StageCounts]:
    """The sum of ``counts``, by stage."""
    total: dict[int, StageCounts] = {}
    for each in counts:
        for stage, found in each.items():
            total[stage] = total[stage] + found if stage in total else found
    return total


def _stages(content: bytes) -> dict[int, StageCounts]:
    try:
        document: Any = orjson.loads(content)
        stages = document["stages"].items()
        found = {int(stage): StageCounts.from_json(each) for stage, each in stages}
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument("the counts are malformed") from error
    if not all(0 <= stage <= MAX_STEPS for stage in found):
        raise InvalidArgument("the counts name a stage that the plan lacks")
    return found


def _state_key(model: str, revision: int) -> str:
    return f"state/{model}/{revision:010d}.json"
