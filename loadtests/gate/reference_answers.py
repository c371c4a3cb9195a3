"""Requests of a gate, and their expected answers: the baseline's own, or recorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from modelport.gateway.errors import UsageError
from modelport.gateway.repository.version_proof import VersionProof
from modelport.gateway.slo import Answers
from modelport.loadtests.load import payloads
from modelport.loadtests.load.payloads import BadPayload, Payloads, Tensors
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.serving.answer_check import shown
from modelport.loadtests.users import random_requests
from modelport.loadtests.users.answer_checker import Checker
from modelport.loadtests.users.answer_collection import CollectedAnswer
from modelport.loadtests.users.protocol_table import dialect
from modelport.loadtests.users.signature import RequestSignature

#: Different requests: with one error in a hundred, about five of them are wrong.
MOST_REQUESTS, LEAST_REQUESTS = 512, 16
#: Size of all requests together.
MOST_BYTES = 64 * 1024 * 1024
Key = tuple[object, ...]


def requests(
    signature: RequestSignature, data: Path | None, batch_size: int, seed: int
) -> Payloads:
    """The requests in the file, or random ones within the model's signature.

    Raises:
        UsageError: the file cannot be read or does not fit, or no requests can be generated.
    """
    try:
        if data is not None:
            return payloads.read(data, signature, batch_size)
        few = random_requests.draw(signature, batch_size, seed, LEAST_REQUESTS)
        largest = max(sum(array.nbytes for array in one.values()) for one in few.requests)
        count = max(LEAST_REQUESTS, min(MOST_REQUESTS, MOST_BYTES // max(largest, 1)))
        return random_requests.draw(signature, batch_size, seed, count)
    except BadPayload as error:
        raise UsageError(str(error)) from error


def tolerance(asked: Payloads, wanted: Answers, proofs: Sequence[VersionProof]) -> Payloads:
    """``asked`` with the accepted error of an answer.

    The tolerance comes from ``slo.toml``, else from the file of recorded answers, else it is the
    sum of the certificates' tolerances, because baseline and candidate may err in opposite
    directions.

    Args:
        proofs: of the compared sides.
    """
    atol, rtol = asked.absolute_tolerance, asked.relative_tolerance
    if asked.expected is None:
        atols = [one.atol for one in proofs if one.atol is not None]
        rtols = [one.rtol for one in proofs if one.rtol is not None]
        if atols and len(atols) == len(rtols) == len(proofs):
            atol, rtol = sum(atols), sum(rtols)
    return replace(
        asked,
        absolute_tolerance=atol if wanted.atol is None else wanted.atol,
        relative_tolerance=rtol if wanted.rtol is None else wanted.rtol,
    )


def responds(asked: Payloads, target: LoadTestTarget, timeout_seconds: float) -> bool:
    """Whether ``target`` answers the first request, rightly or wrongly."""
    spoken = dialect(target.protocol)
    client = spoken.connect(target, timeout_seconds)
    try:
        client.connect()
        spoken.read(*client.ask(spoken.prepare(target, asked, 0)))
    except Exception:  # an unexpected answer can raise almost anything
        return False
    finally:
        client.close()
    return True


def wrong(
    asked: Payloads, found: Sequence[CollectedAnswer], target: LoadTestTarget
) -> tuple[int, str]:
    """The number of wrong answers, and a description of the first."""
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
    """``asked``, preceded by the requests of ``recordings`` with the same batch size."""
    led: dict[Key, Tensors] = {}
    for one in recordings:
        if one is not None and one.batch_size == asked.batch_size:
            led |= {key(request): request for request in one.requests}
    every = (*led.values(), *asked.requests)
    return replace(asked, requests=every[: max(len(led), len(asked.requests))])


def own(asked: Payloads, found: Sequence[CollectedAnswer], recording: Payloads | None) -> Payloads:
    """``asked`` with a side's own answers as the expected ones, or its checkpoint's if recorded."""
    known: dict[Key, Tensors] = {}
    if recording is not None and recording.expected is not None:
        known = dict(zip(map(key, recording.requests), recording.expected, strict=True))
    expected = tuple(
        known.get(key(request), one.tensors)
        for request, one in zip(asked.requests, found, strict=True)
    )
    return replace(asked, expected=expected)


def key(request: Tensors) -> Key:
    """A key that distinguishes a request from others."""
    return tuple(
        (name, array.shape, tuple(array.flat) if array.dtype == object else array.tobytes())
        for name, array in sorted(request.items())
    )


def first(asked: Payloads, count: int) -> Payloads:
    """The first ``count`` requests with their answers and labels."""
    return replace(
        asked,
        requests=asked.requests[:count],
        expected=None if asked.expected is None else asked.expected[:count],
        labels=None if asked.labels is None else asked.labels[:count],
    )
