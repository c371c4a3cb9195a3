"""Writing a package atomically: one rename puts it in place."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from modelport.exporters.packaging import SERVERS, PackageTarget
from modelport.exporters.packaging.selection import SelectedModel, select
from modelport.exporters.runtime.file_errors import writing_to
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.gateway.errors import AlreadyExists, Unsupported, UsageError
from modelport.gateway.repository import untrusted_files


@dataclass(frozen=True, slots=True)
class Package:
    """The contents of a package: models with versions, and the reasons for leaving out others."""

    path: Path
    models: Mapping[str, tuple[int, ...]]
    left_out: Mapping[str, str]


def package(path: Path, server: str, output: Path, base_path: str | None = None) -> Package:
    """Package the models at ``path`` for ``server`` at ``output``.

    Args:
        path: a version, a model, or a repository; of a repository the models that do not fit are
            left out. Versions are those that each model's ``version_policy`` serves.
        server: a key of ``SERVERS``.
        output: what to write; nothing may be there.
        base_path: where the server will find ``output``, if not there.

    Raises:
        UsageError: an argument is wrong; the message names the remedy.
        AlreadyExists: something is at ``output``.
        IntegrityError: a version does not match its manifest, or has none.
        Unsupported: the server cannot load the model's format; the message says which it can.
    """
    row = SERVERS[server]
    packager = importlib.import_module(row.module)
    selected = select(path)
    _check_output(output, row, selected.root)
    models = list(selected.models)
    if row.suffix:
        if selected.whole_repository:
            raise UsageError(f"a {row.suffix} holds one model; name one of '{path}'")
        models = [model.newest() for model in models]
    fitting, left_out = [], {}
    for model in models:
        try:
            _check_format(model, server, row)
            model.verify()
            packager.check(model)
            fitting.append(model)
        except Unsupported as error:
            if not selected.whole_repository:
                raise
            left_out[model.name] = str(error)
    if not fitting:
        raise Unsupported(
            f"no model of '{path}' is in a format that {row.title} loads; export one with "
            f"{_flags(row.formats)}"
        )
    with (
        writing_to(output, "choose another --output"),
        temporary_folder(output.parent) as staging,
    ):
        staged = staging / output.name
        packager.write(fitting, staged, base_path or str(output.absolute()))
        _place(staged, output)
    versions = {model.name: tuple(sorted(model.versions)) for model in fitting}
    return Package(output, versions, left_out)


def _check_output(output: Path, row: PackageTarget, root: Path) -> None:
    if os.path.lexists(output):
        raise AlreadyExists(f"'{output}' exists and is never overwritten; use another --output")
    if not output.name or not output.parent.is_dir():
        raise UsageError(f"--output '{output}': '{output.parent}' is not a folder; create it")
    if output.suffix != row.suffix and row.suffix:
        raise UsageError(f"--output '{output}' must end in {row.suffix}: {row.title} asks for it")
    if output.parent.resolve().is_relative_to(root):
        raise UsageError(f"--output '{output}' is inside the packaged folder; use another place")


def _check_format(model: SelectedModel, server: str, row: PackageTarget) -> None:
    """Raise ``Unsupported`` with the remedy unless ``server`` loads the model's format."""
    if model.format not in row.formats:
        reason = row.reasons.get(model.format)
        raise Unsupported(
            f"'{model.name}' is {model.format or 'of an unknown format'}, which --for {server} "
            f"does not take{f' ({reason})' if reason else ''}; export it with "
            f"{_flags(row.formats)}"
        )


def _flags(formats: tuple[str, ...]) -> str:
    return f"--format {' or '.join(formats)}"


def _place(staged: Path, output: Path) -> None:
    try:
        if staged.is_dir():
            os.rename(staged, output)
        else:
            os.link(staged, output)  # unlike a rename, a link never replaces a file
    except OSError as error:
        if os.path.lexists(output):
            raise AlreadyExists(
                f"'{output}' was created by another process; use another --output"
            ) from error
        raise


def size_of(path: Path) -> int:
    """Size in bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum((path / name).stat().st_size for name in untrusted_files.below(path))
