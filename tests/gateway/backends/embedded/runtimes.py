"""Small untrained models in every format, and what eager PyTorch answers."""

from __future__ import annotations

import asyncio
import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.openvino import from_onnx
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.requests.random_inputs import draw
from modelport.exporters.sources import pytorch
from modelport.gateway.backend_registry import find_loader
from modelport.gateway.backends.base import Artifact, Backend
from modelport.gateway.repository import config, manifest
from modelport.gateway.types import (
    NO_DEADLINE,
    Array,
    Datatype,
    Deadline,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    finished,
)
from tests.exporters.conftest import FRAUD_KWARGS, VIT_KWARGS

MAX_BATCH_SIZE = 8
BATCH_SIZES = (1, 3, MAX_BATCH_SIZE)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fraud": (FraudTransformer, {**FRAUD_KWARGS, "num_layers": 1}),
    "vit": (VisionTransformer, {**VIT_KWARGS, "depth": 1}),
}
#: Formats that take seconds to write, not minutes.
QUICK = ("onnx", "torchscript", "pt2", "savedmodel", "tflite", "openvino")


@dataclass(frozen=True)
class RuntimeCase:
    inputs: dict[str, Array]
    outputs: dict[str, Array]


def source(name: str) -> Source:
    """The model, every layer distinct."""
    factory, kwargs = MODELS[name]
    torch.manual_seed(0)
    module = factory(**kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    spec = module.modelport_spec
    return pytorch.source(module, spec, spec.signature(module, MAX_BATCH_SIZE), model_kwargs=kwargs)


def publish(repository: Path, name: str, model: Source, format_name: str) -> Path:
    """A version of ``model``, as the exporters publish it; its folder."""
    row = FORMATS.builtin[format_name]
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    target = folder / row.platform.default_filename
    draft = repository / name.replace("openvino", "onnx") / "1" / "model.onnx"
    if format_name == "openvino" and draft.exists():  # which an export would write again
        from_onnx(draft, target, half=False)
    else:
        row.export(model, target, ExportTarget())
    wanted = config.build(name, row.platform, model.signature)
    (folder.parent / config.FILENAME).write_text(config.to_text(wanted))
    manifest.write(folder)
    return folder


def published(shared_folder: Path, name: str, format_name: str) -> Path:
    """The folder of a model of ``MODELS``, written once for all processes that run tests."""
    root, model = shared_folder / "published", f"{name}_{format_name}"
    root.mkdir(exist_ok=True)
    if format_name == "openvino":
        published(shared_folder, name, "onnx")
    with (root / f"{model}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / model).exists():
            publish(root, model, source(name), format_name)
    return root / model


def cases(model: Source) -> list[RuntimeCase]:
    rng = np.random.default_rng(0)
    sizes = {axis.name: axis.minimum + 3 for axis in model.signature.axes.values()}
    found = []
    for batch in BATCH_SIZES:
        inputs = draw(model.signature, batch, sizes, rng)
        found.append(RuntimeCase(inputs, model.reference(inputs)))
    return found


def artifact(version: Path, text: str = "", threads: int = 1) -> Artifact:
    """``text``: a configuration, in place of the one beside the version's folder."""
    file = version.parent / config.FILENAME
    parsed = config.parse(text or file.read_text())
    return Artifact("m", 1, version, config.complete(parsed, parsed.name or "m"), threads)


def load(version: Path, text: str = "", threads: int = 1, native: bool = False) -> Backend:
    wanted = artifact(version, text, threads)._replace(native=native)
    return find_loader(wanted.config.backend)(wanted)


def tensors(inputs: dict[str, Any], signature: ModelSignature) -> list[Tensor]:
    datatypes = {spec.name: spec.datatype for spec in signature.inputs}
    return [Tensor(name, datatypes[name], array) for name, array in inputs.items()]


def run(
    backend: Backend,
    *inputs: Tensor,
    outputs: Sequence[str] = (),
    deadline: Deadline = NO_DEADLINE,
) -> InferResponse:
    async def main() -> InferResponse:
        request = InferRequest("m", list(inputs), tuple(outputs))
        return await finished(backend(request, deadline))

    return asyncio.run(main())


def fp32(data: Any, name: str = "x") -> Tensor:
    return Tensor(name, Datatype.FP32, np.asarray(data, np.float32))


def error_of(backend: Backend, model: Source, case: RuntimeCase) -> float:
    """The largest difference between what ``backend`` answers and what eager PyTorch does."""
    response = run(backend, *tensors(case.inputs, model.signature))
    assert [tensor.name for tensor in response.outputs] == list(case.outputs)
    worst = 0.0
    for tensor in response.outputs:
        expected = case.outputs[tensor.name]
        assert (tensor.data.shape, tensor.data.dtype) == (expected.shape, expected.dtype)
        worst = max(worst, float(np.max(np.abs(tensor.data - expected))))
    return worst
