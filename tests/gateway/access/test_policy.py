"""Rules: who may do what, and why not."""

from __future__ import annotations

import random
from contextvars import Context
from types import SimpleNamespace
from typing import Any, cast

import pytest

from modelport.gateway.access import policy as policies
from modelport.gateway.access.context import CURRENT, AccessContext
from modelport.gateway.access.guarded_models import (
    UNKNOWN_VERSION,
    GuardedModels,
    whole_target,
)
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import (
    ALL_VERSIONS,
    AccessPolicy,
    Rule,
    allowed_numbers,
)
from modelport.gateway.access.principal import ANONYMOUS, Grant, Principal
from modelport.gateway.errors import PermissionDenied, Unauthenticated

INFER, METADATA, HEALTH = Operation.INFER, Operation.METADATA, Operation.HEALTH


def rule(*principals: str, models: tuple[str, ...] = ("*",), versions: str = "") -> Rule:
    return Rule(principals, frozenset({INFER}), models, frozenset(versions.split()))


def versions(policy: AccessPolicy, caller: Principal, model: str = "m") -> frozenset[str] | None:
    return policy.rights(caller).by_operation[INFER].versions[model]


def test_what_no_rule_allows_is_denied() -> None:
    rights = AccessPolicy([rule("ci", models=("fraud*",))]).rights(Principal("ci"))
    assert rights.by_operation[INFER].permitted
    assert rights.by_operation[INFER].versions["fraud-2"] == ALL_VERSIONS
    assert rights.by_operation[INFER].versions["other"] is None
    assert not rights.by_operation[METADATA].permitted
    assert rights.by_operation[METADATA].versions["fraud-2"] is None
    assert not AccessPolicy(()).rights(Principal("ci")).by_operation[INFER].permitted


@pytest.mark.parametrize(
    ("wanted", "caller", "applies"),
    [
        ("ci", Principal("ci"), True),
        ("ci", Principal("ci2"), False),
        ("ci", Principal("CI"), False),
        ("ci", Principal("jwt:ci"), False),
        ("jwt:*", Principal("jwt:alice"), True),
        ("jwt:*", Principal("jwt"), False),
        ("*", Principal("cert:a.example.com"), True),
        ("*", ANONYMOUS, False),
        ("a*", ANONYMOUS, False),
        ("c*", Principal("ci"), True),
        ("c*", Principal("cert:x"), False),
        ("*:x", Principal("cert:x"), False),
        ("?ert:x", Principal("cert:x"), False),
        ("c*", Principal("jwt:x", aliases=("cert:x",)), False),
        ("authenticated", ANONYMOUS, False),
        ("authenticated", Principal("proxy:bob"), True),
        ("anonymous", ANONYMOUS, True),
        ("anonymous", Principal("ci"), False),
        ("group:team", Principal("alice"), True),
        ("group:team", Principal("cert:dns:x.ds.example.com"), True),
        ("group:team", Principal("cert:dns:x.example.com"), False),
        ("group:team", Principal("bob", groups=frozenset({"jwt:team"})), False),
        ("group:jwt:team", Principal("jwt:bob", groups=frozenset({"jwt:team"})), True),
        ("group:jwt:team", Principal("jwt:bob"), False),
        ("group:team", Principal("cert:uri:spiffe://other/x.ds.example.com"), False),
        ("group:team", Principal("cert:email:me@x.ds.example.com"), False),
        ("cert:*:x", Principal("cert:dns:x"), False),
        ("cert:?ns:x", Principal("cert:dns:x"), False),
        ("cert:uri:spiffe://a/*", Principal("cert:uri:spiffe://a/b"), True),
        ("cert:dns:b", Principal("cert:dns:a", aliases=("cert:dns:b",)), True),
    ],
)
def test_a_rule_names_principals_globs_and_groups(
    wanted: str, caller: Principal, applies: bool
) -> None:
    groups = {"team": ("alice", "cert:dns:*.ds.example.com")}
    policy = AccessPolicy([rule(wanted)], groups)
    assert (versions(policy, caller) is not None) is applies


def test_rights_to_versions_add_up() -> None:
    some = [rule("ci", versions="1"), rule("ci", models=("m",), versions="stable 2")]
    assert versions(AccessPolicy(some), Principal("ci")) == {"1", "2", "stable"}
    assert versions(AccessPolicy(some), Principal("ci"), "other") == {"1"}
    assert versions(AccessPolicy([*some, rule("ci")]), Principal("ci")) == ALL_VERSIONS


def test_a_label_allows_the_version_that_it_names_now() -> None:
    wanted = frozenset({"stable", "7"})
    assert allowed_numbers(wanted, {"stable": 1, "canary": 2}, [1, 2, 3]) == [1]
    assert allowed_numbers(wanted, {"stable": 2}, [1, 2, 7]) == [2, 7]
    assert allowed_numbers(ALL_VERSIONS, {}, [1, 2]) == [1, 2]
    assert allowed_numbers(wanted, {"7": 1}, [1, 2, 7]) == [7], "a number is no label"


def test_only_a_rule_for_all_models_and_versions_is_unrestricted() -> None:
    ci = Principal("ci")
    assert AccessPolicy([rule("ci")]).rights(ci).by_operation[INFER].unrestricted
    for limited in (rule("ci", models=("a*",)), rule("ci", versions="1")):
        assert not AccessPolicy([limited]).rights(ci).by_operation[INFER].unrestricted


def test_open_health_is_for_the_server_and_not_for_models() -> None:
    rights = AccessPolicy(()).rights(ANONYMOUS).by_operation[HEALTH]
    assert rights.permitted
    assert not rights.has_models
    assert not AccessPolicy((), health_open=False).rights(ANONYMOUS).by_operation[HEALTH].permitted


def test_a_key_brings_rights_of_its_own() -> None:
    key = Principal("ci", grant=Grant(frozenset({INFER}), ("fraud*",)))
    policy = AccessPolicy([rule("ci", models=("x",))])
    assert versions(policy, key, "fraud") == versions(policy, key, "x") == ALL_VERSIONS
    assert versions(policy, key, "other") is None
    assert versions(policy, Principal("ci"), "fraud") is None


def test_names_that_clients_choose_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "KEPT_PRINCIPALS", 16)
    monkeypatch.setattr(policies, "KEPT_MODELS", 16)
    policy = AccessPolicy([rule("authenticated", models=("fraud*",))])
    rights = policy.rights(Principal("ci")).by_operation[INFER]
    for number in range(40):
        rights.versions[f"fraud{number}"]
        policy.rights(Principal(f"jwt:{number}"))
    assert len(rights.versions) <= 16
    rights.versions.clear()
    assert rights.versions["fraud" * 100] == ALL_VERSIONS
    assert not rights.versions
    assert len(policy._rights) <= 16


def test_a_denial_is_explained_rule_by_rule() -> None:
    policy = AccessPolicy(
        [
            rule("bob"),
            Rule(("ci",), frozenset({METADATA})),
            rule("ci", models=("fraud*",)),
            rule("ci", models=("m",), versions="2"),
        ]
    )
    verdicts = list(policy.explain(Principal("ci"), INFER, "m", "1"))
    assert [objection for _, objection in verdicts] == [
        "it is for bob",
        "it allows metadata",
        "it is for the models fraud*",
        "it is for the versions 2",
    ]
    [*_, (_, last)] = policy.explain(Principal("ci"), INFER, "m", "2")
    assert last == ""


class ThreeVersions:
    """Every model is served in versions 1 to 3, and the default is 3."""

    def find(self, name: str, number: int = 0) -> SimpleNamespace:
        return SimpleNamespace(number=number or 3)

    def versions(self, name: str) -> list[int]:
        return [1, 2, 3]

    def labels(self, name: str) -> dict[str, int]:
        return {}


def gateway_allows(
    policy: AccessPolicy, caller: Principal, operation: Operation, model: str, version: str
) -> bool:
    """Whether a gateway allows what ``access check`` is asked about."""
    context = AccessContext(policy.rights(caller))
    try:
        CURRENT.set(context.entering(operation))
        if operation is Operation.ROLLOUT or (operation is Operation.CONTROL and not version):
            return whole_target(operation, model).name == model
        target = GuardedModels(cast(Any, ThreeVersions())).target(model, int(version or 0))
    except (PermissionDenied, Unauthenticated):
        return False
    return target.name == model and target.number != UNKNOWN_VERSION


def test_a_decision_that_is_explained_is_the_gateways() -> None:
    chance = random.Random(17)
    operations = (INFER, METADATA, HEALTH, Operation.CONTROL, Operation.ROLLOUT)
    decisions = set()
    for _ in range(2000):
        rules = [
            Rule(
                tuple(chance.sample(("ci", "b*", "group:team", "anonymous", "authenticated"), 2)),
                frozenset(chance.sample(operations, 2)),
                tuple(chance.sample(("*", "m", "fraud*", "*d", "f?aud"), 2)),
                frozenset(chance.sample(("1", "2", "3"), chance.randint(0, 2))),
            )
            for _ in range(chance.randint(0, 4))
        ]
        policy = AccessPolicy(rules, {"team": ("alice",)}, chance.random() < 0.5)
        caller = chance.choice((Principal("ci"), Principal("bob"), Principal("alice"), ANONYMOUS))
        operation, model = chance.choice(operations), chance.choice(("m", "fraud", "other"))
        version = chance.choice(("", "1", "2"))
        verdicts = policy.explain(caller, operation, model, version)
        allowed = any(not objection for _, objection in verdicts)
        found = Context().run(gateway_allows, policy, caller, operation, model, version)
        assert allowed is found, (rules, caller, operation, model, version)
        decisions.add((operation, bool(version), found))
    assert len(decisions) == 4 * len(operations)
