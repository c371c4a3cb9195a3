"""A TorchServe archive, unpacked: a zip (``.mar``), a ``.tar.gz``, or a folder (``no-archive``).

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
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.errors import IntegrityError, Unsupported

MANIFEST = "MAR-INF/MANIFEST.json"
WORKFLOW = "WAR-INF"
ZIPS, TARS = (".mar", ".zip"), (".tar.gz", ".tgz")

MAX_DOCUMENT_BYTES = 1 << 20  # manifest, settings, labels: read whole


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``MANIFEST.json`` says; a file that it does not name is empty."""

    model_name: str
    model_version: str = "1.0"
    serialized_file: str = ""
    handler: str = ""
    model_file: str = ""
    config_file: str = ""
    requirements_file: str = ""
    archiver: str = ""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive's files in ``root``; ``temporary``: they are ours and may be moved.

    Attributes:
        name: of the file or folder it was read from.
        files: paths relative to ``root`` with sizes in bytes, the manifest excepted.
    """

    name: str
    root: Path
    temporary: bool
    manifest: Manifest
    files: dict[str, int] = field(default_factory=dict)

    def read(self, file: str, most: int = MAX_DOCUMENT_BYTES) -> bytes:
        """The content of a file of at most ``most`` bytes, else ``IntegrityError``."""
        if self.files[file] > most:
            raise IntegrityError(f"'{file}' in '{self.name}' is larger than {most} bytes")
        return (self.root / file).read_bytes()

    def json(self, file: str) -> Any:
        """The content of a file, as JSON; ``IntegrityError`` where it is none."""
        try:
            return json.loads(self.read(file))
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"'{file}' in '{self.name}' is not JSON") from error

    def deliver(self, file: str, target: Path) -> None:
        """Put a file at ``target``: moved where it is ours, else copied."""
        if self.temporary:
            os.replace(self.root / file, target)
        else:
            shutil.copyfile(self.root / file, target)


def is_archive(path: Path) -> bool:
    """Whether ``path`` looks like one archive, rather than a store of them."""
    if path.is_dir():
        return (path / MANIFEST).exists() or (path / WORKFLOW).exists()
    return path.name.lower().endswith((*ZIPS, *TARS, ".war"))


def read(path: Path, space: Path) -> Archive:
    """The archive at ``path``, unpacked into the empty folder ``space``.

    A folder stays where it is.

    Raises:
        UsageError: there is nothing there that could be an archive.
        IntegrityError: it is damaged, or made to harm: the message names the member.
        Unsupported: it is a workflow.
    """
    name = path.name
    if not is_archive(path) or not path.exists():
        raise UsageError(
            f"'{name}' is no archive; give a .mar, a .tar.gz, a folder with {MANIFEST}, or a "
            "model store with such in it"
        )
    if path.is_dir():
        root, temporary = path, False
    else:
        root, temporary = space, True
        unpack(path, space)
        root = _top(space)
    if (root / WORKFLOW).exists():
        raise Unsupported(
            f"'{name}' is a workflow; migrate its models and join them as an ensemble"
        )
    files = dict(_walk(root, name))
    if MANIFEST not in files:
        raise IntegrityError(f"'{name}' has no {MANIFEST}; make it with torch-model-archiver")
    archive = Archive(name, root, temporary, Manifest(""), files)
    manifest = _manifest(archive)
    del files[MANIFEST]
    return Archive(name, root, temporary, manifest, files)


def _manifest(archive: Archive) -> Manifest:
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
                f"{MANIFEST} of '{archive.name}' names '{named}' as its {key}, which is missing"
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
    """Where the manifest lies: in a ``.tar.gz`` one folder further down."""
    inside = list(space.iterdir())
    if len(inside) == 1 and inside[0].is_dir() and not (space / "MAR-INF").exists():
        return inside[0]
    return space


def _walk(root: Path, archive: str) -> Iterator[tuple[str, int]]:
    """Every file below ``root``; of a folder that was given, this is where it is checked."""
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
                raise IntegrityError(f"'{archive}' has more files or folders than a model would")
            if name in names:
                yield relative.as_posix(), information.st_size
