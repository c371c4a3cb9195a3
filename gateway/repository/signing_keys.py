"""Ed25519 keys (RFC 8032) in PEM files. ``cryptography`` is imported lazily."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import gateway_files
from modelport.gateway.runtime.gateway_files import FILES, FileContent

MAX_KEY_BYTES = 64 * 1024
_SPKI_PREFIX = bytes.fromhex("302a300506032b6570032100")  # RFC 8410; the 32 bytes follow
_PEM_LABEL = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key of 32 bytes."""

    raw: bytes

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the key's DER SubjectPublicKeyInfo, in hex."""
        return hashlib.sha256(_SPKI_PREFIX + self.raw).hexdigest()

    def pem(self) -> bytes:
        """SubjectPublicKeyInfo."""
        ed25519, formats = _library()
        key = ed25519.Ed25519PublicKey.from_public_bytes(self.raw)
        pem: bytes = key.public_bytes(
            formats.Encoding.PEM, formats.PublicFormat.SubjectPublicKeyInfo
        )
        return pem

    def verify(self, signature: bytes, content: bytes) -> None:
        """Raise ``cryptography.exceptions.InvalidSignature`` unless this key made ``signature``."""
        ed25519, _ = _library()
        ed25519.Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, content)


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """An Ed25519 private key of 32 bytes, which its ``repr`` hides."""

    raw: bytes = field(repr=False)

    @classmethod
    def generate(cls) -> PrivateKey:
        return cls(_library()[0].Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> PublicKey:
        return PublicKey(self._key.public_key().public_bytes_raw())

    def pem(self) -> bytes:
        """PKCS #8, unencrypted."""
        _, formats = _library()
        pem: bytes = self._key.private_bytes(
            formats.Encoding.PEM, formats.PrivateFormat.PKCS8, formats.NoEncryption()
        )
        return pem

    def sign(self, content: bytes) -> bytes:
        signature: bytes = self._key.sign(content)
        return signature

    @property
    def _key(self) -> Any:
        return _library()[0].Ed25519PrivateKey.from_private_bytes(self.raw)


def _library() -> tuple[ModuleType, ModuleType]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519, serialization


def load_private_key(path: Path) -> PrivateKey:
    """Read the key in a PEM file of ``modelport keygen``.

    Raises:
        InvalidArgument: the file is unreadable or holds no private Ed25519 key.
    """
    ed25519, formats = _library()
    where = f"private key '{path}'"
    content = _content(gateway_files.read(path, wait=True), where)
    labels = _PEM_LABEL.findall(content)
    if labels and all(label.endswith(b"PUBLIC KEY") for label in labels):
        raise InvalidArgument(f"{where} is a public key; give its private key")
    if b"ENCRYPTED" in content:
        raise InvalidArgument(f"{where} is encrypted; decrypt it with 'openssl pkey'")
    load = partial(formats.load_pem_private_key, content, None)
    return PrivateKey(_parse_key(load, ed25519.Ed25519PrivateKey, where).private_bytes_raw())


def load_public_key(path: Path) -> PublicKey:
    """Read the key in a PEM file of ``modelport keygen``.

    Raises:
        InvalidArgument: the file is unreadable or holds no public Ed25519 key.
    """
    ed25519, formats = _library()
    where = f"public key '{path}'"
    content = _content(FILES.keep("public key", path), where)
    if any(label.endswith(b"PRIVATE KEY") for label in _PEM_LABEL.findall(content)):
        raise InvalidArgument(
            f"{where} is a private key; give its public key, and keep the private key secret"
        )
    load = partial(formats.load_pem_public_key, content)
    return PublicKey(_parse_key(load, ed25519.Ed25519PublicKey, where).public_bytes_raw())


def _content(file: FileContent, where: str) -> bytes:
    try:
        content = file.read()
    except OSError as error:
        raise InvalidArgument(f"{where} cannot be read: {error.strerror}") from error
    return content if len(content) <= MAX_KEY_BYTES else b""


def _parse_key(load: Callable[[], Any], kind: type, where: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = load()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise InvalidArgument(
            f"{where} is not a key in PEM; make one with 'modelport keygen'"
        ) from error
    if not isinstance(key, kind):
        raise InvalidArgument(f"{where} is not an Ed25519 key; make one with 'modelport keygen'")
    return key
