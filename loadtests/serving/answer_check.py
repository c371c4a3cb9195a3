"""Checks of single answers before any load, with the client and the comparison of a load."""

from __future__ import annotations

from typing import Any

import numpy as np

from modelport.loadtests.load.payloads import BadPayload, Payloads, Tensors
from modelport.loadtests.load.target import LoadTestTarget

# Import the dialects now, so that their import delays no server's first answer.
from modelport.loadtests.users import oip_http, tfserving, torchserve  # noqa: F401
from modelport.loadtests.users.answer_checker import Checker
from modelport.loadtests.users.protocol_table import dialect

TIMEOUT_SECONDS = 30.0


def shown(request: Tensors, most: int = 120) -> str:
    """The inputs of a request in one line, long ones cut."""
    told = ", ".join(
        f"{name} = {np.array2string(array, separator=', ', threshold=8, edgeitems=3)}"
        for name, array in request.items()
    )
    line = " ".join(told.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


class AnswerCheck:
    """A context manager that checks single answers of one target.

    Raises:
        BadPayload: ``payloads`` has no expected answers.
    """

    def __init__(self, target: LoadTestTarget, payloads: Payloads) -> None:
        if payloads.expected is None:
            raise BadPayload("it has no expected answers; 'modelport sample' records them")
        self._target, self._payloads = target, payloads
        self._dialect = dialect(target.protocol)
        self._checker = Checker(payloads, self._dialect.read)
        self._client = self._dialect.connect(target, TIMEOUT_SECONDS)

    def problem(self, number: int) -> str | None:
        """The problem of the answer to request ``number``, or None.

        Raises:
            Unanswered: there is no answer, or an error.
        """
        return self._checker.problem(number, *self._answer(number))

    def wrong(self, number: int) -> str | None:
        """Like ``problem``, with the request, the wrong value and the expected one."""
        body, json_size = self._answer(number)
        if self._checker.problem(number, body, json_size) is None:
            return None
        told = self._checker.explained(number, body, json_size)
        return f"request {number + 1} ({shown(self._payloads.requests[number])}): {told}"

    def _answer(self, number: int) -> tuple[Any, int | None]:
        return self._client.ask(self._dialect.prepare(self._target, self._payloads, number))

    def __enter__(self) -> AnswerCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
