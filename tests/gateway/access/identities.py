"""Tables of ``access.toml``, keys and tokens for tests of authenticators."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import get_default_algorithms

from modelport.gateway.access import located_toml
from modelport.gateway.access.located_toml import TomlTable

ISSUER, AUDIENCE = "https://issuer.example.com", "modelport"


def table(folder: Path, text: str) -> TomlTable:
    """The only table in ``text``, as of ``access.toml`` in ``folder``."""
    [[found]] = located_toml.parse(folder / "access.toml", text.encode()).tables.values()
    return found


class Issuer:
    """Signs tokens with a key of its own."""

    def __init__(self, algorithm: str = "RS256", kid: str | None = "key-1", bits: int = 2048):
        self.algorithm, self.kid = algorithm, kid
        self.private: Any = {
            "ES": lambda: ec.generate_private_key(
                {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1}.get(algorithm, ec.SECP521R1)()
            ),
            "Ed": ed25519.Ed25519PrivateKey.generate,
        }.get(algorithm[:2], lambda: rsa.generate_private_key(65537, bits))()

    def jwk(self, **changes: Any) -> dict[str, Any]:
        """The public key; ``None`` removes a member."""
        method = get_default_algorithms()[self.algorithm]
        made = json.loads(method.to_jwk(self.private.public_key()))
        made |= {"kid": self.kid, "use": "sig", "alg": self.algorithm} | changes
        return {name: value for name, value in made.items() if value is not None}

    def claims(self, **changes: Any) -> dict[str, Any]:
        made = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": int(time.time()) + 3600}
        return {name: value for name, value in (made | changes).items() if value is not None}

    def token(self, header: Mapping[str, Any] | None = None, **claims: Any) -> bytes:
        """A token; ``header`` adds to its header, a claim of ``None`` is left out."""
        named = {} if self.kid is None else {"kid": self.kid}
        return jwt.encode(
            self.claims(**claims), self.private, self.algorithm, named | dict(header or {})
        ).encode()


def key_set(*issuers: Issuer) -> bytes:
    return json.dumps({"keys": [issuer.jwk() for issuer in issuers]}).encode()
