"""Detection of models that draw random numbers: their answers cannot be proven."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from modelport.gateway.errors import Unsupported

#: Repeated answers differ by more only if they are drawn.
RTOL, ATOL = 1e-3, 1e-6
NAMED = 3  # how many operators a message lists
#: Operators whose results have the form of their argument, and no value of it.
SHAPED_ALIKE = tuple(f"aten.{x}" for x in ("empty", "full", "new_", "ones", "zeros"))
#: Arguments without which dropout, in attention too, draws nothing.
_SWITCHES = frozenset({"dropout", "dropout_p", "is_training", "p", "train", "training"})


def _is_active(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that can draw numbers does: dropout in ``eval()`` does not."""
    given = {x.name: x.default_value for x in func._schema.arguments} | dict(kwargs)
    given |= dict(zip([x.name for x in func._schema.arguments], args, strict=False))
    return not any(given.get(x) in (False, 0.0) for x in _SWITCHES if not _is_tensor(given.get(x)))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _tensors(values: Any) -> list[Tensor]:
    return list(filter(_is_tensor, tree_leaves(values)))


def _storage(value: Tensor) -> int:
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a sparse tensor has none
        return id(value)


class RandomOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that draw random numbers, with the modules that call them, and follows
    what is computed from the numbers."""

    #: Both branches of a ``torch.cond``, and the body of a loop, are run for what they draw.
    supports_higher_order_operators = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, None] = {}
        self._names = {id(part): name for name, part in module.named_modules()}
        self._within: list[nn.Module] = [module]
        #: The storages of the numbers and of what depends on them, kept so that none is reused.
        self._drawn: dict[int, Any] = {}
        self._decides = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        depends = any(map(self.reach, _tensors((args, kwargs))))
        if isinstance(func, HigherOrderOperator):
            depends |= self._run_parts(args)
        elif torch.Tag.nondeterministic_seeded in func.tags and _is_active(func, args, kwargs):
            part = self._within[-1]
            name, kind = self._names.get(id(part), ""), type(part).__name__
            place = f"module '{name}' ({kind})" if name else f"the forward() of {kind}"
            self.found[f"{func.overloadpacket} in {place}"] = None
            depends = True
        result = func(*args, **kwargs)
        if depends and not str(func).startswith(SHAPED_ALIKE):
            results = _tensors(result)
            self._drawn |= {_storage(x): x for x in results}
            # Python may branch by a number.
            self._decides |= not results and result is not None
        return result

    def _run_parts(self, args: Sequence[Any]) -> bool:
        """Whether the results of a function in ``args`` depend on random numbers."""
        operands = _tensors([x for x in args if isinstance(x, list | tuple)])
        depends = False
        for part in filter(callable, args):
            with contextlib.suppress(Exception), self:  # it may take other operands
                depends |= any(map(self.reach, _tensors(part(*operands))))
        return depends

    def reach(self, value: Tensor) -> bool:
        """Whether ``value`` depends on a random number."""
        return self._decides or _storage(value) in self._drawn

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs in the block."""

        def enter(part: nn.Module, _: Any) -> None:
            self._within.append(part)

        def leave(part: nn.Module, *_: Any) -> None:
            self._within.pop()

        register = nn.modules.module
        hooks = [
            register.register_module_forward_pre_hook(enter),
            register.register_module_forward_hook(leave),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


def check(module: nn.Module, run: Callable[[], Mapping[str, Tensor]]) -> None:
    """Call ``run`` twice with different seeds.

    Raises:
        Unsupported: the answers differ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = run()
        torch.manual_seed(2)
        again = run()
    if differs := differing(first, again):
        check_operators(module, run)
        raise Unsupported(
            f"output '{differs[0]}' differs from call to call on the same input: forward() keeps "
            "state, or draws numbers outside torch; make them an input"
        )


def check_operators(module: nn.Module, run: Callable[[], Mapping[str, Tensor]]) -> None:
    """Call ``run`` once.

    Raises:
        Unsupported: an output depends on a random number, even if it does not change this answer.
    """
    recorder = RandomOperators(module)
    with torch.random.fork_rng(devices=[]), recorder.watching():
        answers = run()
    depends = [name for name, value in answers.items() if recorder.reach(value)]
    if depends:
        listed = ", ".join(list(recorder.found)[:NAMED])
        raise Unsupported(
            f"forward() draws random numbers ({listed}): output '{depends[0]}' depends on them and "
            "cannot be verified; remove them, or make them an input"
        )


def differing(first: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> list[str]:
    """The names of the answers that differ by more than rounding."""
    return [name for name, value in first.items() if not _same(value, again.get(name))]


def _same(first: Tensor, again: Tensor | None) -> bool:
    if again is None or first.shape != again.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first, again)
    return torch.allclose(first, again, rtol=RTOL, atol=ATOL, equal_nan=True)
