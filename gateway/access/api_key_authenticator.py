"""API keys as credentials: ``[keys]`` in ``access.toml``."""

from __future__ import annotations

import hashlib
import hmac
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from modelport.gateway.access import api_key_file
from modelport.gateway.access.api_key_file import PREFIX, ApiKey
from modelport.gateway.access.authentication import CredentialAuthenticator
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import Grant, Principal
from modelport.gateway.errors import Unauthenticated
from modelport.gateway.runtime import gateway_files
from modelport.gateway.runtime.file_watcher import FileWatcher
from modelport.gateway.runtime.gateway_files import FileContent
from modelport.gateway.toml_tables import read_by, text

_PREFIX: Final = PREFIX.encode()
_ID: Final = slice(len(_PREFIX), len(_PREFIX) + api_key_file.ID_LENGTH)


@dataclass(frozen=True)
class ApiKeySettings:
    """The table ``[keys]``."""

    file: str = field(metadata=read_by(text))


class _Entry(NamedTuple):
    sha256: bytes
    principal: Principal


#: Stands for an unknown key, so that it costs as much to check as a wrong one.
_UNKNOWN = _Entry(bytes(32), Principal(""))


class ApiKeyAuthenticator(CredentialAuthenticator):
    """Recognises API keys by the hashes in a watched file."""

    def __init__(self, table: TomlTable, watcher: FileWatcher) -> None:
        path = table.path.parent / table.read(ApiKeySettings).file
        self._entries: Mapping[bytes, _Entry] = {}
        self._watcher = watcher
        self._watch = watcher.watch(
            "keys", [path], lambda contents: _parse(table, contents[0]), self._use
        )

    def recognise(self, credential: bytes) -> Principal | None:
        if not credential.startswith(_PREFIX):
            return None
        entry = self._entries.get(credential[_ID], _UNKNOWN)
        if not hmac.compare_digest(hashlib.sha256(credential).digest(), entry.sha256):
            raise Unauthenticated("the API key is wrong, or has been revoked")
        if entry.principal.expires <= time.time():
            raise Unauthenticated("the API key has expired")
        return entry.principal

    def close(self) -> None:
        self._watcher.forget(self._watch)

    def _use(self, entries: Mapping[bytes, _Entry]) -> None:
        self._entries = entries


def keys_of(table: TomlTable, name: str) -> list[Principal]:
    """Return the callers of the keys of that name; none if there is no key file.

    Raises:
        UsageError: The file cannot be read, or is wrong.
    """
    path = table.path.parent / table.read(ApiKeySettings).file
    if not path.exists():
        return []
    found = (entry.principal for entry in _parse(table, gateway_files.read(path)).values())
    return [principal for principal in found if principal.name == name]


def _parse(table: TomlTable, file: FileContent) -> dict[bytes, _Entry]:
    option = f"{table.path.name}:{table.lines.get('file', table.line)}: file"
    return {
        key.id.encode(): _Entry(
            bytes.fromhex(key.sha256),
            Principal(
                key.name,
                method="key",
                fingerprint=f"{PREFIX}{key.id}",
                grant=_grant(key),
                expires=math.inf if key.expires is None else key.expires.timestamp(),
            ),
        )
        for key in api_key_file.parse_file(file, option)
    }


def _grant(key: ApiKey) -> Grant | None:
    if not key.operations:
        return None
    operations = list(Operation) if "*" in key.operations else map(Operation, key.operations)
    return Grant(frozenset(operations), key.models or ("*",))
