"""Migration of one archive to one published version, whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from modelport.exporters.migration import archive as archives
from modelport.exporters.migration import (
    artifact,
    config_mapping,
    handler_model,
    handlers,
    torchserve_settings,
)
from modelport.exporters.migration.archive import TorchServeArchive
from modelport.exporters.migration.artifact import Flags
from modelport.exporters.migration.report import MigrationReport, MigrationState
from modelport.exporters.packaging.torchserve import CONFIGURATION, HANDLER
from modelport.exporters.publishing import contract, publish
from modelport.gateway.errors import IntegrityError, InvalidArgument, Unsupported, UsageError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import signing
from modelport.gateway.repository.config import ModelConfig, Platform
from modelport.gateway.repository.config_file import ConfigFile, config_file
from modelport.gateway.repository.scan import MAX_VERSION, VERSION_NAME
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.types import ModelSignature

UNPACKED = "unpacked"


@dataclass(frozen=True, slots=True)
class MigrationRequest:
    """The options of a migration.

    Attributes:
        name: of the model; empty: the old server's.
        version: a number or ``auto``; empty: the archive's, if it is a number.
        allow_python: a comparison runs handlers.
    """

    repository: Path | Location
    properties: torchserve_settings.Properties = field(
        default_factory=torchserve_settings.Properties
    )
    flags: Flags = field(default_factory=Flags)
    name: str = ""
    version: str = ""
    allow_python: bool = False


@dataclass(slots=True)
class MigrationRun:
    """The versions published by this run of the command.

    Attributes:
        versions: by model, the old server's name of each version.
        made: models that were not in the repository before.
    """

    versions: dict[str, dict[int, str]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)


def migrate(
    path: Path, wanted: MigrationRequest, report: MigrationReport, run: MigrationRun
) -> None:
    """Publish the model in the archive at ``path``, and fill in ``report``.

    Raises:
        UsageError, AlreadyExists, Unsupported, IntegrityError: nothing was published.
    """
    with publish.staging(wanted.repository) as staged:
        space = staged.parent.parent / UNPACKED
        space.mkdir()
        archive = archives.read(path, space)
        manifest = archive.manifest
        name = wanted.name or wanted.properties.name_of(archive.name) or manifest.model_name
        report.model, report.old_version = name, manifest.model_version
        report.code = handlers.listing(archive)
        contract.check_name(name)
        if wanted.version:
            number = contract.parse_version(wanted.version)
        else:
            number = _version(manifest.model_version, run.versions.get(name, {}), report)
        whole = _StagedArchive.of(archive, staged, wanted, report, name)
        config = whole.configuration()
        published = whole.publish(config, number, run)
    report.version = published
    run.versions.setdefault(name, {})[published] = manifest.model_version


def _version(text: str, done: Mapping[int, str], report: MigrationReport) -> int | None:
    """The version number: ``1.0`` and ``1`` are 1; ``2.1`` is None, the next free number."""
    whole, *rest = text.split(".")
    number = int(whole) if VERSION_NAME.match(whole) else 0
    if not 0 < number <= MAX_VERSION or any(part.strip("0") for part in rest):
        reason = "versions must be whole numbers; the next free one was used"
    elif number in done:
        reason = f"another archive has version {number}; the next free one was used"
    else:
        return number
    report.add(f"version {text}", MigrationState.NOTED, reason)
    return None


@dataclass(frozen=True, slots=True)
class _StagedArchive:
    """The model of one archive, written to the folder ``staged`` of a version."""

    archive: TorchServeArchive
    staged: Path
    wanted: MigrationRequest
    report: MigrationReport
    name: str
    platform: Platform
    serving: torchserve_settings.Serving
    #: The reason why the archive's own handler is not carried over; None: it has none.
    obstacle: str | None

    @classmethod
    def of(
        cls,
        archive: TorchServeArchive,
        staged: Path,
        wanted: MigrationRequest,
        report: MigrationReport,
        name: str,
    ) -> _StagedArchive:
        manifest = archive.manifest
        if not manifest.serialized_file:
            raise Unsupported(
                f"'{archive.name}' holds no serialized model: its handler builds or downloads one; "
                "export that with 'modelport export'"
            )
        file = archive.root / manifest.serialized_file
        platform = artifact.platform_of(file, eager=bool(manifest.model_file))
        report.format = platform.format
        serving = torchserve_settings.serving(archive, name, wanted.properties)
        own = not handlers.default_handler(archive) and not _is_packaged(archive)
        obstacle = handler_model.obstacle(archive) if own else None
        return cls(archive, staged, wanted, report, name, platform, serving, obstacle)

    def configuration(self) -> ModelConfig:
        """The model's configuration; the artifact and its companions are in place."""
        return self._packaged() if _is_packaged(self.archive) else self._configured()

    def publish(self, config: ModelConfig, number: int | None, run: MigrationRun) -> int:
        """Publish the model, and its handler as a model around it; return the version."""
        if self.obstacle != "":
            config_mapping.add_serving(config, self.serving, self.report)
            return self._publish(self.staged, config, number, run)
        config.name = f"{self.name}{handler_model.GRAPH}"
        contract.check_name(config.name)
        around = handler_model.configuration_of(self.name, self._largest)
        publish.free_version(self.wanted.repository, around, number)  # if it can be published
        by_name = handler_model.answers_by_name(self.staged / self.platform.default_filename)
        version = self._publish(self.staged, config, number, run)
        with publish.staging(self.wanted.repository) as staged:
            graph = handler_model.HandlerGraph(config, version, by_name, self._largest)
            handler_model.stage(self.archive, staged, self.name, graph)
            config_mapping.add_serving(around, self.serving, self.report)
            return self._publish(staged, around, version, run)

    @property
    def _largest(self) -> int:
        """The largest batch, unless the file says otherwise."""
        largest = self.wanted.flags.max_batch_size
        return max(1, self.serving.batch_size or 1) if largest is None else largest

    def _publish(
        self, staged: Path, config: ModelConfig, number: int | None, run: MigrationRun
    ) -> int:
        repository, name = self.wanted.repository, config.name
        there = config_file(repository, name)
        known = there.read()
        published = publish.publish(staged, repository, config, number)
        if known is not None:
            _after_another(there, known, config, name in run.made, self.report)
        else:
            run.made.add(name)
        return published.version

    def _packaged(self) -> ModelConfig:
        """The configuration that ``modelport package`` put into the archive, with its files."""
        archive, name, report = self.archive, self.name, self.report
        self._refuse_flags(archive.name)
        try:
            text = archive.read(f"{CONFIGURATION}/{configuration.FILENAME}").decode()
            config = configuration.parse(text)
            config.name = name
            completed = configuration.complete(config, name)
            configuration.signature(completed)
        except (InvalidArgument, UnicodeDecodeError) as error:
            raise IntegrityError(f"'{archive.name}': {error}") from error
        if (
            configuration.platform_of(completed) != self.platform
            or completed.default_model_filename != self.platform.default_filename
        ):
            raise IntegrityError(f"'{archive.name}': its configuration is for another artifact")
        for file in configuration.companions(config):
            packed = f"{CONFIGURATION}/{file}"
            if packed not in archive.files or VERSION_NAME.match(file.parts[0]):
                raise IntegrityError(f"'{archive.name}' names '{file}', which is missing")
            target = self.staged.parent / file
            target.parent.mkdir(parents=True, exist_ok=True)
            archive.deliver(packed, target)
        self._deliver_artifact()
        report.add(configuration.FILENAME, MigrationState.CARRIED, "as before 'modelport package'")
        report.add(
            HANDLER, MigrationState.CARRIED, "not needed; the gateway accepts the same requests"
        )
        self._deliver_certificate()
        return config

    def _configured(self) -> ModelConfig:
        """A configuration from the artifact, the handler, the settings and the flags."""
        archive, report = self.archive, self.report
        labels = config_mapping.labels(archive, report)
        signature = self._signature(len(labels))
        config = configuration.build(self.name, self.platform, signature)
        if labels and config_mapping.add_labels(config, len(labels), report):
            text = "".join(f"{label}\n" for label in labels)
            (self.staged.parent / config_mapping.LABELS).write_text(text, encoding="utf-8")
        self._deliver_artifact()
        config_mapping.add_handler(config, signature, archive, report, self.obstacle or "")
        return config

    def _signature(self, classes: int) -> ModelSignature:
        file = self.archive.root / self.archive.manifest.serialized_file
        flags, handler = self.wanted.flags, handlers.default_handler(self.archive)
        signature = artifact.sealed(file, self.platform)
        if signature is not None:
            self._refuse_flags(file.name)
            source = "as modelport wrote it into the file"
        else:
            signature = artifact.signature(file, self.platform, flags, self._largest, handler)
            if handler == "image_classifier" and classes:
                signature = artifact.with_classes(signature, classes)
            stored = "the handler" if self.platform.format == "torchscript" else "the file"
            source = f"as {'the flags declare' if flags.inputs else f'{stored} declares'} it"
        self.report.add(
            "signature",
            MigrationState.CARRIED,
            f"{source}; max_batch_size {signature.max_batch_size}",
        )
        return signature

    def _refuse_flags(self, what: str) -> None:
        if self.wanted.flags:
            raise UsageError(
                f"'{what}' declares its own tensors; omit --input, "
                "--output-tensor and --max-batch-size"
            )

    def _deliver_artifact(self) -> None:
        """Deliver the artifact under the repository's name, and its weight files under their
        own."""
        archive, serialized = self.archive, PurePosixPath(self.archive.manifest.serialized_file)
        for name in artifact.external_files(archive.root / serialized, self.platform):
            file = (serialized.parent / name).as_posix()
            if file not in archive.files or name in (
                *signing.UNLISTED,
                self.platform.default_filename,
            ):
                raise IntegrityError(
                    f"'{archive.name}' lacks '{name}', or uses a reserved name for it"
                )
            (self.staged / name).parent.mkdir(parents=True, exist_ok=True)
            archive.deliver(file, self.staged / name)
            del archive.files[file]
        archive.deliver(str(serialized), self.staged / self.platform.default_filename)

    def _deliver_certificate(self) -> None:
        archive = self.archive
        names = (signing.CERTIFICATE, signing.SIGNATURE, signing.SAMPLES)
        files = [name for name in names if name in archive.files]
        if files and self.name != archive.manifest.model_name:
            detail = "it names the model by its old name"
            self.report.add(signing.CERTIFICATE, MigrationState.NOTED, detail)
            return
        for file in files:
            archive.deliver(file, self.staged / file)
        if signing.CERTIFICATE in files:
            signing.verify_files(self.staged, signing.read_certificate(self.staged, self.name))
            self.report.add(
                signing.CERTIFICATE, MigrationState.CARRIED, "every digest in it matches"
            )


def _is_packaged(archive: TorchServeArchive) -> bool:
    """Whether ``modelport package`` made the archive."""
    return f"{CONFIGURATION}/{configuration.FILENAME}" in archive.files


def _after_another(
    file: ConfigFile, text: str, config: ModelConfig, ours: bool, report: MigrationReport
) -> None:
    """Keep the configuration of an existing model; a model made by this run serves all versions.

    Args:
        text: The existing configuration.
    """
    there = configuration.parse(text)
    wanted = configuration.parse(configuration.to_text(config))
    if ours:
        there.version_policy.all.SetInParent()
        file.replace(configuration.to_text(there), text)
        wanted.version_policy.CopyFrom(there.version_policy)
    if there != wanted:
        report.add(
            configuration.FILENAME,
            MigrationState.NOTED,
            "the model's existing one is kept, with its batching, instances and labels",
        )
