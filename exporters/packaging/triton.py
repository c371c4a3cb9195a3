"""A model repository for NVIDIA Triton that its own backends load.

The repository has Triton's layout already. The copy holds the versions that are served
and the files that ``config.pbtxt`` names; Triton ignores certificates, manifests and
modelport's ``range.``, ``axis.``, ``axes.`` and ``image.`` parameters. Tensors keep their names:

    onnxruntime, tensorflow   bind tensors by name
    pytorch (TorchScript)     binds inputs by the names of ``forward``'s arguments if those are all
                              of the configuration's; else inputs by their order, and outputs always
                              by theirs, unless every name has the form ``NAME__INDEX``. All three
                              must lead to the order here, and that is checked.

Source: ``GetNamingConvention`` in pytorch_backend's ``src/pt/model_instance_state.cc`` (ordering
without ``NAME__INDEX`` since 22.06). The TensorFlow backend left Triton's images with 25.03.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelport.exporters.packaging.selection import SelectedModel
from modelport.exporters.runtime.output_capture import quiet
from modelport.gateway.errors import IntegrityError, Unsupported
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.artifact_checks import torchscript_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.repository.artifact_checks.torch_archive import Archive
from modelport.gateway.types import Datatype

#: pytorch_backend's ``ModelConfigDataTypeToTorchType``.
TORCH_DATATYPES = frozenset(
    map(
        Datatype,
        ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"),
    )
)


def check(model: SelectedModel) -> None:
    """Raise ``Unsupported`` if Triton would refuse the model, or feed it the wrong tensors."""
    model.companions()
    if model.format == "torchscript":
        _check_datatypes(model)
        _check_order("output", model.name, [spec.name for spec in model.signature.outputs])
        for number in model.versions:
            _check_inputs(model, number)


def write(models: Sequence[SelectedModel], target: Path, base_path: str) -> None:
    """Write the repository to the folder ``target``; ``base_path`` is not used."""
    for model in models:
        folder = target / model.name
        for number, version in model.versions.items():
            shutil.copytree(version.path, folder / str(number), copy_function=shutil.copyfile)
        for file in model.companions():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(model.folder / file, folder / file)
        text = configuration.to_text(model.config)
        (folder / configuration.FILENAME).write_text(text, encoding="utf-8")


def _check_datatypes(model: SelectedModel) -> None:
    for spec in (*model.signature.inputs, *model.signature.outputs):
        if spec.datatype not in TORCH_DATATYPES:
            raise Unsupported(
                f"'{spec.name}' of '{model.name}' is {spec.datatype}, which Triton's PyTorch "
                "backend does not take; export it with --format onnx"
            )


def _check_inputs(model: SelectedModel, version: int) -> None:
    names = [spec.name for spec in model.signature.inputs]
    arguments = _forward_arguments(model.artifact(version))
    if len(arguments) != len(names):
        raise Unsupported(
            f"'{model.name}' declares {len(names)} inputs, version {version}'s forward() takes "
            f"{len(arguments)}; Triton's PyTorch backend needs a tensor for each"
        )
    if not set(names) <= set(arguments):
        _check_order("input", model.name, names)
    elif names != arguments:
        raise Unsupported(
            f"'{model.name}' declares its inputs as {', '.join(names)}, version {version}'s "
            f"forward() takes {', '.join(arguments)}; Triton's PyTorch backend would mix them up"
        )


def _forward_arguments(artifact: Path) -> list[str]:
    import torch

    load: Any = torch.jit.load  # without type information
    torchscript_guard.check_archive(Archive(artifact))
    try:
        with quiet(), no_code(artifact.name):
            module = load(str(artifact), map_location="cpu")
    except RuntimeError as error:
        raise IntegrityError(f"'{artifact.name}' is not a TorchScript archive") from error
    return [argument.name for argument in module.forward.schema.arguments[1:]]


def _check_order(kind: str, model: str, names: Sequence[str]) -> None:
    indices = [_index(name) for name in names]
    if None not in indices and indices != list(range(len(names))):
        raise Unsupported(
            f"Triton's PyTorch backend reads the {kind} names of '{model}' ({', '.join(names)}) as "
            "NAME__INDEX, in an order that is not the model's; rename them"
        )


def _index(name: str) -> int | None:
    """The position that Triton reads from a name, None if it reads none."""
    _, separator, digits = name.partition("__")
    if not separator or digits.strip("0123456789"):
        return None
    return int(digits or 0)
