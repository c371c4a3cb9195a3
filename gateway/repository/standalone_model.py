"""A model outside of a repository: an artifact's file, a SavedModel's folder, or a model's folder.

A Python file has a model for each function or class with ``@modelport.model``.

A single artifact is served as version 1 of a model that has its name in the certificate beside it,
as ``modelport export -o`` writes one. Without one it is named after its file, or after its folder
if the file has the name that it would have in a repository, as in ``iris/model.onnx``. An artifact
in a version's folder, as in ``repository/iris/2/model.onnx``, is that version of that model.
"""

from __future__ import annotations

from pathlib import Path

from modelport.gateway.backend_registry import PYTHON, Platform, platforms
from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import python_file, untrusted_files
from modelport.gateway.repository.scan import (
    VERSION_NAME,
    ModelEntry,
    VersionEntry,
    fingerprint,
    is_model_name,
    scan_model,
)

SAVED_MODEL = "saved_model.pb"
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
    return None


def names_of(path: Path) -> list[str]:
    """The names of the models in ``path``, which is as the user wrote it; raises as ``check``."""
    whole = path.resolve(strict=True)
    platform = check(path)
    if platform is None:
        return [whole.name]
    declared = python_file.declared(path) if platform is PYTHON else []
    version, model = whole.parent, whole.parent.parent
    usual = whole.name == platform.default_filename
    if usual and VERSION_NAME.match(version.name) and is_model_name(model.name):
        return [model.name]
    return declared or [_name_of(path, whole, usual)]


def _name_of(path: Path, whole: Path, usual: bool) -> str:
    name = _certified_name(whole)
    if not name and usual and is_model_name(path.parent.name):  # not in the current folder
        return path.parent.name
    name = name or (whole.name if whole.is_dir() else whole.stem)
    if not is_model_name(name):
        raise InvalidArgument(f"'{name}' is not a model's name; name it: NAME={path}")
    return name


def _certified_name(artifact: Path) -> str:
    from modelport.gateway.repository import signing

    return signing.certified_name(artifact)


def scan(path: Path, name: str) -> ModelEntry:
    """Scan the model in ``path`` under ``name``; raises as ``check``."""
    path = path.resolve(strict=True)
    platform = check(path)
    if platform is None:
        return _named(scan_model(path.parent, path), name)
    version, model = path.parent, path.parent.parent
    if VERSION_NAME.match(version.name) and path.name == platform.default_filename:
        entry = scan_model(model.parent, model)
        number = int(version.name)
        if number in entry.versions:
            return _named(entry._replace(versions={number: entry.versions[number]}), name)
    return _standalone(path, platform, name)


def _named(entry: ModelEntry, name: str) -> ModelEntry:
    """``entry`` under another name, whatever its configuration says."""
    if entry.name == name:
        return entry
    try:
        config = configuration.parse(entry.config_text or "")
    except InvalidArgument:  # reported when it loads
        return entry._replace(name=name, certified=entry.name)
    config.ClearField("name")
    text = configuration.to_text(config) if entry.config_text is not None else None
    return entry._replace(name=name, config_text=text, certified=entry.name)


def _platform(path: Path) -> Platform:
    if path.is_dir():
        return next(each for each in platforms() if each.format == "savedmodel")
    suffix = path.suffix.lower()
    for platform in (*platforms(), PYTHON):
        if suffix == Path(platform.default_filename).suffix:
            return platform
    if suffix in _CHECKPOINTS:
        raise InvalidArgument(
            f"'{path.name}' is a checkpoint; export it first: modelport export {path.name} "
            "--format onnx"
        )
    served = (*platforms(), PYTHON)
    names = (each.default_filename for each in served if each.format != "savedmodel")
    known = ", ".join(sorted({Path(name).suffix for name in names}))
    raise InvalidArgument(
        f"'{path.name}' is not a model that can be served; give a file with the suffix {known}, "
        "or the folder of a SavedModel"
    )


def _standalone(path: Path, platform: Platform, name: str) -> ModelEntry:
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
    return ModelEntry(
        name, path.parent, configuration.to_text(config), {1: version},
        certified=_certified_name(path),
    )  # fmt: skip
