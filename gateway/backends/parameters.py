"""A configuration's ``parameters``, which are all text, read as Triton's backends read them."""

from __future__ import annotations

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.settings import usable_cores

#: Each costs memory: stacks, arenas, scratch space of every operator.
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
    """Raises ``InvalidArgument``: it is no whole number, or below ``minimum``."""
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
    """As ``integer``, and no more than the machine has use for."""
    number, most = integer(config, key, default, minimum), max_threads()
    if number > most:
        raise InvalidArgument(
            f"parameter '{key}' must be at most {most}, {THREADS_PER_CORE} for each core of this "
            f"machine, not {number}"
        )
    return number


def max_threads() -> int:
    """The most threads of one kind that a model may ask for."""
    return max(LEAST_MAX_THREADS, THREADS_PER_CORE * usable_cores())


def boolean(config: ModelConfig, key: str, default: bool) -> bool:
    """Raises ``InvalidArgument``: it is neither true nor false."""
    value = text(config, key)
    if not value:
        return default
    if value.lower() not in _WORDS:
        raise InvalidArgument(f"parameter '{key}' must be true or false, not '{value}'")
    return _WORDS[value.lower()]
