"""Tokens: which are accepted, and every way in which one is refused."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from modelport.gateway.access import jwks, jwt_authenticator
from modelport.gateway.access.access import Access
from modelport.gateway.access.authentication import AuthenticatorChain
from modelport.gateway.access.authenticators import AUTHENTICATORS
from modelport.gateway.access.jwt_authenticator import JwtAuthenticator
from modelport.gateway.access.principal import UNKNOWN_CONNECTION, Principal
from modelport.gateway.errors import Unauthenticated, UsageError
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.gateway.access.identities import AUDIENCE, ISSUER, Issuer, key_set, table

SETTINGS = f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\n'
RS256 = SETTINGS + 'algorithms = ["RS256"]\n'
Ask = Callable[[bytes], Principal]


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture(scope="module")
def other() -> Issuer:
    return Issuer()


def make(
    folder: Path, *issuers: Issuer, text: str = RS256, watcher: FileWatcher | None = None
) -> JwtAuthenticator:
    (folder / "jwks.json").write_bytes(key_set(*issuers))
    return JwtAuthenticator(table(folder, text), watcher or FileWatcher())


def caller(tokens: JwtAuthenticator, token: bytes) -> Principal:
    headers = {b"authorization": b"Bearer " + token}
    return AuthenticatorChain([tokens]).authenticate(headers, UNKNOWN_CONNECTION)


def encoded(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def signed(issuer: Issuer, header: Any, payload: Any) -> bytes:
    """A token of any header and payload, with the right signature."""
    method = jwt.get_algorithm_by_name(issuer.algorithm)
    content = encoded(header) + b"." + encoded(payload)
    return content + b"." + encoded(method.sign(content, issuer.private))


def test_a_token_names_its_subject_and_its_groups(tmp_path: Path, issuer: Issuer) -> None:
    tokens = make(tmp_path, issuer)
    token = issuer.token(groups=["ds", "ops", 1, "", "x" * 999, None])
    found = caller(tokens, token)
    assert (found.name, found.method) == ("jwt:alice", "jwt")
    assert found.groups == {"jwt:ds", "jwt:ops"}
    assert found.fingerprint == hashlib.sha256(token).hexdigest()[:16]
    assert caller(tokens, issuer.token(groups="ds")).groups == {"jwt:ds"}
    assert caller(tokens, issuer.token(groups={"ds": 1})).groups == frozenset()
    assert caller(tokens, issuer.token(aud=["other", AUDIENCE])).name == "jwt:alice"


TWO = """
[[jwt]]
name = "corp"
issuer = "https://corp.example.com"
audience = "modelport"
jwks = "corp.json"
algorithms = ["RS256"]

[[jwt]]
name = "guests"
issuer = "https://guests.example.com"
audience = "modelport"
jwks = "guests.json"
algorithms = ["RS256"]
"""


def of_two(folder: Path, corp: Issuer, guests: Issuer, text: str = TWO) -> Access:
    (folder / "corp.json").write_bytes(key_set(corp))
    (folder / "guests.json").write_bytes(key_set(guests))
    (folder / "access.toml").write_text(text)
    return Access(folder / "access.toml", FileWatcher())


async def test_issuers_with_names_cannot_speak_for_each_other(
    tmp_path: Path, issuer: Issuer, other: Issuer
) -> None:
    access = of_two(tmp_path, issuer, other)

    def name(token: bytes) -> str:
        headers = [(b"authorization", b"Bearer " + token)]
        return access.authenticate(headers, UNKNOWN_CONNECTION).principal.name

    corp, guests = "https://corp.example.com", "https://guests.example.com"
    assert name(issuer.token(iss=corp)) == "jwt:corp:alice"
    assert name(other.token(iss=guests)) == "jwt:guests:alice"
    token = other.token(iss=guests, sub="corp:alice", groups=["staff"])
    context = access.authenticate([(b"authorization", b"Bearer " + token)], UNKNOWN_CONNECTION)
    assert context.principal.name == "jwt:guests:corp:alice"
    assert context.principal.groups == {"jwt:guests:staff"}
    for wrong, reason in (
        (issuer.token(iss=guests), "signature is wrong"),
        (other.token(iss=corp), "signature is wrong"),
        (issuer.token(), "does not accept this kind of credential"),
        (issuer.token(iss=None), "does not accept this kind of credential"),
        (b"a.b.c", "does not accept this kind of credential"),
    ):
        with pytest.raises(Unauthenticated, match=reason):
            name(wrong)
    families = {family.name: family for family in access.metrics()}
    labels = [sample.labels for sample in families["modelport_jwks_refresh_failures"].samples]
    assert labels == [{"issuer": "corp"}, {"issuer": "guests"}]
    before = access._authenticators
    (tmp_path / "access.toml").write_text(TWO + "[health]\nopen = false\n")
    await access._watcher.poll()
    assert access._authenticators == before, "no table has changed, so they keep their keys"
    access.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TWO.replace('name = "corp"\n', ""),
            r":2: each of several \[\[jwt\]\] needs the key 'name'",
        ),
        (TWO.replace("guests", "corp", 1), r":10: two \[\[jwt\]\] have the name 'corp'"),
        (TWO.replace('"corp"', '"a:b"'), r":3: jwt.name = 'a:b' must be letters, digits"),
        (TWO + "[[keys]]\nfile = 'k'\n[[keys]]\nfile = 'k'\n", r"\[\[keys\]\] may not be repeated"),
    ],
)
def test_names_of_issuers_are_there_and_different(
    tmp_path: Path, issuer: Issuer, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        of_two(tmp_path, issuer, issuer, text)


def test_claims_are_configurable(tmp_path: Path, issuer: Issuer) -> None:
    text = RS256 + 'principal_claim = "email"\ngroups_claim = "roles"\n'
    tokens = make(tmp_path, issuer, text=text)
    found = caller(tokens, issuer.token(email="a@b.c", roles=["ds"]))
    assert found.name == "jwt:a@b.c"
    assert found.groups == {"jwt:ds"}
    with pytest.raises(Unauthenticated, match="no claim 'email'"):
        caller(tokens, issuer.token())


@pytest.mark.parametrize("algorithm", list(jwks.ALGORITHMS))
def test_every_algorithm_verifies_and_refuses(tmp_path: Path, algorithm: str) -> None:
    issuer = Issuer(algorithm)
    tokens = make(tmp_path, issuer, text=SETTINGS + f'algorithms = ["{algorithm}"]')
    token = issuer.token()
    assert caller(tokens, token).name == "jwt:alice"
    with pytest.raises(Unauthenticated, match="signature is wrong"):
        caller(tokens, Issuer(algorithm).token())
    with pytest.raises(Unauthenticated):
        caller(tokens, token[:-2])


def test_claims_that_are_wrong_are_refused_with_the_reason(tmp_path: Path, issuer: Issuer) -> None:
    tokens = make(tmp_path, issuer)
    now = time.time()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"exp": now - 61}, "has expired"),
        ({"exp": None}, "no claim 'exp'"),
        ({"exp": "never"}, "malformed"),
        ({"exp": str(int(now) + 999)}, "'exp' is not a number"),
        ({"exp": math.nan}, "malformed"),
        ({"exp": math.inf}, "malformed"),
        ({"exp": [now + 999]}, "malformed"),
        ({"exp": True}, "has expired"),
        ({"nbf": now + 3600}, "not valid yet"),
        ({"iat": now + 3600}, "not valid yet"),
        ({"nbf": "x"}, "malformed"),
        ({"iss": ISSUER + "/"}, "another issuer"),
        ({"iss": None}, "no claim 'iss'"),
        ({"aud": "other"}, "another audience"),
        ({"aud": []}, "no claim 'aud'"),
        ({"aud": None}, "no claim 'aud'"),
        ({"aud": [AUDIENCE, 1]}, "another audience"),
        ({"aud": {"modelport": 1}}, "another audience"),
        ({"sub": None}, "no claim 'sub'"),
        ({"sub": ""}, "must be a name"),
        ({"sub": 1}, "malformed"),
        ({"sub": "a\nb"}, "must be a name"),
        ({"sub": "x" * 257}, "must be a name"),
        ({"cnf": {"jkt": "x"}}, "bound to a key"),
    ]
    for changes, message in wrong:
        header = {"alg": "RS256", "kid": issuer.kid}
        with pytest.raises(Unauthenticated, match=message):
            caller(tokens, signed(issuer, header, issuer.claims(**changes)))
    for right in ({"exp": now - 30}, {"exp": 10**30}, {"exp": now + 9.5}, {"nbf": now + 30}):
        assert caller(tokens, issuer.token(**right)).name == "jwt:alice"


def test_headers_that_are_wrong_are_refused(tmp_path: Path, issuer: Issuer, other: Issuer) -> None:
    tokens = make(tmp_path, issuer)
    good = {"alg": "RS256", "kid": issuer.kid}
    payload = issuer.claims()
    assert caller(tokens, signed(issuer, good, payload))
    wrong: list[tuple[Any, str]] = [
        ({**good, "alg": "none"}, "algorithm is not accepted"),
        ({**good, "alg": "RS512"}, "algorithm is not accepted"),
        ({**good, "alg": ["RS256"]}, "algorithm is not accepted"),
        ({"kid": issuer.kid}, "algorithm is not accepted"),
        ({**good, "kid": "key-2"}, "key is unknown"),
        ({**good, "kid": 1}, "malformed"),
        ({**good, "kid": ["key-1"]}, "malformed"),
        ({**good, "crit": ["exp"]}, "critical extensions"),
        ({**good, "crit": ["b64"], "b64": False}, "critical extensions"),
        ({**good, "crit": []}, "critical extensions"),
        ({**good, "b64": True}, "critical extensions"),
        ([good], "malformed"),
        (b"not JSON", "malformed"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 3000, "malformed"),
        ({**good, "x": "x" * 5000}, "malformed"),
        (b'{"alg":"RS256","n":' + b"9" * 5000 + b"}", "malformed"),
    ]
    for header, message in wrong:
        with pytest.raises(Unauthenticated, match=message):
            caller(tokens, signed(issuer, header, payload))
    for unread in ({"jku": "https://example.com"}, {"jwk": other.jwk()}, {"x5c": ["MII"]}):
        assert caller(tokens, signed(issuer, good | unread, payload))
        with pytest.raises(Unauthenticated, match="signature is wrong"):
            caller(tokens, signed(other, good | unread, payload))


def test_a_token_has_one_spelling(tmp_path: Path, issuer: Issuer) -> None:
    tokens, alphabet = make(tmp_path, issuer), string.ascii_letters + string.digits + "-_"
    token = issuer.token()
    assert caller(tokens, token)
    for end in set(alphabet.encode()) - {token[-1]}:
        with pytest.raises(Unauthenticated):
            caller(tokens, token[:-1] + bytes([end]))
    with pytest.raises(Unauthenticated):
        caller(tokens, token[:-9] + b"!" + token[-9:])


def test_no_token_is_verified_with_a_public_key_as_a_shared_secret(
    tmp_path: Path, issuer: Issuer
) -> None:
    tokens = make(tmp_path, issuer)
    public = issuer.private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for algorithm in ("HS256", "RS256"):
        content = encoded({"alg": algorithm, "kid": issuer.kid}) + b"." + encoded(issuer.claims())
        mac = hmac.new(public, content, hashlib.sha256).digest()
        with pytest.raises(Unauthenticated):
            caller(tokens, content + b"." + encoded(mac))


def test_malformed_tokens_are_refused(tmp_path: Path, issuer: Issuer) -> None:
    tokens = make(tmp_path, issuer)
    header, payload, signature = issuer.token().split(b".")
    for token in (
        b"..",
        b"a.b.c",
        header + b"." + payload + b".",
        header + b".." + signature,
        b"." + payload + b"." + signature,
        header + b"=." + payload + b"." + signature,
        header + b"." + payload + b"." + signature + b"=",
        header + b"." + payload + b"." + signature + b"\n.",
        header + b"." + payload + b"." + signature[:-1] + b"!",
        header + b"." + payload + b"\xff." + signature,
        header + b"." + payload + b"." + signature[:-1],
        header + b"." + payload[:-1] + b"." + signature,
        signed(issuer, {"alg": "RS256", "kid": issuer.kid}, b"not JSON"),
        signed(issuer, {"alg": "RS256", "kid": issuer.kid}, [1]),
        signed(issuer, {"alg": "RS256", "kid": issuer.kid}, b"[" * 5000),
    ):
        with pytest.raises(Unauthenticated):
            caller(tokens, token)


def test_a_tokens_last_bits_cannot_be_changed(tmp_path: Path, issuer: Issuer) -> None:
    """Base64 has unused bits at its end: one token would have several fingerprints."""
    tokens = make(tmp_path, issuer)
    token = issuer.token()
    assert caller(tokens, token)
    twins = [
        token[:-1] + bytes([last]) for last in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ" if last != token[-1]
    ]
    for twin in twins:
        with pytest.raises(Unauthenticated):
            caller(tokens, twin)


def test_a_verified_token_is_not_verified_again_until_it_expires(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = make(tmp_path, issuer)
    verified: list[bytes] = []
    original = tokens._verify

    def verify(token: bytes, *others: Any) -> tuple[Principal, float]:
        verified.append(token)
        return original(token, *others)

    monkeypatch.setattr(tokens, "_verify", verify)
    now = time.time()
    token = issuer.token(exp=int(now) + 10)
    first = caller(tokens, token)
    assert caller(tokens, token) is first
    assert verified == [token]
    monkeypatch.setattr("time.time", lambda: now + 80)
    with pytest.raises(Unauthenticated, match="has expired"):
        caller(tokens, token)
    assert tokens._verified == {}


def test_the_cache_is_bounded_and_forgets_the_oldest(
    tmp_path: Path, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_authenticator, "MAX_CACHED", 3)
    tokens = make(tmp_path, issuer)
    several = [issuer.token(sub=f"user-{number}") for number in range(4)]
    for token in (*several[:3], several[0], several[3]):
        caller(tokens, token)
    kept = {hashlib.sha256(several[number]).digest() for number in (0, 2, 3)}
    assert set(tokens._verified) == kept


async def test_tokens_of_a_removed_key_are_refused_once_the_file_has_changed(
    tmp_path: Path, issuer: Issuer
) -> None:
    watcher = FileWatcher()
    tokens = make(tmp_path, issuer, watcher=watcher)
    token = issuer.token()
    assert caller(tokens, token)
    later = Issuer(kid="key-2")
    (tmp_path / "jwks.json").write_bytes(key_set(later))
    await watcher.poll()
    with pytest.raises(Unauthenticated, match="key is unknown"):
        caller(tokens, token)
    assert caller(tokens, later.token())
    (tmp_path / "jwks.json").write_bytes(b'{"keys": []}')
    await watcher.poll()
    assert caller(tokens, later.token())
    assert watcher.errors == {"jwks": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SETTINGS, r"access\.toml:1: \[jwt\] needs the key 'algorithms'"),
        (SETTINGS + "algorithms = []", r"access\.toml:5: .*non-empty list of RS256"),
        (SETTINGS + 'algorithms = ["none"]', r"access\.toml:5: "),
        (SETTINGS + 'algorithms = ["HS256"]', r"access\.toml:5: .*use API keys"),
        (SETTINGS + 'algorithms = ["RS256", "HS256"]', r"access\.toml:5: .*use API keys"),
        (SETTINGS + 'algorithms = "RS256"', r"access\.toml:5: "),
        (
            RS256.replace("jwks.json", "http://x.org/jwks"),
            r"access\.toml:4: .*file or an https URL",
        ),
        (RS256.replace("jwks.json", "https://"), r"access\.toml:4: "),
        (RS256.replace("jwks.json", "https://x:y@z/"), r"access\.toml:4: "),
        (RS256.replace("jwks.json", "https://x:99999/"), r"access\.toml:4: "),
        (RS256.replace("jwks.json", "missing.json"), r"jwks '.*missing.json' cannot be read"),
        (RS256 + 'jwks_ca = "ca.pem"', r"access\.toml:6: jwks_ca is for an https URL"),
        (
            RS256.replace("jwks.json", "https://x.org/jwks") + 'jwks_ca = "ca.pem"',
            r"access\.toml:6: jwks_ca 'ca.pem' has no certificates",
        ),
        (RS256 + "leeway_seconds = 1e9", r"access\.toml:6: "),
        (RS256 + 'audience = ["a", ""]', r"access\.toml:\d+: not TOML"),
        (RS256 + 'keys = "x"', r"access\.toml:6: unknown key 'keys'"),
    ],
)
def test_a_wrong_table_is_refused_with_file_and_line(
    tmp_path: Path, issuer: Issuer, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        make(tmp_path, issuer, text=text)


def test_without_the_library_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    with pytest.raises(UsageError, match=r"^access\.toml:1: .*pip install '\.\[jwt\]' in"):
        AUTHENTICATORS.builtin["jwt"].make(table(tmp_path, RS256), FileWatcher())
