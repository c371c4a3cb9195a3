"""Access to one process of the gateway: its authenticators and rules, as they are now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from prometheus_client.core import Metric

from modelport.gateway.access import credential_headers
from modelport.gateway.access.audit import AuditLog
from modelport.gateway.access.authentication import Authenticator, AuthenticatorChain, combined
from modelport.gateway.access.authenticators import ALWAYS, AUTHENTICATORS, CERTIFICATES
from modelport.gateway.access.context import AccessContext, AccessRecord, Fields
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.access.policy import AccessPolicy, PrincipalRights
from modelport.gateway.access.principal import ConnectionIdentity, Principal
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.access.quotas import Quotas
from modelport.gateway.access.rules_file import AccessFile, parse_access_file
from modelport.gateway.errors import Unauthenticated
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import Contents
from modelport.gateway.settings import (
    Settings,
    TlsFiles,
    is_loopback,
    requires_certificates,
    verifies_clients,
)

log = structlog.get_logger("modelport.access")

_NO_RIGHTS = AccessPolicy(())
#: A credential that was right is right for at most this long, unless a file changes or it expires.
KEPT_SECONDS = 1.0
MAX_KEPT = 1024
#: The kinds of callers that these headers alone decide.
_KEPT_METHODS = ("key", "jwt")


class _Loaded(NamedTuple):
    file: AccessFile
    configured: Sequence[tuple[TomlTable, Authenticator]]


class Access:
    """The rules and authenticators of ``--access``, which follow the file.

    An authenticator whose table has not changed stays, with what it has cached.
    """

    def __init__(
        self,
        path: Path,
        watcher: FileWatcher,
        ledger: QuotaLedger | None = None,
        audit: AuditLog | None = None,
        verifies_clients: bool = True,
    ) -> None:
        """Read ``path``, and again after each change.

        Args:
            ledger: That of all processes; without it this process counts alone.
            verifies_clients: Whether there are authorities of client certificates.

        Raises:
            UsageError: It is wrong; the message names file and line.
        """
        self.audit = audit
        self._verifies_clients = verifies_clients
        self._watcher = watcher
        self._started = False
        #: The authenticators, and the tables that they were made of.
        self._configured: Sequence[tuple[TomlTable, Authenticator]] = ()
        self._authenticators: tuple[Authenticator, ...] = ()
        self._chain = AuthenticatorChain()
        self.policy = AccessPolicy(())
        self.quotas = Quotas((), ledger or QuotaLedger(), self.policy.names)
        #: Contexts without records of callers whose credentials were right a moment ago, by
        #: ``credential_headers.fields``. A look-up compares hashes first, so its time says nothing
        #: about a part of a credential.
        self.kept: dict[tuple[bytes, ...], AccessContext] = {}
        watcher.reloaded.append(self.kept.clear)
        self._watch = watcher.watch("rules", [path], self._load, self._use)

    def authenticate(
        self,
        headers: Fields,
        connection: ConnectionIdentity,
        credential: tuple[bytes, ...] | None = None,
        is_stream: bool = False,
    ) -> AccessContext:
        """Return the context of a request by its credential.

        Args:
            credential: ``credential_headers.fields`` of the headers, if that is known.
            is_stream: Whether the request is a stream, whose context ``renew`` changes.

        Raises:
            Unauthenticated: The credential is wrong.
        """
        if credential is None:
            credential = credential_headers.fields(headers)
        context = self.kept.get(credential) or self._recognise(credential, headers, connection)
        if is_stream or self.audit is not None or context.caller.has_quota:
            record = AccessRecord(headers, connection, self.audit)
            return AccessContext(context.caller, record)
        return context

    def renew(self, context: AccessContext) -> None:
        """Authenticate the caller of a stream again, for its next request.

        Raises:
            Unauthenticated: The credential has expired, or has been revoked.
            PermissionDenied: The rules allow the operation no longer.
        """
        record = context.record
        assert record is not None  # as ``is_stream``
        context.renew(self.authenticate(record.headers, record.connection).caller)

    def _recognise(
        self, credential: tuple[bytes, ...], headers: Fields, connection: ConnectionIdentity
    ) -> AccessContext:
        """Return the caller's context by its credential, and keep a right one for a moment."""
        try:
            principal = self._chain.authenticate(combined(headers), connection)
        except Unauthenticated as error:
            if self.audit is not None:
                known = credential_headers.fingerprint(combined(headers))
                stranger = PrincipalRights(_NO_RIGHTS, Principal("", fingerprint=known))
                record = AccessRecord(headers, connection, self.audit)
                AccessContext(stranger, record).note_refusal(str(error))
            raise
        context = AccessContext(self.policy.rights(principal))
        size = sum(map(len, credential))
        if (
            principal.method in _KEPT_METHODS
            and principal.expires - time.time() > KEPT_SECONDS
            and not self._chain.reads_more
            and size <= credential_headers.MAX_CREDENTIAL_BYTES
        ):
            if not self.kept or len(self.kept) >= MAX_KEPT:
                self.kept.clear()
                asyncio.get_running_loop().call_later(KEPT_SECONDS, self.kept.clear)
            self.kept[credential] = context
        return context

    def start(self) -> None:
        """Begin the authenticators' work in the background."""
        self._started = True
        for authenticator in self._authenticators:
            authenticator.start()

    def close(self) -> None:
        """End the work in the background, and watch no file any longer."""
        self._watcher.forget(self._watch)
        self._watcher.reloaded.remove(self.kept.clear)
        for authenticator in self._authenticators:
            authenticator.close()
        if self.audit is not None:
            self.audit.close()

    def metrics(self) -> Iterator[Metric]:
        """The metrics of all authenticators; those of one name are one family."""
        families: dict[str, Metric] = {}
        for authenticator in self._authenticators:
            for metric in authenticator.metrics():
                family = families.setdefault(metric.name, metric)
                if family is not metric:
                    family.samples.extend(metric.samples)
        yield from families.values()

    def _load(self, contents: Contents) -> _Loaded:
        file = parse_access_file(contents[0])
        configured: list[tuple[TomlTable, Authenticator]] = []
        try:
            for table in file.authenticators:
                authenticator = self._authenticator(table)
                configured.append((table, authenticator))
        except BaseException:
            for each in _without([made for _, made in configured], self._authenticators):
                each.close()
            raise
        return _Loaded(file, configured)

    def _authenticator(self, table: TomlTable) -> Authenticator:
        """The authenticator of a table that has not changed, or a new one."""
        for known, authenticator in self._configured:
            if (known.name, known.values) == (table.name, table.values):
                return authenticator
        if table.name == CERTIFICATES and not self._verifies_clients:
            raise table.error(
                f"[{CERTIFICATES}] identifies nobody without --tls-client-ca FILE; add the "
                "option, or remove the table"
            )
        descriptor = AUTHENTICATORS.get(table.name)
        if descriptor is None:
            raise table.error(f"there is no authenticator '{table.name}'")
        return descriptor.make(table, self._watcher)

    def _use(self, loaded: _Loaded) -> None:
        self.policy, self._configured = loaded.file.policy, loaded.configured
        self.quotas.replace(loaded.file.quotas, self.policy.names)
        before = self._authenticators
        self._authenticators = (*(each for _, each in loaded.configured), *ALWAYS)
        self._chain = AuthenticatorChain(self._authenticators)
        if self._started:
            for each in _without(self._authenticators, before):
                each.start()
        for each in _without(before, self._authenticators):
            each.close()


def access_of(
    settings: Settings, watcher: FileWatcher, ledger: QuotaLedger | None = None
) -> Access | None:
    """Make the access of a process, or None without ``--access``.

    Raises:
        Unavailable: The audit log cannot be written.
        UsageError: As ``Access``.
    """
    if settings.access is None:
        return None
    audit = None
    if settings.audit_log is not None:
        audit = AuditLog(settings.audit_log, settings.audit_log_max_bytes)
    return Access(settings.access, watcher, ledger, audit, verifies_clients(settings.tls))


def check(path: Path, tls: TlsFiles | None) -> None:
    """Read ``access.toml`` and the files that it names; raise ``UsageError`` if one is wrong."""
    Access(path, FileWatcher(), verifies_clients=verifies_clients(tls)).close()


def exposed(settings: Settings, *addresses: str) -> list[str]:
    """The addresses on which everyone on the network may use the gateway."""
    if settings.access is not None or requires_certificates(settings.tls):
        return []
    return sorted({address for address in addresses if not is_loopback(address)})


def warn_if_exposed(settings: Settings) -> None:
    """Log a warning if everyone on the network may use the gateway."""
    addresses = (settings.http_address, settings.grpc_address, settings.metrics_address)
    found = exposed(settings, *addresses)
    if found:
        log.warning("everyone who can reach this gateway may use it", addresses=found,
            remedy="--access FILE or --tls-client-ca FILE")  # fmt: skip


def _without(
    these: Iterable[Authenticator], others: Iterable[Authenticator]
) -> list[Authenticator]:
    known = set(map(id, others))
    return [each for each in these if id(each) not in known]
