"""``modelport key``."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from modelport.gateway.access import api_key_file
from tests.commands import modelport

KEY = re.compile(r"mp_[A-Za-z0-9]{12}_[A-Za-z0-9]{43}\n")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def entries() -> api_key_file.Entries:
    return api_key_file.read(Path("keys.toml"))


def key(*arguments: str) -> str:
    """Standard output of a command that succeeds."""
    done = modelport("key", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_create_prints_the_key_alone_and_keeps_its_hash() -> None:
    done = modelport("key", "create", "--name", "ci", "--models", "fraud*,x", "--expires", "90d")
    assert KEY.fullmatch(done.stdout)
    text = done.stdout.strip()
    [entry] = entries()
    assert entry.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (entry.models, entry.operations) == (("fraud*", "x"), ("infer", "metadata"))
    assert entry.created is not None
    assert entry.expires == entry.created + timedelta(days=90)
    assert text.rpartition("_")[2] not in Path("keys.toml").read_text() + done.stderr
    assert stat.S_IMODE(Path("keys.toml").stat().st_mode) == 0o600
    done = modelport("key", "create", "--name", "bob")
    assert "rights that the rules give to 'bob'" in done.stderr
    assert entries()[1].operations == ()


def test_rotate_keeps_rights_and_lifetime_and_ends_the_old_key() -> None:
    old = key("create", "--name", "ci", "--operations", "*", "--expires", "10d")
    new = key("rotate", "ci", "--overlap", "7d")
    assert KEY.fullmatch(new)
    assert new != old
    first, second = entries()
    now = datetime.now(UTC)
    assert abs(first.expires - now - timedelta(days=7)) < timedelta(minutes=1)  # type: ignore[operator]
    assert abs(second.expires - now - timedelta(days=10)) < timedelta(minutes=1)  # type: ignore[operator]
    assert second.operations == ("*",)
    done = modelport("key", "rotate", "ci")
    assert done.returncode == 2
    assert f"{first.id} and {second.id}; revoke one" in done.stderr
    assert key("revoke", first.id) == f"revoked {first.id} of 'ci'\n"
    key("rotate", "ci", "--expires", "never")
    assert entries()[-1].expires is None


def test_list_shows_names_and_rights() -> None:
    key("create", "--name", "ci", "--models", "fraud*")
    key("create", "--name", "bob", "--file", "keys.toml", "--expires", "2099-01-31")
    rows = json.loads(key("list", "--json"))
    assert [row["name"] for row in rows] == ["ci", "bob"]
    assert rows[0]["operations"] == ["infer", "metadata"]
    assert (rows[1]["expires"], rows[1]["state"]) == ("2099-01-31T00:00:00Z", "valid")
    assert re.search(r"ci +\w{12} +valid .* infer, metadata +fraud\*", key("list"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("create",), "Missing option '--name'"),
        (("create", "--name", "jwt:x"), "the name of a key must be a name of letters"),
        (("create", "--name", "x", "--operations", "infr"), "did you mean 'infer'"),
        (("create", "--name", "x", "--models", "a" * 300), "models must be a non-empty list"),
        (("create", "--name", "x", "--expires", "soon"), "--expires 'soon' is not a time"),
        (("create", "--name", "x", "--expires", "2020-01-01"), "is in the past"),
        (("create", "--name", "x", "--expires", "999999w"), "is too long; use 100000d at most"),
        (("create", "--name", "ci"), "modelport key rotate ci"),
        (("create", "--name", "x", "--file", "no/keys.toml"), "cannot be written: No such file"),
        (("rotate", "c"), "'c' has no valid key; did you mean 'ci'"),
        (("rotate", "ci", "--overlap", "1"), "--overlap '1' is not a duration"),
        (("rotate", "ci", "--overlap", "999999w"), "--overlap '999999w' is too long"),
        (("revoke", "bob"), "'bob' has no key; see: modelport key list"),
        (("list", "--file", "no.toml"), "--file 'no.toml' cannot be read"),
    ],
)
def test_wrong_calls_fail_with_one_line_and_change_nothing(
    arguments: tuple[str, ...], message: str
) -> None:
    key("create", "--name", "ci")
    before = Path("keys.toml").read_bytes()
    done = modelport("key", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert Path("keys.toml").read_bytes() == before


def test_a_file_that_others_may_read_is_not_changed() -> None:
    key("create", "--name", "ci")
    Path("keys.toml").chmod(0o644)
    for arguments in (("create", "--name", "x"), ("rotate", "ci"), ("revoke", "ci"), ("list",)):
        done = modelport("key", *arguments)
        assert done.returncode == 2
        assert "chmod 600 keys.toml" in done.stderr


def test_keys_made_by_many_processes_at_once_are_all_kept(folder: Path) -> None:
    code = (
        "import sys; from modelport.gateway.cli.key import key; "
        "[key(['create', '--name', f'{sys.argv[1]}-{n}'], standalone_mode=False) for n in range(5)]"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(number)], stdout=subprocess.PIPE, text=True
        )
        for number in range(3)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert {each.name for each in entries()} == {f"{n}-{m}" for n in range(3) for m in range(5)}
    texts = "".join(printed).split()
    assert {hashlib.sha256(text.encode()).hexdigest() for text in texts} == {
        each.sha256 for each in entries()
    }
    assert sorted(path.name for path in folder.iterdir()) == ["keys.toml"]


def test_a_key_that_cannot_be_shown_is_not_made() -> None:
    key("create", "--name", "ci")
    before = Path("keys.toml").read_bytes()
    for arguments in (("create", "--name", "x"), ("rotate", "ci")):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "modelport", "key", *arguments],
                stdout=full,
                stderr=subprocess.PIPE,
                check=False,
            )
        assert done.returncode != 0
        assert Path("keys.toml").read_bytes() == before


def test_nobody_else_can_open_what_is_locked() -> None:
    with api_key_file.locked(Path("keys.toml")):
        [lock] = Path().glob(".*.lock")
        assert not stat.S_IMODE(lock.stat().st_mode) & stat.S_IRWXO
