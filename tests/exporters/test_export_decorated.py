"""Decorators of ``forward`` and of functions that it calls change nothing, or are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from modelport.exporters import api
from modelport.gateway.errors import Unsupported
from tests.thorough import thorough

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

FACTORY = "tests.exporters.test_export_decorated:build"
#: The formats that take a module by other ways: the tracer, torch.export, torch.onnx.
FORMATS = ("torchscript", "pt2", "onnx")


class UndecoratedModule(nn.Module):
    """A module without decorators."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x)) * 2


def wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return function(*args)

    return call


#: Decorators of ``forward``.
DECORATORS: dict[str, Callable[[Any], Any]] = {
    "compile": torch.compile,
    "compile_eager": lambda f: torch.compile(f, backend="eager"),
    "disable": torch.compiler.disable,
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "autocast_off": torch.autocast("cpu", enabled=False),
    "ignore": torch.jit.ignore,
    "unused": torch.jit.unused,
    "jit_export": torch.jit.export,
    "wraps": wrapped,
    "record": torch.profiler.record_function("forward"),
    "partial": functools.partialmethod,
    "checkpoint": lambda f: lambda self, x: checkpoint(f, self, x, use_reentrant=False),
}
#: Functions that ``forward`` calls.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "compiled_function": lambda x: torch.compile(_double)(x),
    "scripted_function": lambda x: torch.jit.script(_double)(x),
}


def _double(x: Tensor) -> Tensor:
    return torch.relu(x) * 2


def decorated(name: str) -> nn.Module:
    if name in FUNCTIONS:
        body = {"forward": lambda self, x: FUNCTIONS[name](self.fc(x))}
    else:

        def forward(self: Any, x: Tensor) -> Tensor:
            return _double(self.fc(x))

        body = {"forward": DECORATORS[name](forward)}
    module: nn.Module = type(name, (UndecoratedModule,), body)()
    return module


def compiled_in_place() -> nn.Module:
    module = UndecoratedModule()
    module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
    return module


def scripted_forward() -> nn.Module:
    module = UndecoratedModule()
    module.forward = torch.jit.script(module).forward  # type: ignore[method-assign]
    return module


#: Modules whose ``forward`` is not a method of their class.
MODULES: dict[str, Callable[[], nn.Module]] = {
    "compiled_in_place": compiled_in_place,
    "scripted": lambda: torch.jit.script(UndecoratedModule()),
    "scripted_forward": scripted_forward,
    "traced": lambda: torch.jit.trace(UndecoratedModule(), torch.ones(2, 4)),  # type: ignore[no-untyped-call]
}
LOADED = "loaded"
QUICK = ("compile", "jit_export", "compiled_function", "compiled_in_place", "scripted", LOADED)
#: What a format refuses.
REFUSED = {(LOADED, row) for row in ("pt2", "onnx")}


def build(name: str, inside: bool, archive: str = "") -> nn.Module:
    torch.manual_seed(0)
    if archive:
        module: nn.Module = torch.jit.load(archive)  # type: ignore[no-untyped-call]
    else:
        module = MODULES[name]() if name in MODULES else decorated(name)
    return nn.Sequential(module, nn.Linear(4, 2)) if inside else module


def check(name: str, inside: bool, row: str, folder: Path) -> None:
    kwargs: dict[str, Any] = {"name": name, "inside": inside}
    if name == LOADED:
        kwargs["archive"] = str(folder / "archive.pt")
        torch.jit.script(UndecoratedModule()).save(kwargs["archive"])
    torch.save(build(**kwargs).state_dict(), folder / "m.pt")

    def export() -> None:
        api.export(
            folder / "m.pt",
            format=row,
            model=FACTORY,
            model_kwargs=kwargs,
            input=["x:FP32[4]"],
            output=folder / f"{name}-{inside}.{row}",
            samples=16,
        )

    if (name, row) not in REFUSED:
        return export()
    place = "'0" if inside else ""
    with pytest.raises(Unsupported, match=rf": {place}.* is TorchScript, .* without torch.jit"):
        export()
    return None


@pytest.mark.parametrize("row", ["pt2", thorough("torchscript")])
def test_a_decorated_forward_is_exported_as_if_it_were_not(row: str, tmp_path: Path) -> None:
    for name in QUICK:
        check(name, True, row, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("row", [*FORMATS, "savedmodel"])
def test_every_decorated_forward_is_exported_as_if_it_were_not(
    row: str, inside: bool, tmp_path: Path
) -> None:
    for name in (*DECORATORS, *FUNCTIONS, *MODULES, LOADED):
        if row != "savedmodel" or name not in {*MODULES, LOADED}:
            check(name, inside, row, tmp_path)
