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
    first_call,
    input_bounds,
    module_preparation,
    randomness,
    signature_inference,
)
from modelport.exporters.sources.shared_state import UncopiedState
from modelport.exporters.sources.torch_diagnostics import TorchDiagnostics
from modelport.exporters.sources.torch_eager import (
    Adapted,
    TorchEager,
    call,
    inference_mode,
    is_scripted,
    keywords_of,
    named_tensors,
    narrow_weights,
    widen_weights,
)
from modelport.gateway.errors import Unsupported, UsageError
from modelport.gateway.types import Array, Datatype, ModelSignature

HALVES = (torch.bfloat16, torch.float16)
#: The inputs that a module is tried on; two are enough if the first changes no attribute.
FIRST_INPUTS = 5


def load(request: SourceRequest) -> Source:
    """Load the module that ``request.model`` names, with the weights of a checkpoint file.

    Raises:
        UsageError: model and checkpoint do not fit, or nothing declares a signature.
        IntegrityError: the checkpoint is damaged or wants to run code.
        Unsupported: the model is quantised, or draws random numbers.
    """
    if request.model is None:
        checkpoint.check_suffix(request.checkpoint)
        raise UsageError(
            f"checkpoint '{request.checkpoint}' holds only weights; add --model "
            "(a registered name or package.module:factory)"
        )
    with quiet(), module_preparation.unscripted():
        spec.find_factory(request.model)  # an unknown name costs no reading of weights
    read = checkpoint.read(request.checkpoint)
    known = {**read.model_kwargs, **request.model_kwargs}
    with quiet():
        where = f"checkpoint '{read.filename}'"
        spec.check_sizes(where, request.model, read.shapes, read.model_kwargs, request.model_kwargs)
        module, declared, kwargs = _built(request.model, read, known)
    if declared is not None and request.output_names and not request.inputs:
        raise UsageError(f"--model '{request.model}' names its own outputs; omit --output-name")
    if declared is not None and request.masks and not request.inputs:
        raise UsageError(f"--model '{request.model}' declares its own masks; omit --mask")
    origins = (Origin(read.filename, read.sha256),)

    shared = UncopiedState(module)

    def rebuilt() -> nn.Module:
        assert request.model is not None
        with quiet():
            return _built(request.model, read, known)[0]

    def described() -> Source:
        tried = first_call.copied(module)  # the signature may call it
        tried = module if tried is None else tried
        found = declared
        if found is None or request.inputs:
            found = signature_inference.spec(tried, request, declared)
        if not request.inputs:
            check_batch(spec.signature_of(found, tried, 1), request)
        signature = spec.signature_of(found, tried, request.max_batch_size)
        return source(module, found, signature, origins, kwargs, rebuilt=rebuilt, shared=shared)

    return _at_full_precision(module, declared, request, described)


def _built(
    model: str, read: checkpoint.Checkpoint, known: Mapping[str, Any]
) -> tuple[nn.Module, ModelSpec | None, dict[str, Any]]:
    """The module with its weights, its declared spec, and its hyper-parameters."""
    with module_preparation.unscripted():
        module, declared, kwargs = spec.build(model, read.shapes, known)
    module = module_preparation.uncompiled(module)
    module_preparation.check_not_quantised(module)
    checkpoint.load_into(module, read)
    module_preparation.without_parametrizations(module)
    return module, declared, kwargs


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
    rebuilt: Callable[[], nn.Module] | None = None,
    shared: UncopiedState | None = None,
) -> Source:
    """A ``Source`` of ``module``, whose weights are loaded.

    Args:
        rebuilt: builds the module again, for one that cannot be copied.
        shared: what its copies share, as it was before any of them was called.

    Raises:
        UsageError: the spec's masks do not fit the signature.
        Unsupported: the model draws random numbers, or keeps state.
    """
    attention_masks.check(signature, spec.masks)
    keywords = keywords_of(module, [x.name for x in signature.inputs])
    shared = UncopiedState(module) if shared is None else shared
    results = _tried(module, spec, signature, keywords, rebuilt, shared)
    module, coarse = _adapted(module, signature, keywords, results)
    if coarse:
        spec = replace(spec, rtol=max(spec.rtol, BFLOAT16_STEP))
    reference = TorchEager(module, signature)
    signature, found = input_bounds.with_ranges(signature, reference, spec.masks)
    return Source(
        framework=Framework.PYTORCH,
        model=module.eval(),
        spec=spec,
        signature=signature,
        found_ranges=found,
        reference=reference,
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

    It stays as it is if it is Python, takes its inputs in order, and returns the signature's
    outputs as a tensor or a flat tuple.
    """
    names = [output.name for output in signature.outputs]
    found = {} if results is None else named_tensors(results, names)
    chosen = names if found and set(names) <= set(found) else None
    flat = results if isinstance(results, tuple | list) else (results,)
    plain = results is None or all(isinstance(x, Tensor) for x in flat)
    in_order = chosen is None or (chosen == list(found) and len(flat) == len(names))
    coarse = any(value.dtype is torch.bfloat16 for value in found.values())
    if plain and in_order and not coarse and keywords is None and not is_scripted(module):
        return module, coarse
    return Adapted(module, keywords, chosen), coarse


def _tried(
    module: nn.Module,
    spec: ModelSpec,
    signature: ModelSignature,
    keywords: Sequence[str] | None,
    rebuilt: Callable[[], nn.Module] | None,
    shared: UncopiedState,
) -> Any:
    """The module's result for its smallest inputs; None if it fails on them, as the proof will.

    Raises:
        Unsupported: it draws random numbers, or keeps state.
    """
    names = [x.name for x in signature.outputs]
    try:
        inputs = [_drawn(spec, signature, seed) for seed in range(FIRST_INPUTS)]
        tensors = [[torch.from_numpy(each[x.name]) for x in signature.inputs] for each in inputs]
    except Exception:
        return None
    try:
        unused = first_call.copied(module)
        if unused is None and rebuilt is not None:
            unused = first_call.sharing_weights(rebuilt(), module)
        shared.restore()
        results = _called(module, tensors[0], keywords)
        if unused is None:
            others: list[nn.Module] = []
        elif not first_call.has_changed(module, unused, shared):
            others = [unused]
        else:
            copies = (first_call.copied(unused) for _ in tensors[2:])
            others = [copy for copy in copies if copy is not None] + [unused]
        named_tensors(results, names)
    except Unsupported:
        raise
    except Exception:
        return None

    def first() -> Mapping[str, Tensor]:
        return named_tensors(_called(module, tensors[0], keywords), names)

    try:
        randomness.check_operators(module, first)
    except Unsupported:
        raise
    except Exception:  # a module may not run under a dispatch mode
        pass
    for fresh, given in zip(others, tensors[1:], strict=False):

        def answer(asked: nn.Module, given: Sequence[Tensor] = given) -> Mapping[str, Tensor]:
            return named_tensors(_called(asked, given, keywords), names)

        first_call.check(module, fresh, shared, answer)
    if not others:
        randomness.check(module, first)
    return results


def _drawn(spec: ModelSpec, signature: ModelSignature, seed: int = 0) -> dict[str, Array]:
    """The smallest inputs; with the seed 1, larger ones."""
    named, more = name_axes(signature), int(seed == 1)
    sizes = {
        name: min(axis.minimum + more, sizes_of(axis)[-1]) for name, axis in named.axes.items()
    }
    batch = min(1 + more, signature.max_batch_size)
    return sampler(spec)(named, batch, sizes, np.random.default_rng(seed))


def _runs(source: Source) -> bool:
    try:
        source.reference(_drawn(source.spec, source.signature))
    except Exception:
        return False
    return True


def _called(module: nn.Module, tensors: Sequence[Tensor], keywords: Sequence[str] | None) -> Any:
    with inference_mode(module):
        return call(module, [x.clone() for x in tensors], keywords)
