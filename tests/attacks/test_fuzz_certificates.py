"""Mutated client certificates in handshakes: refused, or exactly the names that they have.

Some are damaged on their way, as bytes of the handshake; others are signed by the right authority,
with alternative names that no authority would write.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID

from modelport.gateway.access.connection_authenticators import CertificateAuthenticator
from modelport.gateway.access.principal import ConnectionIdentity
from modelport.gateway.errors import Unauthenticated
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.server import connection_identity
from modelport.gateway.settings import TlsFiles
from tests.attacks.test_fuzz import CASES, Finds, mutate_bytes
from tests.certificates import TestAuthority, server_contexts
from tests.gateway.access.identities import table

#: Of each kind; a handshake takes milliseconds.
HANDSHAKES = CASES // 200
NAMES = (
    x509.DNSName("ci.example.com"),
    x509.UniformResourceIdentifier("spiffe://example.com/ci"),
    x509.RFC822Name("ci@example.com"),
)
Damage = Callable[[bytes], bytes]


class Handshake:
    """A client and a server of TLS 1.2, where certificates are not encrypted, without a network."""

    def __init__(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        self._to_server, self._to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.server = server.wrap_bio(self._to_server, self._to_client, server_side=True)
        self._client = client.wrap_bio(self._to_client, sent := ssl.MemoryBIO())
        self._sent = sent

    def complete(self, damage: Damage = bytes) -> bool:
        """Shake hands; return whether the server accepts. What the client sends is damaged.

        Raises:
            ssl.SSLError: The server refuses the client.
        """
        for _ in range(4):
            with contextlib.suppress(ssl.SSLWantReadError):
                self._client.do_handshake()
            self._to_server.write(damage(self._sent.read()))
            try:
                self.server.do_handshake()
            except ssl.SSLWantReadError:
                continue
            return True
        return False


@pytest.fixture(scope="module")
def authority() -> TestAuthority:
    return TestAuthority()


@pytest.fixture(scope="module")
def server(authority: TestAuthority, tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    folder = tmp_path_factory.mktemp("server")
    (folder / "ca.crt").write_bytes(authority.pem)
    return server_contexts(TlsFiles(*authority.write(folder, "server"), folder / "ca.crt")).http


def client(chain: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(chain)
    return context


def signed(authority: TestAuthority, key: ec.EllipticCurvePrivateKey, names: bytes) -> bytes:
    """A certificate whose alternative names are these bytes."""
    now = datetime.now(UTC)
    found = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, names), False
        )
        .sign(authority.key, hashes.SHA256())
    )
    return found.public_bytes(serialization.Encoding.PEM)


def test_a_certificate_that_is_damaged_on_its_way_is_refused(
    authority: TestAuthority, server: ssl.SSLContext, tmp_path: Path
) -> None:
    pair = authority.write(tmp_path, "client", "ci.example.com")
    chain = tmp_path / "chain.pem"
    chain.write_bytes(b"".join(path.read_bytes() for path in pair))
    der = ssl.PEM_cert_to_DER_cert(pair[0].read_text())
    context, found, refused = client(chain), Finds(), 0
    assert Handshake(server, context).complete()
    for number in range(HANDSHAKES):
        chance = random.Random(f"damage {number}")
        damaged = bytearray(der)
        for _ in range(chance.choice((1, 1, 2, 8))):
            damaged[chance.randrange(len(der))] ^= 1 << chance.randrange(8)

        def run(damaged: bytes = bytes(damaged)) -> None:
            nonlocal refused
            try:
                accepted = Handshake(server, context).complete(
                    lambda sent: sent.replace(der, damaged)
                )
            except ssl.SSLError:
                refused += 1
                return
            assert not accepted or damaged == der, "a certificate that nobody signed"

        found.run(number, bytes(damaged), run)
    found.assert_none()
    assert refused > HANDSHAKES * 0.9


def test_a_certificate_with_strange_names_has_those_names_or_none(
    authority: TestAuthority, server: ssl.SSLContext, tmp_path: Path
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    names = x509.SubjectAlternativeName(NAMES).public_bytes()
    authenticator = CertificateAuthenticator(table(tmp_path, "[certificates]"), FileWatcher())
    found, chain, accepted = Finds(), tmp_path / "chain.pem", 0
    unreadable: list[bytes] = []
    for number in range(HANDSHAKES):
        chance = random.Random(f"names {number}")
        strange = mutate_bytes(chance, names) if number else names

        def run(strange: bytes = strange) -> None:
            nonlocal accepted
            chain.write_bytes(signed(authority, key, strange) + private)
            try:
                handshake = Handshake(server, client(chain))
                assert handshake.complete()
            except ssl.SSLError:
                return
            accepted += 1
            shown = connection_identity._names(handshake.server)
            if shown is None:
                unreadable.append(strange)
                with pytest.raises(Unauthenticated):
                    authenticator.authenticate({}, ConnectionIdentity("", shown))
                return
            caller = authenticator.authenticate({}, ConnectionIdentity("", shown))
            assert all(is_in(name.partition(":")[2], strange) for name in shown)
            assert (caller.name if caller else "") == (f"cert:{shown[0]}" if shown else "")

        found.run(number, strange, run)
    found.assert_none()
    assert accepted > HANDSHAKES * 0.1
    assert unreadable
    assert not any(each.isascii() for each in unreadable)


def is_in(name: str, names: bytes) -> bool:
    """Whether the bytes of an alternative name are in the extension."""
    try:
        return ipaddress.ip_address(name).packed in names
    except ValueError:
        return name.encode() in names
