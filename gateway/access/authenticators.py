"""The authenticators that ``access.toml`` configures, one table each.

An installed package adds one by an entry point of the group ``modelport.authenticators``, whose
name is that of its table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from modelport.gateway.access.api_key_authenticator import ApiKeyAuthenticator
from modelport.gateway.access.authentication import Authenticator
from modelport.gateway.access.connection_authenticators import (
    CertificateAuthenticator,
    TrustedProxyAuthenticator,
    UnixUserAuthenticator,
)
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.extensions import ExtensionTable
from modelport.gateway.runtime.file_watcher import FileWatcher

#: Makes an authenticator of its table, or raises ``UsageError`` (``TomlTable.error``).
#: Paths are relative to the folder of ``table.path``.
MakeAuthenticator = Callable[[TomlTable, FileWatcher], Authenticator]


class AuthenticatorDescriptor(NamedTuple):
    """An authenticator, by the name of its table in ``access.toml``.

    Attributes:
        repeats: Whether there may be several tables, which their keys ``name`` tell apart.
    """

    name: str
    make: MakeAuthenticator
    repeats: bool = False


def _jwt(table: TomlTable, watcher: FileWatcher) -> Authenticator:
    # needs the extra `jwt`
    from modelport.gateway.access.jwt_authenticator import JwtAuthenticator

    return JwtAuthenticator(table, watcher)


CERTIFICATES: Final = "certificates"
_BUILTIN = (
    AuthenticatorDescriptor("keys", ApiKeyAuthenticator),
    AuthenticatorDescriptor("jwt", _jwt, repeats=True),
    AuthenticatorDescriptor(CERTIFICATES, CertificateAuthenticator),
    AuthenticatorDescriptor("trusted_proxy", TrustedProxyAuthenticator),
)
AUTHENTICATORS: ExtensionTable[AuthenticatorDescriptor] = ExtensionTable(
    "modelport.authenticators", AuthenticatorDescriptor, {each.name: each for each in _BUILTIN}
)
#: Authenticators that need no table.
ALWAYS: tuple[Authenticator, ...] = (UnixUserAuthenticator(),)
