"""Authentication of requests, before their bodies are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from modelport.gateway.access.principal import ANONYMOUS, ConnectionIdentity, Principal


class Authenticator(Protocol):
    """Recognises one kind of credential. Classes inherit from it for ``start`` and ``close``."""

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal | None:
        """Return the caller, or None if the request has no credential of this kind.

        It is called on the event loop for each request, and must not block.

        Args:
            headers: The request's headers, names in lower case; see ``combined``.
            connection: The connection of the request.

        Raises:
            Unauthenticated: The credential is wrong or expired.
        """

    def start(self) -> None:
        """Begin work in the background, if there is any. Called on the event loop, once."""

    def close(self) -> None:
        """End what ``start`` began, and watch no file any longer."""


def authenticate(
    authenticators: Sequence[Authenticator],
    headers: Mapping[bytes, bytes],
    connection: ConnectionIdentity,
) -> Principal:
    """Return the caller by the first authenticator that recognises a credential, or ``ANONYMOUS``.

    Raises:
        Unauthenticated: The credential is wrong; no further authenticator is asked.
    """
    for authenticator in authenticators:
        principal = authenticator.authenticate(headers, connection)
        if principal is not None:
            return principal
    return ANONYMOUS


def combined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Make a mapping of ``headers``; repeated fields are joined by commas (RFC 9110, 5.3).

    So a credential that is sent twice is a wrong one, and not one of the two.
    """
    mapping: dict[bytes, bytes] = {}
    for name, value in headers:
        earlier = mapping.get(name)
        mapping[name] = value if earlier is None else earlier + b", " + value
    return mapping
