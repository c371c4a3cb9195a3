"""A configuration's ``parameters``, which are all text, read as Triton's backends read them."""

from __future__ import annotations

from gateway.errors import InvalidArgument
from gateway.repository.config import ModelConfig

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


def boolean(config: ModelConfig, key: str, default: bool) -> bool:
    """Raises ``InvalidArgument``: it is neither true nor false."""
    value = text(config, key)
    if not value:
        return default
    if value.lower() not in _WORDS:
        raise InvalidArgument(f"parameter '{key}' must be true or false, not '{value}'")
    return _WORDS[value.lower()]
