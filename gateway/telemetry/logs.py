"""Logs: the records of structlog and of libraries, one line each, to stderr."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, TextIO

import structlog

from modelport.gateway.errors import InvalidArgument, Unsupported
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

    Stack traces keep their lines; JSON escapes by itself.
    """
    if LOGS.format is LogFormat.JSON:
        return event
    for key, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            kept = "\n\t" if key in ("exception", "stack") else ""
            event[key] = "".join(
                c if c.isprintable() or c in kept else repr(c)[1:-1] for c in value
            )
    return event


class LogSettings:
    """The settings of the log of this process, which may change while it runs.

    Attributes:
        info, warning, error: Whether lines of the level are written.
        verbose_level: Above 0, every request is logged, too.
        is_first: Whether this is the only process or the first worker, which logs what all have in
            common.
    """

    def __init__(self) -> None:
        self.info = self.warning = self.error = self.is_first = True
        self.verbose_level = 0
        self.format = LogFormat.DEFAULT

    def wants(self, level: str) -> bool:
        """Whether lines of a level are written."""
        if level in ("warning", "warn"):
            return self.warning
        if level == "info":
            return self.info and (self.is_first or self.verbose_level > 0)
        return self.verbose_level > 0 if level == "debug" else self.error

    def drop_unwanted(self, _: Any, name: str, event: Any) -> Any:
        """Drop an event of a level that is not written."""
        if not self.wants(name):
            raise structlog.DropEvent
        return event

    def document(self) -> dict[str, Any]:
        """The settings as Triton's logging extension reports them."""
        return {
            "log_file": "",
            "log_info": self.info,
            "log_warning": self.warning,
            "log_error": self.error,
            "log_verbose_level": self.verbose_level,
            "log_format": self.format.value,
        }

    def update(self, changes: Mapping[str, Any]) -> None:
        """Change settings, checked by ``read_log_changes``."""
        for name, value in changes.items():
            setattr(self, name.removeprefix("log_"), value)
        self.format = LogFormat(self.format)


#: Of this process.
LOGS = LogSettings()


def read_log_changes(document: Mapping[str, Any]) -> dict[str, Any]:
    """Read the changes of a request; None changes nothing.

    Raises:
        InvalidArgument: A value is not one of the setting.
        Unsupported: The setting cannot be changed.
    """
    changes: dict[str, Any] = {}
    for name, value in document.items():
        if name not in LOGS.document():
            known = ", ".join(LOGS.document())
            raise InvalidArgument(f"there is no log setting '{name[:64]}'; there are: {known}")
        if value is None:
            continue
        if name == "log_file":
            raise Unsupported("log file location can not be updated through network protocol")
        if name == "log_verbose_level":
            if type(value) is not int or not 0 <= value < 2**31:
                raise InvalidArgument(f"expect an integer from 0 to 2147483647 for '{name}'")
        elif name == "log_format":
            if value not in [each.value for each in LogFormat]:
                raise InvalidArgument(f"invalid argument for --log_format, got: {str(value)[:64]}")
        elif type(value) is not bool:
            raise InvalidArgument(f"expect boolean for '{name}'")
        changes[name] = value
    return changes


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
    colors = sys.stderr.isatty() and not terminal.is_plain()
    console, dump = (
        structlog.dev.ConsoleRenderer(colors=colors),
        structlog.processors.JSONRenderer(),
    )
    own_stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False)
    iso_stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    LOGS.format, LOGS.verbose_level = log_format, verbose
    LOGS.is_first = not worker

    def stamped(logger: Any, name: str, event: Any) -> Any:
        stamp = own_stamp if LOGS.format is LogFormat.DEFAULT else iso_stamp
        return stamp(logger, name, event)

    def renderer(logger: Any, name: str, event: Any) -> Any:
        return (dump if LOGS.format is LogFormat.JSON else console)(logger, name, event)

    shared: list[Any] = [
        structlog.stdlib.add_log_level,
        stamped,
        structlog.processors.format_exc_info,
        _without_control_characters,
    ]
    if worker is not None:
        shared.append(lambda _, __, event: {**event, "worker": worker})
    structlog.configure(
        processors=[LOGS.drop_unwanted, *shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(output),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(output)
    handler.addFilter(lambda record: LOGS.wants(record.levelname.lower()))
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
