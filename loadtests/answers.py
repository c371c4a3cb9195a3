"""A target's own answers to recorded requests, outside of any load."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from modelport.loadtests.payloads import Payloads, Tensors
from modelport.loadtests.samples import Outcome
from modelport.loadtests.target import Target
from modelport.loadtests.users.client import Unanswered
from modelport.loadtests.users.dialects import dialect

#: Of a request, and what one gets at least when the time is over.
ANSWER_SECONDS, LEAST_SECONDS = 60.0, 1.0


@dataclass(frozen=True)
class Given:
    """An answer as it came, and as it was read."""

    body: bytes
    json_size: int | None
    tensors: Tensors


def given(asked: Payloads, target: Target, until: float = math.inf) -> list[Given]:
    """``target``'s answers to the requests in turn, one at least.

    Args:
        until: no request is sent after that, on the clock of ``time.monotonic()``.

    Raises:
        Unanswered: it does not answer a request, or not with an answer.
    """
    spoken = dialect(target.protocol)
    found: list[Given] = []
    client = spoken.connect(target, max(LEAST_SECONDS, min(ANSWER_SECONDS, _left(until))))
    try:
        client.connect()
        for number in range(len(asked.requests)):
            if found and _left(until) <= 0:
                break
            body, size = client.ask(spoken.prepare(target, asked, number))
            found.append(Given(body, size, spoken.read(body, size)))
    except Unanswered:
        raise
    except Exception as error:  # whatever an answer of another kind leads a reader to
        said = f"its answer is not one of {target.protocol} ({type(error).__name__}: {error})"
        raise Unanswered(Outcome.FAILED, said) from error
    finally:
        client.close()
    return found


def _left(until: float) -> float:
    return until - time.monotonic()
