"""What is asked, and what must come back: the baseline's answers, or recorded ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelport.gateway.cli.errors import UsageError
from modelport.loadtests import drawing, payloads
from modelport.loadtests.answers import Given
from modelport.loadtests.gate.slo import Answers
from modelport.loadtests.payloads import BadPayload, Payloads, Tensors
from modelport.loadtests.serving.examination import shown
from modelport.loadtests.target import Target
from modelport.loadtests.users.answers import Checker
from modelport.loadtests.users.dialects import dialect
from modelport.loadtests.users.signature import Signature

#: Different requests: of an error in one of a hundred, five are among them.
MOST_REQUESTS, LEAST_REQUESTS = 512, 16
#: All of them together.
MOST_BYTES = 64 * 1024 * 1024
#: A quantised model was proven by its decisions: its error is what was measured, and half as much.
MARGIN = 1.5
Key = tuple[object, ...]


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

    Args:
        certificates: of the sides whose answers are compared, each empty where there is none.
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


def wrong(asked: Payloads, found: Sequence[Given], target: Target) -> tuple[int, str]:
    """How many of the answers are not those expected, and the first of them in words."""
    checker = Checker(asked, dialect(target.protocol).read)
    count, first = 0, ""
    for number, one in enumerate(found):
        if checker.problem(number, one.body, one.json_size) is None:
            continue
        count += 1
        if count == 1:
            told = checker.explained(number, one.body, one.json_size)
            first = f"request {number + 1} ({shown(asked.requests[number])}): {told}"
    return count, first


def with_recorded(asked: Payloads, recordings: Sequence[Payloads | None]) -> Payloads:
    """``asked``, led by the requests of ``recordings``, where those are of its batch size."""
    led: dict[Key, Tensors] = {}
    for one in recordings:
        if one is not None and one.batch_size == asked.batch_size:
            led |= {key(request): request for request in one.requests}
    every = (*led.values(), *asked.requests)
    return replace(asked, requests=every[: max(len(led), len(asked.requests))])


def own(asked: Payloads, found: Sequence[Given], recording: Payloads | None) -> Payloads:
    """``asked`` with a side's own answers as the right ones, its checkpoint's where recorded."""
    known: dict[Key, Tensors] = {}
    if recording is not None and recording.expected is not None:
        known = dict(zip(map(key, recording.requests), recording.expected, strict=True))
    expected = tuple(
        known.get(key(request), one.tensors)
        for request, one in zip(asked.requests, found, strict=True)
    )
    return replace(asked, expected=expected)


def key(request: Tensors) -> Key:
    """What tells a request from another."""
    return tuple(
        (name, array.shape, tuple(array.flat) if array.dtype == object else array.tobytes())
        for name, array in sorted(request.items())
    )


def first(asked: Payloads, count: int) -> Payloads:
    """The first ``count`` of the requests, with what is known of them."""
    return replace(
        asked,
        requests=asked.requests[:count],
        expected=None if asked.expected is None else asked.expected[:count],
        labels=None if asked.labels is None else asked.labels[:count],
    )
