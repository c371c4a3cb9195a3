"""Encryption of records at rest: each line by AES-256-GCM.

A line stays a line of JSON, ``{"encrypted": "BASE64"}``, so that files grow, rotate and are cut off
as others. Its bytes are a salt, a nonce, and the record with the tag. Each process has a salt of
its own, by which its key is derived from that of the file (HKDF, RFC 5869), and counts its nonces.
``cryptography`` is imported lazily.
"""

from __future__ import annotations

import base64
import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from modelport.gateway.errors import UsageError
from modelport.gateway.repository import untrusted_files

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CommandT = TypeVar("CommandT", bound=Callable[..., Any])
#: Bytes of a file with a key.
LEAST_KEY_BYTES, MOST_KEY_BYTES = 16, 4096
KEY_VARIABLE = "MODELPORT_RECORD_KEY"
BEGIN, END = b'{"encrypted":"', b'"}\n'
_INFO = b"modelport records 1"
_SALT_BYTES, _NONCE_BYTES, _KEY_BYTES = 16, 12, 32


def read_key(path: Path, option: str) -> bytes:
    """The key in a file.

    Raises:
        UsageError: it cannot be read, or is short.
    """
    remedy = "write one with 'openssl rand -hex 32'"
    try:
        key = untrusted_files.read(path, MOST_KEY_BYTES).strip()
    except OSError as error:
        reason = str(error.strerror).lower()
        raise UsageError(f"{option} '{path}' cannot be read ({reason}); {remedy}") from error
    if len(key) < LEAST_KEY_BYTES:
        raise UsageError(
            f"{option} '{path}' has {len(key)} bytes, and needs {LEAST_KEY_BYTES}; {remedy}"
        )
    return key


def record_key_option(command: CommandT) -> CommandT:
    """Add ``--record-key`` to a command that reads records; ``given_key`` returns the key."""
    return click.option(
        "--record-key",
        metavar="FILE",
        type=click.Path(exists=True, path_type=Path),
        envvar=KEY_VARIABLE,
        expose_value=False,
        callback=_keep,
        help="File with the key of encrypted records.",
    )(command)


def _keep(context: click.Context, option: click.Parameter, value: Path | None) -> None:
    context.meta[KEY_VARIABLE] = value


def given_key() -> bytes | None:
    """The key for the records that the command at hand reads; None: it has none."""
    context = click.get_current_context(silent=True)
    given = None if context is None else context.meta.get(KEY_VARIABLE)
    path = given or os.environ.get(KEY_VARIABLE)
    return read_key(Path(path), "--record-key") if path else None


@functools.lru_cache(64)
def _cipher(key: bytes, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), _KEY_BYTES, salt, _INFO).derive(key))


class RecordCipher:
    """Encrypts the records of one process."""

    def __init__(self, key: bytes) -> None:
        self._salt = os.urandom(_SALT_BYTES)
        self._cipher, self._nonces = _cipher(key, self._salt), itertools.count()

    def encrypt(self, line: bytes) -> bytes:
        """The line in place of the one of a record."""
        nonce = next(self._nonces).to_bytes(_NONCE_BYTES, "big")
        content = self._salt + nonce + self._cipher.encrypt(nonce, line, None)
        return BEGIN + base64.b64encode(content) + END


def decrypt(line: bytes, key: bytes | None) -> bytes:
    """The record of a line, which may be clear.

    Raises:
        UsageError: it is encrypted, and there is no key.
        ValueError: it has been changed, or has another key.
    """
    if not line.startswith(BEGIN):
        return line
    if key is None:
        raise UsageError(
            f"the records are encrypted; name the file with their key in {KEY_VARIABLE}, or with "
            "--record-key"
        )
    from cryptography.exceptions import InvalidTag

    content = base64.b64decode(line[len(BEGIN) : -len(END)], validate=True)
    salt, rest = content[:_SALT_BYTES], content[_SALT_BYTES:]
    try:
        return _cipher(key, salt).decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError) as error:
        raise ValueError("it has another key, or was changed") from error
