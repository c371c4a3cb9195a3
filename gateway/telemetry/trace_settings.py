"""Settings of traces, as in Triton: given at the start, changed while the gateway runs.

A model without a setting of its own has the global one; the global ones that are cleared have again
the value of the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from modelport.gateway.errors import InvalidArgument, Unsupported, UsageError
from modelport.gateway.settings import TraceConfig, TraceMode

OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
#: The settings that may change, and the least value of those that are numbers.
NUMBERS: Final[Mapping[str, int]] = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
LEVEL: Final = "trace_level"
_MOST: Final = {"trace_rate": 2**32 - 1, "trace_count": 2**31 - 1, "log_frequency": 2**32 - 1}
FILE_REFUSED: Final = "trace file location can not be updated through network protocol"
#: The environment's own way to ask for traces: ``OTEL_TRACES_EXPORTER``.
EXPORTER: Final = "OTEL_TRACES_EXPORTER"
#: The numbers of ``--trace-config opentelemetry`` that the batching of spans takes.
_BATCHING: Final = (
    "bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size",
)  # fmt: skip

#: Settings by name; a level is a tuple, other values are numbers.
Values = Mapping[str, Any]
#: None clears a setting.
Changes = Mapping[str, Any]


class TraceSettings:
    """The settings of one process."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._start: Values = {
            LEVEL: config.level,
            "trace_rate": config.rate,
            "trace_count": config.limit,
            "log_frequency": config.log_frequency,
        }
        #: The settings that were changed, by model; empty: global.
        self.changed: dict[str, dict[str, Any]] = {}

    def values(self, model: str = "") -> dict[str, Any]:
        """The settings of a model, or the global ones."""
        return {**self._start, **self.changed.get("", {}), **self.changed.get(model, {})}

    def update(self, model: str, changes: Changes) -> None:
        """Change settings of a model, or the global ones.

        Raises:
            InvalidArgument: The changed settings do not go together.
        """
        made = {**self.changed.get(model, {}), **changes}
        made = {name: value for name, value in made.items() if value is not None}
        before = self.changed.pop(model, None)
        if made:
            self.changed[model] = made
        try:
            self._check(self.values(model))
        except InvalidArgument:
            self.changed.pop(model, None)
            if before is not None:
                self.changed[model] = before
            raise

    def _check(self, values: Values) -> None:
        if not values[LEVEL]:
            return
        reason = ""
        if self.config.mode is TraceMode.TRITON and not self.config.file:
            reason = "trace file name is not given"
        elif self.config.mode is TraceMode.OPENTELEMETRY and TENSORS in values[LEVEL]:
            reason = "trace mode 'opentelemetry' does not support trace level 'TENSORS'"
        if reason:
            raise InvalidArgument(f"Attempting to set invalid trace setting :{reason}")

    def document(self, model: str = "") -> dict[str, Any]:
        """The settings as the trace extension reports them."""
        values = self.values(model)
        found: dict[str, Any] = {
            LEVEL: list(values[LEVEL]) or [OFF],
            "trace_rate": str(values["trace_rate"]),
            "trace_count": str(values["trace_count"]),
        }
        if self.config.mode is TraceMode.TRITON:
            found["log_frequency"] = str(values["log_frequency"])
            found["trace_file"] = self.config.file
        found["trace_mode"] = self.config.mode.value
        return found


def read_changes(document: Mapping[str, Any]) -> dict[str, Any]:
    """Read the changes of a request, as texts, lists of texts, or None.

    Raises:
        InvalidArgument: A value is not one of the setting.
        Unsupported: The setting cannot be changed.
    """
    changes: dict[str, Any] = {}
    for name, value in document.items():
        if name == "trace_file":
            raise Unsupported(FILE_REFUSED)
        if name == LEVEL:
            changes[name] = None if value is None else _level(value)
        elif name in NUMBERS:
            changes[name] = None if value is None else _number(name, value)
        else:
            known = ", ".join((LEVEL, *NUMBERS))
            raise InvalidArgument(f"there is no trace setting '{name[:64]}'; there are: {known}")
    return changes


def _level(value: Any) -> tuple[str, ...]:
    levels = [value] if isinstance(value, str) else value
    if type(levels) is not list or not all(each in (OFF, TIMESTAMPS, TENSORS) for each in levels):
        raise InvalidArgument(
            f"Unable to parse '{LEVEL}': expected a list of {OFF}, {TIMESTAMPS} or {TENSORS}"
        )
    if OFF in levels and len(levels) > 1:
        raise InvalidArgument("Expect only one trace level 'OFF' is specified")
    return tuple(each for each in (TIMESTAMPS, TENSORS) if each in levels)


def _number(name: str, value: Any) -> int:
    text = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(text, str):
        raise InvalidArgument(f"expect only 1 value for '{name}', a string")
    digits = text[1:] if text.startswith("-") else text
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(f"Unable to parse '{name}', got: {text[:64]}")
    least, most = NUMBERS.get(name, 1), _MOST.get(name, 2**31 - 1)
    if len(digits) > 10 or int(text) > most or (name != "trace_count" and int(text) < least):
        raise InvalidArgument(
            f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text[:64]}"
        )
    if int(text) < least:
        raise InvalidArgument(f"Unable to parse '{name}'. Expecting value >= {least}, got:{text}")
    return int(text)


def parse_config(flags: Sequence[str], environment: Mapping[str, str] = os.environ) -> TraceConfig:
    """Parse the values of ``--trace-config``: ``SETTING=VALUE`` or ``MODE,SETTING=VALUE``.

    Raises:
        UsageError: One is invalid.
    """
    config, levels = TraceConfig(), list[str]()
    asked = environment.get(EXPORTER, "") == "otlp"
    if asked:  # OpenTelemetry's sampler chooses, every request by default
        config = TraceConfig(TraceMode.OPENTELEMETRY, (TIMESTAMPS,), rate=1)
    for flag in flags:
        mode, comma, rest = flag.partition(",")
        name, equals, value = (rest if comma else flag).partition("=")
        if not equals or not name or not value:
            raise UsageError(
                f"--trace-config '{flag}' is not SETTING=VALUE or MODE,SETTING=VALUE, such as "
                "rate=100 or triton,file=trace.json"
            )
        where = mode if comma else ""
        try:
            if where == "" and name == LEVEL.removeprefix("trace_"):
                levels += _level(value)
                config = config._replace(level=())
            else:
                config = _with(config, where, name, value)
        except InvalidArgument as error:
            raise UsageError(f"--trace-config '{flag}': {error}") from error
    if levels:
        config = config._replace(
            level=tuple(each for each in (TIMESTAMPS, TENSORS) if each in levels)
        )
    try:
        TraceSettings(config)._check({LEVEL: config.level})
    except InvalidArgument as error:
        raise UsageError(
            f"--trace-config: {str(error).partition(':')[2]}; add --trace-config triton,file=FILE, "
            "or mode=opentelemetry"
        ) from error
    return config


def _with(config: TraceConfig, mode: str, name: str, value: str) -> TraceConfig:
    """``config`` with one more value."""
    if mode == "":
        if name == "mode":
            if value not in [each.value for each in TraceMode]:
                raise InvalidArgument("the mode is 'triton' or 'opentelemetry'")
            return config._replace(mode=TraceMode(value))
        if name == "rate":
            return config._replace(rate=_number("trace_rate", value))
        if name == "count":
            return config._replace(limit=_number("trace_count", value))
    elif mode == TraceMode.TRITON.value:
        if name == "file":
            return config._replace(file=value)
        if name == "log-frequency":
            return config._replace(log_frequency=_number("log_frequency", value))
    elif mode == TraceMode.OPENTELEMETRY.value:
        if name == "url":
            return config._replace(url=value)
        if name == "resource" and "=" in value:
            key, _, text = value.partition("=")
            return config._replace(resource=(*config.resource, (key, text)))
        if name in _BATCHING:
            return config._replace(batching=(*config.batching, (name, _number(name, value))))
    else:
        raise InvalidArgument(f"there is no mode '{mode}'; it is 'triton' or 'opentelemetry'")
    raise InvalidArgument(f"there is no setting '{name}'" + (f" of mode '{mode}'" if mode else ""))
