"""TorchServe's settings of a model: ``config.properties`` and ``model-config.yaml``.

The archive's own ``model-config.yaml`` overrides ``models`` in ``config.properties``, as in
TorchServe's ``ModelManager.createModel``. Settings in neither are TorchServe's defaults and are not
carried over: a repository has its own defaults.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from modelport.exporters.migration.archive import MAX_DOCUMENT_BYTES, TorchServeArchive
from modelport.gateway.errors import IntegrityError, UsageError
from modelport.gateway.repository import untrusted_files

MAX_YAML_BYTES = 64 * 1024  # the parser is slow
MAX_NUMBER = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Serving:
    """The settings of one model version; None: not set.

    Attributes:
        max_batch_delay: milliseconds.
        response_timeout: seconds.
        others: names of further settings.
    """

    batch_size: int | None = None
    max_batch_delay: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    response_timeout: int | None = None
    others: tuple[str, ...] = ()


#: TorchServe's name of each number.
NUMBERS = {
    "batchSize": "batch_size",
    "maxBatchDelay": "max_batch_delay",
    "minWorkers": "min_workers",
    "maxWorkers": "max_workers",
    "responseTimeout": "response_timeout",
}
_NO_SETTINGS = ("marName", "defaultVersion")


@dataclass(frozen=True, slots=True)
class Properties:
    """``config.properties``.

    Attributes:
        models: the value of ``models``: settings by model and version.
        loaded: file names in ``load_models``, with the model's name if it is given; None: all,
            or not set.
        workers: ``default_workers_per_model``.
    """

    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    loaded: Mapping[str, str] | None = None
    workers: int | None = None

    def name_of(self, file: str) -> str:
        """The name under which the archive ``file`` was registered; empty: its own."""
        for name, versions in self.models.items():
            if any(entry.get("marName") == file for entry in versions.values()):
                return name
        return (self.loaded or {}).get(file, "")

    def default_version(self, name: str) -> str:
        """The version for requests without one; empty: not set."""
        versions = self.models.get(name, {})
        return next((v for v, entry in versions.items() if entry.get("defaultVersion")), "")


def read_properties(path: Path) -> Properties:
    """Read the file of ``--config-properties``.

    Raises:
        UsageError: it cannot be read, or a value in it is of another form than TorchServe's.
    """
    try:
        values = dict(_lines(untrusted_files.read_text(path, MAX_DOCUMENT_BYTES)))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--config-properties '{path}' cannot be read: {reason}") from error
    models = _models(values.get("models", "{}"))
    workers = values.get("default_workers_per_model")
    if workers is not None and not workers.isdecimal():
        raise UsageError("--config-properties: 'default_workers_per_model' is not a number")
    listed = [part.strip() for part in values.get("load_models", "").split(",") if part.strip()]
    loaded = None
    if listed and "all" not in map(str.lower, listed):
        pairs = (part.rpartition("=") for part in listed)
        loaded = {file.strip(): name.strip() for name, _, file in pairs}
    return Properties(models, loaded, int(workers) if workers else None)


def serving(archive: TorchServeArchive, name: str, properties: Properties) -> Serving:
    """The settings that this archive was served with.

    Raises:
        UsageError: a number in ``config.properties`` is invalid.
        IntegrityError: a number in ``model-config.yaml`` is invalid, or it is not YAML.
    """
    versions = properties.models.get(name, {})
    declared = _numbers(
        versions.get(archive.manifest.model_version, {}), "--config-properties", UsageError
    )
    where = f"'{archive.manifest.config_file}' in '{archive.name}'"
    own = _numbers(document(archive), where, IntegrityError)
    values = {}
    for setting in fields(Serving):
        value = getattr(own, setting.name)
        values[setting.name] = getattr(declared, setting.name) if value in (None, ()) else value
    values["min_workers"] = values["min_workers"] or properties.workers
    return Serving(**values)


def document(archive: TorchServeArchive) -> Mapping[str, Any]:
    """The content of ``model-config.yaml``; empty without one.

    Raises:
        IntegrityError: it is not YAML.
    """
    return _yaml(archive, f"'{archive.manifest.config_file}' in '{archive.name}'")


def _numbers(entry: Mapping[str, Any], where: str, refuse: type[Exception]) -> Serving:
    found: dict[str, int] = {}
    for key, attribute in NUMBERS.items():
        value = entry.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
            # a few aliases can expand to a text that fills the memory
            shown = reprlib.repr(value)[:60]
            raise refuse(f"{where}: '{key}' must be a number, not {shown}")
        found[attribute] = value
    others = (str(key) for key in entry if key not in NUMBERS and key not in _NO_SETTINGS)
    return Serving(**found, others=tuple(others))


def _yaml(archive: TorchServeArchive, where: str) -> Mapping[str, Any]:
    file = archive.manifest.config_file
    if not file:
        return {}
    try:
        document = yaml.safe_load(archive.read(file, MAX_YAML_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise IntegrityError(f"{where} is not YAML") from error
    if not isinstance(document, dict | None):
        raise IntegrityError(f"{where} is not a mapping")
    return document or {}


def _models(text: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    try:
        models = json.loads(text)
        shaped = all(
            isinstance(entry, dict) for versions in models.values() for entry in versions.values()
        )
    except (ValueError, AttributeError, RecursionError) as error:
        raise UsageError(
            "--config-properties: 'models' is not JSON of models, versions and settings"
        ) from error
    if not shaped:
        raise UsageError("--config-properties: 'models' does not map each version to its settings")
    known: Mapping[str, Mapping[str, Mapping[str, Any]]] = models
    return known


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Parse keys and values of Java's format; escapes other than line ends stay."""
    waiting = ""
    for raw in text.splitlines():
        line = waiting + raw.lstrip()
        waiting = ""
        if not line or line[0] in "#!":
            continue
        if line.endswith("\\") and not line.endswith("\\\\"):
            waiting = line[:-1]
            continue
        cut = next((i for i, character in enumerate(line) if character in "=:"), len(line))
        yield line[:cut].strip(), line[cut + 1 :].strip()
