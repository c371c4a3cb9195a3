"""Options with which commands authenticate to a server: a token, authorities, a certificate.

A token comes from a file or the environment, never from the command line, which every user of the
machine can read.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from modelport.gateway.cli.paths import EXISTING
from modelport.gateway.runtime import gateway_files

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
TOKEN_VARIABLE = "MODELPORT_TOKEN"
#: The error for a URL with a user name and a password, which the message does not repeat.
USER_IN_URL = "--url has a user name; give the credential with --token-file"
_META = "modelport.server_credentials"
#: Help of each option; the order is that of ``ServerCredentials``.
CREDENTIAL_HELP = {
    "token_file": f"File with an API key or a JSON Web Token.  [default: ${TOKEN_VARIABLE}]",
    "ca_file": "Authorities of the server's certificate (PEM), instead of the system's.",
    "client_cert": "Client certificate and its chain (PEM), for mutual TLS.",
    "client_key": "The client certificate's private key (PEM).",
}


class ServerCredentials(NamedTuple):
    """The files that the options of a command name."""

    token_file: Path | None = None
    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def absolute(self) -> ServerCredentials:
        """Return the same files, for a process in another folder."""
        return ServerCredentials(*(None if path is None else path.absolute() for path in self))

    @property
    def needs_tls(self) -> bool:
        return self.ca_file is not None or self.client_cert is not None

    def token(self) -> str:
        """Return the token of the file or the environment, or an empty string.

        Raises:
            InvalidArgument: The file cannot be read, or either holds something else.
        """
        given = os.environ.get(TOKEN_VARIABLE, "").strip()
        if self.token_file is None and not given:
            return ""
        from modelport.gateway.upstream import credentials

        if self.token_file is None:
            return credentials.checked_token(os.fsencode(given), f"${TOKEN_VARIABLE}")
        return credentials.read_token(self.token_file)

    def context(self) -> ssl.SSLContext:
        """Make the context of a TLS connection.

        Raises:
            InvalidArgument: A file cannot be used.
            click.UsageError: A certificate without its key, or a key without its certificate.
        """
        from modelport.gateway.upstream import credentials

        if (self.client_cert is None) != (self.client_key is None):
            raise click.UsageError("--client-cert and --client-key belong together; give both")
        ca, certificate, key = (
            None if path is None else gateway_files.read(path, wait=True)
            for path in (self.ca_file, self.client_cert, self.client_key)
        )
        return credentials.client_context(ca, certificate, key)


def credential_options(command: CommandT) -> CommandT:
    """Add the options to a command; ``current`` returns their values."""
    for name, help_text in reversed(CREDENTIAL_HELP.items()):
        command = click.option(
            f"--{name.replace('_', '-')}",
            metavar="FILE",
            type=EXISTING,
            envvar=f"MODELPORT_{name.upper()}",
            expose_value=False,
            callback=_keep,
            help=help_text,
        )(command)
    return command


def _keep(context: click.Context, option: click.Parameter, value: Path | None) -> None:
    context.meta.setdefault(_META, {})[option.name] = value


def current() -> ServerCredentials:
    """Return the credentials that the command at hand was given."""
    context = click.get_current_context(silent=True)
    return ServerCredentials(**({} if context is None else context.meta.get(_META, {})))
