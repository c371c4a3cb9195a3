"""Scan a model repository, without loading or trusting its contents.

    <repository>/<model>/config.pbtxt  [labels.txt]
    <repository>/<model>/<version>/<default file>  [manifest.json  certificate.json]

A scan never raises for a bad model: anything that cannot be served carries the reason, so that it
does not affect other models. Names that begin with a dot are hidden, and never models.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import NamedTuple

from modelport.gateway.backend_registry import PIPELINE
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest, untrusted_files
from modelport.gateway.repository.storage.location import is_segment

#: Positive integers in canonical form; ``01``, ``v2`` and ``.tmp`` are not versions.
VERSION_NAME = re.compile(r"[1-9][0-9]{0,18}\Z")
#: Folders that may be meant as versions.
LIKE_A_VERSION = re.compile(r"(?![1-9][0-9]{0,18}\Z)[vV]?[0-9][0-9._]*\Z")
#: A folder that file systems make.
_SYSTEM_FOLDER = "lost+found"
#: Files that nobody takes for a model; others get a row of the index.
TEXT_SUFFIXES = (".md", ".txt", ".rst", ".json", ".toml", ".yaml", ".yml")
MAX_VERSION = 2**63 - 1  # Triton's versions are int64
MAX_LABEL_BYTES = 16 * 1024 * 1024
#: Files that run code when they are read; a version with one is not served.
REFUSED_SUFFIXES = (".pkl", ".pickle", ".h5", ".hdf5", ".joblib")

#: Changes if a file is added, removed, replaced or written: (name, size, mtime_ns, inode).
Fingerprint = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class VersionEntry:
    """A version's folder. ``fetch`` downloads the files to ``path`` if they are remote; blocking.

    ``unreadable``: ``problem`` is a failure to read the folder, which the next scan may not have.
    ``pipeline`` is the text of a ``pipeline.toml``, which names other models.
    """

    number: int
    path: Path
    fingerprint: Fingerprint
    problem: str = ""
    fetch: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    unreadable: bool = False
    pipeline: str = field(default="", repr=False)


class ModelEntry(NamedTuple):
    """A model's folder. ``config_text`` is None without a ``config.pbtxt``.

    A ``remote`` model runs on another server; it has no folder, and ``path`` is the current one.
    ``ignored`` are folders that may be meant as versions. What is not ``is_model`` is never loaded;
    ``problem`` says why. A model registered under another name has its name in the repository as
    ``source``, or its folder outside of the repositories. ``certified`` is the name in its
    certificates if the user has named it otherwise.

    With ``--model-namespacing``, ``namespace`` is the repository, and ``name`` begins with it if
    another one has the model's name, too. ``beside`` are the names of such models of the
    repository, each with the one that it is known by.
    """

    name: str
    path: Path
    config_text: str | None = None
    versions: Mapping[int, VersionEntry] = MappingProxyType({})
    problem: str = ""
    remote: bool = False
    ignored: tuple[str, ...] = ()
    is_model: bool = True
    source: str = ""
    namespace: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    certified: str = ""

    @property
    def repository_name(self) -> str:
        """The model's name in the repository, in its configuration and its certificates."""
        if self.certified:
            return self.certified
        if self.namespace and not self.source:
            return self.name.removeprefix(_in_namespace(self.namespace, ""))
        return self.source.rpartition("/")[2] or self.name

    def registered_as(self, name: str) -> ModelEntry:
        """The model under another name."""
        return self._replace(name=name, source=self.name, ignored=())

    @property
    def content(self) -> str:
        """A hash that changes with ``config.pbtxt`` and with the files of versions."""
        versions = {} if self.remote else self.versions  # those of a server come and go
        files = sorted((number, each.fingerprint) for number, each in versions.items())
        return hashlib.sha256(repr((self.config_text, files)).encode()).hexdigest()

    def companion(self, name: str) -> Path:
        """A file below the model's folder, by its path in it.

        Raises:
            OSError, ValueError: there is no such file, or it is outside of the repository.
        """
        path = PurePosixPath(name)
        file = self.path / path
        inside = not self.remote and not path.is_absolute() and ".." not in path.parts
        if not inside or not file.is_file() or _leaves(self.path.parent, file):
            raise FileNotFoundError(f"'{name}' is not a file of the model's folder")
        return file

    def labels(self, filename: str) -> tuple[str, ...]:
        """The lines of a label file directly in the model's folder.

        Raises:
            OSError: there is no such file, or it is too large.
        """
        file = self.companion(filename)
        if file.parent != self.path:
            raise FileNotFoundError(f"'{filename}' is not directly in the model's folder")
        return tuple(untrusted_files.read_text(file, MAX_LABEL_BYTES).splitlines())


def scan(repositories: Iterable[Path]) -> dict[str, ModelEntry]:
    """Every model of every repository, by name.

    Raises:
        OSError: a repository itself cannot be listed.
    """
    found = together(scan_folder(repository) for repository in repositories)
    return {name: entry for name, entry in found.items() if entry.is_model}


def scan_folder(repository: Path, config_name: str = "") -> dict[str, ModelEntry]:
    """Every model of one repository, and what is beside them; raises as ``scan``.

    Args:
        config_name: a model that has ``configs/NAME.pbtxt`` is configured by that file.
    """
    root = repository.resolve(strict=True)
    found = {}
    for path in sorted(root.iterdir()):
        if not path.name.startswith("."):
            entry = no_model(path.name, _is_folder(path)) or scan_model(
                root, path, config_name=config_name
            )
            found[entry.name] = entry
    return found


def is_model_name(name: str) -> bool:
    """Whether ``name`` is a component of a path that is safe in URLs and logs, and not hidden."""
    return is_segment(name) and not name.startswith(".")


def no_model(name: str, is_folder: bool) -> ModelEntry | None:
    """The entry of what is in a repository, not hidden, and no model; None for a model.

    A name that cannot be shown is escaped.
    """
    if not is_folder:
        problem = "it is not a folder; a model is a folder of versions, as in NAME/1/model.onnx"
    elif name == _SYSTEM_FOLDER:
        problem = "it is a folder of the file system"
    elif not is_model_name(name):
        problem = "its name is too long, or has a backslash or unprintable characters"
    else:
        return None
    shown = name if name.isprintable() else repr(name)[1:-1]
    return ModelEntry(shown, Path(), problem=problem, is_model=False)


def together(repositories: Iterable[Mapping[str, ModelEntry]]) -> dict[str, ModelEntry]:
    """The models of all ``repositories``; a model in more than one has a problem."""
    found: dict[str, ModelEntry] = {}
    for repository in repositories:
        for name, entry in repository.items():
            known = found.get(name)
            if known is not None and known.is_model:
                if not entry.is_model:
                    continue
                problem = "model appears in two or more repositories"
                entry = ModelEntry(name, entry.path, problem=problem)
            found[name] = entry
    return found


def _in_namespace(namespace: str, name: str) -> str:
    return f"{namespace}::{name}"


def namespaced(
    repositories: Mapping[str, Mapping[str, ModelEntry]],
) -> tuple[dict[str, ModelEntry], dict[str, list[str]]]:
    """The models of all ``repositories``, which are their namespaces; and the ambiguous names.

    A model whose name more than one repository has is known by its namespace and its name.
    """
    counts = Counter(
        name for found in repositories.values() for name, each in found.items() if each.is_model
    )
    models: dict[str, ModelEntry] = {}
    ambiguous: dict[str, list[str]] = {}
    for namespace, found in repositories.items():
        own = {
            name: _in_namespace(namespace, name)
            for name, entry in sorted(found.items())
            if entry.is_model and counts[name] > 1
        }
        for name, entry in found.items():
            known = own.get(name, name)
            if entry.is_model:
                beside = tuple(own.items())
                models[known] = entry._replace(name=known, namespace=namespace, beside=beside)
            else:
                models.setdefault(name, entry)
        for name, known in own.items():
            ambiguous.setdefault(name, []).append(known)
    return models, ambiguous


def settled(
    found: ModelEntry, before: ModelEntry | None, accepted: ModelEntry | None
) -> ModelEntry | None:
    """``found`` without changes that may be incomplete: those not seen in the scan ``before``.

    Such changes, and parts that this scan could not read, keep the ``accepted`` state. A version
    with a manifest needs no second scan: it is complete, or does not match. None: no part of the
    model is accepted yet.
    """
    if accepted is not None and accepted.problem and not accepted.versions:
        accepted = None  # nothing of it was ever read
    if found.remote:
        return found
    if found.problem:
        return accepted._replace(problem=found.problem) if accepted is not None else found
    still = before is not None and not before.problem and before.config_text == found.config_text
    if accepted is None and not still:
        return None
    versions = {}
    for number, version in found.versions.items():
        kept = accepted.versions.get(number) if accepted is not None else None
        seen = before.versions.get(number) if before is not None else None
        written_last = any(name == manifest.FILENAME for name, *_ in version.fingerprint)
        if (seen == version or written_last) and not (version.unreadable and kept is not None):
            versions[number] = version
        elif kept is not None:
            versions[number] = kept
    text = found.config_text if still or accepted is None else accepted.config_text
    return found._replace(versions=versions, config_text=text)


def _folders(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The folders in ``path`` with matching names, without dangling links."""
    return sorted(p for p in path.iterdir() if pattern.match(p.name) and _is_folder(p))


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:  # reported when it is read; it must not hide the other folders
        return error.errno != errno.ELOOP


def scan_model(
    root: Path,
    path: Path,
    version_name: re.Pattern[str] = VERSION_NAME,
    config_name: str = "",
) -> ModelEntry:
    """Scan the model in the folder ``path`` of the repository ``root``, as ``scan`` does."""
    name = path.name
    try:
        if _leaves(root, path):
            return ModelEntry(
                name, path, problem=f"'{name}' is a symbolic link out of the repository"
            )
        versions = {
            int(folder.name): _scan_version(root, folder)
            for folder in _folders(path, version_name)
            if int(folder.name) <= MAX_VERSION
        }
        ignored = tuple(
            folder.name
            for folder in _folders(path, LIKE_A_VERSION)
            if not version_name.match(folder.name)
        )
        own = path / configuration.FILENAME
        custom = path / "configs" / f"{config_name}.pbtxt"
        text = _read_config(root, custom) if config_name else None
        text = _read_config(root, own) if text is None else text
        return ModelEntry(name, path, text, versions, ignored=ignored)
    except (OSError, ValueError, IntegrityError) as error:
        return ModelEntry(name, path, problem=_reason(error))


def _read_config(root: Path, config: Path) -> str | None:
    try:
        config.lstat()
    except FileNotFoundError:
        return None
    if _leaves(root, config):
        raise ValueError(f"'{config.name}' is a symbolic link out of the repository")
    if not stat.S_ISREG(config.stat().st_mode):
        raise ValueError(f"'{config.name}' is not a file")
    return untrusted_files.read(config, untrusted_files.MAX_CONFIG_BYTES).decode()


def _scan_version(root: Path, path: Path) -> VersionEntry:
    number, problem, unreadable = int(path.name), "", False
    files: list[tuple[str, int, int, int]] = []
    try:
        if _leaves(root, path):
            problem = f"version {number} is a symbolic link out of the repository"
            return VersionEntry(number, path, (), problem)
        for folder, folders, names in os.walk(path, onerror=_raise):
            for name in names + folders:
                file = Path(folder) / name
                relative = file.relative_to(path).as_posix()
                if file.is_symlink() and _leaves(root, file):
                    problem = problem or f"'{relative}' is a symbolic link out of the repository"
                elif name in names and not stat.S_ISREG(_stat(file).st_mode):
                    problem = problem or f"'{relative}' is not a file"
                else:
                    problem = problem or refusal(relative)
            files += fingerprint(path, (Path(folder) / name for name in names))
    except OSError as error:
        problem, unreadable = _reason(error), True
    except RecursionError:  # os.walk is recursive before Python 3.12
        problem = "the version's folders are nested too deeply"
    text = ""
    if not problem and any(name == PIPELINE.default_filename for name, *_ in files):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # loading the version reports it
            text = untrusted_files.read_text(
                path / PIPELINE.default_filename, untrusted_files.MAX_CONFIG_BYTES
            )
    found = tuple(sorted(files))
    return VersionEntry(number, path, found, problem, unreadable=unreadable, pipeline=text)


def refusal(name: str) -> str:
    """The reason why a version with the file ``name`` is not served; empty: none."""
    if not name.lower().endswith(REFUSED_SUFFIXES):
        return ""
    return f"'{name}' may run code when it is read; export the model to a supported format instead"


def fingerprint(folder: Path, files: Iterable[Path]) -> Fingerprint:
    """The fingerprint of ``files`` in ``folder``; a dangling link has one too."""
    seen = ((file.relative_to(folder).as_posix(), _stat(file)) for file in files)
    return tuple(sorted((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in seen))


def _stat(file: Path) -> os.stat_result:
    """The status of the file, or of a dangling link itself."""
    try:
        return file.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and file.is_symlink():
            return file.lstat()
        raise


def _raise(error: OSError) -> None:
    raise error


def _leaves(root: Path, path: Path) -> bool:
    """Whether ``path`` resolves to a place outside ``root``, or cannot be resolved."""
    try:
        return not path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):  # a link to itself
        return True


def is_unreadable(error: BaseException | None) -> bool:
    """Whether a file could not be read in its present state: permissions, I/O, or incomplete."""
    if isinstance(error, OSError):
        return error.errno is not None  # a library that fails to load has none
    return isinstance(error, UnicodeDecodeError)


def _reason(error: Exception) -> str:
    """The reason without the path, because an index is public."""
    if isinstance(error, OSError):
        return error.strerror or "unreadable"
    if isinstance(error, UnicodeDecodeError):
        return f"'{configuration.FILENAME}' is not UTF-8"
    return str(error)
