"""The request for a rollout that the options of ``modelport rollout start`` and its files make."""

from __future__ import annotations

import dataclasses
import getpass
from pathlib import Path
from typing import Any

import click

from modelport.gateway import slo
from modelport.gateway.errors import UsageError
from modelport.gateway.rollout import gate_report as gate_reports
from modelport.gateway.rollout.plan import RolloutLimits

#: Settings of ``[answers]`` that are not limits.
_ANSWERS = frozenset({"retrained", "decision_output", "decision_threshold", "decision_top_k"})
_LIMITS = frozenset(field.name for field in dataclasses.fields(RolloutLimits))


def read_share(text: str) -> float:
    """Parse a share of the traffic: ``5%`` or ``0.05``."""
    try:
        share = float(text.strip().removesuffix("%")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise click.BadParameter(f"'{text}' is not a share of the traffic, such as 5% or 0.05")
    return share


def read_shares(text: str) -> tuple[float, ...]:
    """Parse shares that commas separate."""
    return tuple(map(read_share, text.split(",")))


def request_of(
    slo_file: Path | None,
    gate_report: Path | None,
    max_disagreement: float | None,
    no_disagreement_limit: bool,
    **options: Any,
) -> dict[str, Any]:
    """The request of the command's options, and of its files."""
    if no_disagreement_limit and max_disagreement is not None:
        raise UsageError("--max-disagreement and --no-disagreement-limit exclude each other")
    settings = {} if slo_file is None else settings_of(slo.read(slo_file))
    limits: dict[str, float | None] = settings.pop("limits", {})
    if gate_report is not None:
        allowed = gate_reports.max_disagreement(gate_report)
        if allowed is not None:
            limits.setdefault("max_disagreement", allowed)
    if no_disagreement_limit or max_disagreement is not None:
        limits["max_disagreement"] = max_disagreement
    given = {name: value for name, value in options.items() if value is not None}
    return {**settings, **given, "limits": limits, "by": user_name()}


def settings_of(limits: slo.Slo) -> dict[str, Any]:
    """The settings of a rollout that ``slo.toml`` states, as fields of a request."""
    found: dict[str, Any] = {"limits": {}}
    for key in limits.said:
        table, _, name = key.partition(".")
        value = getattr(getattr(limits, table), name)
        if name in _ANSWERS or table == "rollout":
            found[name] = 0.0 if name == "power" and value is None else value
        elif name in _LIMITS and table != "duration":
            found["limits"][name] = value
    return found


def user_name() -> str:
    """The name of the person at this terminal, if it is known."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return ""
