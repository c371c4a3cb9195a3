"""The interface of protocol clients: send one request, and record its times.

Times are on the clock of ``time.perf_counter``, which on Linux is the same for all processes.
"""

from __future__ import annotations

from typing import Any, Protocol

from modelport.loadtests.load.samples import Outcome


class Unanswered(Exception):
    """There was no answer, or an error; ``outcome`` has the kind."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class DialectClient(Protocol):
    """A client with one open connection and one request at a time."""

    #: Times of the last request, in seconds.
    sent: float
    first_byte: float
    done: float

    def connect(self) -> None:
        """Open the connection, so that no request includes the time for it.

        Raises:
            Unanswered: nothing listens there.
        """
        ...

    def ask(self, request: Any) -> tuple[Any, int | None]:
        """Send a prepared request; return the answer's body, and the size of its JSON part.

        Raises:
            Unanswered: there was no answer, or an error. The three times are set nevertheless.
        """
        ...

    def close(self) -> None: ...
