"""Functions that would turn an open size of a graph into the number that the example has.

Python's ``len`` and ``range`` give plain numbers, ``einsum`` looks for the cheapest order of its
operands, and pooling of one dimension, ``linspace`` and ``tensor`` take no open size (torch 2.13).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from modelport.exporters.decompositions.composites import traceable_composites
from modelport.exporters.formats import loop_rewriting, open_loops, packed_sequences
from modelport.gateway.errors import Unsupported

_ITERATE = Tensor.__iter__
_AVG_POOL = torch.avg_pool1d
_MAX_POOL, _TENSOR, _LINSPACE = torch.max_pool1d, torch.tensor, torch.linspace


@contextlib.contextmanager
def kept_by(module: nn.Module) -> Iterator[None]:
    """Trace ``module`` with variants of these functions that keep sizes open.

    Raises:
        Unsupported: the number of steps of a loop is not the same for all sizes.
    """
    replaced = {
        "len": _length,
        "range": _steps,
        **open_loops.NAMES,
        f"{loop_rewriting.PREFIX}run": _run,
        f"{loop_rewriting.PREFIX}listed": _listed,
    }
    names = {type(part).__module__ for part in module.modules()}
    places = [sys.modules[n] for n in names if n in sys.modules and not _is_torch(n)]
    changed = [(vars(p), name) for p in places for name in replaced if name not in vars(p)]
    for globals_, name in changed:
        globals_[name] = replaced[name]
    functions = list(_with_variants(module, places))
    for place, name, _, variant in functions:
        setattr(place, name, variant)
    # torch keeps the functions that ``torch.device`` steers as it first sees them. With one of ours
    # transformers would take a model on the meta device for built, and leave values uninitialised.
    _device_constructors()
    for function in (_max_pool1d, _tensor, _linspace):
        setattr(torch, function.__name__[1:], function)
    Tensor.__iter__ = _elements  # type: ignore[method-assign]
    functional.avg_pool1d = torch.avg_pool1d = _avg_pool1d  # type: ignore[assignment]
    validated = Distribution._validate_args
    Distribution.set_default_validate_args(False)  # it asks for values
    try:
        with (
            torch.backends.opt_einsum.flags(enabled=False),
            traceable_composites(),
            packed_sequences.padded(places),
        ):
            yield
    except open_loops.OpenLoop as error:
        raise Unsupported(
            f"forward() loops along an axis of open length ({error}), which a graph can only repeat"
            " for one length; declare one length with --input, as x:FP32[16], or compute all steps "
            "at once or in torch's scan"
        ) from None
    finally:
        torch.max_pool1d, torch.tensor, torch.linspace = _MAX_POOL, _TENSOR, _LINSPACE
        Tensor.__iter__ = _ITERATE  # type: ignore[method-assign]
        functional.avg_pool1d = torch.avg_pool1d = _AVG_POOL
        Distribution.set_default_validate_args(validated)
        for place, name, function, _ in functions:
            setattr(place, name, function)
        for globals_, name in changed:
            del globals_[name]


def _with_variants(module: nn.Module, places: Sequence[Any]) -> Iterator[tuple[Any, str, Any, Any]]:
    """Classes and modules, with the names of their functions that have loops, and the variants."""
    owners = {owner: None for part in module.modules() for owner in type(part).__mro__}
    for owner in (*owners, *places):
        for name, function in list(vars(owner).items()):
            if _is_torch(getattr(function, "__module__", None) or "torch"):
                continue
            if variant := loop_rewriting.rewritten(function):
                yield owner, name, function, variant


def _run(*given: Any) -> Any:
    """A loop of open length; one that is irregular is refused with its line."""
    try:
        return open_loops.run(*given)
    except Exception as error:
        depth = 2 if sys._getframe(1).f_code is _listed.__code__ else 1
        raise open_loops.open_loop(depth) from error


def _listed(whole: Callable[[], Any], step: Callable[[Any], Any], bounds: Any) -> Any:
    """A list with an element for each step."""
    if not open_loops.is_open(bounds):
        return whole()
    _, (rest,) = _run(lambda place: ([], [step(place)]), bounds, [], 0)
    return open_loops.Steps((), rest)


def _is_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _max_pool1d(
    x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, *rest: bool
) -> Tensor:
    """The maximum pooling of images one pixel high."""
    kernel, step, margin, spread = (
        n[0] if isinstance(n, tuple | list) else n
        for n in (kernel_size, stride or kernel_size, padding, dilation)
    )
    if _is_whole(x, kernel) and not margin:
        return x.amax(-1, keepdim=True)
    pooled: Tensor = torch.max_pool2d(
        x.unsqueeze(-2), [1, kernel], [1, step], [0, margin], [1, spread], *rest
    )
    return pooled.squeeze(-2)


def _avg_pool1d(x: Tensor, kernel_size: Any, *given: Any, **options: Any) -> Tensor:
    """The mean of images one pixel high; pooling over an open length takes the whole of it."""
    kernel = kernel_size[0] if isinstance(kernel_size, tuple | list) else kernel_size
    if _is_whole(x, kernel) and not given[1:] and not options.get("padding"):
        return x.mean(-1, keepdim=True)
    pooled: Tensor = _AVG_POOL(x, kernel_size, *given, **options)
    return pooled


def _is_whole(x: Tensor, kernel: Any) -> bool:
    return isinstance(kernel, torch.SymInt) and statically_known_true(kernel == x.shape[-1])


def _tensor(data: Any, **options: Any) -> Tensor:
    """Make a tensor of numbers; open sizes may be among them."""
    numbers = tree_leaves(data)
    if not any(isinstance(x, torch.SymInt | torch.SymFloat) for x in numbers):
        return _TENSOR(data, **options)
    floats = any(isinstance(x, float | torch.SymFloat) for x in numbers)
    options.setdefault("dtype", torch.get_default_dtype() if floats else torch.int64)
    options.pop("requires_grad", None)
    if not isinstance(data, list | tuple):
        return torch.scalar_tensor(data, **options)
    return torch.stack([_tensor(each, **options) for each in data])


def _linspace(start: Any, end: Any, steps: Any, **options: Any) -> Tensor:
    """Numbers from ``start`` to ``end``, counted from the nearer one, as torch does."""
    if not isinstance(steps, torch.SymInt):
        return _LINSPACE(start, end, steps, **options)
    dtype = options.setdefault("dtype", torch.get_default_dtype())
    place: Tensor = torch.arange(steps, **options)  # type: ignore[call-overload]
    last = torch.sym_max(steps - 1, 1)  # type: ignore[no-untyped-call]
    step = torch.scalar_tensor(end - start, dtype=dtype) / last
    is_near: Any = 2 * place < steps
    near: Tensor = start + step * place
    return near.where(is_near, end - step * (last - place))


def _elements(x: Tensor) -> Any:
    own = _is_torch(str(sys._getframe(1).f_globals.get("__name__")))  # it answers in its own way
    if not own and x.dim() and isinstance(x.shape[0], torch.SymInt):
        raise open_loops.open_loop()
    return _ITERATE(x)  # type: ignore[no-untyped-call]


def _length(x: Any) -> Any:
    if isinstance(x, open_loops.Steps):
        return x.length
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else len(x)


def _steps(*bounds: Any) -> Iterable[Any]:
    if not any(isinstance(bound, torch.SymInt) for bound in bounds):
        return range(*bounds)
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    return _counted(start, stop, step)


def _counted(number: Any, stop: Any, step: Any) -> Iterator[Any]:
    """Count as long as the bounds of the sizes decide if there is a next number."""
    while True:
        left = (stop - number) * (1 if step > 0 else -1)
        if statically_known_true(left <= 0):
            return
        if not statically_known_true(left > 0):
            raise open_loops.open_loop()
        yield number
        number = number + step
