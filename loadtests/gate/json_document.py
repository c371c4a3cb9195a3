"""The JSON document of a decision, for ``--json-report``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from modelport.loadtests.gate.decision import GateDecision
from modelport.loadtests.load.samples import LoadRun
from modelport.loadtests.load.summary import summarise

FORMAT = "modelport-gate/1"


def document(decision: GateDecision) -> dict[str, Any]:
    """Everything but the raw samples; numbers that are not finite become null."""
    told = {
        field.name: getattr(decision, field.name)
        for field in dataclasses.fields(decision)
        if field.name not in ("questions", "agreement", "baseline_runs", "candidate_runs")
    }
    differ = decision.agreement
    return {
        "format": FORMAT,
        **{name: _plain(value) for name, value in told.items()},
        "agreement": None if differ is None else _plain(dataclasses.asdict(differ)),
        "questions": [_plain(dataclasses.asdict(one)) for one in decision.questions],
        "runs": {
            "baseline": [_run(run) for run in decision.baseline_runs],
            "candidate": [_run(run) for run in decision.candidate_runs],
        },
    }


def _run(run: LoadRun) -> dict[str, Any]:
    summary = _plain(dataclasses.asdict(summarise(run)))
    assert isinstance(summary, dict)
    return {"began_at": run.began_at, "target": run.target.url, **summary}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
