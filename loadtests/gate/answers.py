"""What is asked, and what must come back: the baseline's answers, or recorded ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from exporters.errors import UsageError
from loadtests import drawing, payloads
from loadtests.gate.slo import Answers
from loadtests.payloads import BadPayload, Payloads
from loadtests.samples import Outcome
from loadtests.target import Target
from loadtests.users.client import Unanswered
from loadtests.users.dialects import dialect
from loadtests.users.signature import Signature

#: Different requests: of an error in one of a hundred, five are among them.
MOST_REQUESTS, LEAST_REQUESTS = 512, 16
#: All of them together.
MOST_BYTES = 64 * 1024 * 1024
ANSWER_SECONDS = 60.0
#: A quantised model was proven by its decisions: its error is what was measured, and half as much.
MARGIN = 1.5


def requests(signature: Signature, data: Path | None, batch_size: int, seed: int) -> Payloads:
    """The file's, else drawn from what the model says that it takes.

    Raises:
        UsageError: the file cannot be read or does not fit; nothing can be drawn.
    """
    try:
        if data is not None:
            return payloads.read(data, signature, batch_size)
        few = drawing.draw(signature, batch_size, seed, LEAST_REQUESTS)
        largest = max(sum(array.nbytes for array in one.values()) for one in few.requests)
        count = max(LEAST_REQUESTS, min(MOST_REQUESTS, MOST_BYTES // max(largest, 1)))
        return drawing.draw(signature, batch_size, seed, count)
    except BadPayload as error:
        raise UsageError(str(error)) from error


def tolerance(
    asked: Payloads, wanted: Answers, certificates: Sequence[Mapping[str, Any]]
) -> Payloads:
    """``asked`` with what an answer may be off by.

    As ``slo.toml`` says; else, where right answers are recorded, as their file says; else the sum
    of what the certificates allow, because baseline and candidate may err in opposite directions.
    """
    atol, rtol = asked.absolute_tolerance, asked.relative_tolerance
    if asked.expected is None:
        allowed = [_allowed(one) for one in certificates]
        found = [one for one in allowed if one is not None]
        if found and len(found) == len(allowed):
            atol, rtol = (sum(values) for values in zip(*found, strict=True))
    return replace(
        asked,
        absolute_tolerance=atol if wanted.atol is None else wanted.atol,
        relative_tolerance=rtol if wanted.rtol is None else wanted.rtol,
    )


def _allowed(certificate: Mapping[str, Any]) -> tuple[float, float] | None:
    try:
        parity = certificate["parity"]
        atol, rtol = (float(parity["tolerance"][name]) for name in ("atol", "rtol"))
        if parity.get("bounds") is not None:
            errors = [float(one["max_abs_error"]) for one in parity["outputs"].values()]
            atol = max(atol, MARGIN * max(errors, default=0.0))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    allowed = (atol, rtol)
    return allowed if all(math.isfinite(one) and one >= 0 for one in allowed) else None


def responds(asked: Payloads, target: Target, timeout_seconds: float) -> bool:
    """Whether ``target`` answers the first request, rightly or not."""
    spoken = dialect(target.protocol)
    client = spoken.connect(target, timeout_seconds)
    try:
        client.connect()
        spoken.read(*client.ask(spoken.prepare(target, asked, 0)))
    except Exception:  # whatever it says instead of an answer
        return False
    finally:
        client.close()
    return True


def recorded(asked: Payloads, target: Target) -> Payloads:
    """``asked`` with ``target``'s answers as the right ones.

    Raises:
        Unanswered: it does not answer every request, or not with an answer.
    """
    spoken = dialect(target.protocol)
    client = spoken.connect(target, ANSWER_SECONDS)
    answers = []
    try:
        client.connect()
        for number in range(len(asked.requests)):
            body, size = client.ask(spoken.prepare(target, asked, number))
            answers.append(spoken.read(body, size))
    except Unanswered:
        raise
    except Exception as error:  # whatever an answer of another kind leads a reader to
        said = f"its answer is not one of {target.protocol} ({type(error).__name__}: {error})"
        raise Unanswered(Outcome.FAILED, said) from error
    finally:
        client.close()
    return replace(asked, expected=tuple(answers))
