"""Mutated credentials, key files, key sets and rules: refused, or what they say; nothing else.

``MODELPORT_FUZZ_CASES`` as in ``test_fuzz``; a tenth of them are credentials, which cost more.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from jwt.algorithms import OKPAlgorithm

from modelport.gateway.access import api_key_file, credential_headers, jwks, located_toml
from modelport.gateway.access.api_key_authenticator import ApiKeyAuthenticator
from modelport.gateway.access.authentication import Authenticator, AuthenticatorChain, combined
from modelport.gateway.access.authenticators import ALWAYS, AUTHENTICATORS
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import ANONYMOUS, ConnectionIdentity, Principal
from modelport.gateway.access.rules_file import read_access_file
from modelport.gateway.errors import Unauthenticated, UsageError
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.attacks.test_fuzz import CASES, Finds, mutate_bytes, mutate_value
from tests.gateway.access.identities import AUDIENCE, ISSUER, Issuer, key_set, table

SHARE = CASES // 10
HEADERS = (
    *(b"authorization", b"x-api-key", b"x-goog-api-key", b"x-forwarded-user"),
    b"x-amzn-sagemaker-custom-attributes",
)
SIGNATURE = re.compile(rb"(?i)aws4-[^ ,]+([ ,]+(credential|signedheaders|signature)=[^ ,]+)+")
SCHEMES = (b"Bearer ", b"bearer ", b"", b"Basic ", b"AWS4-HMAC-SHA256 ", b"x-api-key=", b"Bearer\t")
TOKEN = re.compile(rb"[A-Za-z0-9_-]+[.][A-Za-z0-9_-]+[.][A-Za-z0-9_-]+")
ADDRESSES = ("10.0.0.1", "::ffff:10.0.0.1", "11.0.0.1", "::1", "", "x", "10.0.0.1%eth0")


class EveryAuthenticator:
    """Authenticators of every kind, and the credentials that they accept."""

    def __init__(self, folder: Path) -> None:
        self.text, entry = api_key_file.generate("ci", operations=["infer"])
        with api_key_file.locked(folder / "keys.toml") as replace:
            replace((entry,))
        self.issuer, self.stranger = Issuer("EdDSA"), Issuer("EdDSA")
        (folder / "jwks.json").write_bytes(key_set(self.issuer))
        tables = (
            '[keys]\nfile = "keys.toml"',
            f'[jwt]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "jwks.json"\n'
            'algorithms = ["EdDSA"]',
            "[certificates]",
            '[trusted_proxy]\naddresses = ["10.0.0.0/8"]',
        )
        made = []
        for text in tables:
            found = table(folder, text)
            made.append(AUTHENTICATORS.builtin[found.name].make(found, FileWatcher()))
        self.authenticators: tuple[Authenticator, ...] = (*made, *ALWAYS)

    def credential(self, chance: random.Random) -> bytes:
        """A credential: good, mutated, or mutated and signed."""
        kind = chance.randrange(8)
        if kind == 0:
            return self.text.encode()
        if kind == 1:
            return mutate_bytes(chance, self.text.encode())
        if kind == 2:
            return mutate_bytes(chance, self.issuer.token())
        header: Any = {"alg": "EdDSA", "kid": "key-1", "typ": "JWT"}
        claims: Any = self.issuer.claims(nbf=1, iat=1, groups=["a", "b"])
        if kind > 3:
            header = mutate_value(chance, header) if chance.random() < 0.4 else header
            claims = mutate_value(chance, claims) if chance.random() < 0.8 else claims
        signer = self.stranger if kind == 4 else self.issuer
        text = [json.dumps(part).encode() for part in (header, claims)]
        if kind == 5:
            text[chance.randrange(2)] = mutate_bytes(chance, text[chance.randrange(2)])
        content = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in text)
        signature = signer.private.sign(content)
        token = content + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")
        return mutate_bytes(chance, token) if kind == 7 else token

    def headers(self, chance: random.Random) -> list[tuple[bytes, bytes]]:
        headers = []
        for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 3))):
            name = chance.choice((*HEADERS[:2] * 3, *HEADERS))
            scheme = chance.choice(SCHEMES[:2] if chance.random() < 0.8 else SCHEMES)
            value = (b"" if name[:2] == b"x-" else scheme) + self.credential(chance)
            if name == HEADERS[-1]:
                value = b"a=1; x-api-key=" + value
            headers.append((name, mutate_bytes(chance, value) if chance.random() < 0.1 else value))
        return headers

    def check(self, caller: Principal, headers: dict[bytes, bytes], now: float) -> None:
        """Fail unless an independent reading of the headers names ``caller``, too."""
        everything = b"\n".join(headers.values())
        stated = {
            value[7:].strip() if value[:7].lower() == b"bearer " else value
            for name, value in headers.items()
            if name in HEADERS[:3] and not SIGNATURE.fullmatch(value)
        }
        assert len(stated) <= 1
        if caller.method == "key":
            assert caller.name == "ci"
            assert self.text.encode() in everything
        elif caller.method == "jwt":
            [token] = {
                token
                for token in TOKEN.findall(everything)
                if hashlib.sha256(token).hexdigest().startswith(caller.fingerprint)
            }
            content, _, signature = token.rpartition(b".")
            public = self.issuer.private.public_key()
            public.verify(base64.urlsafe_b64decode(signature + b"=="), content)
            claims = jwt.decode(token, options={"verify_signature": False})
            assert claims["iss"] == ISSUER
            assert claims["aud"] == AUDIENCE or AUDIENCE in claims["aud"]
            assert math.isfinite(claims["exp"])
            assert claims["exp"] > now - 90
            assert caller.name == f"jwt:{claims['sub']}"
            assert len(caller.name) <= 300
        else:
            assert not {*headers} & {*HEADERS[:3]}


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> EveryAuthenticator:
    return EveryAuthenticator(tmp_path_factory.mktemp("gate"))


def only(*errors: type[Exception]) -> Callable[[Callable[[], Any]], Callable[[], None]]:
    """Fail for any other error, even of the same base class."""

    def wrap(run: Callable[[], Any]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                run()
            except Exception as error:
                if type(error) not in errors:
                    raise AssertionError(f"{type(error).__name__}: {error}") from error

        return guarded

    return wrap


def fuzz_credentials(gate: EveryAuthenticator, cases: int) -> tuple[Finds, dict[str, int]]:
    """Failures, and the number of callers by the kind of their credential."""
    finds, callers = Finds(), dict.fromkeys(("key", "jwt", "proxy", ""), 0)
    for number in range(cases):
        chance = random.Random(f"credential {number}")
        headers = combined(gate.headers(chance))
        connection = ConnectionIdentity(chance.choice(ADDRESSES))

        def run(
            headers: dict[bytes, bytes] = headers, connection: ConnectionIdentity = connection
        ) -> None:
            caller = AuthenticatorChain(gate.authenticators).authenticate(headers, connection)
            gate.check(caller, headers, time.time())
            callers[caller.method] += 1

        finds.run(number, b"\n".join(headers.values()), only(Unauthenticated)(run))
    return finds, callers


def test_credentials_name_their_caller_or_are_refused(gate: EveryAuthenticator) -> None:
    finds, callers = fuzz_credentials(gate, SHARE)
    finds.assert_none()
    assert min(callers.values()) > SHARE // 1000, callers
    assert sum(callers.values()) < SHARE * 0.8, callers


def believe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OKPAlgorithm, "verify", lambda *_: True)


def choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credential_headers, "_only", lambda found, other: other)


def compare_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda *_: True)


@pytest.mark.parametrize("spoil", [believe, choose, compare_ids])
def test_known_bad_authenticators_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spoil(monkeypatch)
    finds, _ = fuzz_credentials(EveryAuthenticator(tmp_path), 1000)
    with pytest.raises(AssertionError):
        finds.assert_none()


def test_the_names_of_certificates_and_users_stay_names(gate: EveryAuthenticator) -> None:
    finds = Finds()
    for number in range(SHARE // 10):
        chance = random.Random(f"names {number}")
        names = tuple(
            mutate_bytes(chance, b"spiffe://example.com/ci").decode("latin-1")
            for _ in range(chance.randrange(3))
        )
        user = mutate_bytes(chance, b"alice").decode("utf-8", "surrogateescape")

        def run(names: tuple[str, ...] = names, user: str = user) -> None:
            for connection, kind in (
                (ConnectionIdentity("::1", names), "cert:"),
                (ConnectionIdentity(user=user), "unix:"),
            ):
                caller = AuthenticatorChain(gate.authenticators).authenticate({}, connection)
                assert caller.is_anonymous or caller.name.startswith(kind)

        finds.run(number, repr((names, user)).encode(), only()(run))
    finds.assert_none()


def key_files() -> list[bytes]:
    entries = [
        api_key_file.generate("ci", operations=["infer", "metadata"], models=["fraud*", "größe"])[
            1
        ],
        api_key_file.generate("b.c-d_e@f", operations=["*"])[1],
    ]
    return [api_key_file.serialize(entries), api_key_file.serialize(entries[1:])]


def test_key_files_are_read_as_written_or_refused(tmp_path: Path) -> None:
    finds, seeds = Finds(), key_files()
    for number in range(SHARE // 5):
        chance = random.Random(f"key file {number}")
        content = mutate_bytes(chance, chance.choice(seeds))

        def run(content: bytes = content) -> None:
            entries = api_key_file.parse(Path("keys.toml"), content)
            written = api_key_file.serialize(entries)
            assert api_key_file.parse(Path("keys.toml"), written) == entries

        finds.run(number, content, run)
    finds.assert_none()
    assert SHARE // 5 * 0.02 < finds.passed < SHARE // 5 * 0.9


def test_key_sets_have_fit_keys_or_are_refused() -> None:
    finds = Finds()
    rows = [Issuer(name).jwk(kid=name) for name in ("RS256", "ES256", "EdDSA")]
    for number in range(SHARE // 10):
        chance = random.Random(f"key set {number}")
        value: Any = {"keys": rows}
        for _ in range(chance.choice((1, 2, 4))):
            value = mutate_value(chance, value)
        content = json.dumps(value).encode()
        if chance.random() < 0.3:
            content = mutate_bytes(chance, content)

        def run(content: bytes = content) -> None:
            keys = jwks.parse(content, list(jwks.ALGORITHMS))
            for algorithm in jwks.ALGORITHMS:
                key = keys.find(None, algorithm)
                assert key is None or key.algorithm_name == algorithm
                assert key is None or key.Algorithm.verify(b"content", key.key, b"0" * 64) is False

        finds.run(number, content, only(ValueError)(run))
    finds.assert_none()


TABLES = (
    b'[jwt]\nissuer = "i"\naudience = ["a"]\nalgorithms = ["RS256"]\njwks = "https://x.org/y"\n'
    b"leeway_seconds = 5\nrefresh_seconds = 60\n",
    b'[trusted_proxy]\naddresses = ["10.0.0.0/8", "fd00::/8"]\nheader = "x-user"\n',
    b'[certificates]\nnames = "san"\n',
    b'[keys]\nfile = "keys.toml"\n',
)


def test_tables_make_authenticators_or_are_refused_with_their_line(tmp_path: Path) -> None:
    finds, path = Finds(), tmp_path / "access.toml"
    for number in range(SHARE // 10):
        chance = random.Random(f"table {number}")
        content = mutate_bytes(chance, chance.choice(TABLES))

        def run(content: bytes = content) -> None:
            for tables in located_toml.parse(path, content).tables.values():
                for each in tables:
                    descriptor = AUTHENTICATORS.builtin.get(each.name)
                    if descriptor is not None:
                        descriptor.make(each, FileWatcher())

        finds.run(number, content, only(UsageError)(run))
    finds.assert_none()


RULES = b"""\
[groups]
ds = ["alice", "ci", "cert:dns:*.ds.example.com"]

[[rules]]
principals = ["ci", "group:ds", "group:jwt:ops", "authenticated"]
operations = ["infer", "metadata"]
models = ["fraud*", "[a-c]?"]
versions = ["1", "stable", 2]

[[rules]]
principals = ["anonymous"]
operations = "*"

[health]
open = true
"""
CALLERS = (
    ANONYMOUS,
    Principal("ci"),
    Principal("jwt:x", frozenset({"jwt:ops"})),
    Principal("cert:dns:a", aliases=("cert:dns:b.ds.example.com",)),
)


def test_rules_are_compiled_or_refused_with_their_line(tmp_path: Path) -> None:
    finds, path, compiled = Finds(), tmp_path / "access.toml", 0
    for number in range(SHARE // 10):
        chance = random.Random(f"rules {number}")
        content = mutate_bytes(chance, RULES)

        def run(content: bytes = content) -> None:
            nonlocal compiled
            path.write_bytes(content)
            policy = read_access_file(path).policy
            for caller in CALLERS:
                for operation in Operation:
                    policy.rights(caller).by_operation[operation].versions["fraud"]
            stranger = policy.rights(Principal("stranger:x")).by_operation[Operation.CONTROL]
            assert stranger.versions["fraud"] is None or any(
                Operation.CONTROL in rule.operations for rule in policy.rules
            ), "a right that no rule gives"
            compiled += 1

        finds.run(number, content, only(UsageError)(run))
    finds.assert_none()
    assert SHARE // 10 * 0.05 < compiled < SHARE // 10 * 0.9


def test_a_hash_that_starts_like_the_right_one_is_wrong(tmp_path: Path) -> None:
    """The known-bad variant of the check above: a comparison of prefixes would pass."""
    text, entry = api_key_file.generate("ci")
    digest = hashlib.sha256(text.encode()).hexdigest()
    flipped = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    entries = api_key_file.serialize([entry]).replace(digest.encode(), flipped.encode())
    (tmp_path / "keys.toml").write_bytes(entries)
    (tmp_path / "keys.toml").chmod(0o600)
    keys = ApiKeyAuthenticator(table(tmp_path, '[keys]\nfile = "keys.toml"'), FileWatcher())
    with pytest.raises(Unauthenticated):
        AuthenticatorChain([keys]).authenticate({b"x-api-key": text.encode()}, ConnectionIdentity())
