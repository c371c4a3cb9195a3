"""The rules of ``access.toml``: who may do what, to which models and versions.

A request is allowed if any rule allows it. There are no rules that deny. The rights of a principal
are compiled on its first request; afterwards a decision is one look-up by the model's name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import NamedTuple

from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import ANONYMOUS_NAME, CERTIFICATE, Grant, Principal
from modelport.gateway.repository.storage.location import MAX_SEGMENT_BYTES

#: Every principal except ``anonymous``.
AUTHENTICATED = "authenticated"
GROUP = "group:"
#: Principals, and models of each operation of one, whose rights are kept: clients choose the names.
KEPT_PRINCIPALS, KEPT_MODELS = 1024, 32
#: No model has a longer name.
MAX_KEPT_NAME = MAX_SEGMENT_BYTES
_KIND = re.compile(rf"{CERTIFICATE}[^:]*:|[^:]*:")
#: The versions of a rule that names none.
ALL_VERSIONS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Rule:
    """A rule, as it is written; ``line`` is that of its header."""

    principals: tuple[str, ...]
    operations: frozenset[Operation]
    models: tuple[str, ...] = ("*",)
    #: Numbers and labels; empty for all.
    versions: frozenset[str] = ALL_VERSIONS
    line: int = 0


class RuleVerdict(NamedTuple):
    """A rule and its verdict on a request: why it does not allow it, or an empty string."""

    rule: Rule
    objection: str


class AllowedVersions(dict[str, frozenset[str] | None]):
    """The allowed versions and labels by model; None if the model is forbidden.

    Each model is judged when it is first looked up.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        super().__init__()
        self._rules = [(_any_of(rule.models), rule.versions) for rule in rules]

    def __missing__(self, model: str) -> frozenset[str] | None:
        # No model has a longer name: the beginning of such a name is enough to refuse it.
        beginning = model[: MAX_KEPT_NAME + 1]
        found = [versions for matches, versions in self._rules if matches(beginning)]
        allowed = None
        if found:
            allowed = ALL_VERSIONS if ALL_VERSIONS in found else frozenset().union(*found)
        if len(self) >= KEPT_MODELS:
            self.clear()
        if len(model) <= MAX_KEPT_NAME:
            self[model] = allowed
        return allowed


class OperationRights:
    """The rights of one principal to one operation."""

    def __init__(
        self, operation: Operation | None, rules: Sequence[Rule], is_open: bool = False
    ) -> None:
        self.operation = operation
        #: Whether the operation is allowed at all; the model may still be forbidden.
        self.permitted = bool(rules) or is_open
        #: Whether it is allowed for a model, and not only for the server.
        self.has_models = bool(rules)
        #: Whether every model and version is allowed, whichever there may be.
        self.unrestricted = any("*" in rule.models and not rule.versions for rule in rules)
        self.versions = AllowedVersions(rules)


class PrincipalRights:
    """A principal and its rights, by operation.

    Attributes:
        name: That of the principal.
        by_operation: The rights to each operation.
        has_quota: Whether a quota limits its use of some model.
    """

    def __init__(self, policy: AccessPolicy, principal: Principal) -> None:
        self.principal, self.name = principal, principal.name
        self.has_quota = any(policy.names(each, principal) for each in policy.limited)
        rules = [rule for rule in policy.rules if policy.names(rule.principals, principal)]
        if principal.grant is not None:
            rules.append(granted(principal, principal.grant))
        self.by_operation = {
            operation: OperationRights(
                operation,
                [rule for rule in rules if operation in rule.operations],
                operation is Operation.HEALTH and policy.health_open,
            )
            for operation in Operation
        }


@dataclass(frozen=True)
class AccessPolicy:
    """All rules, and the members of groups.

    Attributes:
        groups: Names and globs of members.
        health_open: Whether probes of the server need no rule. Probes of a model always do.
        limited: The principals of each quota.
    """

    rules: Sequence[Rule]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    health_open: bool = True
    limited: Sequence[Sequence[str]] = ()
    _rights: dict[Principal, PrincipalRights] = field(default_factory=dict, compare=False)

    def rights(self, principal: Principal) -> PrincipalRights:
        """Return the rights of ``principal``."""
        found = self._rights.get(principal)
        if found is None:
            if len(self._rights) >= KEPT_PRINCIPALS:
                self._rights.clear()
            found = self._rights[principal] = PrincipalRights(self, principal)
        return found

    def names(self, principals: Sequence[str], principal: Principal) -> bool:
        """Whether one of ``principals``, names, globs and groups, is or contains ``principal``."""
        return any(self._names(wanted, principal) for wanted in principals)

    def explain(
        self, principal: Principal, operation: Operation, model: str, version: str = ""
    ) -> Iterator[RuleVerdict]:
        """Judge a request by every rule; it is allowed if one has no objection.

        The rights of the credential itself come last.
        """
        own = () if principal.grant is None else (granted(principal, principal.grant),)
        for rule in (*self.rules, *own):
            objection = ""
            if not self.names(rule.principals, principal):
                objection = f"it is for {', '.join(rule.principals)}"
            elif operation not in rule.operations:
                objection = f"it allows {', '.join(sorted(rule.operations))}"
            elif model and not _any_of(rule.models)(model):
                objection = f"it is for the models {', '.join(rule.models)}"
            elif rule.versions and not _is_within(rule.versions, operation, model, version):
                objection = f"it is for the versions {', '.join(sorted(rule.versions))}"
            yield RuleVerdict(rule, objection)

    def _names(self, wanted: str, principal: Principal) -> bool:
        if wanted.startswith(GROUP):
            group = wanted.removeprefix(GROUP)
            members = self.groups.get(group, ())
            return group in principal.groups or any(_is(one, principal) for one in members)
        return _is(wanted, principal)


def allowed_numbers(
    versions: Collection[str], labels: Mapping[str, int], served: Iterable[int]
) -> list[int]:
    """The ``served`` versions that a rule's ``versions`` name, by number or by label."""
    return [
        number
        for number in served
        if not versions
        or str(number) in versions
        or any(
            labels[label] == number for label in versions if label in labels and not label.isdigit()
        )
    ]


def _is(wanted: str, principal: Principal) -> bool:
    """Whether ``wanted``, a name or a glob, is ``principal``. No glob is ``anonymous``."""
    if principal.is_anonymous:
        return wanted == ANONYMOUS_NAME
    if wanted in (AUTHENTICATED, "*", principal.name):
        return True
    kind, matches = _kind(wanted), re.compile(translate(wanted)).match
    names = (principal.name, *principal.aliases)
    return any(matches(name) and _kind(name) == kind for name in names)


def _kind(name: str) -> str:
    """The prefix of a name, which globs do not match (``c*``: not ``cert:``); empty for a key.

    The names of certificates have two: ``cert:dns:*.com`` must not match the URI
    ``spiffe://other/x.com``, which another part of an organisation may choose.
    """
    found = _KIND.match(name)
    return found[0] if found else ""


def _is_within(versions: Collection[str], operation: Operation, model: str, version: str) -> bool:
    """Whether a request may be for some versions only; a rollout and a load of a model may not."""
    whole = operation is Operation.ROLLOUT or (operation is Operation.CONTROL and not version)
    return not (model and whole) and (not version or version in versions)


def granted(principal: Principal, grant: Grant) -> Rule:
    """Make the rule that a credential brings with itself."""
    return Rule((principal.name,), grant.operations, grant.models)


def _any_of(globs: Sequence[str]) -> Callable[[str], object]:
    """Make a predicate: whether a name matches any of ``globs``."""
    return re.compile("|".join(map(translate, globs))).match
