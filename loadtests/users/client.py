"""What every client of a dialect does: ask once, and leave the times of it.

Times are ``time.perf_counter``'s, which on Linux is one clock for all processes.
"""

from __future__ import annotations

from typing import Any, Protocol

from modelport.loadtests.samples import Outcome


class Unanswered(Exception):
    """No answer, or one that is an error; ``outcome`` says which kind."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class DialectClient(Protocol):
    """One request at a time, one connection, kept open."""

    #: Of the last request, seconds.
    sent: float
    first_byte: float
    done: float

    def connect(self) -> None:
        """Open the connection, so that no request pays for it.

        Raises:
            Unanswered: nobody listens there.
        """
        ...

    def ask(self, request: Any) -> tuple[Any, int | None]:
        """Send what the dialect prepared; the answer's body, and the size of its JSON part.

        Raises:
            Unanswered: see there. The three times are set all the same.
        """
        ...

    def close(self) -> None: ...
