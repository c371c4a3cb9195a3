"""Access to one process of the gateway: its authenticators and rules, as they are now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog
from prometheus_client.core import Metric

from modelport.gateway.access import credentials
from modelport.gateway.access.audit import AuditLog
from modelport.gateway.access.authentication import Authenticator, AuthenticatorChain
from modelport.gateway.access.authenticators import ALWAYS, AUTHENTICATORS
from modelport.gateway.access.context import AccessContext
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.access.policy import AccessPolicy, PrincipalRights
from modelport.gateway.access.principal import ConnectionIdentity, Principal
from modelport.gateway.access.quota_ledger import QuotaLedger
from modelport.gateway.access.quotas import Quota, Quotas
from modelport.gateway.access.rules_file import read_access_file
from modelport.gateway.access.watched_file import FileWatcher
from modelport.gateway.errors import Unauthenticated
from modelport.gateway.settings import Settings, is_loopback, requires_certificates

log = structlog.get_logger("modelport.access")

_REQUEST_ID = b"x-request-id"
_MAX_REQUEST_ID = 128
#: The caller of a request with a wrong credential.
UNKNOWN = Principal("")
_NO_RIGHTS = PrincipalRights(AccessPolicy(()), UNKNOWN)
#: A credential that was right is right for this long, unless a file changes.
KEPT_SECONDS = 1.0
MAX_KEPT = 1024
_CREDENTIALS = tuple(sorted(credentials.HEADERS))
#: The kinds of callers that these headers alone decide.
_KEPT_METHODS = ("key", "jwt")


class _Configured(NamedTuple):
    """An authenticator, and the table that it was made of."""

    table: TomlTable
    authenticator: Authenticator


class _KeptCaller(NamedTuple):
    """A caller whose credential was right a moment ago."""

    principal: Principal
    rights: PrincipalRights
    until: float


class _Loaded(NamedTuple):
    policy: AccessPolicy
    configured: tuple[_Configured, ...]
    quotas: Sequence[Quota]


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
    ) -> None:
        """Read ``path``, and again after each change.

        Args:
            ledger: That of all processes; without it this process counts alone.

        Raises:
            UsageError: It is wrong; the message names file and line.
        """
        self.audit = audit
        self._path = path
        self._watcher = watcher
        self._started = False
        self._configured: tuple[_Configured, ...] = ()
        self._authenticators: tuple[Authenticator, ...] = ()
        self._chain = AuthenticatorChain()
        #: Whether requests may add fields to their responses (``response_headers``).
        self.adds_fields = False
        self.policy = AccessPolicy(())
        self.quotas = Quotas((), ledger or QuotaLedger(), self.policy.names)
        #: Callers by the values of ``_CREDENTIALS``, for one revision of the files.
        self._kept: dict[tuple[bytes | None, ...], _KeptCaller] = {}
        self._kept_revision = watcher.revision
        self._watch = watcher.watch("rules", [path], self._load, self._use)

    def authenticate(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> AccessContext:
        """Return the context of a request by its credential.

        Raises:
            Unauthenticated: The credential is wrong.
        """
        stated = headers.get(_REQUEST_ID)
        request_id = "" if stated is None else stated[:_MAX_REQUEST_ID].decode("latin-1")
        source = connection.address or connection.user
        try:
            caller, rights = self._caller(headers, connection)
        except Unauthenticated as error:
            refused = AccessContext(UNKNOWN, _NO_RIGHTS, source, request_id, self.audit)
            refused.note_refusal(str(error))
            raise
        return AccessContext(caller, rights, source, request_id, self.audit)

    def _caller(
        self, headers: Mapping[bytes, bytes], connection: ConnectionIdentity
    ) -> tuple[Principal, PrincipalRights]:
        """Return the caller and its rights; those of a right credential are kept for a moment."""
        credential, now = tuple(map(headers.get, _CREDENTIALS)), time.monotonic()
        if self._kept_revision != self._watcher.revision:
            self._kept.clear()
            self._kept_revision = self._watcher.revision
        kept = self._kept.get(credential)
        if kept is not None and now < kept.until:
            return kept.principal, kept.rights
        caller = self._chain.authenticate(headers, connection)
        rights = self.policy.rights(caller)
        if caller.method in _KEPT_METHODS and not self._chain.reads_more:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            self._kept[credential] = _KeptCaller(caller, rights, now + KEPT_SECONDS)
        return caller, rights

    def start(self) -> None:
        """Begin the authenticators' work in the background."""
        self._started = True
        for authenticator in self._authenticators:
            authenticator.start()

    def close(self) -> None:
        """End the work in the background, and watch no file any longer."""
        self._watcher.forget(self._watch)
        for authenticator in self._authenticators:
            authenticator.close()
        if self.audit is not None:
            self.audit.close()

    def metrics(self) -> Iterator[Metric]:
        """The metrics of all authenticators."""
        for authenticator in self._authenticators:
            yield from authenticator.metrics()

    def _load(self) -> _Loaded:
        file = read_access_file(self._path)
        current = {each.table.name: each for each in self._configured}
        configured: list[_Configured] = []
        try:
            for table in file.authenticators:
                kept = current.get(table.name)
                if kept is not None and kept.table.values == table.values:
                    configured.append(_Configured(table, kept.authenticator))
                else:
                    configured.append(_Configured(table, _make(table, self._watcher)))
        except BaseException:
            self._close_others(configured, self._configured)
            raise
        return _Loaded(file.policy, tuple(configured), file.quotas)

    def _use(self, loaded: _Loaded) -> None:
        before, self._configured = self._configured, loaded.configured
        self.policy = loaded.policy
        self.quotas.replace(loaded.quotas, loaded.policy.names)
        self.adds_fields = bool(loaded.quotas)
        self._kept.clear()
        configured = (each.authenticator for each in loaded.configured)
        self._authenticators = (*configured, *ALWAYS)
        self._chain = AuthenticatorChain(self._authenticators)
        if self._started:
            known = {id(each.authenticator) for each in before}
            for each in loaded.configured:
                if id(each.authenticator) not in known:
                    each.authenticator.start()
        self._close_others(before, loaded.configured)

    @staticmethod
    def _close_others(made: Iterable[_Configured], kept: Iterable[_Configured]) -> None:
        """Close the authenticators of ``made`` that are not in ``kept``."""
        known = {id(each.authenticator) for each in kept}
        for each in made:
            if id(each.authenticator) not in known:
                each.authenticator.close()


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
    return Access(settings.access, watcher, ledger, audit)


def check(path: Path) -> None:
    """Read ``access.toml`` and the files that it names; raise ``UsageError`` if one is wrong."""
    Access(path, FileWatcher()).close()


def warn_if_exposed(settings: Settings) -> None:
    """Log a warning if everybody on the network may use the gateway."""
    if settings.access is not None or requires_certificates(settings.tls):
        return
    addresses = (settings.http_address, settings.grpc_address, settings.metrics_address)
    exposed = sorted({address for address in addresses if not is_loopback(address)})
    if exposed:
        log.warning("everybody who reaches this gateway may use it", addresses=exposed,
            remedy="--access FILE or --tls-client-ca FILE")  # fmt: skip


def _make(table: TomlTable, watcher: FileWatcher) -> Authenticator:
    descriptor = AUTHENTICATORS.get(table.name)
    if descriptor is None:
        raise table.error(f"there is no authenticator '{table.name}'")
    return descriptor.make(table, watcher)
