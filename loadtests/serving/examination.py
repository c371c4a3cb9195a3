"""One request at a time, each answer held against the right one: what is asked before any load.

By the client and the check that a load uses.
"""

from __future__ import annotations

from types import TracebackType

from loadtests.payloads import BadPayload, Payloads
from loadtests.target import Target

# The dialects are imported here, so that no first answer of a server pays for it.
from loadtests.users import oip_http, tfserving, torchserve  # noqa: F401
from loadtests.users.answers import Checker
from loadtests.users.dialects import dialect

TIMEOUT_SECONDS = 30.0


class Examination:
    """Of one target; use it as a context.

    Raises:
        BadPayload: there are no right answers in ``payloads``.
    """

    def __init__(
        self, target: Target, payloads: Payloads, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        if payloads.expected is None:
            raise BadPayload("no right answers in it; 'modelport sample' writes them")
        self._target, self._payloads = target, payloads
        self._dialect = dialect(target.protocol)
        self._checker = Checker(payloads, self._dialect.read)
        self._client = self._dialect.connect(target, timeout_seconds)

    def problem(self, number: int) -> str | None:
        """What is wrong with the answer to request ``number``; None: nothing.

        Raises:
            Unanswered: there is none, or it is an error.
        """
        request = self._dialect.prepare(self._target, self._payloads, number)
        body, json_size = self._client.ask(request)
        return self._checker.problem(number, body, json_size)

    def __enter__(self) -> Examination:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._client.close()
