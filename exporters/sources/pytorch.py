"""An ``nn.Module`` with a checkpoint's weights, as a ``Source``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from modelport.exporters import model_spec as spec
from modelport.exporters.loaded_model import Framework, Origin, Source, WeightPrecision
from modelport.exporters.model_spec import BFLOAT16_STEP, ModelSpec
from modelport.exporters.requests import attention_masks
from modelport.exporters.requests.random_inputs import name_axes, sampler, sizes_of
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import (
    SourceRequest,
    checkpoint,
    module_preparation,
    randomness,
    signature_inference,
)
from modelport.exporters.sources.torch_diagnostics import TorchDiagnostics
from modelport.exporters.sources.torch_eager import (
    Adapted,
    TorchEager,
    call,
    inference_mode,
    keywords_of,
    named_tensors,
    narrow_weights,
    widen_weights,
)
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Array, Datatype, ModelSignature

HALVES = (torch.bfloat16, torch.float16)


def load(request: SourceRequest) -> Source:
    """Load the module that ``request.model`` names, with the weights of a checkpoint file.

    Raises:
        UsageError: model and checkpoint do not fit, or nothing declares a signature.
        IntegrityError: the checkpoint is damaged or wants to run code.
        Unsupported: the model is quantised, or draws random numbers.
    """
    if request.model is None:
        raise UsageError(
            f"checkpoint '{request.checkpoint}' holds only weights; add --model "
            "(a registered name or package.module:factory)"
        )
    with quiet():
        spec.find_factory(request.model)  # an unknown name costs no reading of weights
    read = checkpoint.read(request.checkpoint)
    known = {**read.model_kwargs, **request.model_kwargs}
    with quiet():
        where = f"checkpoint '{read.filename}'"
        spec.check_sizes(where, request.model, read.shapes, read.model_kwargs, request.model_kwargs)
        module, declared, kwargs = spec.build(request.model, read.shapes, known)
        module = module_preparation.uncompiled(module)
        module_preparation.check_not_quantised(module)
        checkpoint.load_into(module, read)
        module_preparation.without_parametrizations(module)
    if declared is not None and request.output_names and not request.inputs:
        raise UsageError(f"--model '{request.model}' names its own outputs; omit --output-name")
    if declared is not None and request.masks and not request.inputs:
        raise UsageError(f"--model '{request.model}' declares its own masks; omit --mask")
    origins = (Origin(read.filename, read.sha256),)

    def described() -> Source:
        found = declared
        if found is None or request.inputs:
            found = signature_inference.spec(module, request, declared)
        if not request.inputs:
            check_batch(spec.signature_of(found, module, 1), request)
        signature = spec.signature_of(found, module, request.max_batch_size)
        return source(module, found, signature, origins, kwargs)

    return _at_full_precision(module, declared, request, described)


def check_batch(own: ModelSignature, request: SourceRequest) -> None:
    """Raise ``UsageError`` if a batch is refused to a model whose own signature has one."""
    if request.max_batch_size == 0 and own.max_batch_size:
        raise UsageError(
            "--max-batch-size 0 is for models without a batch dimension, and this one has one in "
            "its own signature; give 1 or more"
        )


def _at_full_precision(
    module: nn.Module,
    declared: ModelSpec | None,
    request: SourceRequest,
    described: Callable[[], Source],
) -> Source:
    """The source with weights in half precision computed in float32, if the model runs so.

    It does not if it takes half precision, or its code asks for it.
    """
    stored = Counter({str(p.dtype).removeprefix("torch."): p.numel() for p in module.parameters()})
    dtypes: tuple[torch.dtype, ...] = HALVES
    if declared is not None and not request.inputs:
        signature = spec.signature_of(declared, module, request.max_batch_size)
        if any(x.datatype is Datatype.FP16 for x in (*signature.inputs, *signature.outputs)):
            dtypes = (torch.bfloat16,)
    former = widen_weights(module, *dtypes)
    try:
        found = described()
        runs = not former or _runs(found)
    except (UsageError, Unsupported):
        if not former:
            raise
        runs = False
    if not runs:
        narrow_weights(module, former)
        found, former = described(), {}
    if not stored:
        return found
    kept = next(iter(stored.most_common(1)))[0]
    return replace(found, weights=WeightPrecision(kept, "float32" if former else kept))


def source(
    module: nn.Module,
    spec: ModelSpec,
    signature: ModelSignature,
    origins: tuple[Origin, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    labels: tuple[str, ...] = (),
) -> Source:
    """A ``Source`` of ``module``, whose weights are loaded.

    Raises:
        UsageError: the spec's masks do not fit the signature.
        Unsupported: the model draws random numbers.
    """
    attention_masks.check(signature, spec.masks)
    keywords = keywords_of(module, [x.name for x in signature.inputs])
    results = _tried(module, spec, signature, keywords)
    module, coarse = _adapted(module, signature, keywords, results)
    if coarse:
        spec = replace(spec, rtol=max(spec.rtol, BFLOAT16_STEP))
    return Source(
        framework=Framework.PYTORCH,
        model=module.eval(),
        spec=spec,
        signature=signature,
        reference=TorchEager(module, signature),
        diagnostics=TorchDiagnostics(module, signature),
        parameter_count=sum(p.numel() for p in module.parameters()),
        origins=origins,
        model_kwargs=dict(model_kwargs or {}),
        labels=labels,
    )


def _adapted(
    module: nn.Module,
    signature: ModelSignature,
    keywords: Sequence[str] | None,
    results: Any,
) -> tuple[nn.Module, bool]:
    """``module`` as formats call it, and whether it gives bfloat16.

    It stays as it is if it takes its inputs in order and returns the signature's outputs as a
    tensor or a flat tuple.
    """
    names = [output.name for output in signature.outputs]
    found = {} if results is None else named_tensors(results, names)
    chosen = names if found and set(names) <= set(found) else None
    flat = results if isinstance(results, tuple | list) else (results,)
    plain = results is None or all(isinstance(x, Tensor) for x in flat)
    in_order = chosen is None or (chosen == list(found) and len(flat) == len(names))
    coarse = any(value.dtype is torch.bfloat16 for value in found.values())
    if plain and in_order and not coarse and keywords is None:
        return module, coarse
    return Adapted(module, keywords, chosen), coarse


def _tried(
    module: nn.Module,
    spec: ModelSpec,
    signature: ModelSignature,
    keywords: Sequence[str] | None,
) -> Any:
    """The module's result for its smallest inputs; None if it fails on them, as the proof will.

    Raises:
        Unsupported: it draws random numbers.
    """
    try:
        inputs = _smallest_inputs(spec, signature)
        tensors = [torch.from_numpy(inputs[x.name]) for x in signature.inputs]
    except Exception:
        return None
    try:
        return _answered_twice(module, tensors, keywords, [x.name for x in signature.outputs])
    except Unsupported:
        raise
    except Exception:
        return None


def _smallest_inputs(spec: ModelSpec, signature: ModelSignature) -> dict[str, Array]:
    named = name_axes(signature)
    sizes = {name: sizes_of(axis)[0] for name, axis in named.axes.items()}
    batch = 1 if signature.max_batch_size else 0
    return sampler(spec)(named, batch, sizes, np.random.default_rng(0))


def _runs(source: Source) -> bool:
    try:
        source.reference(_smallest_inputs(source.spec, source.signature))
    except Exception:
        return False
    return True


def _answered_twice(
    module: nn.Module,
    tensors: Sequence[Tensor],
    keywords: Sequence[str] | None,
    names: Sequence[str],
) -> Any:
    results: list[Any] = []

    def run() -> Mapping[str, Tensor]:
        with inference_mode(module):
            results.append(call(module, [x.clone() for x in tensors], keywords))
        return named_tensors(results[-1], names)

    randomness.check(module, run)
    return results[0]
