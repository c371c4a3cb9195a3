"""Key sets: which keys are used, and an issuer that rotates, fails, dawdles and lies."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelport.gateway.access import jwks
from modelport.gateway.access.authentication import AuthenticatorChain
from modelport.gateway.access.jwks import JwksUrl, parse
from modelport.gateway.access.jwt_authenticator import JwtAuthenticator
from modelport.gateway.access.principal import UNKNOWN_CONNECTION, Principal
from modelport.gateway.errors import Unauthenticated, Unavailable
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.certificates import TestAuthority
from tests.gateway.access.identities import AUDIENCE, ISSUER, Issuer, key_set, table
from tests.gateway.access.key_server import KeyServer, dawdle, endless_body, endless_head, reply
from tests.polling import eventually

RS = ("RS256",)


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


def keys_of(*rows: Any, algorithms: tuple[str, ...] = RS) -> jwks.KeySet:
    return parse(json.dumps({"keys": rows}).encode(), algorithms)


def test_a_key_without_an_algorithm_serves_all_that_its_type_allows(issuer: Issuer) -> None:
    keys = keys_of(issuer.jwk(alg=None), algorithms=("RS256", "PS512", "ES256"))
    assert keys.find("key-1", "RS256") is not None
    assert keys.find("key-1", "PS512") is not None
    assert keys.find("key-1", "ES256") is None
    assert keys_of(issuer.jwk(), algorithms=("RS256", "PS512")).find("key-1", "PS512") is None


def test_a_token_without_a_key_id_finds_the_only_key_and_none_of_several(issuer: Issuer) -> None:
    assert keys_of(issuer.jwk(kid=None)).find(None, "RS256") is not None
    assert keys_of(issuer.jwk()).find(None, "RS256") is not None
    both = keys_of(issuer.jwk(), issuer.jwk(kid="key-2"))
    assert both.find(None, "RS256") is None
    assert both.find("key-2", "RS256") is not None
    assert keys_of(issuer.jwk(), issuer.jwk()).find("key-1", "RS256") is None


def test_keys_that_are_unfit_are_left_out(issuer: Issuer) -> None:
    good = issuer.jwk()
    weak = Issuer(bits=1024).jwk(kid="weak")
    unfit: list[Any] = [
        *(None, 1, [], "key", {}, weak),
        {**good, "use": "enc"},
        {**good, "key_ops": ["sign"]},
        {**good, "key_ops": "verify"},
        {**good, "alg": "HS256"},
        {**good, "alg": ["RS256"]},
        {**good, "kty": "oct", "k": "c2VjcmV0"},
        {**good, "kty": ["RSA"]},
        {**good, "kid": 1},
        {**good, "crv": "P-256"},
        {**good, "n": "!"},
        {**good, "n": 5},
        {**good, "n": "AQAB" * 1000},
        {**good, "e": "AQ"},
        {**good, "e": "Ag"},
        {**good, "e": good["n"]},
        {name: value for name, value in good.items() if name != "n"},
    ]
    for row in unfit:
        with pytest.raises(ValueError, match="no key for RS256"):
            keys_of(row)
    assert keys_of(*unfit, {**good, "kid": "good"}).find("good", "RS256") is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"9" * 10_000, "not JSON"),
        (b"[]", "not a JSON Web Key Set"),
        (b'{"keys": {}}', "not a JSON Web Key Set"),
        (b'{"keys": []}', "no key for RS256"),
        (json.dumps({"keys": [{}] * 101}).encode(), "more than 100 keys"),
    ],
)
def test_a_document_that_is_no_key_set_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(content, RS)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@pytest.mark.thorough
@settings(max_examples=300)
@given(
    st.sampled_from(["kty", "kid", "alg", "use", "key_ops", "crv", "n", "e", "x", "y", "d", "k"]),
    JSON_VALUES,
    st.integers(0, 1000),
)
def test_a_key_with_any_value_at_all_is_left_out_or_refused(
    issuer: Issuer, name: str, value: Any, depth: int
) -> None:
    text = json.dumps(issuer.jwk() | {name: "here"})
    nested = "[" * depth + json.dumps(value) + "]" * depth
    for rows in (text, f"{text}, {json.dumps(issuer.jwk(kid='good'))}"):
        content = f'{{"keys": [{rows.replace(json.dumps("here"), nested, 1)}]}}'
        with contextlib.suppress(ValueError):
            parse(content.encode(), tuple(jwks.ALGORITHMS))


def test_a_private_key_is_refused(issuer: Issuer) -> None:
    with pytest.raises(ValueError, match="a private key"):
        keys_of({**issuer.jwk(), "d": "AQAB"})


def test_a_key_of_more_bits_than_verify_quickly_is_left_out(issuer: Issuer) -> None:
    number = base64.urlsafe_b64encode((2**jwks.MAX_RSA_BITS + 1).to_bytes(1025)).rstrip(b"=")
    with pytest.raises(ValueError, match="no key for RS256"):
        keys_of(issuer.jwk(n=number.decode()))


# -- over HTTPS -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> TestAuthority:
    return TestAuthority()


@pytest.fixture
def server(authority: TestAuthority, tmp_path: Path) -> Iterator[KeyServer]:
    certificate, key = authority.write(tmp_path, "server")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    made = KeyServer(context)
    yield made
    made.close()


@pytest.fixture
def tokens(
    server: KeyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[JwtAuthenticator]:
    monkeypatch.setattr(JwksUrl, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(JwksUrl, "FETCH_SECONDS", 1.0)
    text = (
        f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\nalgorithms = ["RS256"]\n'
        f'jwks = "https://localhost:{server.port}/jwks"\njwks_ca = "ca.pem"\n'
    )
    made = JwtAuthenticator(table(tmp_path, text), FileWatcher())
    yield made
    made.close()


def ask(tokens: JwtAuthenticator, token: bytes) -> Principal:
    return AuthenticatorChain([tokens]).authenticate(
        {b"authorization": b"Bearer " + token}, UNKNOWN_CONNECTION
    )


def test_before_the_first_fetch_tokens_are_neither_right_nor_wrong(
    tokens: JwtAuthenticator, issuer: Issuer
) -> None:
    with pytest.raises(Unavailable, match="keys are not loaded"):
        ask(tokens, issuer.token())
    assert tokens.source.age_seconds() is None
    assert [family.name for family in tokens.metrics()] == ["modelport_jwks_refresh_failures"]


def test_keys_are_fetched_and_rotated_ones_soon_after_their_first_token(
    tokens: JwtAuthenticator, server: KeyServer, issuer: Issuer
) -> None:
    server.answer = reply(key_set(issuer))
    tokens.start()
    eventually(lambda: tokens.source.keys)
    old = issuer.token()
    assert ask(tokens, old).name == "jwt:alice"
    rotated = Issuer(kid="key-2")
    server.answer = reply(key_set(rotated))
    with pytest.raises(Unauthenticated, match="key is unknown"):
        ask(tokens, rotated.token())
    first = tokens.source.keys
    eventually(lambda: tokens.source.keys is not first)
    assert ask(tokens, rotated.token()).name == "jwt:alice"
    with pytest.raises(Unauthenticated, match="key is unknown"):
        ask(tokens, old)
    age = tokens.source.age_seconds()
    assert age is not None
    assert 0 <= age < 20
    families = {family.name: family.samples[0].value for family in tokens.metrics()}
    assert set(families) == {"modelport_jwks_age_seconds", "modelport_jwks_refresh_failures"}
    assert families["modelport_jwks_refresh_failures"] == 0


def test_old_keys_serve_through_an_outage_of_any_kind(
    tokens: JwtAuthenticator, server: KeyServer, issuer: Issuer
) -> None:
    server.answer = reply(key_set(issuer))
    tokens.start()
    eventually(lambda: tokens.source.keys)
    keys = tokens.source.keys
    evil = Issuer()
    failing: list[Callable[[ssl.SSLSocket], Any]] = [
        lambda peer: None,
        reply(b"", "500 Oops"),
        reply(key_set(evil), "203 Changed"),
        reply(b"", "302 Found", f"Location: https://localhost:{server.port}/jwks\r\n"),
        reply(b"", "302 Found", "Location: http://localhost/jwks\r\n"),
        reply(b'{"keys": []}'),
        reply(b"<html>"),
        reply(b"[" * 50_000),
        reply(b'{"keys": [{"kty": "RSA", "n": ' + b"[" * 1000 + b"]" * 1000 + b"}]}"),
        reply(b" " * (jwks.MAX_DOCUMENT_BYTES + 1)),
        reply(gzip.compress(key_set(evil)), headers="Content-Encoding: gzip\r\n"),
        lambda peer: peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n{"),
        lambda peer: peer.sendall(b"nonsense\r\n\r\n"),
        *(dawdle, endless_body, endless_head),
    ]
    for number, answer in enumerate(failing):
        server.answer = answer
        before = tokens.source.failures
        tokens.source.miss()
        eventually(lambda before=before: tokens.source.failures > before)  # type: ignore[misc]
        assert tokens.source.keys is keys, number
        assert ask(tokens, issuer.token()).name == "jwt:alice"
    server.answer = reply(key_set(issuer))
    served = server.requests
    tokens.source.miss()
    server.wait(served + 1)
    assert ask(tokens, issuer.token()).name == "jwt:alice"


def test_an_issuer_whose_certificate_is_not_trusted_is_not_believed(
    server: KeyServer, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JwksUrl, "MIN_SECONDS", 0.0)
    server.answer = reply(key_set(issuer))
    for name, tls in (
        ("localhost", ssl.create_default_context()),
        ("127.0.0.2", ssl.create_default_context(cadata=TestAuthority().pem.decode())),
    ):
        source = JwksUrl(f"https://{name}:{server.port}/", tls, RS, 300)
        source.start()
        eventually(lambda source=source: source.failures)  # type: ignore[misc]
        assert source.keys is None
        source.close()
    assert server.requests == 0


def test_unknown_keys_of_anybodys_tokens_cause_few_fetches(
    tokens: JwtAuthenticator, server: KeyServer, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JwksUrl, "MIN_SECONDS", 3600.0)
    server.answer = reply(key_set(issuer))
    tokens.start()
    eventually(lambda: tokens.source.keys)
    stranger = Issuer(kid="unknown")
    for number in range(200):
        with pytest.raises(Unauthenticated):
            ask(tokens, stranger.token({"kid": f"unknown-{number}"}))
    assert server.requests == 1
    tokens.close()


def test_equal_keys_keep_the_verified_tokens(
    tokens: JwtAuthenticator, server: KeyServer, issuer: Issuer
) -> None:
    server.answer = reply(key_set(issuer))
    tokens.start()
    eventually(lambda: tokens.source.keys)
    token = issuer.token()
    caller = ask(tokens, token)
    tokens.source.miss()
    server.wait(2)
    tokens.source.miss()
    server.wait(3)  # the second answer was used before the third request
    assert ask(tokens, token) is caller


def test_an_error_that_nobody_foresaw_ends_no_fetching(
    tokens: JwtAuthenticator, server: KeyServer, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = reply(key_set(issuer))
    with monkeypatch.context() as patched:
        patched.setattr(jwks, "parse", lambda *_: {}["nobody foresaw this"])
        tokens.start()
        eventually(lambda: tokens.source.failures)
    tokens.source.miss()
    eventually(lambda: tokens.source.keys)
    assert ask(tokens, issuer.token()).name == "jwt:alice"
