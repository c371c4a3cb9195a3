"""``slo.toml``: the limits of a candidate, and the duration of the gate.

Everything has a default; an empty file is a gate on regressions. ``false`` switches a criterion
off. Unknown tables and keys are errors, and so are values of the wrong type or range.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.gateway.cli.errors import UsageError, first_line
from modelport.loadtests.load.target import LoadTestProtocol

#: Most connections (one per user) of a load generator, and a rate beyond what it can send.
MOST_USERS, MOST_RATE = 10_000, 1e6
#: Python reads a dotted key in time that grows with the square of its length.
MAX_FILE_BYTES = 32 * 1024
MAX_SHOWN = 100
#: Checks a key's value; raises ``_Bad`` with the expected type.
Reader = Callable[[Any], Any]


class _Bad(ValueError):
    """The expected type of an invalid value."""


def _number(least: float, most: float, *, open_end: bool = False) -> Reader:
    """A finite number in ``least..most``; ``least`` itself is excluded if ``open_end``."""
    wanted = f"a number {'above' if open_end else 'of at least'} {least:g}"
    wanted += f", at most {most:g}" if math.isfinite(most) else ""

    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Bad(wanted)
        try:
            number = float(value)
        except OverflowError:
            raise _Bad(wanted) from None
        if not math.isfinite(number) or not least <= number <= most:
            raise _Bad(wanted)
        if open_end and number == least:
            raise _Bad(wanted)
        return number

    return read


def _count(least: int, most: float = math.inf) -> Reader:
    wanted = f"a whole number of at least {least}"
    wanted += f", at most {most}" if math.isfinite(most) else ""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _Bad(wanted)
        return value

    return read


def _or_off(reader: Reader) -> Reader:
    def read(value: Any) -> Any:
        if value is False:
            return None
        try:
            return reader(value)
        except _Bad as error:
            raise _Bad(f"{error}, or false for no such criterion") from None

    return read


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Bad("a non-empty string")
    return value


def _digest(value: Any) -> str:
    if (
        not isinstance(value, str)
        or len(value) != 64
        or set(value.lower()) - set("0123456789abcdef")
    ):
        raise _Bad("a SHA-256: 64 hexadecimal digits")
    return value.lower()


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Bad("true or false")
    return value


def _paths(value: Any) -> tuple[Path, ...]:
    if not isinstance(value, list) or not all(isinstance(path, str) and path for path in value):
        raise _Bad("a list of files")
    return tuple(Path(path) for path in value)


def _protocol(value: Any) -> LoadTestProtocol:
    if value not in list(LoadTestProtocol):
        raise _Bad(f"one of {', '.join(LoadTestProtocol)}")
    return LoadTestProtocol(value)


def _by(reader: Reader) -> dict[str, Reader]:
    return {"read": reader}


_MOST = _by(_or_off(_number(0, math.inf, open_end=True)))
_LARGEST_SHARE = _by(_or_off(_number(0, 1)))
#: Larger regressions are no meaningful limit.
_LARGEST_CHANGE = _by(_or_off(_number(0, 10)))


@dataclass(frozen=True)
class AbsoluteLimits:
    """Limits of the candidate's own figures."""

    p50_ms: float | None = field(default=None, metadata=_MOST)
    p99_ms: float | None = field(default=None, metadata=_MOST)
    #: Time to first response, warm: from sending to the answer's first byte.
    first_byte_p50_ms: float | None = field(default=None, metadata=_MOST)
    first_byte_p99_ms: float | None = field(default=None, metadata=_MOST)
    #: Time to first response, cold: process start to the first correct answer. Folders only.
    first_response_seconds: float | None = field(default=None, metadata=_MOST)
    #: Process start to READY. Folders only.
    cold_start_seconds: float | None = field(default=None, metadata=_MOST)
    #: Share of requests that are refused, fail or time out: the error budget.
    max_error_share: float | None = field(default=0.001, metadata=_LARGEST_SHARE)
    max_wrong_share: float | None = field(default=0.001, metadata=_LARGEST_SHARE)


@dataclass(frozen=True)
class Regressions:
    """Accepted slowdown against the baseline: 0.05 allows 5 %.

    A regression of 15 % must be detected; the default of 5 % makes it unlikely that one passes.
    """

    max_p50_regression: float | None = field(default=0.05, metadata=_LARGEST_CHANGE)
    max_p99_regression: float | None = field(default=0.05, metadata=_LARGEST_CHANGE)
    max_first_byte_p50_regression: float | None = field(default=None, metadata=_LARGEST_CHANGE)
    #: Larger, as a start gives one observation per round and a load thousands.
    max_first_response_regression: float | None = field(default=0.15, metadata=_LARGEST_CHANGE)
    max_cold_start_regression: float | None = field(default=None, metadata=_LARGEST_CHANGE)
    #: Accepted loss of accuracy or AUC, in its own unit, on --data with labels.
    max_drop: float | None = field(default=0.01, metadata=_LARGEST_SHARE)


@dataclass(frozen=True)
class VerdictSettings:
    """The required confidence."""

    #: 1 - the error probability, of failing a good candidate and of passing a bad one.
    confidence: float = field(default=0.95, metadata=_by(_number(0.5, 0.9999)))


@dataclass(frozen=True)
class DurationSettings:
    """The lengths of slices, rounds and the whole gate."""

    max_seconds: float = field(default=600.0, metadata=_by(_number(1, 7 * 86_400)))
    #: Length of one slice of load; a round alternates ``slices`` of each side.
    slice_seconds: float = field(default=3.0, metadata=_by(_number(0.2, 3600)))
    warmup_seconds: float = field(default=0.5, metadata=_by(_number(0, 600)))
    slices: int = field(default=2, metadata=_by(_count(1)))
    #: Rounds before anything about latency is decided.
    min_rounds: int = field(default=5, metadata=_by(_count(2)))
    #: Time limit for a server to become ready.
    ready_seconds: float = field(default=120.0, metadata=_by(_number(1, 3600)))


@dataclass(frozen=True)
class Traffic:
    """The load, the same on both sides."""

    protocol: LoadTestProtocol = field(
        default=LoadTestProtocol.OIP_HTTP_BINARY, metadata=_by(_protocol)
    )
    #: Most requests in flight; without a rate this many always (closed loop).
    users: int = field(default=1, metadata=_by(_count(1, MOST_USERS)))
    rate_per_second: float | None = field(
        default=None, metadata=_by(_or_off(_number(0, MOST_RATE, open_end=True)))
    )
    batch_size: int = field(default=1, metadata=_by(_count(1)))
    timeout_seconds: float = field(default=30.0, metadata=_by(_number(0.001, 3600)))

    @property
    def is_lone(self) -> bool:
        """Whether there is a single user without a rate, who can ask both sides in turn."""
        return self.users == 1 and self.rate_per_second is None


@dataclass(frozen=True)
class CertificateSettings:
    """Requirements on a candidate in a folder; its files must match the manifest in any case."""

    required: bool = field(default=True, metadata=_by(_truth))
    #: One of these Ed25519 keys (PEM) must have signed it; paths are relative to the file.
    public_keys: tuple[Path, ...] = field(default=(), metadata=_by(_paths))
    model: str | None = field(default=None, metadata=_by(_text))
    checkpoint_sha256: str | None = field(default=None, metadata=_by(_digest))


@dataclass(frozen=True)
class Answers:
    """An answer is right if ``|error| <= atol + rtol * |expected|``; defaults come from
    certificates."""

    #: Whether the candidate has another checkpoint and is compared with its own answers; None:
    #: the certificates decide.
    retrained: bool | None = field(default=None, metadata=_by(_truth))
    atol: float | None = field(default=None, metadata=_by(_number(0, math.inf)))
    rtol: float | None = field(default=None, metadata=_by(_number(0, math.inf)))


@dataclass(frozen=True)
class Slo:
    """The content of ``slo.toml``."""

    limits: AbsoluteLimits = field(default_factory=AbsoluteLimits)
    regressions: Regressions = field(default_factory=Regressions)
    verdict: VerdictSettings = field(default_factory=VerdictSettings)
    duration: DurationSettings = field(default_factory=DurationSettings)
    load: Traffic = field(default_factory=Traffic)
    certificate: CertificateSettings = field(default_factory=CertificateSettings)
    answers: Answers = field(default_factory=Answers)
    #: ``table.key`` of all settings in the file.
    said: frozenset[str] = frozenset()

    @property
    def wants_labels(self) -> bool:
        """Whether a limit on the loss of accuracy was set explicitly."""
        return "regressions.max_drop" in self.said and self.regressions.max_drop is not None


def read(path: Path) -> Slo:
    """Read the file.

    Raises:
        UsageError: it cannot be read, or has an invalid setting; the message names the key.
    """
    try:
        document = tomllib.loads(_text_of(path))
    except OSError as error:
        raise UsageError(
            f"--slo '{path}' cannot be read ({error.strerror}); an empty file sets the defaults"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number is no TOMLDecodeError
        raise UsageError(f"'{path}' is not TOML: {first_line(error)}") from error
    try:
        slo = parse(document)
    except ValueError as error:
        raise UsageError(f"'{path}': {error}") from error
    keys = tuple(path.parent / key for key in slo.certificate.public_keys)
    certificate = dataclasses.replace(slo.certificate, public_keys=keys)
    return dataclasses.replace(slo, certificate=certificate)


def _text_of(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
    return content.decode()


def parse(document: Mapping[str, Any]) -> Slo:
    """Parse a TOML document.

    Raises:
        ValueError: an unknown table or key, or an invalid value; the message names it.
    """
    sections = {one.name: one.default_factory for one in dataclasses.fields(Slo)}
    del sections["said"]
    parts: dict[str, Any] = {}
    said: set[str] = set()
    for name, table in document.items():
        if name not in sections:
            what = f"table [{name}]" if isinstance(table, dict) else f"key '{name}'"
            raise ValueError(f"unknown {what}; there are [{'], ['.join(sections)}]")
        if not isinstance(table, dict):
            raise ValueError(f"'{name}' must be a table, [{name}]")
        parts[name] = _section(name, sections[name], table)
        said |= {f"{name}.{key}" for key in table}
    return Slo(**parts, said=frozenset(said))


def _section(name: str, kind: Any, table: Mapping[str, Any]) -> Any:
    readers: dict[str, Reader] = {
        one.name: one.metadata["read"] for one in dataclasses.fields(kind)
    }
    values = {}
    for key, value in table.items():
        if key not in readers:
            raise ValueError(f"unknown key '{key}' in [{name}]; it knows {', '.join(readers)}")
        try:
            values[key] = readers[key](value)
        except _Bad as error:
            raise ValueError(f"{name}.{key} = {_shown(value)} must be {error}") from None
    return kind(**values)


def _shown(value: Any) -> str:
    try:
        said = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    except ValueError:  # a number of more digits than Python prints
        said = "a number without end"
    return said if len(said) <= MAX_SHOWN else said[:MAX_SHOWN] + "..."
