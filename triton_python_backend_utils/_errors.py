"""Errors: of one response, and those that a model raises."""

from __future__ import annotations


class TritonModelException(Exception):
    """An error of a model, or of its use of this module."""

    def message(self) -> str:
        return str(self)


class TritonError:
    """The error of one response.

    Codes: ``UNKNOWN``, ``INTERNAL``, ``NOT_FOUND``, ``INVALID_ARG``, ``UNAVAILABLE``,
    ``UNSUPPORTED``, ``ALREADY_EXISTS``, ``CANCELLED``; as a client, see them as statuses.
    """

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG = 0, 1, 2, 3
    UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = 4, 5, 6, 7
    __slots__ = ("_code", "_message", "reason")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message, self._code = message, code
        #: Message and code without Triton's words, of another model's error.
        self.reason = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message
