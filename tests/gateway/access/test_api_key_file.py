"""``keys.toml``: what is read, refused, added, replaced and revoked."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modelport.gateway.access import api_key_file
from modelport.gateway.errors import AlreadyExists, NotFound, UsageError

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
FULL = """\
[[keys]]
name = "ci"
id = "abcdefghijkl"
sha256 = "{digest}"
""".format(digest="0" * 64)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_key_has_256_random_bits_and_only_its_hash_is_kept() -> None:
    text, entry = api_key_file.generate("ci")
    assert re.fullmatch(r"mp_[A-Za-z0-9]{12}_[A-Za-z0-9]{43}", text)
    assert 62**43 > 2**256
    assert entry.sha256 == hashlib.sha256(text.encode()).hexdigest()
    secret = text.rpartition("_")[2]
    assert secret not in api_key_file.serialize([entry]).decode()
    assert secret not in repr(entry)
    assert len({api_key_file.generate("ci")[0] for _ in range(1000)}) == 1000


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    entries = tuple(
        api_key_file.generate(name, expires=expires, operations=operations, models=models)[1]
        for name, expires, operations, models in (
            ("ci", None, (), ()),
            ("a.b-c_d@e", NOW, ["*"], ["fraud*", 'quote"\\', "größe", "[a-c]?"]),
            ("x", NOW.astimezone(), ["infer", "metadata"], ()),
        )
    )
    path = tmp_path / "keys.toml"
    with api_key_file.locked(path) as replace:
        replace(entries)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert api_key_file.read(path) == entries
    assert sorted(os.listdir(tmp_path)) == ["keys.toml"]


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644, 0o666, 0o777, 0o601, 0o610])
def test_a_file_that_is_open_to_others_is_refused_with_the_remedy(
    tmp_path: Path, mode: int
) -> None:
    path = write(tmp_path / "keys.toml", FULL, mode)
    with pytest.raises(UsageError, match=rf"'{path}' is open .*{mode:04o}.*: chmod 600 {path}$"):
        api_key_file.read(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_the_owner_and_the_group_of_a_mounted_secret_may_read_the_file(
    tmp_path: Path, mode: int
) -> None:
    assert len(api_key_file.read(write(tmp_path / "keys.toml", FULL, mode))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[keys]]\nname = 1", r"keys\.toml:1: \[keys\] needs the key 'id'"),
        (FULL.replace('"ci"', '"jwt:ci"'), r"keys\.toml:2: keys\.name = 'jwt:ci' must be a name"),
        (FULL.replace('"ci"', '"anonymous"'), r"keys\.toml:2: .*neither 'anonymous'"),
        (FULL.replace('"ci"', '"c*"'), r"keys\.toml:2: "),
        (FULL.replace("abcdefghijkl", "short"), r"keys\.toml:3: .*12 letters and digits"),
        (FULL.replace("0" * 64, "secret"), r"keys\.toml:4: .*SHA-256"),
        (FULL + 'expires = "soon"', r"keys\.toml:5: .*2030-01-31T00:00:00Z"),
        (FULL + "expires = 2030-01-01T00:00:00", r"keys\.toml:5: .*time zone"),
        (FULL + 'operations = ["infr"]', r"keys\.toml:5: .*did you mean 'infer'"),
        (FULL + "operations = []", r"keys\.toml:5: "),
        (FULL + 'models = ["a"]', r"keys\.toml:5: a key with models needs operations"),
        (FULL + 'models = [""]\noperations = ["infer"]', r"keys\.toml:5: "),
        (FULL + "owner = 1", r"keys\.toml:5: unknown key 'owner'"),
        (FULL + FULL, r"keys\.toml:7: id 'abcdefghijkl' is also used by the key in line 1"),
        ("[key]\n", r"keys\.toml:1: unknown table \[key\]"),
        ("keys = 1", r"keys\.toml:1: 'keys' must be a table"),
        ("[[keys]\n", r"keys\.toml:1: not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        api_key_file.read(write(tmp_path / "keys.toml", text))


def test_a_file_that_is_none_or_endless_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "large").write_bytes(b"#" * (api_key_file.MAX_FILE_BYTES + 1))
    (tmp_path / "large").chmod(0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name, message in (
        ("pipe", "is not a regular file"),
        ("folder", "cannot be read .Is a directory"),
        ("large", "is larger than"),
        ("missing", "cannot be read .No such file.*; 'modelport key create' makes one"),
    ):
        with pytest.raises(UsageError, match=message):
            api_key_file.read(tmp_path / name)


def test_a_name_has_one_key_until_it_is_rotated_and_two_at_most() -> None:
    _, first = api_key_file.generate("ci", operations=["infer"], models=["fraud*"])
    entries = api_key_file.add((), first, NOW)
    with pytest.raises(AlreadyExists, match="modelport key rotate ci"):
        api_key_file.add(entries, api_key_file.generate("ci")[1], NOW)
    text, entries = api_key_file.rotate(entries, "ci", None, DAY, NOW)
    old, new = entries
    assert (old.id, old.expires) == (first.id, NOW + DAY)
    assert new.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (new.operations, new.models) == (first.operations, first.models)
    assert all(each.is_valid(NOW) for each in entries)
    with pytest.raises(AlreadyExists, match=f"{old.id} and {new.id}; revoke one"):
        api_key_file.rotate(entries, "ci", None, DAY, NOW)
    _, later = api_key_file.rotate(entries, "ci", None, timedelta(0), NOW + DAY)
    assert later[0].id == new.id, "the expired key is gone"
    assert [each.is_valid(NOW + DAY) for each in later] == [False, True]


def test_a_rotation_does_not_prolong_the_old_key() -> None:
    _, first = api_key_file.generate("ci", expires=NOW + DAY)
    _, (old, _) = api_key_file.rotate((first,), "ci", None, 10 * DAY, NOW)
    assert old.expires == NOW + DAY


def test_keys_are_revoked_by_name_or_id() -> None:
    entries = tuple(api_key_file.generate(name)[1] for name in ("ci", "ci", "bob"))
    assert api_key_file.revoke(entries, "ci") == (entries[2:], entries[:2])
    assert api_key_file.revoke(entries, entries[0].id) == (entries[1:], entries[:1])
    with pytest.raises(NotFound, match="'bib' has no key; did you mean 'bob'"):
        api_key_file.revoke(entries, "bib")
    with pytest.raises(NotFound, match="'ann' has no valid key; see: modelport key list"):
        api_key_file.rotate(entries, "ann", None, DAY, NOW)


def test_concurrent_writers_lose_nothing_and_readers_see_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    with api_key_file.locked(path) as replace:
        replace(())

    def append(number: int) -> None:
        with api_key_file.locked(path) as replace:
            entries = api_key_file.read(path)
            replace((*entries, api_key_file.generate(f"key-{number}")[1]))

    def read(_: int) -> int:
        return len(api_key_file.read(path))

    with ThreadPoolExecutor(8) as threads:
        written = [threads.submit(append, number) for number in range(40)]
        seen = list(threads.map(read, range(100)))
        for each in written:
            each.result()
    assert {each.name for each in api_key_file.read(path)} == {f"key-{n}" for n in range(40)}
    assert seen == sorted(seen) or max(seen) <= 40
    assert sorted(os.listdir(tmp_path)) == ["keys.toml"]


def test_a_rewritten_file_keeps_its_link_its_group_and_its_mode(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = write(tmp_path / "real" / "keys.toml", FULL, 0o640)
    if os.geteuid() == 0:
        os.chown(real, 12345, 23456)
    before = real.stat()
    link = tmp_path / "keys.toml"
    link.symlink_to(real)
    with api_key_file.locked(link) as replace:
        replace(api_key_file.read(link))
    assert link.is_symlink()
    after = real.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (
        before.st_uid,
        before.st_gid,
        before.st_mode,
    )
