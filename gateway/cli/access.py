"""``modelport access``: explain what the rules of ``access.toml`` allow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from modelport.gateway.access.api_key_authenticator import keys_of
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import ANONYMOUS, ANONYMOUS_NAME, Principal
from modelport.gateway.access.rules_file import read_access_file
from modelport.gateway.cli.errors import renamed_option
from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.cli.tables import print_table, printable

EXIT_DENIED = 1
KEYS_TABLE = "keys"


@click.group()
def access() -> None:
    """Explain what the rules of access.toml allow."""


@access.command()
@click.option("--as", "principal", required=True, metavar="NAME", help="The caller: ci, jwt:bob.")
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="NAME",
    help="A group in the caller's token, such as jwt:staff. Repeatable.",
)
@click.option(
    "--access",
    "file",
    type=EXISTING,
    default=Path("access.toml"),
    show_default=True,
    help="The rules file.",
)
@click.option(
    "--model-version", "version", default="", metavar="N", help="A version number or a label."
)
@renamed_option("--version", "--model-version")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument(
    "operation", type=click.Choice([each.value for each in Operation]), metavar="OPERATION"
)
@click.argument("model", default="")
def check(
    principal: str,
    groups: tuple[str, ...],
    file: Path,
    version: str,
    as_json: bool,
    operation: str,
    model: str,
) -> None:
    """Check whether a caller may perform OPERATION on MODEL, rule by rule.

    The exit code is 0 if it may, and 1 if it may not. Only rules and keys are read; 'modelport
    serve' checks the other tables.
    """
    rules = read_access_file(file)
    wanted = Operation(operation)
    anonymous = principal == ANONYMOUS_NAME
    caller = ANONYMOUS if anonymous else Principal(principal, frozenset(groups))
    #: A rule's place, and why it does not allow the request; empty if it does.
    verdicts = [
        (f"{file.name}:{rule.line}", objection)
        for rule, objection in rules.policy.explain(caller, wanted, model, version)
    ]
    tables = [table for table in rules.authenticators if table.name == KEYS_TABLE]
    keys = [key for table in tables for key in keys_of(table, principal)]
    for key in keys:
        if key.grant is not None:
            *_, last = rules.policy.explain(key, wanted, model, version)
            objection = "it has expired" if key.expires <= time.time() else last.objection
            verdicts.append((f"key {key.fingerprint}", objection))
    if wanted is Operation.HEALTH and not model:
        closed = "" if rules.policy.health_open else "[health] open is false"
        verdicts.append(("open probes", closed))
    allowed = any(not objection for _, objection in verdicts)
    if as_json:
        shown = [
            {"place": place, "allows": not objection, "objection": objection}
            for place, objection in verdicts
        ]
        click.echo(json.dumps({"allowed": allowed, "rules": shown}, indent=2))
    else:
        what = f" '{model}'" if model else ""
        what += f" version {version}" if version else ""
        may = "may" if allowed else "may not"
        decision = "allowed" if allowed else "denied"
        click.echo(printable(f"{decision}: '{principal}' {may} {operation}{what}"))
        rows = [(place, "no" if why else "yes", why) for place, why in verdicts]
        print_table(("rule", "allows it", "because"), rows)
        needs_key = not anonymous and ":" not in principal  # all other names have a colon
        if needs_key and not any(key.expires > time.time() for key in keys):
            click.echo(
                printable(f"'{principal}' has no valid API key, so its requests get 401"), err=True
            )
    if not allowed:
        raise SystemExit(EXIT_DENIED)
