"""Logs: the records of structlog and of libraries, one line each, to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any, TextIO

import structlog

from modelport.gateway.runtime import terminal
from modelport.gateway.settings import LogFormat
from modelport.gateway.telemetry import native_lines


class _StandardError:
    """Standard error; if its reader goes away, the log is lost and nothing else fails.

    ``stream`` is standard error as it was before native lines were diverted from it.

    A line is written with its end by one call: with ``PYTHONUNBUFFERED`` every call is a system
    call, and the lines of several workers would mix.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            (self._stream or sys.stderr).write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            (self._stream or sys.stderr).flush()


def _without_control_characters(_: Any, __: str, event: MutableMapping[str, Any]) -> Any:
    """Escape what a terminal would obey: names and messages come from outside.

    Stack traces keep their lines.
    """
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            kept = "\n\t" if key in ("exception", "stack") else ""
            event[key] = "".join(
                c if c.isprintable() or c in kept else repr(c)[1:-1] for c in value
            )
    return event


@contextlib.contextmanager
def gateway_log(log_format: LogFormat, verbose: int) -> Iterator[None]:
    """Configure the log of a whole gateway: in JSON, native libraries write objects, too."""
    diverted = native_lines.divert() if log_format is LogFormat.JSON else None
    configure_logging(log_format, verbose, stream=diverted)
    try:
        yield
    finally:
        native_lines.end()


def configure_logging(
    log_format: LogFormat,
    verbose: int,
    worker: int | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send the records of structlog and of libraries to stderr, one line each.

    The records of a ``worker`` have its number. Only the first worker logs what all have in common;
    the others log warnings and errors, unless ``verbose``.
    """
    output: Any = _StandardError(stream)
    renderer: Any = structlog.processors.JSONRenderer()
    if log_format is not LogFormat.JSON:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty() and not terminal.is_plain()
        )
    stamp = "iso" if log_format is not LogFormat.DEFAULT else "%H:%M:%S.%f"
    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt=stamp, utc=log_format is not LogFormat.DEFAULT),
        structlog.processors.format_exc_info,
    ]
    if log_format is not LogFormat.JSON:
        shared.append(_without_control_characters)
    if worker is not None:
        shared.append(lambda _, __, event: {**event, "worker": worker})
    least = logging.WARNING if worker else logging.INFO
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG if verbose else least),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processor=renderer, foreign_pre_chain=shared)
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


class StandardLibraryLogs:
    """Sends structlog's records to the loggers ``modelport.*`` of ``logging`` while it is entered.

    It may be entered several times. A program that has configured structlog itself keeps its
    configuration.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._ours = False

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered > 1 or structlog.is_configured():
                return
            self._ours = True
            structlog.configure(
                processors=[
                    structlog.stdlib.filter_by_level,
                    structlog.processors.format_exc_info,
                    _line,
                ],
                wrapper_class=structlog.stdlib.BoundLogger,
                logger_factory=structlog.stdlib.LoggerFactory(),
            )

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if not self._entered and self._ours:
                self._ours = False
                structlog.reset_defaults()


#: Of this process.
STANDARD_LIBRARY_LOGS = StandardLibraryLogs()


def _line(_: Any, __: str, event: MutableMapping[str, Any]) -> str:
    """The event, then its fields as ``key=value``."""
    text = str(event.pop("event"))
    return " ".join([text, *(f"{key}={value}" for key, value in event.items())])
