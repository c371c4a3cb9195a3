"""One version packaged for a server that the gateway starts.

The version was verified, and may be a copy without the model's folder around it. Files beside
``config.pbtxt`` (labels, warm-up requests) are left out, as the gateway applies the labels.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from modelport.exporters.packaging import SERVERS, PackageTarget
from modelport.exporters.packaging.package import check_format
from modelport.exporters.packaging.selection import SelectedModel
from modelport.exporters.publishing.temporary_folder import temporary_folder
from modelport.gateway.errors import Unsupported, install_extra
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import VersionEntry

#: Triton's backend for models that are code, a ``model.py`` that Triton executes in its own
#: process. Nothing else runs such a model.
PYTHON, PYTHON_FILENAME = "python", "model.py"


def write(
    name: str, version: int, path: Path, config: ModelConfig, server: str, target: Path
) -> None:
    """Write the version in ``path`` to ``target``, as ``server``, a key of ``SERVERS``, loads it.

    Raises:
        Unsupported: the server cannot load the format; the message says which it can.
        IntegrityError: the artifact does not match its configuration.
    """
    row = SERVERS[server]
    packager = importlib.import_module(row.module)
    with temporary_folder(target.parent) as folder:
        model = _model(name, version, path, config, folder)
        _write(model, server, row, packager, target)


def _write(
    model: SelectedModel, server: str, row: PackageTarget, packager: Any, target: Path
) -> None:
    if not (server == "triton" and model.config.backend == PYTHON):
        check_format(model, server, row)
    try:
        packager.check(model)
    except ImportError as error:
        raise Unsupported(
            f"'{model.name}' cannot be checked for {row.title}: {error.name} is not installed; "
            f"{install_extra('torch')}"
        ) from error
    packager.write([model], target, str(target))


def _model(name: str, version: int, path: Path, given: ModelConfig, folder: Path) -> SelectedModel:
    """The model as if ``folder`` held this version alone."""
    config = type(given)()
    config.CopyFrom(given)
    config.name = name
    config.version_policy.Clear()
    config.version_policy.specific.versions.append(version)
    for output in config.output:
        output.ClearField("label_filename")
    warmup = [
        each
        for each in config.model_warmup
        if not any(source.input_data_file for source in each.inputs.values())
    ]
    del config.model_warmup[:]
    config.model_warmup.extend(warmup)
    if config.backend == PYTHON and not config.default_model_filename:
        config.default_model_filename = PYTHON_FILENAME
    text = configuration.to_text(config)
    (folder / configuration.FILENAME).write_text(text, encoding="utf-8")
    platform = configuration.platform_of(config)
    return SelectedModel(
        name=name,
        folder=folder,
        config=config,
        signature=configuration.signature(config),
        format=platform.format if platform else "",
        versions={version: VersionEntry(version, path, ())},
    )
