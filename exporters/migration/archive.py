"""TorchServe archives: a zip (``.mar``), a ``.tar.gz``, or a folder (``no-archive``).

    MAR-INF/MANIFEST.json    {"model": {"modelName", "modelVersion", "serializedFile", "handler",
                             "modelFile", "configFile", "requirementsFile"}, "archiverVersion", ...}
    ...                      the files it names and any others, side by side

The layout is ``torch-model-archiver`` 0.12's (``model_packaging_utils.py`` of pytorch/serve); in a
``.tar.gz`` all of it lies in one folder.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.exporters.migration.unpacking import MAX_DEPTH, MAX_MEMBERS, unpack
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError
from modelport.gateway.repository import untrusted_files

MANIFEST = "MAR-INF/MANIFEST.json"
WORKFLOW = "WAR-INF"
ZIPS, TARS = (".mar", ".zip"), (".tar.gz", ".tgz")

MAX_DOCUMENT_BYTES = 1 << 20  # manifest, settings, labels are read whole


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of ``MANIFEST.json``; a file that it does not name is empty."""

    model_name: str
    model_version: str = "1.0"
    serialized_file: str = ""
    handler: str = ""
    model_file: str = ""
    config_file: str = ""
    requirements_file: str = ""
    archiver: str = ""


@dataclass(frozen=True, slots=True)
class TorchServeArchive:
    """The files of an archive in ``root``; ``temporary`` files may be moved.

    Attributes:
        name: name of the file or folder it was read from.
        files: paths relative to ``root`` with sizes in bytes, without the manifest.
    """

    name: str
    root: Path
    temporary: bool
    manifest: Manifest
    files: dict[str, int] = field(default_factory=dict)

    def read(self, file: str, most: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Read a file of at most ``most`` bytes; raise ``IntegrityError`` if it is larger."""
        if self.files[file] > most:
            raise IntegrityError(f"'{file}' in '{self.name}' is larger than {most} bytes")
        return untrusted_files.read(self.root / file, most)

    def json(self, file: str) -> Any:
        """Parse a file as JSON; raise ``IntegrityError`` if it is not JSON."""
        try:
            return json.loads(self.read(file))
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"'{file}' in '{self.name}' is not JSON") from error

    def deliver(self, file: str, target: Path) -> None:
        """Put a file at ``target``: moved if it is temporary, otherwise copied."""
        if self.temporary:
            os.replace(self.root / file, target)
        else:
            shutil.copyfile(self.root / file, target)


def is_archive(path: Path) -> bool:
    """Whether ``path`` looks like one archive, rather than a store of them."""
    if path.is_dir():
        return (path / MANIFEST).exists() or (path / WORKFLOW).exists()
    return path.name.lower().endswith((*ZIPS, *TARS, ".war"))


def read(path: Path, space: Path) -> TorchServeArchive:
    """Read the archive at ``path``, unpacked into the empty folder ``space``.

    A folder stays where it is.

    Raises:
        UsageError: ``path`` is not an archive.
        IntegrityError: the archive is damaged or malicious; the message names the member.
        Unsupported: the archive is a workflow.
    """
    name = path.name
    if not is_archive(path) or not path.exists():
        raise UsageError(
            f"'{name}' is not an archive; give a .mar, a .tar.gz, a folder with {MANIFEST}, or a "
            "model store of these"
        )
    if path.is_dir():
        root, temporary = path, False
    else:
        root, temporary = space, True
        unpack(path, space)
        root = _top(space)
    if (root / WORKFLOW).exists():
        raise Unsupported(
            f"'{name}' is a workflow; migrate its models, and combine them in an ensemble"
        )
    files = dict(_walk(root, name))
    if MANIFEST not in files:
        raise IntegrityError(f"'{name}' has no {MANIFEST}; make it with torch-model-archiver")
    archive = TorchServeArchive(name, root, temporary, Manifest(""), files)
    manifest = _manifest(archive)
    del files[MANIFEST]
    return TorchServeArchive(name, root, temporary, manifest, files)


def _manifest(archive: TorchServeArchive) -> Manifest:
    document = archive.json(MANIFEST)
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise IntegrityError(f"{MANIFEST} of '{archive.name}' has no 'model'")

    def text(key: str, holder: dict[str, Any] = model) -> str:
        value = holder.get(key)
        if value is not None and not isinstance(value, str | int | float):
            raise IntegrityError(f"'{key}' in {MANIFEST} of '{archive.name}' is not a string")
        return "" if value is None else str(value).strip()

    def file(key: str) -> str:
        named = text(key)
        if named and named not in archive.files:
            raise IntegrityError(
                f"{MANIFEST} of '{archive.name}' names '{named}' as its {key}, but it is missing"
            )
        return named

    return Manifest(
        model_name=text("modelName"),
        model_version=text("modelVersion") or "1.0",
        serialized_file=file("serializedFile"),
        handler=text("handler"),
        model_file=file("modelFile"),
        config_file=file("configFile"),
        requirements_file=file("requirementsFile"),
        archiver=text("archiverVersion", document),
    )


def _top(space: Path) -> Path:
    """The folder with the manifest; in a ``.tar.gz`` it is one level down."""
    inside = list(space.iterdir())
    if len(inside) == 1 and inside[0].is_dir() and not (space / "MAR-INF").exists():
        return inside[0]
    return space


def _walk(root: Path, archive: str) -> Iterator[tuple[str, int]]:
    """Yield and check every file below ``root``."""
    count = 0
    for folder, folders, names in os.walk(root):
        for name in folders + names:
            count += 1
            path = Path(folder) / name
            relative = path.relative_to(root)
            information = path.lstat()
            if not (stat.S_ISREG(information.st_mode) or stat.S_ISDIR(information.st_mode)):
                raise IntegrityError(f"'{archive}': '{relative}' is not a plain file")
            if count > MAX_MEMBERS or len(relative.parts) > MAX_DEPTH:
                raise IntegrityError(f"'{archive}' has too many files or folders for a model")
            if name in names:
                yield relative.as_posix(), information.st_size
