"""Principals, and the connections that they use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from modelport.gateway.access.operations import Operation


@dataclass(frozen=True, slots=True)
class ConnectionIdentity:
    """The identity of a connection, known when it is accepted.

    Attributes:
        address: IP address of the peer; empty for a UNIX domain socket.
        certificate_names: Subject alternative names of the verified client certificate, each with
            its kind: ``dns:ci.example.com``. None if they cannot be read.
        user: User name of the peer of a UNIX domain socket; empty for any other.
    """

    address: str = ""
    certificate_names: tuple[str, ...] | None = ()
    user: str = ""


#: A connection without any known identity.
UNKNOWN_CONNECTION = ConnectionIdentity()


@dataclass(frozen=True, slots=True)
class Grant:
    """Rights of a credential itself, besides those that rules give to its principal.

    Attributes:
        models: Globs of model names.
    """

    operations: frozenset[Operation]
    models: tuple[str, ...] = ("*",)


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    The name of an API key has no colon. Every other kind of name has a prefix: ``jwt:SUBJECT``,
    ``cert:KIND:NAME``, ``unix:USER``, ``proxy:USER``; so no issuer or proxy can claim the rights of
    another kind.

    Attributes:
        groups: Groups that the credential itself states, prefixed like names: ``jwt:NAME``.
        method: Kind of the credential: ``key``, ``jwt``, ``certificate``, ``unix``, ``proxy``.
        fingerprint: Identifies the credential in the audit log, but does not reveal it.
        aliases: Further names of the same caller, which rules may use too.
        grant: Rights of an API key itself (``modelport key create --models``).
        expires: When the credential ends, as Unix time.
    """

    name: str
    groups: frozenset[str] = frozenset()
    method: str = ""
    fingerprint: str = ""
    aliases: tuple[str, ...] = ()
    grant: Grant | None = None
    expires: float = field(default=math.inf, compare=False)

    @property
    def is_anonymous(self) -> bool:
        """Whether the request came without any credential."""
        return self.name == ANONYMOUS_NAME


ANONYMOUS_NAME = "anonymous"
#: Prefix of the names of client certificates, followed by the kind of name: ``cert:dns:NAME``.
CERTIFICATE = "cert:"
#: The kinds of names, by Python's names for them. Rules can name a client by these.
CERTIFICATE_KINDS = {"DNS": "dns", "URI": "uri", "email": "email", "IP Address": "ip"}
#: The caller of a request without any credential.
ANONYMOUS = Principal(ANONYMOUS_NAME)
