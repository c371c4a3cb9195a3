"""The server's log."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import PurePath
from typing import ClassVar

from triton_python_backend_utils._runtime import Current


class LogLevel(Enum):
    """Levels of the server's log."""

    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    VERBOSE = "VERBOSE"


class Logger:
    """Writes lines to the server's log, with the caller's file and line."""

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        _log(message, level)

    @staticmethod
    def log_info(message: str) -> None:
        _log(message, LogLevel.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(message, LogLevel.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        _log(message, LogLevel.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(message, LogLevel.VERBOSE)


def _log(message: str, level: LogLevel) -> None:
    if not isinstance(message, str) or not isinstance(level, LogLevel):
        raise TypeError(
            "log(): incompatible function arguments. The following argument types are supported:\n"
            "    1. (message: str, level: c_python_backend_utils.LogLevel)\n\nInvoked with: "
            f"{message!r}, {level!r}"
        )
    caller = sys._getframe(2)
    file = PurePath(caller.f_code.co_filename).name
    Current.runtime.log(level.value, message, file, caller.f_lineno)
