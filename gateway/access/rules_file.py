"""``access.toml``: groups, rules, and the tables of authenticators.

[groups]
data-science = ["alice", "ci", "cert:dns:*.ds.example.com"]

[[rules]]                        # a request is allowed if any rule allows it
principals = ["ci", "group:data-science"]
operations = ["infer", "metadata"]
models = ["fraud*"]              # default: all
versions = ["1", "stable"]       # numbers or labels; default: all

[[quotas]]                       # the first that matches holds; each model has its own
principals = ["ci"]
models = ["fraud*"]              # default: all
requests_per_second = 100        # and "burst" at once; default: those of a second
in_flight = 16
bytes_per_second = 1_000_000
tokens_per_second = 20_000       # of models with a text interface

[health]
open = true                      # probes of the server need no credential
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.gateway.access.authenticators import AUTHENTICATORS
from modelport.gateway.access.located_toml import TomlFile, TomlTable, parse_file
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import ALL_VERSIONS, GROUP, AccessPolicy, Rule
from modelport.gateway.access.principal import CERTIFICATE, CERTIFICATE_KINDS
from modelport.gateway.access.quotas import Quota
from modelport.gateway.errors import closest
from modelport.gateway.runtime import gateway_files
from modelport.gateway.runtime.gateway_files import FileContent
from modelport.gateway.toml_tables import InvalidValue, names, read_by, truth

OPTION = "--access"
EVERY = "*"
_RULES, _GROUPS, _HEALTH, _QUOTAS = "rules", "groups", "health", "quotas"
#: Prefix of the groups that tokens state: ``group:jwt:NAME``.
_STATED = "jwt:"
_CERTIFICATE_KINDS = tuple(CERTIFICATE_KINDS.values())


@dataclass(frozen=True)
class AccessFile:
    """The content of ``access.toml``.

    Attributes:
        authenticators: Their tables, in the order in which they are asked.
    """

    policy: AccessPolicy
    authenticators: Sequence[TomlTable]
    quotas: Sequence[Quota] = ()


def _operations(value: Any) -> frozenset[Operation]:
    """A list of operations, or ``"*"``."""
    if value == EVERY:
        return frozenset(Operation)
    found = names(value)
    for name in found:
        if name != EVERY and name not in set(Operation):
            near = closest(name, Operation)
            hint = f"did you mean '{near}'?" if near else f"use {', '.join(Operation)}, or '*'"
            raise InvalidValue(f"operations; '{name}' is not one; {hint}")
    return frozenset(Operation) if EVERY in found else frozenset(map(Operation, found))


def _versions(value: Any) -> frozenset[str]:
    """A list of version numbers and labels."""
    if isinstance(value, list):
        value = [str(one) if type(one) is int else one for one in value]
    return frozenset(names(value))


@dataclass(frozen=True)
class _RuleTable:
    principals: tuple[str, ...] = field(metadata=read_by(names))
    operations: frozenset[Operation] = field(metadata=read_by(_operations))
    models: tuple[str, ...] = field(default=(EVERY,), metadata=read_by(names))
    versions: frozenset[str] = field(default=ALL_VERSIONS, metadata=read_by(_versions))


@dataclass(frozen=True)
class _HealthTable:
    open: bool = field(default=True, metadata=read_by(truth))


def read_access_file(path: Path) -> AccessFile:
    """Read ``access.toml``; raise as ``parse_access_file``."""
    return parse_access_file(gateway_files.read(path))


def parse_access_file(content: FileContent) -> AccessFile:
    """Parse ``access.toml``.

    Raises:
        UsageError: It cannot be read, or a table is wrong; the message names file and line.
    """
    file = parse_file(content, OPTION)
    _check_names(file)
    groups = _read_groups(file.one(_GROUPS))
    rules = [_read_rule(table, groups) for table in file.tables.get(_RULES, ())]
    health = file.one(_HEALTH)
    is_open = health is None or health.read(_HealthTable).open
    tables = [table for name in AUTHENTICATORS.names() for table in _authenticators(file, name)]
    quotas = [_read_quota(table, groups) for table in file.tables.get(_QUOTAS, ())]
    limited = [quota.principals for quota in quotas]
    return AccessFile(AccessPolicy(rules, groups, is_open, limited), tables, quotas)


def _authenticators(file: TomlFile, name: str) -> Sequence[TomlTable]:
    """Return the tables of an authenticator, or of several of its kind."""
    tables = file.tables.get(name, ())
    descriptor = AUTHENTICATORS.get(name) if len(tables) > 1 else None
    if descriptor is None or not descriptor.repeats:
        table = file.one(name)
        return [] if table is None else [table]
    seen: set[object] = set()
    for table in tables:
        own = table.values.get("name")
        if not own:
            raise table.error(f"each of several [[{name}]] needs the key 'name'")
        if str(own) in seen:
            raise table.error(f"two [[{name}]] have the name '{own}'; rename one", "name")
        seen.add(str(own))
    return tables


def _check_names(file: TomlFile) -> None:
    known = [_RULES, _GROUPS, _HEALTH, _QUOTAS, *AUTHENTICATORS.names()]
    for name, tables in file.tables.items():
        if name not in known and tables:
            near = closest(name, known)
            hint = f"did you mean [{near}]?" if near else f"use {', '.join(known)}"
            raise tables[0].error(f"unknown table [{name}]; {hint}")


def _read_groups(table: TomlTable | None) -> dict[str, tuple[str, ...]]:
    groups = {}
    for name, members in table.values.items() if table is not None else ():
        assert table is not None
        try:
            groups[name] = names(members)
        except InvalidValue as error:
            raise table.error(f"group '{name}' must be {error}", name) from None
        if any(member.startswith(GROUP) for member in groups[name]):
            raise table.error(f"group '{name}' may not contain a group; list its members", name)
        _check_certificates(table, groups[name], name)
    return groups


def _read_rule(table: TomlTable, groups: dict[str, tuple[str, ...]]) -> Rule:
    rule = table.read(_RuleTable)
    _check_principals(table, rule.principals, groups)
    return Rule(rule.principals, rule.operations, rule.models, rule.versions, table.line)


def _read_quota(table: TomlTable, groups: dict[str, tuple[str, ...]]) -> Quota:
    quota = table.read(Quota)
    _check_principals(table, quota.principals, groups)
    rates = (quota.requests_per_second, quota.bytes_per_second, quota.tokens_per_second)
    if all(limit is None for limit in (*rates, quota.in_flight)):
        raise table.error(
            "a quota needs requests_per_second, bytes_per_second, tokens_per_second or in_flight"
        )
    if quota.burst is not None and quota.requests_per_second is None:
        raise table.error("burst needs requests_per_second", "burst")
    return quota


def _check_principals(
    table: TomlTable, principals: Sequence[str], groups: dict[str, tuple[str, ...]]
) -> None:
    _check_certificates(table, principals, "principals")
    for principal in principals:
        group = principal.removeprefix(GROUP)
        if group != principal and group not in groups and not group.startswith(_STATED):
            near = closest(group, groups)
            hint = f"did you mean 'group:{near}'?" if near else "define it in [groups]"
            raise table.error(f"there is no group '{group}'; {hint}", "principals")


def _check_certificates(table: TomlTable, principals: Sequence[str], key: str) -> None:
    for principal in principals:
        kind, separator, _ = principal.removeprefix(CERTIFICATE).partition(":")
        if principal.startswith(CERTIFICATE) and not (separator and kind in _CERTIFICATE_KINDS):
            raise table.error(
                f"'{principal}' does not say which kind of name it is; use "
                f"{', '.join(f'{CERTIFICATE}{kind}:NAME' for kind in _CERTIFICATE_KINDS)}",
                key,
            )
