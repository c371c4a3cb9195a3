"""Authentication of requests, before their bodies are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client.core import Metric

from modelport.gateway.access import credential_headers
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


class CredentialAuthenticator(Authenticator):
    """Recognises credentials in the headers that ``credentials`` reads, such as tokens."""

    def recognise(self, credential: bytes) -> Principal | None:
        """Return the caller, or None if the credential is of another kind.

        Raises:
            Unauthenticated: It is wrong or expired.
        """

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal | None:
        credential = credential_headers.presented(headers)
        return None if credential is None else self.recognise(credential)


class AuthenticatorChain:
    """All authenticators of a gateway."""

    def __init__(self, authenticators: Iterable[Authenticator] = ()) -> None:
        every = tuple(authenticators)
        self._of_connections = tuple(each for each in every if each.of_connection)
        of_requests = [each for each in every if not each.of_connection]
        self._of_credentials = tuple(
            each for each in of_requests if isinstance(each, CredentialAuthenticator)
        )
        self._of_headers = tuple(
            each for each in of_requests if not isinstance(each, CredentialAuthenticator)
        )

    @property
    def reads_more(self) -> bool:
        """Whether other headers than those of ``credentials`` may decide."""
        return bool(self._of_headers)

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> Principal:
        """Return the caller, or ``ANONYMOUS`` if neither request nor connection has a credential.

        Raises:
            Unauthenticated: The credential is wrong or unknown, or there is more than one.
        """
        credential = credential_headers.presented(headers)
        caller: Principal | None = None
        if credential is not None:
            for recogniser in self._of_credentials:
                caller = recogniser.recognise(credential)
                if caller is not None:
                    break
        for authenticator in self._of_headers:
            principal = authenticator.authenticate(headers, connection)
            if principal is not None:
                if caller is not None:
                    raise Unauthenticated(credential_headers.MORE_THAN_ONE)
                caller = principal
        if caller is not None:
            return caller
        if credential is not None:
            raise Unauthenticated("this gateway does not accept this kind of credential")
        for authenticator in self._of_connections:
            principal = authenticator.authenticate(headers, connection)
            if principal is not None:
                return principal
        return ANONYMOUS


def combined(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Make a mapping of ``headers``; repeated fields are joined by commas (RFC 9110, 5.3).

    So a credential that is sent twice is a wrong one, and not one of the two.
    """
    fields = list(headers)
    mapping = dict(fields)
    if len(mapping) == len(fields):
        return mapping
    mapping.clear()
    for name, value in fields:
        earlier = mapping.get(name)
        mapping[name] = value if earlier is None else earlier + b", " + value
    return mapping
