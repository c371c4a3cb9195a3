"""One-operator modules of the samples in PyTorch's own tests (``OpInfo``)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.sources.torch_eager import DATATYPES, TorchEager
from modelport.gateway.types import ModelSignature, TensorSpec

DTYPES = (torch.float32, torch.int64, torch.bool)

#: Samples of an operator and datatype: as many, spread over all that PyTorch has.
SAMPLES = 6
#: Larger samples would take long and say no more.
LARGEST = 20_000
#: Longest list of samples that is looked at.
MOST_SAMPLES = 400

#: Operators that no test could call right or wrong.
EXCLUDED = {
    "it draws random numbers": (
        *("cauchy", "exponential", "geometric", "log_normal", "normal.in_place", "uniform"),
    ),
    "its result is not defined": (
        *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"),
        *("new_empty_strided", "resize_", "resize_as_"),
    ),
    "it reads PyTorch's own memory layout": ("hash_tensor", "as_strided_scatter"),
    "it compiles code for a GPU": (
        *("jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args"),
        *("jiterator_binary_return_by_ref", "jiterator_2inputs_2outputs", "bmm.triton_optimized"),
    ),
}


@dataclass(frozen=True, slots=True)
class OperatorSample:
    """A call of an operator: its arguments, with the tensors in them taken apart.

    Attributes:
        gauge: what PyTorch's tests compare of a result that is not unique, such as the signs of
            singular vectors.
    """

    function: Any
    leaves: tuple[Any, ...]
    structure: Any
    gauge: Any

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.leaves if isinstance(x, Tensor)]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        left = iter(tensors)
        leaves = [next(left) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        result = self.gauge(self.function(*args, **kwargs))
        return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]

    def __str__(self) -> str:
        def shown(x: Any) -> Any:
            return f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, Tensor) else x

        args, kwargs = pytree.tree_unflatten(list(map(shown, self.leaves)), self.structure)
        return ", ".join([*map(str, args), *(f"{k}={v}" for k, v in kwargs.items())])


class Operator(nn.Module):
    """Several calls of an operator, of which each has its own inputs."""

    def __init__(self, samples: Sequence[OperatorSample]) -> None:
        super().__init__()
        self.samples = samples

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        left = iter(inputs)
        results: list[Tensor] = []
        for sample in self.samples:
            given = list(itertools.islice(left, len(sample.tensors)))
            results += (x + 0 if any(x is y for y in given) else x for x in sample(given))
        return tuple(results)


#: Operators that draw random numbers only in training.
_IN_TRAINING = ("rrelu_with_noise", "scaled_dot_product")


class _Randomness(TorchDispatchMode):
    """Notes whether an operator draws random numbers; OpInfo restores the generator's state."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.found |= random and not any(name in str(func) for name in _IN_TRAINING)
        return func(*args, **(kwargs or {}))


@cache
def operators() -> dict[str, Any]:
    """PyTorch's own descriptions of its operators, by name."""
    with warnings.catch_warnings(action="ignore"):
        from torch.testing._internal.common_methods_invocations import op_db
    return {info.full_name: info for info in op_db}


def excluded(name: str) -> str:
    """The reason why the operator is no subject; empty if it is one."""
    return next((why for why, names in EXCLUDED.items() if name in names), "")


class NoSubject(Exception):
    """No sample of an operator and datatype can be a model; the text is the reason."""


def samples(name: str, dtype: torch.dtype) -> list[OperatorSample]:
    """Samples of an operator that can be models, spread over all that PyTorch has.

    Raises:
        NoSubject: there is none.
    """
    info = operators()[name]
    if why := excluded(name):
        raise NoSubject(why)
    found: list[OperatorSample] = []
    why = "PyTorch has no sample of it"
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():
        for given in itertools.islice(
            info.sample_inputs_func(info, "cpu", dtype, requires_grad=False), MOST_SAMPLES
        ):
            leaves, structure = pytree.tree_flatten(((given.input, *given.args), given.kwargs))
            sample = OperatorSample(info.op, tuple(leaves), structure, given.output_process_fn_grad)
            try:
                _check(info, sample)
            except NoSubject as error:
                why = str(error)
                continue
            found.append(sample)
    if not found:
        raise NoSubject(why)
    step = (len(found) - 1) / max(1, SAMPLES - 1)
    return [found[i] for i in sorted({round(step * n) for n in range(min(SAMPLES, len(found)))})]


def without_empty_inputs(chosen: Sequence[OperatorSample]) -> list[OperatorSample]:
    """``chosen`` without those that LiteRT cannot be given.

    Raises:
        NoSubject: none is left.
    """
    kept = [sample for sample in chosen if all(x.numel() for x in sample.tensors)]
    if not kept:
        raise NoSubject("all its samples have empty tensors")
    return kept


def _check(info: Any, sample: OperatorSample) -> None:
    tensors = sample.tensors
    if not tensors:
        raise NoSubject("it takes no tensor")
    keywords = pytree.tree_unflatten(sample.leaves, sample.structure)[1]
    if keywords.get("dropout_p") or ("rrelu" in info.name and keywords.get("training")):
        raise NoSubject("it draws random numbers")
    if any(x.layout is not torch.strided or x.is_quantized for x in tensors):
        raise NoSubject("it is about sparse or quantised tensors")
    if any(x.dtype not in DATATYPES or x.dtype is torch.bfloat16 for x in tensors):
        raise NoSubject("its tensors have datatypes that no request has")
    if sum(x.numel() for x in tensors) > LARGEST:
        raise NoSubject("its samples are large")
    watcher = _Randomness()
    try:
        with watcher:
            first = sample([x.clone() for x in tensors])
    except Exception as error:
        raise NoSubject("PyTorch refuses its samples") from error
    if not first:
        raise NoSubject("it returns no tensor")
    known = DATATYPES.keys() - {torch.bfloat16}
    if any(x.layout is not torch.strided or x.dtype not in known for x in first):
        raise NoSubject("its results have datatypes that no request has")
    if watcher.found:
        raise NoSubject("it draws random numbers")
    if not info.supports_autograd and any(x.is_floating_point() for x in first):
        raise NoSubject("it is neither differentiable nor about indices")


def source_of(name: str, chosen: Sequence[OperatorSample]) -> tuple[Source, dict[str, Any]]:
    """A loaded model that calls an operator for each of ``chosen``, and its inputs."""
    module = Operator(chosen).eval()
    given = [x for sample in chosen for x in sample.tensors]
    with torch.no_grad():
        results = module(*[x.clone() for x in given])
    signature = ModelSignature(
        tuple(_spec(f"x{i}", x) for i, x in enumerate(given)),
        tuple(_spec(f"y{i}", x) for i, x in enumerate(results)),
    )
    spec = ModelSpec(name, lambda module, most: signature)
    source = Source(
        Framework.PYTORCH, module, spec, signature, TorchEager(module, signature), 0, ()
    )
    return source, {f"x{i}": x.numpy() for i, x in enumerate(given)}


def _spec(name: str, x: Tensor) -> TensorSpec:
    return TensorSpec(name, DATATYPES[x.dtype], tuple(x.shape))


def places(chosen: Sequence[OperatorSample]) -> Mapping[str, OperatorSample]:
    """The sample that each output of ``source_of``'s model belongs to."""
    with torch.no_grad():
        owners = [s for s in chosen for _ in s([x.clone() for x in s.tensors])]
    return {f"y{i}": sample for i, sample in enumerate(owners)}
