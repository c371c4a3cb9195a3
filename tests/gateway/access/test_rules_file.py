"""``access.toml``: what it says, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import ANONYMOUS, Principal
from modelport.gateway.access.rules_file import read_access_file
from modelport.gateway.errors import UsageError

WHOLE = """
[groups]
team = ["alice", "cert:dns:*.example.com"]

[[rules]]
principals = ["ci", "group:team", "group:jwt:staff"]
operations = ["infer", "metadata"]
models = ["fraud*"]
versions = [1, "stable"]

[[rules]]
principals = ["root"]
operations = "*"

[health]
open = false
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "access.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_with_defaults(tmp_path: Path) -> None:
    policy = read_access_file(write(tmp_path, WHOLE)).policy
    first, second = policy.rules
    assert first.operations == {Operation.INFER, Operation.METADATA}
    assert (first.models, first.versions, first.line) == (("fraud*",), {"1", "stable"}, 5)
    assert (second.operations, second.models) == (frozenset(Operation), ("*",))
    assert not policy.health_open
    alice = policy.rights(Principal("alice")).by_operation[Operation.INFER]
    assert alice.versions["fraud"] == {"1", "stable"}


def test_an_empty_file_allows_probes_and_nothing_else(tmp_path: Path) -> None:
    policy = read_access_file(write(tmp_path, "")).policy
    permitted = [one for one in Operation if policy.rights(ANONYMOUS).by_operation[one].permitted]
    assert permitted == [Operation.HEALTH]


RULE = '[[rules]]\nprincipals = ["ci"]\noperations = ["infer"]\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[rule]]\n", "access.toml:1: unknown table [rule]; did you mean [rules]?"),
        ("\n[zzz]\n", "access.toml:2: unknown table [zzz]; use rules, groups, health"),
        ("[[rules]]\nprincipals = ['a']\n", "access.toml:1: [rules] needs the key 'operations'"),
        (RULE + "modles = ['a']", "access.toml:4: unknown key 'modles' in [rules]; its keys are"),
        (RULE + "models = []", "access.toml:4: rules.models = [] must be a list of names"),
        (RULE + "models = 'a'", "access.toml:4: rules.models = 'a' must be a list of names"),
        (RULE + "versions = [true]", "access.toml:4: rules.versions = [True] must be"),
        (
            "[[rules]]\nprincipals = ['a']\noperations = ['inferr']",
            "access.toml:3: rules.operations = ['inferr'] must be operations; 'inferr' is not "
            "one; did you mean 'infer'?",
        ),
        (
            "[[rules]]\nprincipals = ['a']\noperations = ['zzz']",
            "access.toml:3: rules.operations = ['zzz'] must be operations; 'zzz' is not one; "
            "use infer, metadata",
        ),
        (
            "[groups]\nteam = ['a']\n[[rules]]\nprincipals = ['group:taem']\noperations = '*'",
            "access.toml:4: there is no group 'taem'; did you mean 'group:team'?",
        ),
        ("[groups]\nteam = 'a'", "access.toml:2: group 'team' must be a list of names"),
        ("[groups]\na = ['b']\nteam = ['group:a']", "access.toml:3: group 'team' may not contain"),
        (
            "[groups]\nteam = ['cert:*.example.com']",
            "access.toml:2: 'cert:*.example.com' does not say which kind of name it is; use "
            "cert:dns:NAME, cert:uri:NAME, cert:email:NAME, cert:ip:NAME",
        ),
        (
            "[[rules]]\nprincipals = ['cert:spiffe://a']\noperations = '*'",
            "access.toml:2: 'cert:spiffe://a' does not say which kind of name it is",
        ),
        ("[health]\nopen = 'no'", "access.toml:2: health.open = 'no' must be true or false"),
        ("[health]\n[[rules]", "access.toml:2: not TOML"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file_the_line_and_the_remedy(
    tmp_path: Path, text: str, expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read_access_file(write(tmp_path, text))
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)
