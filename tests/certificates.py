"""Certificates made for a test: an authority, and what it signs.

They have the extensions that Python requires from 3.13 on.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from modelport.gateway.runtime import gateway_files
from modelport.gateway.server.tls import certificate
from modelport.gateway.server.tls.certificate import TlsContexts
from modelport.gateway.settings import TlsFiles

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True,
    crl_sign=True,
    **dict.fromkeys(
        (
            *("digital_signature", "content_commitment", "key_encipherment"),
            *("data_encipherment", "key_agreement", "encipher_only", "decipher_only"),
        ),
        False,
    ),
)


class TestAuthority:
    """A certificate authority; ``sign`` makes certificates for a server or a client."""

    __test__ = False

    def __init__(self, name: str = "modelport test authority") -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder()
            .subject_name(self.name)
            .issuer_name(self.name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=30))
            .not_valid_after(now + timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), False)
            .add_extension(_SIGNS_CERTIFICATES, critical=True)
            .sign(self.key, hashes.SHA256())
        )
        self.pem = self._certificate.public_bytes(serialization.Encoding.PEM)

    def sign(
        self, *names: str, days: float = 7, begins: float = -1, serial: int | None = None
    ) -> tuple[bytes, bytes]:
        """The certificate and the key as PEM; ``names`` are DNS names, IP addresses or URIs."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number() if serial is None else serial)
            .not_valid_before(now + timedelta(days=min(begins, days - 1)))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(
                x509.SubjectAlternativeName([_name(each) for each in names]), critical=True
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False
            )
            .sign(self.key, hashes.SHA256())
        )
        return (
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def write(self, folder: Path, name: str, *names: str, **options: float) -> tuple[Path, Path]:
        """Sign, and write NAME.crt and NAME.key."""
        certificate, key = self.sign(*(names or LOOPBACK), **options)  # type: ignore[arg-type]
        return write_pair(folder, name, certificate, key)


def write_pair(folder: Path, name: str, certificate: bytes, key: bytes) -> tuple[Path, Path]:
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(certificate)
    descriptor = os.open(paths[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(key)
    return paths


def _name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def server_contexts(files: TlsFiles) -> TlsContexts:
    """The contexts of the listeners with these files."""
    contents = tuple(map(gateway_files.read, certificate.paths(files)))
    certificate.check_validity(contents)
    return certificate.load(contents, files.client_required)
