"""The certificate of the listeners: read, checked, and replaced while they serve.

Protocol versions and ciphers are Mozilla's "intermediate" of guideline 6.0 (2026,
https://ssl-config.mozilla.org/guidelines/6.0.json), and so is the choice against session tickets.
The files are looked at every ``POLL_SECONDS`` of ``runtime.file_watcher``.
"""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from modelport.gateway.errors import Unavailable, plain_reason
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import Contents, FileContent, at_path
from modelport.gateway.settings import Settings, TlsFiles

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

#: Of TLS 1.2. Those of TLS 1.3 are OpenSSL's, which are Mozilla's too.
CIPHERS = (
    "ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-RSA-AES128-GCM-SHA256:"
    "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-RSA-AES256-GCM-SHA384:"
    "ECDHE-ECDSA-CHACHA20-POLY1305:ECDHE-RSA-CHACHA20-POLY1305:@SECLEVEL=2"
)
HTTP_PROTOCOLS = ("h2", "http/1.1")
GRPC_PROTOCOLS = ("h2",)
#: Name of the watch, in the log and in metrics.
WATCH = "certificate"


class TlsContexts(NamedTuple):
    """Contexts made of the files as they were at one time."""

    http: ssl.SSLContext
    grpc: ssl.SSLContext
    #: Unix time.
    expires_at: float


class ServerCertificate:
    """The contexts for new handshakes, which follow the files.

    Raises:
        Unavailable: A file cannot be used; the message names it and the remedy.
    """

    def __init__(self, files: TlsFiles, watcher: FileWatcher) -> None:
        self._contexts: TlsContexts
        self._watcher = watcher
        required = files.client_required
        watcher.watch(
            WATCH, paths(files), lambda found: load(found, required), self._use, check_validity
        )

    def _use(self, contexts: TlsContexts) -> None:
        self._contexts = contexts

    def http(self) -> ssl.SSLContext:
        """Return the context for a handshake on an HTTP listener."""
        return self._contexts.http

    def grpc(self) -> ssl.SSLContext:
        """Return the context for a handshake on the gRPC listener."""
        return self._contexts.grpc

    @property
    def expires_at(self) -> float:
        return self._contexts.expires_at

    @property
    def reload_errors(self) -> int:
        return self._watcher.errors[WATCH]


def certificate_families(certificate: ServerCertificate) -> Iterator[Metric]:
    """Its metrics; the end is Unix time, as cert-manager and blackbox_exporter give it."""
    yield GaugeMetricFamily(
        "modelport_certificate_expiry_seconds",
        "Expiry of the certificate being served, as Unix time",
        value=certificate.expires_at,
    )
    yield CounterMetricFamily(
        "modelport_certificate_reload_errors",
        "Changes of the certificate's files that could not be used",
        value=certificate.reload_errors,
    )


def of_settings(settings: Settings, watcher: FileWatcher) -> ServerCertificate | None:
    """Return the certificate of a server, or None if it has none."""
    return None if settings.tls is None else ServerCertificate(settings.tls, watcher)


def paths(files: TlsFiles) -> list[Path]:
    """The files of the watch: certificate, key, and the authorities of clients if there are any."""
    return [path for path in files[:3] if path is not None]


def check_validity(contents: Contents) -> None:
    """Refuse a certificate that is not valid now, which may still be in use.

    Raises:
        Unavailable: It has expired, is not valid yet, or is not one; the message names the remedy.
    """
    file, _, *authorities = contents
    certificate, now = _certificates("--tls-cert", file)[0], datetime.now(UTC)
    if certificate.not_valid_after_utc <= now:
        raise Unavailable(
            f"--tls-cert {file.path} expired on "
            f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it"
        )
    if certificate.not_valid_before_utc > now:
        raise Unavailable(
            f"--tls-cert {file.path} is not valid before "
            f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC; check it, and the "
            "machine's clock"
        )
    for each in authorities:
        found = _certificates("--tls-client-ca", each)
        if all(authority.not_valid_after_utc <= now for authority in found):
            raise Unavailable(
                f"every certificate in --tls-client-ca {each.path} has expired; renew it"
            )


def load(contents: Contents, client_required: bool) -> TlsContexts:
    """Make the contexts of the files in ``paths``.

    Raises:
        Unavailable: A file cannot be used; the message names it and the remedy.
    """
    certificate = _certificates("--tls-cert", contents[0])[0]
    _check_key(contents[1])
    for authorities in contents[2:]:
        _certificates("--tls-client-ca", authorities)
    http, grpc = (
        _context(contents, client_required, each) for each in (HTTP_PROTOCOLS, GRPC_PROTOCOLS)
    )
    return TlsContexts(http, grpc, certificate.not_valid_after_utc.timestamp())


def _certificates(flag: str, file: FileContent) -> list[Certificate]:
    from cryptography import x509  # takes longer to import than the rest of a start without TLS

    try:
        return x509.load_pem_x509_certificates(_read(flag, file))
    except ValueError as error:
        raise Unavailable(
            f"{flag} {file.path} is not a certificate in PEM format (-----BEGIN CERTIFICATE-----)"
        ) from error


def _read(flag: str, file: FileContent) -> bytes:
    try:
        return file.read()
    except OSError as error:
        raise Unavailable(f"{flag} {file.path} cannot be read: {error.strerror}") from error


def _check_key(file: FileContent) -> None:
    """Check what OpenSSL's own message would not tell."""
    content, path = _read("--tls-key", file), file.path
    if file.mode & stat.S_IROTH:
        raise Unavailable(
            f"--tls-key {path} can be read by every user of this machine; run: "
            f"chmod o= {path} (in Kubernetes, give the volume defaultMode: 0440)"
        )
    if b"ENCRYPTED" in content:
        raise Unavailable(f"--tls-key {path} is encrypted; decrypt it: openssl pkey -in {path}")
    if b"PRIVATE KEY-----" not in content:
        raise Unavailable(
            f"--tls-key {path} is not a key in PEM format (-----BEGIN PRIVATE KEY-----)"
        )


def _context(
    contents: Contents, client_required: bool, protocols: tuple[str, ...]
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    # The client knows whether it has instructions for AES.
    context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    # Without tickets no key decrypts sessions later, and none outlives its context: what a changed
    # certificate or authority means takes effect at once. OpenSSL keeps sessions of TLS 1.2 within
    # the context for five minutes.
    context.num_tickets = 0
    context.set_alpn_protocols(list(protocols))
    certificate, key, *authorities = contents
    try:
        with at_path(certificate.content) as chain, at_path(key.content) as private:
            # Without a password OpenSSL would ask the terminal for it.
            context.load_cert_chain(chain, private, password=lambda: "")
    except (ssl.SSLError, OSError) as error:
        raise Unavailable(_reason(certificate.path, key.path, error)) from error
    for each in authorities:
        context.verify_mode = ssl.CERT_REQUIRED if client_required else ssl.CERT_OPTIONAL
        try:
            with at_path(each.content) as path:
                context.load_verify_locations(path)
        except (ssl.SSLError, OSError) as error:
            reason = plain_reason(error)
            raise Unavailable(f"--tls-client-ca {each.path} cannot be used: {reason}") from error
    return context


def _reason(certificate: Path, key: Path, error: OSError) -> str:
    reason = getattr(error, "reason", None)
    if reason == "KEY_VALUES_MISMATCH":
        return (
            f"--tls-key {key} is not the key of --tls-cert {certificate}; "
            "give a pair that was generated together"
        )
    if reason in ("EE_KEY_TOO_SMALL", "CA_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):
        return (
            f"--tls-cert {certificate} is too weak ({reason}); use ECDSA P-256 or RSA with "
            "2048 bits, signed with SHA-256"
        )
    return f"--tls-key {key} or --tls-cert {certificate} cannot be used: {plain_reason(error)}"
