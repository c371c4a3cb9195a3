"""The outcome of a rollout, written into the repository's configuration of the model.

With that it holds for gateways that start later, and after the rollout is forgotten.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from modelport.gateway.errors import ModelportError, Unavailable
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.version_choice import VersionChoice
from modelport.gateway.rollout.plan import RolloutPlan
from modelport.gateway.rollout.shared_state.state import RolloutPhase, RolloutState

#: Errors of a full disk.
_PASSING = (errno.ENOSPC, errno.EDQUOT)


def settle(repositories: Sequence[Path | Location], state: RolloutState) -> str:
    """Make the outcome of ``state`` that of the configuration; blocking.

    Returns:
        The reason why it cannot be; empty if it is.

    Raises:
        Unavailable: the object store does not respond, or the disk is full; try again.
    """
    plan, promoted = state.plan, state.phase is RolloutPhase.PROMOTED
    own = plan.candidate.model == plan.model
    if promoted and not own:
        return f"the candidate is another model, '{plan.candidate.model}'"
    try:
        choice = find(repositories, plan.model)
        if choice is None:  # that of a route never names a candidate
            return f"no model repository holds '{plan.model}'" if own else ""
        (_promote if promoted else _roll_back)(choice, plan)
    except Unavailable:
        raise
    except ModelportError as error:
        return str(error)
    except OSError as error:
        reason = (error.strerror or "it cannot be written").lower()
        problem = f"the {configuration.FILENAME} of '{plan.model}' cannot be written: {reason}"
        if error.errno in _PASSING:
            raise Unavailable(problem) from error
        return problem
    return ""


def _promote(choice: VersionChoice, plan: RolloutPlan) -> None:
    new, old = plan.candidate.version, plan.baseline.version
    if plan.label and choice.labels.get(plan.label) != str(new):
        choice.label(plan.label, new)
    choice.prefer(new if plan.moves_default else choice.default(), old)


def _roll_back(choice: VersionChoice, plan: RolloutPlan) -> None:
    old = plan.baseline.version
    new = plan.candidate.version if plan.candidate.model == plan.model else 0
    if new and plan.label and choice.labels.get(plan.label) == str(new):
        choice.label(plan.label, old)
    choice.prefer(old if plan.moves_default else choice.default(), new)  # as it was served


def find(repositories: Sequence[Path | Location], model: str) -> VersionChoice | None:
    """The configuration of ``model``; None if no repository holds it.

    Raises:
        ModelportError: it cannot be read.
    """
    for repository in repositories:
        found = VersionChoice.find(repository, model)
        if found is not None:
            return found
    return None
