"""Authentication of requests, before their bodies are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import Metric

from modelport.gateway.access import credentials
from modelport.gateway.access.principal import ANONYMOUS, ConnectionIdentity, Principal
from modelport.gateway.errors import Unauthenticated


class Authenticator(Protocol):
    """Recognises one kind of credential. Classes inherit from it for ``start`` and ``close``.

    Attributes:
        of_connection: Whether it recognises the connection and not the request. It is asked only
            about requests without a credential of their own.
    """

    of_connection: bool = False

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
        return

    def close(self) -> None:
        """End what ``start`` began, and watch no file any longer."""
        return

    def metrics(self) -> Iterable[Metric]:
        """Return the authenticator's own metrics, if it has any."""
        return ()


def authenticate(
    authenticators: Sequence[Authenticator],
    headers: Mapping[bytes, bytes],
    connection: ConnectionIdentity,
) -> Principal:
    """Return the caller, or ``ANONYMOUS`` if neither request nor connection has a credential.

    Raises:
        Unauthenticated: The credential is wrong or unknown, or there is more than one.
    """
    token = credentials.presented(headers)
    caller: Principal | None = None
    for authenticator in authenticators:
        if authenticator.of_connection:
            continue
        principal = authenticator.authenticate(headers, connection)
        if principal is not None:
            if caller is not None:
                raise Unauthenticated(credentials.MORE_THAN_ONE)
            caller = principal
    if caller is not None:
        return caller
    if token is not None:
        raise Unauthenticated("the credential is of no kind that this gateway accepts")
    for authenticator in authenticators:
        if authenticator.of_connection:
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
