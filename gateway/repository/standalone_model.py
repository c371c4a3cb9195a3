"""A model outside of a repository: an artifact's file, a SavedModel's folder, or a model's folder.

A single artifact is served as version 1 of a model named after its file. An artifact in a version's
folder, as in ``repository/iris/2/model.onnx``, is that version of that model.
"""

from __future__ import annotations

import re
from pathlib import Path

from modelport.gateway.backends.registry import Platform, platforms
from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import (
    MODEL_NAME,
    VERSION_NAME,
    ModelEntry,
    VersionEntry,
    fingerprint,
    scan_model,
)

SAVED_MODEL = "saved_model.pb"
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")
_MAX_NAME = 128
#: Checkpoints hold weights; they have to be exported first.
_CHECKPOINTS = frozenset({".keras", ".pth", ".safetensors", ".h5", ".ckpt", ".bin"})


def is_model(path: Path) -> bool:
    """Whether ``path`` is a file, a SavedModel or a model's folder, not a model repository."""
    if not path.is_dir():
        return path.is_file()
    return (path / SAVED_MODEL).is_file() or _is_model_folder(path)


def _is_model_folder(path: Path) -> bool:
    """Whether ``path`` has a configuration, or versions that contain more than versions."""
    if (path / configuration.FILENAME).is_file():
        return True
    return any(
        VERSION_NAME.match(version.name)
        and version.is_dir()
        and any(not VERSION_NAME.match(each.name) for each in version.iterdir())
        and not (version / configuration.FILENAME).is_file()
        for version in path.iterdir()
    )


def check(path: Path) -> Platform | None:
    """Check by its name whether the model in ``path`` can be served.

    Returns:
        The artifact's platform; None for a model's folder.

    Raises:
        InvalidArgument: it cannot be served; the message has the remedy.
        OSError: it cannot be read.
    """
    path = path.resolve(strict=True)
    if not path.is_dir() or (path / SAVED_MODEL).is_file():
        return _platform(path)
    if not MODEL_NAME.match(path.name):
        raise InvalidArgument(f"'{path.name}' is not a valid model name; rename the folder")
    return None


def scan(path: Path) -> ModelEntry:
    """Scan the model in ``path``; raises as ``check``."""
    path = path.resolve(strict=True)
    platform = check(path)
    if platform is None:
        return scan_model(path.parent, path)
    version, model = path.parent, path.parent.parent
    if VERSION_NAME.match(version.name) and MODEL_NAME.match(model.name):
        entry = scan_model(model.parent, model)
        number = int(version.name)
        if number in entry.versions and path.name == platform.default_filename:
            return entry._replace(versions={number: entry.versions[number]})
    return _standalone(path, platform)


def _platform(path: Path) -> Platform:
    if path.is_dir():
        return next(each for each in platforms() if each.format == "savedmodel")
    suffix = path.suffix.lower()
    for platform in platforms():
        if suffix == Path(platform.default_filename).suffix:
            return platform
    if suffix in _CHECKPOINTS:
        raise InvalidArgument(
            f"'{path.name}' is a checkpoint; export it first: modelport export {path.name} "
            "--format onnx"
        )
    names = (each.default_filename for each in platforms() if each.format != "savedmodel")
    known = ", ".join(sorted({Path(name).suffix for name in names}))
    raise InvalidArgument(
        f"'{path.name}' is not a model that can be served; give a file with the suffix {known}, "
        "or the folder of a SavedModel"
    )


def _standalone(path: Path, platform: Platform) -> ModelEntry:
    stem = path.name if path.is_dir() else path.stem
    name = _NOT_IN_A_NAME.sub("_", stem)[:_MAX_NAME].lstrip(".-") or "model"
    config = configuration.parse("")
    config.platform, config.backend = platform.platform, platform.backend
    config.default_model_filename = path.name
    # Of ONNX with large weights, and of OpenVINO.
    beside = (path.with_name(f"{path.name}.data"), path.with_suffix(".bin"))
    found = [path, *(weights for weights in beside if weights.is_file())]
    if path.is_dir():
        try:
            found = [path / name for name in untrusted_files.below(path)]
        except IntegrityError as error:
            raise IntegrityError(f"'{path}' cannot be served: {error}") from error
    version = VersionEntry(1, path.parent, fingerprint(path.parent, found))
    return ModelEntry(name, path.parent, configuration.to_text(config), {1: version})
