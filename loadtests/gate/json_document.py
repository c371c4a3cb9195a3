"""The JSON document of a decision, for ``--json-report``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import orjson

from modelport.loadtests.gate.decision import GateDecision
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import summarise

FORMAT = "modelport-gate/1"


def document(decision: GateDecision) -> dict[str, Any]:
    """Everything but the raw samples; numbers that are not finite become null."""
    told = {field.name: getattr(decision, field.name) for field in dataclasses.fields(decision)}
    runs = {side: _runs(told.pop(f"{side}_runs")) for side in ("baseline", "candidate")}
    found: dict[str, Any] = orjson.loads(orjson.dumps({"format": FORMAT, **told, "runs": runs}))
    return found


def _runs(runs: Sequence[LoadRun]) -> list[dict[str, Any]]:
    return [
        {"began_at": run.began_at, "target": run.target.url, **dataclasses.asdict(summarise(run))}
        for run in runs
    ]
