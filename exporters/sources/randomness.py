"""Detection of models that draw random numbers: their answers cannot be proven."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelport.gateway.errors import Unsupported

#: Repeated answers differ by more only if they are drawn.
RTOL, ATOL = 1e-3, 1e-6
NAMED = 3  # how many operators a message lists


class RandomOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operators that draw random numbers, and the modules that call them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, None] = {}
        self._names = {id(part): name for name, part in module.named_modules()}
        self._within: list[nn.Module] = [module]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            part = self._within[-1]
            name, kind = self._names.get(id(part), ""), type(part).__name__
            place = f"module '{name}' ({kind})" if name else f"the forward() of {kind}"
            self.found[f"{func.overloadpacket} in {place}"] = None
        return func(*args, **(kwargs or {}))

    @contextmanager
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


def check(module: nn.Module, run: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
    """Call ``run`` twice with different seeds, and return its first answer.

    Raises:
        Unsupported: the answers differ.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = run()
        torch.manual_seed(2)
        again = run()
        differs = differing(first, again)
        if not differs:
            return first
        recorder = RandomOperators(module)
        with recorder.watching():
            run()
    listed = ", ".join(list(recorder.found)[:NAMED])
    if listed:
        raise Unsupported(
            f"forward() draws random numbers ({listed}): output '{differs[0]}' differs from call "
            "to call and cannot be verified; remove them, or make them an input"
        )
    raise Unsupported(
        f"output '{differs[0]}' differs from call to call on the same input: forward() keeps "
        "state, or draws numbers outside torch; make them an input"
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
