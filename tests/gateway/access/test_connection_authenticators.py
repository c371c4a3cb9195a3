"""Callers identified by their connection: client certificates, UNIX users, trusted proxies."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelport.gateway.access.authentication import AuthenticatorChain, combined
from modelport.gateway.access.authenticators import ALWAYS, AUTHENTICATORS
from modelport.gateway.access.connection_authenticators import (
    CertificateAuthenticator,
    TrustedProxyAuthenticator,
)
from modelport.gateway.access.principal import (
    ANONYMOUS,
    UNKNOWN_CONNECTION,
    ConnectionIdentity,
    Principal,
)
from modelport.gateway.errors import Unauthenticated, UsageError
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.gateway.access.identities import table

PROXY = '[trusted_proxy]\naddresses = ["10.0.0.0/8", "fd00::/8"]\n'
HEADER = b"x-forwarded-user"


@pytest.fixture
def proxy(tmp_path: Path) -> TrustedProxyAuthenticator:
    return TrustedProxyAuthenticator(table(tmp_path, PROXY), FileWatcher())


def test_a_certificate_is_its_first_name_and_has_the_others_as_aliases(tmp_path: Path) -> None:
    certificates = CertificateAuthenticator(table(tmp_path, "[certificates]"), FileWatcher())
    names = ("dns:ci.example.com", "uri:spiffe://example.com/ci")
    caller = certificates.authenticate({}, ConnectionIdentity("::1", names))
    assert caller == Principal(
        "cert:dns:ci.example.com",
        method="certificate",
        aliases=("cert:uri:spiffe://example.com/ci",),
    )
    assert certificates.authenticate({}, UNKNOWN_CONNECTION) is None


def test_the_user_of_a_unix_socket_is_recognised_without_any_table() -> None:
    caller = AuthenticatorChain(ALWAYS).authenticate({}, ConnectionIdentity(user="alice"))
    assert caller == Principal("unix:alice", method="unix")
    assert AuthenticatorChain(ALWAYS).authenticate({}, ConnectionIdentity("127.0.0.1")) is ANONYMOUS


@pytest.mark.parametrize("address", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "fd00::1%eth0"])
def test_a_trusted_proxy_names_the_user(proxy: TrustedProxyAuthenticator, address: str) -> None:
    caller = proxy.authenticate({HEADER: b"alice@example.com"}, ConnectionIdentity(address))
    assert caller == Principal("proxy:alice@example.com", method="proxy")
    assert proxy.authenticate({}, ConnectionIdentity(address)) is None


def test_blanks_around_the_name_of_a_proxys_user_are_no_part_of_it(
    proxy: TrustedProxyAuthenticator,
) -> None:
    caller = proxy.authenticate({HEADER: b"\talice \t"}, ConnectionIdentity("10.0.0.1"))
    assert caller == Principal("proxy:alice", method="proxy")


@pytest.mark.parametrize(
    "address", ["11.1.2.3", "127.0.0.1", "::1", "::ffff:11.0.0.1", "", "10.0.0", "fe80::1%10.0.0.1"]
)
def test_the_header_from_elsewhere_is_refused_and_not_ignored(
    proxy: TrustedProxyAuthenticator, address: str
) -> None:
    with pytest.raises(Unauthenticated, match="from trusted proxies only"):
        proxy.authenticate({HEADER: b"alice"}, ConnectionIdentity(address))
    assert proxy.authenticate({}, ConnectionIdentity(address)) is None


@pytest.mark.parametrize(
    "value", [b"", b"\xff", b"a\x7f", "a\u202eb".encode(), b"x" * 257, b"alice, root", b"a\tb"]
)
def test_a_header_without_one_valid_name_is_refused(
    proxy: TrustedProxyAuthenticator, value: bytes
) -> None:
    with pytest.raises(Unauthenticated, match="not hold a valid user name"):
        proxy.authenticate({HEADER: value}, ConnectionIdentity("10.0.0.1"))


def test_a_repeated_header_of_a_proxy_is_refused(proxy: TrustedProxyAuthenticator) -> None:
    headers = combined([(HEADER, b"alice"), (HEADER, b"root")])
    with pytest.raises(Unauthenticated):
        proxy.authenticate(headers, ConnectionIdentity("10.0.0.1"))


def test_a_proxys_user_and_a_token_are_two_credentials(proxy: TrustedProxyAuthenticator) -> None:
    headers = {HEADER: b"alice", b"authorization": b"Basic eDp5"}
    assert AuthenticatorChain([proxy]).authenticate(
        {HEADER: b"alice"}, ConnectionIdentity("10.0.0.1")
    )
    with pytest.raises(Unauthenticated, match="more than one credential"):
        AuthenticatorChain([proxy]).authenticate(headers, ConnectionIdentity("10.0.0.1"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trusted_proxy]", r"access\.toml:1: \[trusted_proxy\] needs the key 'addresses'"),
        ("[trusted_proxy]\naddresses = []", r"access\.toml:2: .*10\.0\.0\.0/8"),
        ('[trusted_proxy]\naddresses = "10.0.0.1"', r"access\.toml:2: "),
        ('[trusted_proxy]\naddresses = ["10.0.0.1/8"]', r"access\.toml:2: .*has host bits set"),
        ('[trusted_proxy]\naddresses = ["*"]', r"access\.toml:2: "),
        (f'{PROXY}header = "x-api-key"', r"access\.toml:3: .*no other credential"),
        (f'{PROXY}header = "Authorization"', r"access\.toml:3: "),
        (f'{PROXY}header = "a b"', r"access\.toml:3: "),
        ('[certificates]\nnames = "cn"', r"access\.toml:2: certificates\.names = 'cn' must be"),
    ],
)
def test_a_wrong_table_is_refused_with_file_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
    found = table(tmp_path, text)
    with pytest.raises(UsageError, match=f"^{message}"):
        AUTHENTICATORS.builtin[found.name].make(found, FileWatcher())
