"""A model's declaration for export and proof, and the lookup of models by name.

A model is named by a registered name or as ``package.module:factory``. The factory is any callable
that returns an ``nn.Module``, usually the class; an attribute ``modelport_spec`` on the factory, or
on the module it returns, holds the ``ModelSpec``:

    class Scorer(nn.Module):
        modelport_spec = ModelSpec(name="scorer", signature=my_signature)

Declarative, after ``optimum``'s export configurations. Importing this imports no torch.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from modelport.exporters import model_registry as registry
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.tolerance import FP32
from modelport.gateway.errors import ModelportError, UsageError, suggestion
from modelport.gateway.types import Array, Datatype, ModelSignature, TensorSpec

if TYPE_CHECKING:
    from torch import nn

ATTRIBUTE = "modelport_spec"

#: Relative distance between neighbouring bfloat16 numbers; runtimes may round to either.
BFLOAT16_STEP = 2.0**-7

Shape = tuple[int, ...]
Factory = Callable[..., "nn.Module"]
Sampler = Callable[[ModelSignature, int, Mapping[str, int], np.random.Generator], dict[str, Array]]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision a caller takes from ``output``: ``>= threshold``, or argmax of the last axis.

    ``minimum_agreement`` holds in fp32, over the decisions that are not within tolerance of a tie.
    """

    output: str
    threshold: float | None = None
    minimum_agreement: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """An input that says which positions hold data: 1 where they do, 0 elsewhere.

    An input whose values end at an axis (``seq_lens`` up to ``sequence``) holds the number of
    positions with data instead.

    Attributes:
        input: positions are along its last axis; at least one of them holds data.
        padding: the place of positions without data: ``right``, ``left`` or ``any``.
        outputs: outputs with the same axis whose positions without data are undefined, and are not
            compared. All others are defined everywhere.
    """

    input: str
    padding: str = "right"
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The export and proof settings of one model.

    Attributes:
        name: the model's name in the repository, unless ``--name`` gives another.
        signature: maps the module and the largest batch size to the model's signature. Inputs are
            in the order of ``forward``'s arguments, outputs in the order of its results.
        infer_kwargs: derives hyper-parameters from the state dict's shapes and the known ones.
        sample: generates inputs for a batch size and axis sizes; None: from the signature's ranges
            and the masks.
        masks: inputs that say which positions hold data.
        waveforms: inputs that are sound, whose values lie around 0 and vary.
        atol, rtol: an output is right if ``|error| <= atol + rtol * |reference|``.
        parameters: further entries for ``config.pbtxt``.
        keras_port: ``module:attribute`` of the ``exporters.keras_ports.KerasPort`` for ``convert``.
        recorded: the number of samples that ``sample`` gives in turn, where no others have answers.
    """

    name: str
    signature: Callable[[Any, int], ModelSignature]
    infer_kwargs: Callable[[Mapping[str, Shape], Mapping[str, Any]], dict[str, Any]] | None = None
    sample: Sampler | None = None
    atol: float = FP32.atol
    rtol: float = FP32.rtol
    decision: Decision | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    keras_port: str | None = None
    masks: tuple[AttentionMask, ...] = ()
    waveforms: tuple[str, ...] = ()
    recorded: int = 0


def classifies_images(module: Any, max_batch_size: int) -> ModelSignature:
    """A signature from ``image`` ``[C, H, W]`` to ``logits`` ``[classes]``, with the module's
    sizes."""
    size = module.image_size
    return ModelSignature(
        inputs=(TensorSpec("image", Datatype.FP32, (module.in_channels, size, size)),),
        outputs=(TensorSpec("logits", Datatype.FP32, (module.num_classes,)),),
        max_batch_size=max_batch_size,
    )


def count_blocks(shapes: Mapping[str, Shape], prefix: str) -> int:
    """Count the numbered blocks ``<prefix>N.`` of a state dict.

    Raises:
        KeyError: there are none, or more than tensors.
    """
    numbers = {int(k.removeprefix(prefix).split(".")[0]) for k in shapes if k.startswith(prefix)}
    if not numbers:
        raise KeyError(prefix)
    if max(numbers) >= len(shapes):
        raise KeyError(f"{prefix}{max(numbers)}.")
    return max(numbers) + 1


def import_module(name: str, flag: str, own: bool = True) -> Any:
    """Import the module that ``flag`` names; of one's own, the working directory is importable.

    Raises:
        UsageError: importing it fails.
    """
    if own and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{flag}: importing '{name}' failed: {type(error).__name__}: {error}"
        ) from error


def find_factory(model: str) -> Factory:
    """Import the callable that ``--model`` names; the working directory is importable.

    Raises:
        UsageError: there is no such name, module or attribute, or importing it fails.
    """
    path = model if ":" in model else registry.find(model) or model
    module_name, separator, attribute = path.partition(":")
    if not (separator and module_name and attribute):
        known = registry.registered()
        raise UsageError(
            f"--model '{model}' is not registered; use {', '.join(known)}, or name your own as "
            f"package.module:factory; {suggestion(model, known)}".removesuffix("; ")
        )
    if path == model and module_name.endswith(".py"):
        raise UsageError(
            f"--model '{model}' names a file; name its module, as in --model "
            f"'{Path(module_name).stem}:{attribute}', from the file's folder"
        )
    found = import_module(module_name, f"--model '{model}'", own=path == model)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UsageError(f"--model '{model}': '{module_name}' has no callable '{attribute}'")
    factory: Factory = found
    return factory


def build(
    model: str, shapes: Mapping[str, Shape], known: Mapping[str, Any]
) -> tuple[nn.Module, ModelSpec | None, dict[str, Any]]:
    """Build the untrained module that ``model`` names; return it, its spec and hyper-parameters.

    The spec is None if nothing declares one.

    Args:
        model: a registered name or ``package.module:factory``.
        shapes: shapes of the state dict to load; they determine missing hyper-parameters.
        known: hyper-parameters from the command line and the checkpoint.

    Raises:
        UsageError: the factory refuses, returns no module, or declares no ``ModelSpec``.
    """
    factory = find_factory(model)
    declared = getattr(factory, ATTRIBUTE, None)
    kwargs = dict(known)
    try:
        infer = declared.infer_kwargs if isinstance(declared, ModelSpec) else None
        if infer is not None and not _accepts(factory, kwargs):
            kwargs = {**infer(shapes, known), **known}
        module = factory(**kwargs)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"it exits ({error})" if isinstance(error, SystemExit) else error
        missing = isinstance(error, ModuleNotFoundError)
        raise UsageError(
            f"--model '{model}' cannot be built with {kwargs or 'no arguments'}: {reason}; "
            + ("install what it imports" if missing else "correct --model-kwargs")
        ) from error
    if not callable(getattr(module, "state_dict", None)):
        raise UsageError(
            f"--model '{model}' returns a {type(module).__name__}; return a torch.nn.Module"
        )
    spec = declared or getattr(module, ATTRIBUTE, None)
    if spec is not None and not isinstance(spec, ModelSpec):
        raise UsageError(
            f"--model '{model}': '{ATTRIBUTE}' is a {type(spec).__name__}; set it to an "
            "modelport.exporters.model_spec.ModelSpec"
        )
    return module, spec, kwargs


def check_sizes(
    where: str,
    model: str,
    shapes: Mapping[str, Shape],
    stored: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Raise ``UsageError`` if the hyper-parameters ``stored`` with weights contradict their shapes.

    A file could ask for a model of any size; what the user has ``given`` is not questioned.
    """
    declared = getattr(find_factory(model), ATTRIBUTE, None)
    if not stored or not isinstance(declared, ModelSpec) or declared.infer_kwargs is None:
        return
    for name, value in declared.infer_kwargs(shapes, {**stored, **given}).items():
        if name in stored and name not in given and stored[name] != value:
            raise UsageError(
                f"{where}: {name} is {stored[name]!r} in model_kwargs, and {value!r} in the "
                "weights; save both from one model"
            )


@contextlib.contextmanager
def calling(failure: str, correct: str) -> Iterator[None]:
    """Call a function of a user's ``ModelSpec``, without its output.

    Raises:
        UsageError: it fails; the message says ``failure``, the error, and what to ``correct``.
    """
    try:
        with quiet():
            yield
    except ModelportError:
        raise
    except Exception as error:
        raise UsageError(
            f"{failure} ({type(error).__name__}: {error}); correct {correct}"
        ) from error


def signature_of(spec: ModelSpec, module: Any, max_batch_size: int) -> ModelSignature:
    """The signature that ``spec`` declares for ``module``.

    Raises:
        UsageError: its function fails, or returns something else.
    """
    with calling(f"the signature of model '{spec.name}' fails", "its ModelSpec"):
        found: Any = spec.signature(module, max_batch_size)
    if not isinstance(found, ModelSignature):
        raise UsageError(
            f"the signature of model '{spec.name}' is a {type(found).__name__}; return a "
            "ModelSignature"
        )
    return found


def _accepts(factory: Factory, kwargs: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(factory).bind(**kwargs)
    except (TypeError, ValueError):
        return False
    return True
