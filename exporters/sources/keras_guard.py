"""Safety checks of a ``.keras`` or HDF5 file before Keras opens it.

A ``.keras`` file is a zip of ``config.json``, which names a class or function for every layer,
activation and loss, and ``model.weights.h5``. Keras imports and calls what the configuration names,
and its ``safe_mode`` was bypassed more than once (CVE-2025-1550, CVE-2025-8747, CVE-2025-9906). So
only names of modelling code pass here. HDF5 can point into other files.

This module does not import Keras.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py

from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import zip_guard

CONFIG = "config.json"
WEIGHTS = "model.weights.h5"
WEIGHTS_SUFFIX = ".weights.h5"

#: Whole models of Keras 1 and 2; weights files of Keras 3 end in ``.weights.h5``.
LEGACY_SUFFIXES = frozenset({".h5", ".hdf5"})
LEGACY_CONFIG = "model_config"

#: Prefix of classes registered by ``register_keras_serializable(package="modelport")``.
OWN_PACKAGE = "modelport>"
#: Where those are, now and in files that 0.1.0 wrote.
OWN_MODULES = ("modelport.exporters.", "exporters.")

#: Modules of a model's parts, as ``keras.<name>`` or ``keras.src.<name>``. Without ``utils``,
#: ``config``, ``saving`` and ``callbacks``, whose functions fetch files, unpack archives and lift
#: safe mode.
MODELLING = frozenset(
    {
        "activations",
        "constraints",
        "dtype_policies",
        "initializers",
        "layers",
        "losses",
        "metrics",
        "models",
        "ops",
        "optimizers",
        "quantizers",
        "random",
        "regularizers",
    }
)

#: Modules whose functions may be named; others load and unpack, with arguments from the file.
FUNCTIONS = frozenset(
    {"activations", "constraints", "initializers", "losses", "metrics", "ops", "regularizers"}
)

#: Layers whose computation is code in the file, or lies in another file.
CODE_LAYERS: Mapping[str, str] = {
    "Lambda": "holds Python code that runs when the model is loaded",
    "__lambda__": "holds Python code that runs when the model is loaded",
    "TorchModuleWrapper": "holds a pickle, which runs when the model is loaded",
    "JaxLayer": "holds a function of another framework",
    "FlaxLayer": "holds a function of another framework",
    "TFSMLayer": "loads another SavedModel by its path",
}

HDF5 = b"\x89HDF\r\n\x1a\n"

MAX_CONFIG_BYTES = 64 << 20
#: DEFLATE and HDF5's filters shrink weights little; a bomb shrinks a thousandfold.
MAX_EXPANSION = 100
EXPANSION_FLOOR_BYTES = 16 << 20


def read_config(path: Path, registered: Collection[str] = ()) -> dict[str, Any]:
    """Read the configuration in the ``.keras`` file at ``path`` without running any of it.

    Args:
        registered: names of classes that the user has vouched for and Keras finds by these names.

    Raises:
        UsageError: the file is of an older kind.
        IntegrityError: the file is damaged, a bomb, or names code other than modelling code.
    """
    with _translated(path), untrusted_files.open_file(path) as file:
        if file.read(len(HDF5)) == HDF5:
            raise hdf5_refusal(path)
    with _translated(path), zipfile.ZipFile(path) as archive:
        _check_members(path, archive)
        config = json.loads(archive.read(CONFIG))
        names = archive.namelist()
    _check_config(path, config, registered)
    if WEIGHTS in names:
        with open_weights(path) as weights:
            check_weights(path, weights)
    found: dict[str, Any] = config
    return found


def check_legacy(path: Path, registered: Collection[str] = ()) -> None:
    """Check a whole model of Keras 1 or 2 in HDF5, whose configuration is an attribute.

    Args:
        registered: as in ``read_config``.

    Raises:
        UsageError: the file has only weights.
        IntegrityError: as in ``read_config``.
    """
    with open_weights(path) as file, _translated(path):
        check_weights(path, file)
        content = file.attrs.get(LEGACY_CONFIG)
        if content is None:
            raise UsageError(
                f"'{path.name}' holds only weights; build their model where its code is, and call "
                f"model.load_weights('{path.name}') and model.save('model.keras')"
            )
        _check_config(path, json.loads(content), registered)


def _check_config(path: Path, config: Any, registered: Collection[str]) -> None:
    if not isinstance(config, dict) or not isinstance(config.get("class_name"), str):
        raise IntegrityError(f"'{path.name}': its configuration describes no model; save it again")
    config["compile_config"] = None  # losses and metrics are not loaded; they may be custom
    for found in _objects(config):
        if not _is_registered(found, registered):
            _check_object(path, found)


def _is_registered(found: dict[str, Any], registered: Collection[str]) -> bool:
    """Whether Keras takes ``found`` from its registry; functions and code it looks up elsewhere."""
    name, key = str(found.get("class_name")), found.get("registered_name")
    return isinstance(key, str) and key in registered and name != "function" and name[:2] != "__"


def hdf5_refusal(path: Path) -> UsageError:
    """The error about an HDF5 file with a whole model."""
    return UsageError(
        f"'{path.name}': legacy HDF5 holds whole models, which Keras loads without safe mode, so "
        "that a Lambda layer in one runs code; use a .keras file: load the old one where you trust "
        "it and call model.save('model.keras')"
    )


#: Keras' words for a class that it neither has nor was told of.
_UNKNOWN_CLASS = re.compile(
    r"(?:Could not locate (?:class|function)|Unknown \w+:) '?(?P<name>[\w.>]+)'?"
)


def damaged(path: Path, error: BaseException) -> ModelportError:
    """The error about a file that Keras cannot load, in one line."""
    if unknown := _UNKNOWN_CLASS.search(str(error)):
        return Unsupported(
            f"'{path.name}' has the class '{unknown['name']}', which Keras lacks, and a file's "
            "code is never run; give the module that registers it, --custom-objects MODULE, or "
            "save a SavedModel with model.export(folder), and export that"
        )
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return IntegrityError(
        f"'{path.name}' is damaged, or Keras cannot load what it has saved ({reason}); copy it "
        "again, or save a SavedModel with model.export(folder)"
    )


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    zip_guard.check(path)
    members = archive.infolist()
    names = [member.filename for member in members]
    expanded = sum(member.file_size for member in members)
    stored = min(sum(member.compress_size for member in members), path.stat().st_size)
    if CONFIG in names and archive.getinfo(CONFIG).file_size > MAX_CONFIG_BYTES:
        raise IntegrityError(f"'{path.name}': its {CONFIG} is larger than {MAX_CONFIG_BYTES} bytes")
    for size, room in [(expanded, stored), *((m.file_size, m.compress_size) for m in members)]:
        _check_expansion(path, size, room)


def _objects(config: Any) -> Iterator[dict[str, Any]]:
    """Every dict in ``config``, at any depth."""
    left = [config]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _check_object(path: Path, found: dict[str, Any]) -> None:
    name, module = found.get("class_name"), found.get("module")
    last = re.split(r"[.>]", name)[-1] if isinstance(name, str) else ""
    if last in CODE_LAYERS:
        raise IntegrityError(
            f"'{path.name}': layer '{_layer_name(found)}' is a {last}, which {CODE_LAYERS[last]}: "
            "refused and not run; rebuild it from Keras' own layers or keras.ops and save again"
        )
    if isinstance(found.get("vocabulary"), str):
        raise IntegrityError(
            f"'{path.name}' takes a vocabulary from the file '{found['vocabulary']}' on this "
            "machine: refused; save it with the vocabulary inside"
        )
    registered, wanted = found.get("registered_name"), name
    if name == "function":
        wanted = found.get("config")
    elif isinstance(registered, str) and ">" in registered:  # custom classes are package>name
        own = module is None or str(module).startswith(OWN_MODULES)
        if own and registered.startswith(OWN_PACKAGE):
            return
        module, wanted = None, registered
    elif module is None:  # __keras_tensor__ and the like; Keras looks up any other name in itself
        return
    # Keras looks up ``module.name``, so a name with a dot leads to another module; it writes none.
    dotted = module is not None and isinstance(wanted, str) and "." in wanted
    if dotted or not _is_modelling(module, name == "function"):
        place = "" if module is None else f"{module}."
        raise IntegrityError(
            f"'{path.name}' wants to run '{place}{wanted}' while loading, which is not Keras' "
            "modelling code: refused and not run; if it is your own layer, give the module that "
            "registers it, --custom-objects MODULE, or export the model as a SavedModel "
            "(model.export('folder')) and give that folder"
        )


def _is_modelling(module: object, function: bool) -> bool:
    """Whether ``module`` holds only parts of models."""
    if not isinstance(module, str):
        return False
    if module in ("builtins", "keras"):  # built-in functions, and Keras' most common classes
        return function == (module == "builtins")
    package, _, rest = module.partition(".")
    part = rest.removeprefix("src.").partition(".")[0]
    return package == "keras" and part in (FUNCTIONS if function else MODELLING)


def _layer_name(found: dict[str, Any]) -> object:
    config = found.get("config")
    return config.get("name") if isinstance(config, dict) else found.get("class_name")


@contextlib.contextmanager
def open_weights(path: Path) -> Iterator[h5py.File]:
    """Open the weights of a ``.keras`` file, or an HDF5 file.

    Raises:
        IntegrityError: the file has no weights, or is damaged.
    """
    with _translated(path):
        untrusted_files.open_file(path).close()  # HDF5 would wait for the writer of a pipe
        if path.suffix.lower() == ".keras":
            with zipfile.ZipFile(path) as archive:
                _check_members(path, archive)
                content: Any = io.BytesIO(archive.read(WEIGHTS))
        else:
            content = path
        file = h5py.File(content, "r")
    with file:
        yield file


def check_weights(path: Path, file: h5py.File) -> dict[str, h5py.Dataset]:
    """Every dataset of ``file`` by its path.

    Raises:
        IntegrityError: a name or values lie outside the file, or the file is a bomb.
    """
    found: dict[str, h5py.Dataset] = {}
    seen: set[Any] = set()
    left: list[tuple[str, h5py.Group]] = [("", file)]
    with _translated(path):
        while left:
            prefix, group = left.pop()
            address = h5py.h5o.get_info(group.id).addr
            if address in seen:  # a group may hold itself
                continue
            seen.add(address)
            for name in group:
                where = f"{prefix}{name}"
                if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                    raise IntegrityError(f"'{path.name}': '{where}' leads elsewhere: refused")
                entry = group[name]
                if isinstance(entry, h5py.Dataset):
                    _check_dataset(path, where, entry)
                    found[where] = entry
                elif isinstance(entry, h5py.Group):
                    left.append((f"{where}/", entry))
        _check_expansion(path, sum(entry.nbytes for entry in found.values()), path.stat().st_size)
    return found


def _check_dataset(path: Path, where: str, dataset: h5py.Dataset) -> None:
    if dataset.external or dataset.is_virtual:
        raise IntegrityError(f"'{path.name}': '{where}' has its values in another file: refused")
    _check_expansion(path, dataset.nbytes, dataset.id.get_storage_size())


def _check_expansion(path: Path, size: int, stored: int) -> None:
    if size > EXPANSION_FLOOR_BYTES and size > MAX_EXPANSION * stored:
        raise IntegrityError(
            f"'{path.name}' would inflate from {stored} to {size} bytes, as a "
            "decompression bomb does: refused"
        )


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate the many exceptions of zip, zlib, JSON and HDF5 about damage."""
    try:
        yield
    except ModelportError:
        raise
    except Exception as error:
        raise damaged(path, error) from error
