"""Branches and loops of torch are exported, beside functions that ``torch.compile`` decorates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

from modelport.exporters import api
from modelport.exporters.sources import torch_eager
from modelport.gateway.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

FACTORY = "tests.exporters.test_export_control_flow:build"


class ControlFlow(nn.Module):
    """A module of two layers, whose ``forward`` chooses among them."""

    def __init__(self, body: Callable[[ControlFlow, Tensor], Tensor]) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self._body = body

    def forward(self, x: Tensor) -> Tensor:
        return self._body(self, x)


def branch(module: ControlFlow, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: module.left(y), lambda y: module.right(y), (x,))  # type: ignore[no-any-return]


def branch_in_a_branch(module: ControlFlow, x: Tensor) -> Tensor:
    def inner(y: Tensor) -> Tensor:
        return torch.cond(y.max() > 1, lambda z: z.tanh(), lambda z: module.left(z), (y,))  # type: ignore[no-any-return]

    return torch.cond(x.sum() > 0, inner, lambda y: module.right(y), (x,))  # type: ignore[no-any-return]


def loop(module: ControlFlow, x: Tensor) -> Tensor:
    def goes_on(count: Tensor, y: Tensor) -> Tensor:
        return (count < 5) & (y.abs().max() > 0.5)

    def turn(count: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, module.left(y) * 0.5

    return while_loop(goes_on, turn, (torch.tensor(0), x))[1]  # type: ignore[no-any-return]


def prefixes(module: ControlFlow, x: Tensor) -> Tensor:
    def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.tanh(carry + row)
        return new, new.clone()

    return scan(step, torch.zeros(4), module.left(x), dim=0)[1]  # type: ignore[no-any-return]


def two_states(module: ControlFlow, x: Tensor) -> Tensor:
    def step(carry: list[Tensor], row: Tensor) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        new = [torch.tanh(carry[0] + row), carry[1] + 1]
        return new, (new[0].clone(), row - carry[1])

    (last, _), (first, second) = scan(step, [torch.zeros(4), torch.zeros(4)], x, dim=0)
    found: Tensor = module.left(first + second) + last
    return found


def _doubled(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


def branch_beside_compiled(module: ControlFlow, x: Tensor) -> Tensor:
    return torch.compile(_doubled, backend="eager")(branch(module, x))


BODIES = {
    each.__name__: each
    for each in (branch, branch_in_a_branch, loop, prefixes, two_states, branch_beside_compiled)
}
FORMATS = ("onnx", "pt2", "savedmodel", "tflite")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ControlFlow(BODIES[name])


def export(name: str, row: str, folder: Path) -> None:
    torch.save(build(name).state_dict(), folder / "m.pt")
    api.export(
        folder / "m.pt",
        format=row,
        model=FACTORY,
        model_kwargs={"name": name},
        input=["x:FP32[3,4]"],
        max_batch_size=0,
        output=folder / f"{name}.{row}",
        samples=16,
    )


@pytest.mark.parametrize("name", ["branch_beside_compiled", "two_states"])
def test_what_torch_compiles_is_exported(name: str, tmp_path: Path) -> None:
    export(name, "pt2", tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("row", FORMATS)
@pytest.mark.parametrize("name", BODIES)
def test_every_branch_and_loop_is_exported(name: str, row: str, tmp_path: Path) -> None:
    export(name, row, tmp_path)


def test_one_that_is_not_compiled_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def uncompiled() -> object:
        with torch.compiler.set_stance("force_eager"):
            yield

    monkeypatch.setattr(torch_eager, "_uncompiled", uncompiled)
    with pytest.raises(Unsupported):
        export("branch", "pt2", tmp_path)


def test_torchscript_says_which_formats_have_branches(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"no branches and loops .*; use --format onnx, pt2"):
        export("branch", "torchscript", tmp_path)
