"""Selection of models and versions for ``modelport package``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from modelport.gateway.errors import IntegrityError, InvalidArgument, UsageError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import manifest, signing
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import (
    VERSION_NAME,
    ModelEntry,
    VersionEntry,
    is_model_name,
    scan,
    scan_model,
)
from modelport.gateway.types import ModelSignature


@dataclass(frozen=True, slots=True)
class SelectedModel:
    """A model and its versions to package.

    Attributes:
        config: as published, with the format's platform, backend and file name filled in.
        format: a name of ``exporters.formats.registry``; empty if the configuration names none.
    """

    name: str
    folder: Path
    config: ModelConfig
    signature: ModelSignature
    format: str
    versions: Mapping[int, VersionEntry]

    def newest(self) -> SelectedModel:
        number = max(self.versions)
        return replace(self, versions={number: self.versions[number]})

    def artifact(self, version: int) -> Path:
        return self.versions[version].path / str(self.config.default_model_filename)

    def certificates(self, version: int) -> list[Path]:
        """The certificate, its signature and its samples, as far as they exist."""
        folder = self.versions[version].path
        names = (signing.CERTIFICATE, signing.SIGNATURE, signing.SAMPLES)
        files = [folder / name for name in names]
        return [file for file in files if file.is_file()]

    def companions(self) -> list[PurePosixPath]:
        """Files of the model's folder that its configuration names: labels and warm-up inputs.

        Raises:
            IntegrityError: a file is missing, or lies outside the folder.
        """
        names = configuration.companions(self.config)
        for file in names:
            if not (self.folder / file).resolve().is_relative_to(self.folder.resolve()):
                raise IntegrityError(f"'{file}' of '{self.name}' is outside its folder")
            if not (self.folder / file).is_file():
                raise IntegrityError(
                    f"{configuration.FILENAME} of '{self.name}' names '{file}', which is missing"
                )
        return names

    def verify(self) -> None:
        """Raise ``IntegrityError`` unless every version matches its manifest."""
        for number, version in self.versions.items():
            where = f"version {number} of '{self.name}'"
            if version.problem:
                raise IntegrityError(f"{where}: {version.problem}")
            try:
                proven = manifest.verify(version.path)
            except IntegrityError as error:
                raise IntegrityError(f"{where}: {error}") from error
            if not proven:
                raise IntegrityError(
                    f"{where} has no {manifest.FILENAME} to check it against; publish it with "
                    "modelport export"
                )
            if not self.artifact(number).exists():
                raise IntegrityError(f"{where} has no '{self.config.default_model_filename}'")


@dataclass(frozen=True, slots=True)
class Selection:
    """The selected models; ``root`` is the folder in which nothing may be written."""

    models: tuple[SelectedModel, ...]
    root: Path
    whole_repository: bool = False


def select(path: Path) -> Selection:
    """Select the models below ``path``: a version's folder, a model's, or a repository.

    Raises:
        UsageError: ``path`` is none of them, or a configuration is wrong.
        IntegrityError: a model's folder leads out of its repository.
    """
    if not path.is_dir():
        raise UsageError(f"'{path}' is not a folder; name a version, a model or a repository")
    path = path.resolve()
    if VERSION_NAME.match(path.name) and (path.parent / configuration.FILENAME).is_file():
        return Selection((_model(path.parent, only=path.name),), path.parent)
    if (path / configuration.FILENAME).is_file():
        return Selection((_model(path),), path)
    entries = [e for e in scan([path]).values() if e.config_text is not None or e.problem]
    if not entries:
        raise UsageError(
            f"'{path.name}' has no {configuration.FILENAME} and holds no model that has one; name "
            "a version, a model or a repository"
        )
    return Selection(tuple(map(_read, entries)), path, whole_repository=True)


def _model(folder: Path, only: str | None = None) -> SelectedModel:
    if not is_model_name(folder.name):
        raise UsageError(f"'{folder.name}' is not a model name; rename the folder")
    return _read(scan_model(folder.parent, folder), only)


def _read(entry: ModelEntry, only: str | None = None) -> SelectedModel:
    if entry.problem:
        raise IntegrityError(f"model '{entry.name}': {entry.problem}")
    try:
        config = configuration.parse(entry.config_text or "")
        completed = configuration.complete(config, entry.name)
        signature = configuration.signature(completed)
    except InvalidArgument as error:
        raise UsageError(f"model '{entry.name}': {error}") from error
    if only is not None:
        completed.version_policy.latest.num_versions = 1
        versions = {int(only): entry.versions[int(only)]} if int(only) in entry.versions else {}
    else:
        versions = _served(completed, entry.versions)
    if not versions:
        raise UsageError(f"model '{entry.name}' has no version that its version_policy serves")
    config.name = entry.name
    config.platform, config.backend = completed.platform, completed.backend
    config.default_model_filename = completed.default_model_filename
    config.version_policy.CopyFrom(completed.version_policy)
    if config.version_policy.HasField("specific"):  # servers fail on versions that are missing
        config.version_policy.specific.versions[:] = sorted(versions)
    platform = configuration.platform_of(config)
    format_name = platform.format if platform else ""
    return SelectedModel(entry.name, entry.path, config, signature, format_name, versions)


def _served(config: ModelConfig, versions: Mapping[int, VersionEntry]) -> dict[int, VersionEntry]:
    policy = config.version_policy
    if policy.HasField("all"):
        wanted = set(versions)
    elif policy.HasField("specific"):
        wanted = set(policy.specific.versions)
    else:
        wanted = set(sorted(versions)[-policy.latest.num_versions :])
    return {number: versions[number] for number in sorted(wanted & set(versions))}
