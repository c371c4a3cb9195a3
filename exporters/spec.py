"""What a model declares about itself so that it can be exported and proven, and how it is found.

A model is named by a registered name or as ``package.module:factory``. The factory is any callable
that returns an ``nn.Module``, usually the class; an attribute ``modelport_spec`` on the factory, or
on the module it returns, holds the ``ModelSpec``:

    class Scorer(nn.Module):
        modelport_spec = ModelSpec(name="scorer", signature=my_signature)

Declarative, after ``optimum``'s export configurations. Importing this imports no torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from modelport.exporters.models import registered
from modelport.gateway.cli.errors import UsageError, suggestion
from modelport.gateway.types import Array, Datatype, ModelSignature, TensorSpec

if TYPE_CHECKING:
    from torch import nn

ATTRIBUTE = "modelport_spec"

DEFAULT_RTOL = 1e-4

#: From one bfloat16 to the next, relative: another runtime may round to the neighbour.
BFLOAT16_STEP = 2.0**-7

Shape = tuple[int, ...]
Factory = Callable[..., "nn.Module"]
Sampler = Callable[[ModelSignature, int, Mapping[str, int], np.random.Generator], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class Decision:
    """What a caller decides from ``output``: ``>= threshold``, or the argmax of the last axis.

    ``minimum_agreement`` holds in fp32, over the decisions that are not within tolerance of a tie.
    """

    output: str
    threshold: float | None = None
    minimum_agreement: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How one model is exported and proven.

    Attributes:
        name: the model's name in the repository, unless ``--name`` says otherwise.
        signature: from the module and the largest batch size to what the model takes and gives.
            Inputs are in the order of ``forward``'s arguments, outputs in that of its results.
        infer_kwargs: hyper-parameters from the state dict's shapes and those already known.
        sample: inputs for a batch size and axis sizes; None: drawn from the signature's ranges.
        atol, rtol: an output is right if ``|error| <= atol + rtol * |reference|``.
        parameters: further entries for ``config.pbtxt``.
        twin: ``module:attribute`` of the ``exporters.keras_ports.Twin`` that computes the same in
            Keras; without one there is no route to TensorFlow's formats.
    """

    name: str
    signature: Callable[[Any, int], ModelSignature]
    infer_kwargs: Callable[[Mapping[str, Shape], Mapping[str, Any]], dict[str, Any]] | None = None
    sample: Sampler | None = None
    atol: float = 1e-5
    rtol: float = DEFAULT_RTOL
    decision: Decision | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    twin: str | None = None


def classifies_images(module: Any, max_batch_size: int) -> ModelSignature:
    """``image`` ``[C, H, W]`` to ``logits`` ``[classes]``, by the module's own sizes."""
    size = module.image_size
    return ModelSignature(
        inputs=(TensorSpec("image", Datatype.FP32, (module.in_channels, size, size)),),
        outputs=(TensorSpec("logits", Datatype.FP32, (module.num_classes,)),),
        max_batch_size=max_batch_size,
    )


def count_blocks(shapes: Mapping[str, Shape], prefix: str) -> int:
    """How many numbered blocks ``<prefix>N.`` a state dict has.

    Raises:
        KeyError: none.
    """
    numbers = {int(k.removeprefix(prefix).split(".")[0]) for k in shapes if k.startswith(prefix)}
    if not numbers:
        raise KeyError(prefix)
    return max(numbers) + 1


def find_factory(model: str) -> Factory:
    """The callable that ``--model`` names; the working directory is importable.

    Raises:
        UsageError: there is no such name, module or attribute, or importing it fails.
    """
    known = registered()
    path = known.get(model, model)
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        raise UsageError(
            f"--model '{model}' is not registered; use {', '.join(known)}, or name your own as "
            f"package.module:factory; {suggestion(model, known)}".removesuffix("; ")
        )
    if path == model and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--model '{model}': importing '{module_name}' failed: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"--model '{model}': '{module_name}' has no callable '{attribute}'")
    factory: Factory = found
    return factory


def build(
    model: str, shapes: Mapping[str, Shape], known: Mapping[str, Any]
) -> tuple[nn.Module, ModelSpec | None, dict[str, Any]]:
    """The untrained module that ``model`` names, its spec, and the hyper-parameters it was given.

    The spec is None where nothing declares one.

    Args:
        model: a registered name or ``package.module:factory``.
        shapes: of the state dict that will be loaded; fills in hyper-parameters nobody gave.
        known: hyper-parameters from the command line and the checkpoint.

    Raises:
        UsageError: the factory refuses, or what it declares is no ``ModelSpec``.
    """
    factory = find_factory(model)
    declared = getattr(factory, ATTRIBUTE, None)
    kwargs = dict(known)
    if isinstance(declared, ModelSpec) and declared.infer_kwargs and not _accepts(factory, kwargs):
        kwargs = {**declared.infer_kwargs(shapes, known), **known}
    try:
        module = factory(**kwargs)
    except Exception as error:
        raise UsageError(
            f"--model '{model}' cannot be built with {kwargs or 'no arguments'}: {error}; "
            "correct --model-kwargs"
        ) from error
    spec = declared or getattr(module, ATTRIBUTE, None)
    if spec is not None and not isinstance(spec, ModelSpec):
        raise UsageError(
            f"--model '{model}': '{ATTRIBUTE}' is a {type(spec).__name__}; set it to an "
            "modelport.exporters.spec.ModelSpec"
        )
    return module, spec, kwargs


def _accepts(factory: Factory, kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(factory).bind(**kwargs)
    except (TypeError, ValueError):
        return False
    return True
