"""JSON Web Tokens as credentials: ``[jwt]`` in ``access.toml``, or ``[[jwt]]`` for each issuer.

Signatures are verified on the event loop: 20 us each with RSA of 2048 bits, which is what a thread
would cost. The callers of verified tokens are kept until the tokens expire or the keys change.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import ssl
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from modelport.gateway.access.authentication import CredentialAuthenticator
from modelport.gateway.access.credential_headers import token_fingerprint
from modelport.gateway.access.jwks import ALGORITHMS, JwksFile, JwksUrl, KeySet
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.access.principal import Principal
from modelport.gateway.errors import Unauthenticated, Unavailable, plain_reason
from modelport.gateway.extras import missing_extra
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import Contents, at_path
from modelport.gateway.toml_tables import InvalidValue, number, read_by, text

if TYPE_CHECKING:
    from jwt import PyJWK

MAX_HEADER_BYTES: Final = 4096
MAX_NAME_LENGTH: Final = 256
MAX_GROUPS: Final = 500
#: Callers of verified tokens that are kept.
MAX_CACHED: Final = 10_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN = re.compile(rb"([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)")


def _texts(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(each, str) and each for each in values):
        raise InvalidValue("a non-empty string, or a list of them")
    return tuple(values)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidValue("letters, digits, '-', '_' and '.', at most 64 of them")
    return value


def _algorithms(value: Any) -> tuple[str, ...]:
    wanted = f"a non-empty list of {', '.join(ALGORITHMS)}"
    if not isinstance(value, list) or not value:
        raise InvalidValue(wanted)
    for each in value:
        if each not in list(ALGORITHMS):
            shared = isinstance(each, str) and each.startswith("HS")
            hint = "; HMAC needs a shared secret: use API keys" if shared else ""
            raise InvalidValue(wanted + hint)
    return tuple(dict.fromkeys(value))


@dataclass(frozen=True)
class JwtSettings:
    """The table ``[jwt]``.

    Attributes:
        audience: A token must be for one of them.
        name: Part of the callers' names, ``jwt:NAME:SUBJECT``, which tells issuers apart.
        jwks: A file, or an ``https`` URL.
        jwks_ca: Certificates of the URL's authorities, instead of the system's.
        leeway_seconds: Accepted difference of clocks.
        refresh_seconds: Time between two fetches of the URL.
    """

    issuer: str = field(metadata=read_by(text))
    audience: tuple[str, ...] = field(metadata=read_by(_texts))
    algorithms: tuple[str, ...] = field(metadata=read_by(_algorithms))
    jwks: str = field(metadata=read_by(text))
    jwks_ca: str | None = field(default=None, metadata=read_by(text))
    name: str = field(default="", metadata=read_by(_name))
    principal_claim: str = field(default="sub", metadata=read_by(text))
    groups_claim: str = field(default="groups", metadata=read_by(text))
    leeway_seconds: float = field(default=60.0, metadata=read_by(number(0, 600)))
    refresh_seconds: float = field(default=300.0, metadata=read_by(number(10, 86_400)))


class JwtAuthenticator(CredentialAuthenticator):
    """Recognises signed tokens of one issuer."""

    def __init__(self, table: TomlTable, watcher: FileWatcher) -> None:
        try:
            import jwt
        except ImportError as error:
            raise table.error(f"[jwt] cannot be used: {missing_extra(error)}") from error
        self._jwt = jwt
        self._settings = settings = table.read(JwtSettings)
        #: Of the names of callers and groups. No name has a colon, so no issuer has another's.
        self._prefix = f"jwt:{settings.name}:" if settings.name else "jwt:"
        self.source = _source(table, settings, watcher)
        self._keys: KeySet | None = None
        #: SHA-256 of a token verified with ``_keys`` → its caller.
        self._verified: OrderedDict[bytes, Principal] = OrderedDict()

    def start(self) -> None:
        self.source.start()

    def close(self) -> None:
        self.source.close()

    def metrics(self) -> Iterator[Metric]:
        name = self._settings.name
        labels, values = (("issuer",), (name,)) if name else ((), ())
        failures = CounterMetricFamily(
            "modelport_jwks_refresh_failures", "Failed fetches of the issuer's keys", labels=labels
        )
        failures.add_metric(values, self.source.failures)
        ages = GaugeMetricFamily(
            "modelport_jwks_age_seconds", "Time since the issuer's keys were read", labels=labels
        )
        age = self.source.age_seconds()
        if age is not None:
            ages.add_metric(values, age)
            yield ages
        yield failures

    def recognise(self, credential: bytes) -> Principal | None:
        if credential.count(b".") != 2:
            return None
        if self._settings.name and _issuer(credential) != self._settings.issuer:
            return None
        keys = self.source.keys
        if keys is not self._keys:
            self._keys = keys
            self._verified.clear()
        if keys is None:
            raise Unavailable("tokens cannot be verified yet: the issuer's keys are not loaded")
        digest = hashlib.sha256(credential).digest()
        caller = self._verified.get(digest)
        if caller is None:
            caller = self._verify(credential, keys)
            self._verified[digest] = caller
            if len(self._verified) > MAX_CACHED:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(digest)
        if caller.expires <= time.time():
            del self._verified[digest]
            raise Unauthenticated("the token has expired")
        return caller

    def _verify(self, token: bytes, keys: KeySet) -> Principal:
        """The caller that the token names."""
        key = self._key_of(token, keys)
        settings = self._settings
        try:
            claims = self._jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=settings.audience,
                issuer=settings.issuer,
                leeway=settings.leeway_seconds,
                options={
                    "require": ["exp", "iss", "aud", settings.principal_claim],
                    "enforce_minimum_key_length": True,
                },
            )
        except self._jwt.PyJWTError as error:
            raise Unauthenticated(_reason(error)) from error
        expires = claims["exp"]
        if isinstance(expires, bool) or not isinstance(expires, int | float):
            raise Unauthenticated("the token's claim 'exp' is not a number")
        if "cnf" in claims:
            raise Unauthenticated("the token is bound to a key (claim 'cnf'); send a bearer token")
        subject = _named(claims, settings.principal_claim)
        stated = _groups(claims.get(settings.groups_claim))
        groups = frozenset(f"{self._prefix}{name}" for name in stated)
        until = min(expires, 2**40) + settings.leeway_seconds
        name = f"{self._prefix}{subject}"
        return Principal(name, groups, "jwt", token_fingerprint(token), expires=until)

    def _key_of(self, token: bytes, keys: KeySet) -> PyJWK:
        """The key that has signed the token.

        The signature is verified before the claims are read, which takes longer for large tokens;
        ``jwt.decode`` reads them first.
        """
        parts = _TOKEN.fullmatch(token)
        header = _object(parts[1], MAX_HEADER_BYTES) if parts is not None else None
        if parts is None or header is None:
            raise Unauthenticated("the token is malformed")
        algorithm, kid = header.get("alg"), header.get("kid")
        if algorithm not in list(self._settings.algorithms):
            raise Unauthenticated("the token's algorithm is not accepted")
        if "crit" in header or "b64" in header:
            raise Unauthenticated("the token has critical extensions")
        if not isinstance(kid, str | None):
            raise Unauthenticated("the token is malformed")
        key = keys.find(kid, algorithm)
        if key is None:
            self.source.miss()
            raise Unauthenticated("the token's key is unknown")
        signed = token[: parts.start(2) - 1]
        signature = _decoded(parts[2])
        if signature is None or not key.Algorithm.verify(signed, key.key, signature):
            raise Unauthenticated("the token's signature is wrong")
        return key


def _source(table: TomlTable, settings: JwtSettings, watcher: FileWatcher) -> JwksFile | JwksUrl:
    folder = table.path.parent
    if "://" not in settings.jwks:
        if settings.jwks_ca is not None:
            raise table.error("jwks_ca is for an https URL; remove it", "jwks_ca")
        return JwksFile(folder / settings.jwks, settings.algorithms, watcher)
    try:
        url = urlsplit(settings.jwks)
        if url.scheme != "https" or not url.hostname or url.username is not None:
            raise ValueError
        url.port  # noqa: B018  # raises, if it is not a number
    except ValueError:
        raise table.error(
            f"jwks = '{settings.jwks}' must be a file or an https URL", "jwks"
        ) from None
    tls = ssl.create_default_context()
    source = JwksUrl(settings.jwks, tls, settings.algorithms, settings.refresh_seconds)
    if settings.jwks_ca is not None:
        authorities = folder / settings.jwks_ca
        source.follow_authorities(watcher, authorities, lambda files: _trusting(table, files))
    return source


def _trusting(table: TomlTable, authorities: Contents) -> ssl.SSLContext:
    """Make the context that trusts the certificates in a file alone."""
    try:
        with at_path(authorities[0].read()) as path:
            return ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        name = table.values["jwks_ca"]
        raise table.error(
            f"jwks_ca '{name}' has no certificates in PEM: {plain_reason(error)}", "jwks_ca"
        ) from error


def _decoded(segment: bytes) -> bytes | None:
    """The bytes of a part of a token; None if they are not canonical base64url."""
    try:
        decoded = base64.urlsafe_b64decode(segment + b"=" * (-len(segment) % 4))
    except ValueError:
        return None
    # Other spellings of a token would be kept as other tokens.
    return decoded if base64.urlsafe_b64encode(decoded).rstrip(b"=") == segment else None


def _object(segment: bytes, most: float = math.inf) -> dict[str, Any] | None:
    """Return the JSON object in a part of a token, or None."""
    decoded = _decoded(segment) if len(segment) <= most else None
    if decoded is None:
        return None
    try:
        document = json.loads(decoded)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _issuer(token: bytes) -> object:
    """Return the issuer that a token names, which is not verified yet: it chooses the keys."""
    claims = _object(token.split(b".")[1])
    return None if claims is None else claims.get("iss")


def _reason(error: Exception) -> str:
    """The public reason; the library's own may quote the token."""
    import jwt

    if isinstance(error, jwt.MissingRequiredClaimError):
        return f"the token has no claim '{error.claim}'"
    reasons: Mapping[type[Exception], str] = {
        jwt.ExpiredSignatureError: "the token has expired",
        jwt.ImmatureSignatureError: "the token is not valid yet",
        jwt.InvalidAudienceError: "the token is for another audience",
        jwt.InvalidIssuerError: "the token is from another issuer",
    }
    return reasons.get(type(error), "the token is malformed")


def _named(claims: Mapping[str, Any], claim: str) -> str:
    name = claims[claim]
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
        raise Unauthenticated(
            f"the token's claim '{claim}' must be a name of at most {MAX_NAME_LENGTH} characters"
        )
    return name


def _groups(value: Any) -> Iterator[str]:
    """The names in a claim that is a list or a single name; none in any other."""
    names = [value] if isinstance(value, str) else value
    for name in names[:MAX_GROUPS] if isinstance(names, list) else ():
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable():
            yield name
