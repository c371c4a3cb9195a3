"""The models that the caller of the current request may see, and no others.

A forbidden model is looked up under a name that no model has, and a forbidden version under a
number that none has. So the answer, its status and the work are those for an unknown one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from modelport.gateway.access.context import CURRENT, NO_CREDENTIAL, note_refusal, required
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import ALL_VERSIONS, allowed_numbers
from modelport.gateway.errors import (
    MAX_MESSAGE,
    ModelportError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.models.model_view import ModelView

#: No model has this name, and no version this number.
UNKNOWN_MODEL, UNKNOWN_VERSION = "/unknown", -(2**62) - 1


class AllowedTarget(NamedTuple):
    """A model and a version to look up for a request, and those that the request names."""

    name: str
    number: int
    stated_name: str
    stated_number: int

    @contextmanager
    def stated(self) -> Iterator[None]:
        """Restore the names of the request in the message of an error."""
        try:
            yield
        except ModelportError as error:
            if (self.name, self.number) != (self.stated_name, self.stated_number):
                message = str(error).replace(UNKNOWN_MODEL, self.stated_name[:MAX_MESSAGE])
                if not self.stated_number:  # the request names no version
                    message = message.replace(f" version {UNKNOWN_VERSION}", "")
                message = message.replace(str(UNKNOWN_VERSION), str(self.stated_number))
                error.args = ModelportError(message).args  # as long as others are
            raise


def whole_target(operation: Operation, name: str) -> AllowedTarget:
    """Return what to look up for a change of all versions of a model.

    Raises:
        PermissionDenied: The caller may change some versions only.
    """
    versions = required(operation).versions[name]
    if versions:
        raise denied(
            f"the operation '{operation}' is allowed on some versions of '{name}' only, and "
            "this request concerns all of them",
            name,
        )
    if versions is None:
        _note_hidden(name)
    return AllowedTarget(UNKNOWN_MODEL if versions is None else name, 0, name, 0)


def rollout_target(name: str) -> AllowedTarget:
    """Return the model to look up for a request about rollouts; without ``--access``, ``name``."""
    if CURRENT.get() is None:
        return AllowedTarget(name, 0, name, 0)
    return whole_target(Operation.ROLLOUT, name)


def candidate_target(name: str, model: str) -> AllowedTarget:
    """Return the model to look up for a candidate in a rollout of ``model``.

    The callers of ``model`` get answers of another model, and the one who starts the rollout, too.

    Raises:
        PermissionDenied: The caller may not use that model, which need not exist.
    """
    if CURRENT.get() is not None and name != model:
        require_use(Operation.INFER, name, "another model as the candidate")
    return rollout_target(name)


def require_use(operation: Operation, name: str, use: str) -> None:
    """Check the right to a model that a request for another one uses.

    Args:
        use: What the request makes of the model, for the error.

    Raises:
        Unauthenticated: No request is being answered.
        PermissionDenied: The caller may not use all versions of it; it need not exist.
    """
    context = CURRENT.get()
    if context is None:
        raise Unauthenticated(NO_CREDENTIAL)
    if context.caller.by_operation[operation].versions[name] is not ALL_VERSIONS:
        raise denied(f"{use} needs the operation '{operation}' on all versions of '{name}'", name)


def may_see_rollouts(name: str) -> bool:
    """Whether the caller may see the rollouts of a model, as of all its versions."""
    return CURRENT.get() is None or required(Operation.ROLLOUT).versions[name] is ALL_VERSIONS


class GuardedModels:
    """The part of ``models`` that the caller may see, for the operation of its request.

    To a caller that may use only some versions of a model, the default version is the newest of
    these, unless the model's own default is among them.
    """

    def __init__(self, models: ModelView) -> None:
        self._models = models

    @property
    def draining(self) -> asyncio.Event:
        return self._models.draining

    @property
    def closing(self) -> asyncio.Event:
        return self._models.closing

    def target(self, name: str, number: int = 0) -> AllowedTarget:
        """Return what to look up for version ``number``, or for the default version if it is 0."""
        versions = required().versions[name]
        if versions is ALL_VERSIONS:
            return AllowedTarget(name, number, name, number)
        if versions is None:
            _note_hidden(name, number)
            return AllowedTarget(UNKNOWN_MODEL, number, name, number)
        numbers = self._allowed(name, versions)
        if number:
            found = number if number in numbers or str(number) in versions else UNKNOWN_VERSION
        else:
            default = self._models.find(name)
            if default is None:
                found = 0  # nothing is served: the error is that of the model
            elif default.number in numbers:
                found = default.number
            else:
                found = max(numbers, default=UNKNOWN_VERSION)
        if found == UNKNOWN_VERSION:
            _note_hidden(name, number)
        return AllowedTarget(name, found, name, number)

    def shows(self, name: str, version: str = "") -> bool:
        """Whether the caller may see the model, or this version of it."""
        versions = required().versions[name]
        if versions is None or versions is ALL_VERSIONS or not version:
            return versions is not None
        return version in versions or int(version) in self._allowed(name, versions)

    def _allowed(self, name: str, versions: frozenset[str]) -> list[int]:
        try:
            labels = self._models.labels(name)
        except (NotFound, Unavailable):
            labels = {}
        return allowed_numbers(versions, labels, self._models.versions(name))

    # -- the models ---------------------------------------------------------------------------

    def get(self, name: str, number: int = 0) -> ServedVersion:
        context = CURRENT.get()
        if context is not None and context.rights.versions[name] is ALL_VERSIONS:
            return self._models.get(name, number)  # most requests
        target = self.target(name, number)
        with target.stated():
            return self._models.get(target.name, target.number)

    def find(self, name: str, number: int = 0) -> ServedVersion | None:
        return self._models.find(*self.target(name, number)[:2])

    def names(self) -> list[str]:
        rights = required()
        return [name for name in self._models.names() if rights.versions[name] is not None]

    def versions(self, name: str) -> list[int]:
        versions = required().versions[name]
        if versions is None:
            return self._models.versions(UNKNOWN_MODEL)
        return self._allowed(name, versions) if versions else self._models.versions(name)

    def labels(self, name: str) -> Mapping[str, int]:
        target = self.target(name)
        with target.stated():
            labels = self._models.labels(target.name)
        return {label: n for label, n in labels.items() if self.shows(name, str(n))}

    def version_of(self, name: str, label: str) -> int:
        target = self.target(name)
        with target.stated():
            number = self._models.version_of(target.name, label)
        if not self.shows(name, str(number)):
            raise NotFound(f"Unrecognized servable version label: {label}")
        return number

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        rows = self._models.index(ready_only)
        return [row for row in rows if self.shows(row["name"], row.get("version", ""))]


def denied(reason: str, model: str = "") -> PermissionDenied:
    """Make the error for a request that the rules allow in part only, and note it."""
    note_refusal(reason, model)
    return PermissionDenied(reason)


def _note_hidden(name: str, number: int = 0) -> None:
    """Note a request for a model that its caller may not know of."""
    version = str(number) if number else ""
    note_refusal("the model or version is forbidden or unknown", name, version)
