"""The decisions that a retrained candidate changed in the gate, as a limit for its rollout."""

from __future__ import annotations

import json
import math
from pathlib import Path

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import untrusted_files
from modelport.gateway.rollout.statistics.sequential_tests import TrialCounts, confidence_sequence

FORMAT = "modelport-gate/1"
MAX_REPORT_BYTES = 64 * 1024 * 1024
#: Live traffic differs from the gate's requests; the limit is the upper bound times this.
MARGIN = 1.25
ALPHA = 0.05
LARGEST = 0.999


def max_disagreement(file: Path) -> float | None:
    """The share of decisions that may differ, from a report of ``modelport gate --json-report``.

    None if both sides had the same checkpoint, so that a rollout compares their values.

    Raises:
        InvalidArgument: the file cannot be read, or has no changed decisions of a candidate.
    """
    try:
        report = json.loads(untrusted_files.read_text(file, MAX_REPORT_BYTES))
        agreement = report["agreement"]
        if agreement is None and report["format"] == FORMAT:
            return None
        decisions, changed = int(agreement["decisions"]), int(agreement["changed"])
        if not 0 <= changed <= decisions or not decisions:
            raise ValueError
    except OSError as error:
        raise InvalidArgument(f"'{file}' cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidArgument(
            f"'{file}' is not a report of 'modelport gate --json-report' with the decisions of a "
            "retrained candidate; give the limit as answers.max_disagreement in --slo"
        ) from error
    interval = confidence_sequence([TrialCounts(0.5, changed, decisions)], ALPHA)
    odds = interval.upper if interval is not None else math.inf
    upper = 1.0 if math.isinf(odds) else odds / (1 + odds)
    return min(MARGIN * upper, LARGEST)
