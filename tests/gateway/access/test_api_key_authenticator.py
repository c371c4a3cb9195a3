"""API keys as credentials."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modelport.gateway.access import api_key_file
from modelport.gateway.access.api_key_authenticator import ApiKeyAuthenticator
from modelport.gateway.access.api_key_file import ApiKey
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.principal import UNKNOWN_CONNECTION, Grant, Principal
from modelport.gateway.errors import Unauthenticated, UsageError
from modelport.gateway.runtime.file_watcher import FileWatcher
from tests.gateway.access.identities import table

Store = Callable[..., None]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    def write(*entries: ApiKey) -> None:
        with api_key_file.locked(tmp_path / "keys.toml") as replace:
            replace(entries)

    return write


def authenticator(folder: Path, watcher: FileWatcher | None = None) -> ApiKeyAuthenticator:
    return ApiKeyAuthenticator(
        table(folder, '[keys]\nfile = "keys.toml"'), watcher or FileWatcher()
    )


def ask(keys: ApiKeyAuthenticator, key: str | bytes) -> Principal | None:
    key = key.encode() if isinstance(key, str) else key
    return keys.authenticate({b"x-api-key": key}, UNKNOWN_CONNECTION)


def test_a_key_is_recognised_with_its_name_and_its_rights(tmp_path: Path, store: Store) -> None:
    plain, first = api_key_file.generate("ci")
    granted, second = api_key_file.generate(
        "bob", operations=["infer", "metadata"], models=["fraud*"]
    )
    everything, third = api_key_file.generate("root", operations=["*"])
    store(first, second, third)
    keys = authenticator(tmp_path)
    assert ask(keys, plain) == Principal("ci", method="key", fingerprint=f"mp_{first.id}")
    operations = frozenset({Operation.INFER, Operation.METADATA})
    found = ask(keys, granted)
    assert found is not None
    assert (found.name, found.grant) == ("bob", Grant(operations, ("fraud*",)))
    found = ask(keys, everything)
    assert found is not None
    assert found.grant == Grant(frozenset(Operation), ("*",))


def test_a_wrong_or_expired_key_is_refused(tmp_path: Path, store: Store) -> None:
    now = datetime.now(UTC)
    text, entry = api_key_file.generate("ci")
    old, expired = api_key_file.generate("old", expires=now - timedelta(seconds=1))
    store(entry, expired)
    keys = authenticator(tmp_path)
    wrong: list[str | bytes] = [
        text[:-1] + ("a" if text[-1] != "a" else "b"),
        text[:-1],
        text + "a",
        text.swapcase().replace("MP_", "mp_"),
        f"mp_{entry.id}_",
        f"mp_{entry.id}",
        "mp_",
        f"mp_{entry.id}_{old.rpartition('_')[2]}",
        api_key_file.generate("ci")[0],
        b"mp_\xff\xfe\x00" + text.encode(),
        f"mp_{entry.sha256}",
    ]
    for key in wrong:
        with pytest.raises(Unauthenticated, match="wrong, or has been revoked"):
            ask(keys, key)
    with pytest.raises(Unauthenticated, match="has expired"):
        ask(keys, old)
    assert ask(keys, text)


def test_other_credentials_are_left_to_other_authenticators(tmp_path: Path, store: Store) -> None:
    store()
    keys = authenticator(tmp_path)
    assert keys.authenticate({}, UNKNOWN_CONNECTION) is None
    assert ask(keys, "a.b.c") is None
    assert ask(keys, "") is None


def test_both_keys_of_a_rotation_are_valid_until_the_overlap_ends(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    first, entry = api_key_file.generate("ci")
    second, entries = api_key_file.rotate((entry,), "ci", None, timedelta(hours=1), now)
    store(*entries)
    keys = authenticator(tmp_path)
    assert {ask(keys, first).name, ask(keys, second).name} == {"ci"}  # type: ignore[union-attr]
    monkeypatch.setattr("time.time", lambda: now.timestamp() + 3601)
    with pytest.raises(Unauthenticated, match="has expired"):
        ask(keys, first)
    assert ask(keys, second)


async def test_a_changed_file_is_used_and_a_wrong_one_is_not(tmp_path: Path, store: Store) -> None:
    path, watcher = tmp_path / "keys.toml", FileWatcher()
    text, entry = api_key_file.generate("ci")
    store(entry)
    keys = authenticator(tmp_path, watcher)
    path.write_text("[[keys]]\n")
    await watcher.poll()
    assert ask(keys, text)
    assert watcher.errors == {"keys": 1}
    store()
    await watcher.poll()
    with pytest.raises(Unauthenticated):
        ask(keys, text)
    keys.close()
    store(entry)
    await watcher.poll()
    with pytest.raises(Unauthenticated):
        ask(keys, text)


async def test_a_file_that_was_open_to_others_is_used_once_it_is_closed(
    tmp_path: Path, store: Store
) -> None:
    path, watcher = tmp_path / "keys.toml", FileWatcher()
    store()
    keys = authenticator(tmp_path, watcher)
    text, entry = api_key_file.generate("ci")
    path.write_bytes(api_key_file.serialize([entry]))
    path.chmod(0o644)
    await watcher.poll()
    with pytest.raises(Unauthenticated):
        ask(keys, text)
    path.chmod(0o600)
    await watcher.poll()
    assert ask(keys, text)


def test_a_missing_or_open_file_is_named_at_start(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^access.toml:2: file '.*keys.toml' cannot be read"):
        authenticator(tmp_path)
    (tmp_path / "keys.toml").write_text("")
    os.chmod(tmp_path / "keys.toml", 0o644)
    with pytest.raises(UsageError, match="chmod 600"):
        authenticator(tmp_path)
    with pytest.raises(UsageError, match=r"^access.toml:1: \[keys\] needs the key 'file'"):
        ApiKeyAuthenticator(table(tmp_path, "[keys]"), FileWatcher())


def test_an_entry_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        api_key_file.generate("ci")[1].name = "root"  # type: ignore[misc]
