"""``keys.toml``: API keys, as hashes.

A key is ``mp_ID_SECRET``. The ID finds the entry, and the secret has 256 random bits. One SHA-256
protects it: a slow hash such as scrypt is for secrets that can be guessed, and would let anybody
make the server compute slow hashes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import secrets
import stat
import string
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

from modelport.gateway.access import located_toml
from modelport.gateway.access.located_toml import TomlTable
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import AlreadyExists, NotFound, UsageError, closest
from modelport.gateway.runtime import file_lock, gateway_files
from modelport.gateway.runtime.gateway_files import FileContent
from modelport.gateway.toml_tables import InvalidValue, digest, read_by

T = TypeVar("T")

PREFIX: Final = "mp_"
MAX_FILE_BYTES: Final = 1024 * 1024
#: Valid keys of one name: the one in use, and the one that replaces it.
MAX_VALID_KEYS: Final = 2
MAX_GLOBS: Final = 100
_ALPHABET: Final = string.ascii_letters + string.digits
ID_LENGTH: Final = 12
_SECRET_LENGTH: Final = 43  # 62**43 > 2**256
_ID = re.compile(rf"[A-Za-z0-9]{{{ID_LENGTH}}}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
#: Names with a meaning of their own in rules.
_RESERVED = frozenset({"anonymous", "authenticated"})
_HEADER: Final = """\
# API keys of modelport, as hashes. 'modelport key' writes this file, and keeps no comments.
"""


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value) or value in _RESERVED:
        raise InvalidValue(
            "a name of letters, digits, '.', '_', '-' and '@', at most 100 characters, and neither "
            "'anonymous' nor 'authenticated'"
        )
    return value


def _id(value: Any) -> str:
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise InvalidValue(f"{ID_LENGTH} letters and digits")
    return value


def _time(value: Any) -> datetime:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise InvalidValue("a date and time with a time zone, such as 2030-01-31T00:00:00Z")
    return value


def _globs(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_GLOBS:
        raise InvalidValue("a non-empty list of model names or globs")
    for glob in value:
        if not isinstance(glob, str) or not glob or len(glob) > 256 or not glob.isprintable():
            raise InvalidValue("a non-empty list of model names or globs")
    return tuple(value)


def _operations(value: Any) -> tuple[str, ...]:
    known = ", ".join(Operation)
    if not isinstance(value, list) or not value:
        raise InvalidValue(f"a non-empty list of these operations: {known}, or '*' for all")
    for name in value:
        if name != "*" and name not in list(Operation):
            similar = closest(name, Operation) if isinstance(name, str) else ""
            hint = f"; did you mean '{similar}'?" if similar else ""
            raise InvalidValue(f"a list of these operations: {known}, or '*' for all{hint}")
    return tuple(value)


@dataclass(frozen=True)
class ApiKey:
    """An entry of the file.

    Attributes:
        sha256: Hash of the whole key, in hexadecimal digits.
        operations: Operations that the key allows besides the rules; empty for none.
        models: Globs of the models that it allows them on.
    """

    name: str = field(metadata=read_by(_name))
    id: str = field(metadata=read_by(_id))
    sha256: str = field(metadata=read_by(digest))
    created: datetime | None = field(default=None, metadata=read_by(_time))
    expires: datetime | None = field(default=None, metadata=read_by(_time))
    operations: tuple[str, ...] = field(default=(), metadata=read_by(_operations))
    models: tuple[str, ...] = field(default=(), metadata=read_by(_globs))

    def is_valid(self, now: datetime) -> bool:
        """Whether the key has not expired."""
        return self.expires is None or now < self.expires


def generate(
    name: str,
    *,
    expires: datetime | None = None,
    operations: Sequence[str] = (),
    models: Sequence[str] = (),
) -> tuple[str, ApiKey]:
    """Make a key: its text, which nothing keeps, and its entry.

    Raises:
        UsageError: The name, an operation or a glob is invalid.
    """
    text = f"{PREFIX}{_random(ID_LENGTH)}_{_random(_SECRET_LENGTH)}"
    entry = ApiKey(
        _checked("the name of a key", _name, name),
        text[len(PREFIX) :][:ID_LENGTH],
        hashlib.sha256(text.encode()).hexdigest(),
        datetime.now(UTC).replace(microsecond=0),
        expires,
        _checked("operations", _operations, list(operations)) if operations else (),
        _checked("models", _globs, list(models)) if models else (),
    )
    return text, entry


def _checked(name: str, reader: Callable[[Any], T], value: Any) -> T:
    try:
        return reader(value)
    except InvalidValue as error:
        raise UsageError(f"{name} must be {error}") from None


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def read(path: Path, option: str = "[keys] file") -> tuple[ApiKey, ...]:
    """Read the entries of the file that ``option`` names.

    Raises:
        UsageError: The file cannot be read, is open to other users or invalid.
    """
    return parse_file(gateway_files.read(path), option)


def parse_file(file: FileContent, option: str) -> tuple[ApiKey, ...]:
    """Parse a file that was read; raise as ``read``."""
    path = file.path
    try:
        content = file.read()
    except OSError as error:
        remedy = "; 'modelport key create' makes one" if error.errno == errno.ENOENT else ""
        raise UsageError(f"{option} '{path}' cannot be read ({error.strerror}){remedy}") from error
    _check_mode(path, file.mode)
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"{option} '{path}' is larger than {MAX_FILE_BYTES} bytes")
    return parse(path, content)


def _check_mode(path: Path, found: int) -> None:
    """Raise ``UsageError`` unless only the owner can change the file, and others cannot read it.

    The group may read it, because Kubernetes makes a Secret readable to a user other than root in
    no other way.
    """
    if not stat.S_ISREG(found):
        raise UsageError(f"'{path}' is not a regular file; 'modelport key create' makes one")
    if found & (stat.S_IWGRP | stat.S_IXGRP | stat.S_IRWXO):
        mode = stat.S_IMODE(found)
        raise UsageError(
            f"'{path}' is open to other users (mode {mode:04o}); close it with: chmod 600 {path}"
        )


def parse(path: Path, content: bytes) -> tuple[ApiKey, ...]:
    """Parse the content of the file ``path``.

    Raises:
        UsageError: It is invalid; the message has the file's name and the line.
    """
    file = located_toml.parse(path, content)
    for name, tables in file.tables.items():
        if name != "keys":
            raise tables[0].error(f"unknown table [{name}]; each key is a table [[keys]]")
    seen: dict[str, TomlTable] = {}
    entries = []
    for table in file.tables.get("keys", ()):
        entry = table.read(ApiKey)
        if entry.id in seen:
            first = seen[entry.id].line
            raise table.error(f"id '{entry.id}' is also used by the key in line {first}", "id")
        if entry.models and not entry.operations:
            raise table.error("a key with models needs operations", "models")
        seen[entry.id] = table
        entries.append(entry)
    return tuple(entries)


def serialize(entries: Sequence[ApiKey]) -> bytes:
    """The content of a file with these entries."""
    return "\n".join([_HEADER, *map(_table, entries)]).encode()


def _table(entry: ApiKey) -> str:
    lines = ["[[keys]]"]
    for each in dataclasses.fields(entry):
        value = getattr(entry, each.name)
        if value is None or value == ():
            continue
        if isinstance(value, datetime):
            text = value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        else:  # printable text is the same in JSON and in TOML
            text = json.dumps(value, ensure_ascii=False)
        lines.append(f"{each.name} = {text}")
    return "\n".join([*lines, ""])


# -- changes --------------------------------------------------------------------------------------

Entries = tuple[ApiKey, ...]


def add(entries: Entries, entry: ApiKey, now: datetime) -> Entries:
    """Add the first key of a name.

    Raises:
        AlreadyExists: The name has a valid key.
    """
    if any(each.name == entry.name and each.is_valid(now) for each in entries):
        raise AlreadyExists(
            f"'{entry.name}' has a key; replace it with: modelport key rotate {entry.name}"
        )
    return (*entries, entry)


def rotate(
    entries: Entries, name: str, expires: datetime | None, overlap: timedelta, now: datetime
) -> tuple[str, Entries]:
    """Replace the key of ``name``; the old one stays valid during ``overlap``.

    Return the text of the new key, which has the rights of the old one.

    Raises:
        NotFound: The name has no valid key.
        AlreadyExists: It has two already.
    """
    valid = [each for each in entries if each.name == name and each.is_valid(now)]
    if not valid:
        raise no_key(entries, name, "valid key")
    if len(valid) >= MAX_VALID_KEYS:
        ids = " and ".join(each.id for each in valid)
        raise AlreadyExists(
            f"'{name}' has {len(valid)} valid keys, {ids}; revoke one with: modelport key revoke ID"
        )
    [old] = valid
    text, entry = generate(name, expires=expires, operations=old.operations, models=old.models)
    end = (now + overlap).replace(microsecond=0)
    ending = dataclasses.replace(old, expires=min(end, old.expires or end))
    kept = [ending if each is old else each for each in entries if each is old or each.name != name]
    return text, (*kept, entry)


def revoke(entries: Entries, name_or_id: str) -> tuple[Entries, Entries]:
    """Split the entries into those that stay and those of ``name_or_id``.

    Raises:
        NotFound: There is none.
    """
    gone = tuple(each for each in entries if name_or_id in (each.id, each.name))
    if not gone:
        raise no_key(entries, name_or_id, "key")
    return tuple(each for each in entries if each not in gone), gone


def no_key(entries: Entries, name: str, what: str) -> NotFound:
    """Make the error for a name or ID without a key."""
    similar = closest(name, {each.name for each in entries})
    hint = (
        f"did you mean '{similar}'?" if similar and similar != name else "see: modelport key list"
    )
    return NotFound(f"'{name}' has no {what}; {hint}")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Callable[[Entries], None]]:
    """Lock the file against other writers; yield a function that replaces its content.

    Readers see the old or the new content. A symbolic link stays one.

    Raises:
        UsageError: The folder cannot be written.
    """
    path = Path(os.path.realpath(path))
    try:
        with file_lock.locked(path):
            yield lambda entries: _replace(path, serialize(entries))
    except OSError as error:
        raise UsageError(f"--file '{path}' cannot be written: {error.strerror}") from error


def _replace(path: Path, content: bytes) -> None:
    if len(content) > MAX_FILE_BYTES:
        raise UsageError(f"--file '{path}' would be larger than {MAX_FILE_BYTES} bytes")
    descriptor, written = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            if path.exists():
                _keep_owner(file.fileno(), path)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(written)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _keep_owner(descriptor: int, path: Path) -> None:
    """Give the new file the owner and group of the old one, so that the server can read it."""
    old, new = path.stat(), os.fstat(descriptor)
    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode) & (stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP))
