"""Collection of a target's answers to recorded requests, outside of any load."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from modelport.loadtests.load.payloads import Payloads, Tensors
from modelport.loadtests.load.samples import Outcome
from modelport.loadtests.load.target import LoadTestTarget
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.protocol_table import dialect

#: Time limit of a request, and the least that a request gets when the time is over.
ANSWER_SECONDS, LEAST_SECONDS = 60.0, 1.0


@dataclass(frozen=True)
class CollectedAnswer:
    """An answer as it came, and its tensors."""

    body: bytes
    json_size: int | None
    tensors: Tensors


def given(
    asked: Payloads, target: LoadTestTarget, until: float = math.inf
) -> list[CollectedAnswer]:
    """Collect ``target``'s answers to the requests in turn, at least one.

    Args:
        until: no request is sent after this time of ``time.monotonic()``.

    Raises:
        Unanswered: a request gets no answer, or an error.
    """
    spoken = dialect(target.protocol)
    found: list[CollectedAnswer] = []
    client = spoken.connect(target, max(LEAST_SECONDS, min(ANSWER_SECONDS, _left(until))))
    try:
        client.connect()
        for number in range(len(asked.requests)):
            if found and _left(until) <= 0:
                break
            body, size = client.ask(spoken.prepare(target, asked, number))
            found.append(CollectedAnswer(body, size, spoken.read(body, size)))
    except Unanswered:
        raise
    except Exception as error:  # an unexpected answer can raise almost anything in its reader
        said = f"its response is not valid {target.protocol} ({type(error).__name__}: {error})"
        raise Unanswered(Outcome.FAILED, said) from error
    finally:
        client.close()
    return found


def _left(until: float) -> float:
    return until - time.monotonic()
