"""A TorchServe model archive: one version of a TorchScript model with a handler for its tensors.

    MAR-INF/MANIFEST.json       read by TorchServe: name, version, handler, model file
    modelport_handler.py        the handler named there
    modelport_torchserve/       the handler's code; its envelope module defines requests and answers
    signature.json              the handler checks rows against it
    model.pt  certificate.json  as published
    modelport/                  config.pbtxt as published, with the files it names, for
                                ``modelport migrate``

The archive is a zip as ``torch-model-archiver`` 0.12.0 writes them, without compression and with
fixed times: the same version gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from modelport import __version__
from modelport.exporters.packaging.selection import SelectedModel
from modelport.gateway.errors import Unsupported
from modelport.gateway.repository.config import FILENAME
from modelport.gateway.types import Datatype, TensorSpec

HANDLER = "modelport_handler.py"
CODE = "modelport_torchserve"
MODULES = ("torchserve_envelope.py", "torchserve_handler.py")
SIGNATURE = "signature.json"
CONFIGURATION = "modelport"

#: The earliest time that a zip can store.
EPOCH = (1980, 1, 1, 0, 0, 0)


def check(model: SelectedModel) -> None:
    """Raise ``Unsupported`` if PyTorch lacks the type of a tensor, or an input is optional."""
    model.companions()
    for spec in (*model.signature.inputs, *model.signature.outputs):
        if spec.datatype is Datatype.BYTES:
            raise Unsupported(
                f"'{spec.name}' of '{model.name}' is BYTES, which PyTorch does not support"
            )
        if spec.optional:
            raise Unsupported(
                f"input '{spec.name}' of '{model.name}' is optional; TorchScript takes every input"
            )


def write(models: Sequence[SelectedModel], target: Path, base_path: str) -> None:
    """Write the only version of the only model to ``target``; ``base_path`` is not used."""
    (model,) = models
    (number,) = model.versions
    artifact = model.artifact(number)
    manifest = {
        "runtime": "python",
        "model": {
            "modelName": model.name,
            "modelVersion": str(number),
            "serializedFile": artifact.name,
            "handler": HANDLER,
        },
        "archiverVersion": f"modelport {__version__}",
    }
    code = resources.files(__package__ or "modelport.exporters.packaging")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        _add(archive, "MAR-INF/MANIFEST.json", _json(manifest))
        _add(archive, HANDLER, f"from {CODE}.torchserve_handler import handle  # noqa: F401\n")
        _add(archive, f"{CODE}/__init__.py", "")
        for name in MODULES:
            _add(archive, f"{CODE}/{name}", code.joinpath(name).read_text(encoding="utf-8"))
        _add(archive, SIGNATURE, _json(_signature(model, number)))
        for file in (artifact, *model.certificates(number)):
            _add_file(archive, file, file.name)
        for name in (FILENAME, *map(str, model.companions())):
            _add_file(archive, model.folder / name, f"{CONFIGURATION}/{name}")


def _signature(model: SelectedModel, version: int) -> dict[str, Any]:
    signature = model.signature
    return {
        "name": model.name,
        "version": str(version),
        "max_batch_size": signature.max_batch_size,
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
        "axes": {name: [axis.minimum, axis.maximum] for name, axis in signature.axes.items()},
        "padding": {name: axis.padding for name, axis in signature.axes.items()},
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "datatype": spec.datatype.value,
        "dims": spec.dims,
        "reshape": spec.reshape,
        "minimum": spec.minimum,
        "maximum": spec.maximum,
    }


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2) + "\n"


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, EPOCH)
    entry.external_attr = 0o100644 << 16
    return entry


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    archive.writestr(_entry(name), text)


def _add_file(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    entry = _entry(name)
    entry.file_size = path.stat().st_size  # decides whether the entry needs 64-bit sizes
    with path.open("rb") as source, archive.open(entry, "w") as target:
        shutil.copyfileobj(source, target, 1 << 20)
