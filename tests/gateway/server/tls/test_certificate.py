"""The files of TLS: what is wrong with them is said in one line, and a good change is served."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from modelport.gateway.errors import Unavailable
from modelport.gateway.runtime import file_watcher, gateway_files
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import GatewayFiles
from modelport.gateway.server.tls import certificate
from modelport.gateway.server.tls.certificate import ServerCertificate, certificate_families
from modelport.gateway.settings import TlsFiles
from tests.certificates import TestAuthority, server_contexts, write_pair


@pytest.fixture
def files(tmp_path: Path, authority: TestAuthority) -> TlsFiles:
    (tmp_path / "ca.crt").write_bytes(authority.pem)
    return TlsFiles(*authority.write(tmp_path, "server"), client_ca=tmp_path / "ca.crt")


def expire(files: TlsFiles, authority: TestAuthority) -> None:
    authority.write(files.key.parent, "server", days=-1)


def begin_later(files: TlsFiles, authority: TestAuthority) -> None:
    authority.write(files.key.parent, "server", begins=1)


def take_another_key(files: TlsFiles, authority: TestAuthority) -> None:
    files.key.write_bytes(authority.sign("other")[1])


def open_to_all(files: TlsFiles, authority: TestAuthority) -> None:
    files.key.chmod(0o644)


def encrypt(files: TlsFiles, authority: TestAuthority) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    how = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files.key.write_bytes(key.private_bytes(pem, pkcs8, how))


def swap(files: TlsFiles, authority: TestAuthority) -> None:
    certificate, key = files.certificate.read_bytes(), files.key.read_bytes()
    files.certificate.write_bytes(key)
    files.key.write_bytes(certificate)


def cut_certificate(files: TlsFiles, authority: TestAuthority) -> None:
    files.certificate.write_bytes(files.certificate.read_bytes()[:200])


def cut_key(files: TlsFiles, authority: TestAuthority) -> None:
    files.key.write_bytes(files.key.read_bytes()[:60])


def empty_authority(files: TlsFiles, authority: TestAuthority) -> None:
    (files.key.parent / "ca.crt").write_bytes(b"")


Damage = Callable[[TlsFiles, TestAuthority], None]
DAMAGES: dict[Damage, str] = {
    expire: r"--tls-cert \S+server.crt expired on \S+ \S+ UTC; renew it",
    begin_later: r"--tls-cert \S+server.crt is not valid before \S+ \S+ UTC; check it",
    take_another_key: r"--tls-key \S+server.key is not the key of --tls-cert \S+server.crt",
    open_to_all: r"--tls-key \S+server.key can be read by every user .* chmod o= \S+server.key",
    encrypt: r"--tls-key \S+server.key is encrypted; decrypt it: openssl pkey",
    swap: r"--tls-cert \S+server.crt is not a certificate in PEM format",
    cut_certificate: r"--tls-cert \S+server.crt is not a certificate in PEM format",
    cut_key: r"--tls-key \S+server.key or --tls-cert \S+server.crt cannot be used",
    empty_authority: r"--tls-client-ca \S+ca.crt is not a certificate in PEM format",
    lambda files, _: files.key.unlink(): r"--tls-key \S+ cannot be read: No such file",
    lambda files, _: files.certificate.unlink(): r"--tls-cert \S+ cannot be read: No such file",
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_file_is_named_with_the_remedy_and_never_replaces_a_good_one(
    damage: Damage, files: TlsFiles, authority: TestAuthority
) -> None:
    watcher = FileWatcher()
    served = ServerCertificate(files, watcher)
    before = served.http()
    damage(files, authority)
    with pytest.raises(Unavailable) as caught:
        server_contexts(files)
    assert re.match(DAMAGES[damage], str(caught.value)), caught.value
    await watcher.poll()
    assert served.http() is before
    assert served.reload_errors == 1
    authority.write(files.key.parent, "server", days=3)
    (files.key.parent / "ca.crt").write_bytes(authority.pem)
    files.key.chmod(0o600)
    await watcher.poll()
    assert served.http() is not before


def test_a_worker_serves_an_expired_certificate_that_is_in_use(
    files: TlsFiles, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent has accepted it before, and found no better one since."""
    expire(files, authority)
    contents = tuple(map(gateway_files.read, certificate.paths(files)))
    parents = GatewayFiles()
    with pytest.raises(Unavailable, match="expired on"):
        ServerCertificate(files, FileWatcher())
    monkeypatch.setattr(file_watcher, "FILES", GatewayFiles())
    key = certificate.WATCH, tuple(certificate.paths(files))
    file_watcher.FILES.receive(parents.rows([(key, contents)]))
    for path in certificate.paths(files):
        path.unlink()
    served = ServerCertificate(files, FileWatcher())
    assert served.expires_at < time.time()
    assert served.http().verify_mode is ssl.CERT_REQUIRED


async def test_the_metric_is_the_end_of_the_certificate_that_is_served(
    files: TlsFiles, authority: TestAuthority
) -> None:
    watcher = FileWatcher()
    served = ServerCertificate(files, watcher)

    def metrics() -> dict[str, float]:
        families = certificate_families(served)
        return {each.name: each.value for family in families for each in family.samples}

    def end() -> float:
        parsed = x509.load_pem_x509_certificate(files.certificate.read_bytes())
        return parsed.not_valid_after_utc.timestamp()

    assert metrics()["modelport_certificate_expiry_seconds"] == end()
    cut_key(files, authority)
    await watcher.poll()
    assert metrics()["modelport_certificate_reload_errors_total"] == 1
    authority.write(files.key.parent, "server", days=3)
    await watcher.poll()
    assert metrics()["modelport_certificate_expiry_seconds"] == end()


async def test_the_link_that_kubernetes_replaces_is_followed(
    tmp_path: Path, authority: TestAuthority
) -> None:
    """``tls.crt -> ..data/tls.crt``, ``..data -> ..FOLDER``: only the second link changes."""

    def publish(folder: str) -> None:
        (tmp_path / folder).mkdir()
        write_pair(tmp_path / folder, "tls", *authority.sign("localhost"))
        (tmp_path / "..new").symlink_to(folder)
        (tmp_path / "..new").rename(tmp_path / "..data")

    publish("..2026_1")
    for name in ("tls.crt", "tls.key"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    watcher = FileWatcher()
    served = ServerCertificate(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key"), watcher)
    before = served.http()
    await watcher.poll()
    assert served.http() is before
    publish("..2026_2")
    await watcher.poll()
    assert served.http() is not before
    assert served.reload_errors == 0
