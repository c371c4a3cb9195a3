"""Common code of the programs behind slow ``make`` verbs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from modelport.loadtests.system import environments


def run(main: Callable[[], int]) -> NoReturn:
    """Exit with ``main``'s status; what the machine lacks is one line."""
    # An end by SIGTERM has to pass the finally clauses too: they stop the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except environments.Missing as error:
        sys.exit(str(error))
