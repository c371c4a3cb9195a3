"""An ``nn.Module`` with a checkpoint's weights, as a ``Source``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from modelport.exporters import model_spec as spec
from modelport.exporters.loaded_model import Framework, Origin, Source
from modelport.exporters.model_spec import BFLOAT16_STEP, AttentionMask, ModelSpec
from modelport.exporters.requests import attention_masks
from modelport.exporters.requests.random_inputs import draw, name_axes, sizes_of
from modelport.exporters.sources import SourceRequest, checkpoint, signature_inference
from modelport.exporters.sources.torch_eager import (
    TorchEager,
    Widened,
    as_tensors,
    inference_mode,
    widen_weights,
)
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.types import ModelSignature


def load(request: SourceRequest) -> Source:
    """Load the module that ``request.model`` names, with the weights of a checkpoint file.

    Raises:
        UsageError: model and checkpoint do not fit, or nothing declares a signature.
        IntegrityError: the checkpoint is damaged or wants to run code.
    """
    if request.model is None:
        raise UsageError(
            f"checkpoint '{request.checkpoint}' holds weights alone; add --model "
            "(a registered name or package.module:factory)"
        )
    spec.find_factory(request.model)  # an unknown name costs no reading of weights
    read = checkpoint.read(request.checkpoint)
    known = {**read.model_kwargs, **request.model_kwargs}
    module, declared, kwargs = spec.build(request.model, read.shapes, known)
    checkpoint.load_into(module, read)
    widen_weights(module)
    if declared is not None and request.output_names and not request.inputs:
        raise UsageError(f"--model '{request.model}' names its own outputs; leave --output-name")
    if declared is not None and request.masks and not request.inputs:
        raise UsageError(f"--model '{request.model}' declares its own masks; leave --mask")
    if declared is None or request.inputs:
        declared = signature_inference.spec(module, request, declared)
    signature = declared.signature(module, request.max_batch_size)
    return source(module, declared, signature, (Origin(read.filename, read.sha256),), kwargs)


def source(
    module: nn.Module,
    spec: ModelSpec,
    signature: ModelSignature,
    origins: tuple[Origin, ...] = (),
    model_kwargs: Mapping[str, Any] | None = None,
    labels: tuple[str, ...] = (),
) -> Source:
    """A ``Source`` of ``module``, whose weights are loaded."""
    attention_masks.check(signature, spec.masks)
    if _gives_bfloat16(module, signature, spec.masks):
        module = Widened(module)
        spec = replace(spec, rtol=max(spec.rtol, BFLOAT16_STEP))
    return Source(
        framework=Framework.PYTORCH,
        model=module.eval(),
        spec=spec,
        signature=signature,
        reference=TorchEager(module, signature),
        parameter_count=sum(p.numel() for p in module.parameters()),
        origins=origins,
        model_kwargs=dict(model_kwargs or {}),
        labels=labels,
    )


def _gives_bfloat16(
    module: nn.Module, signature: ModelSignature, masks: Sequence[AttentionMask]
) -> bool:
    """Whether the module returns bfloat16 for its smallest inputs.

    A module that fails on them fails in the proof.
    """
    signature = name_axes(signature)
    sizes = {name: sizes_of(axis)[0] for name, axis in signature.axes.items()}
    try:
        inputs = draw(signature, 1, sizes, np.random.default_rng(0), masks=masks)
        with inference_mode(module):
            results = as_tensors(
                module(*(torch.from_numpy(inputs[s.name]) for s in signature.inputs))
            )
    except Exception:
        return False
    return any(result.dtype is torch.bfloat16 for result in results)
