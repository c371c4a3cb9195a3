"""Values of a configuration's ``parameters``, parsed as Triton's backends do."""

from __future__ import annotations

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.settings import usable_cores

#: Threads cost memory: stacks, arenas, scratch space of every operator.
THREADS_PER_CORE = 8
LEAST_MAX_THREADS = 64

_WORDS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def text(config: ModelConfig, key: str, default: str = "") -> str:
    value: str = config.parameters[key].string_value if key in config.parameters else ""
    return value or default


def integer(config: ModelConfig, key: str, default: int, minimum: int = 0) -> int:
    """Read an integer; raises ``InvalidArgument`` if it is invalid or below ``minimum``."""
    value = text(config, key)
    if not value:
        return default
    try:
        number = int(value)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise InvalidArgument(
            f"parameter '{key}' must be a whole number of at least {minimum}, not '{value}'"
        )
    return number


def threads(config: ModelConfig, key: str, default: int, minimum: int = 0) -> int:
    """Read a number of threads, at most ``max_threads``."""
    number, most = integer(config, key, default, minimum), max_threads()
    if number > most:
        raise InvalidArgument(
            f"parameter '{key}' must be at most {most}, {THREADS_PER_CORE} per core of this "
            f"machine, not {number}"
        )
    return number


def max_threads() -> int:
    """The largest number of threads of one kind in a model's configuration."""
    return max(LEAST_MAX_THREADS, THREADS_PER_CORE * usable_cores())


def boolean(config: ModelConfig, key: str, default: bool) -> bool:
    """Read a truth value; raises ``InvalidArgument`` for any other text."""
    value = text(config, key)
    if not value:
        return default
    if value.lower() not in _WORDS:
        raise InvalidArgument(f"parameter '{key}' must be true or false, not '{value}'")
    return _WORDS[value.lower()]
