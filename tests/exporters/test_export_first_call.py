"""Modules that keep what their first input was are refused, wherever they keep it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from modelport.exporters import api
from modelport.exporters.sources import first_call
from modelport.gateway.errors import Unsupported

FACTORY = "tests.exporters.test_export_first_call:build"


class Keeps(nn.Module):
    """Subtracts what ``kept`` gives for the input, which is what it gave for the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.c: Any = None

    def kept(self, x: Tensor) -> Any:
        if self.c is None:
            self.c = x.mean()
        return self.c

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.fc(x) - self.kept(x)
        return result


class AsNumber(Keeps):
    """Keeps a number of Python."""

    def kept(self, x: Tensor) -> Any:
        self.c = float(x.mean()) if self.c is None else self.c
        return self.c


class AsSign(Keeps):
    """Keeps one of two values, which two inputs may have in common."""

    def kept(self, x: Tensor) -> Any:
        self.c = bool(x.sum() > 0) if self.c is None else self.c
        return int(self.c)


class AsSize(Keeps):
    """Keeps the number of rows."""

    def kept(self, x: Tensor) -> Any:
        self.c = len(x) if self.c is None else self.c
        return self.c


class InList(Keeps):
    """In a list."""

    def __init__(self) -> None:
        super().__init__()
        self.c = []

    def kept(self, x: Tensor) -> Any:
        self.c = self.c or [x.mean()]
        return self.c[0]


class InDict(Keeps):
    """In a dict in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.c = {"inner": {}}

    def kept(self, x: Tensor) -> Any:
        return self.c["inner"].setdefault("mean", x.mean())


class InObject(Keeps):
    """In an object of no library."""

    def __init__(self) -> None:
        super().__init__()
        self.c = type("Holder", (), {})()

    def kept(self, x: Tensor) -> Any:
        vars(self.c).setdefault("mean", x.mean())
        return self.c.mean


class InLateBuffer(Keeps):
    """In a buffer that is registered by the first call."""

    def __init__(self) -> None:
        super().__init__()
        del self.c

    def kept(self, x: Tensor) -> Any:
        if "c" not in self._buffers:
            self.register_buffer("c", x.mean())
        return self.c


class InBuffer(Keeps):
    """In a buffer, by a flag in another."""

    def __init__(self) -> None:
        super().__init__()
        del self.c
        self.register_buffer("c", torch.zeros(()), persistent=False)
        self.register_buffer("done", torch.tensor(False), persistent=False)

    def kept(self, x: Tensor) -> Any:
        if not self.done:
            self.c.copy_(x.mean())
            self.get_buffer("done").fill_(True)
        return self.c


class InWeight(Keeps):
    """In a weight that is still 0."""

    def __init__(self) -> None:
        super().__init__()
        del self.c
        self.c = nn.Parameter(torch.zeros(()))

    def kept(self, x: Tensor) -> Any:
        if self.c == 0:
            self.c.data.copy_(x.mean())
        return self.c


class WithLock(Keeps):
    """In a module that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class WithClosure(Keeps):
    """In a module with a function whose copy would call the original."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: self.fc(x) - self.kept(x)  # type: ignore[method-assign]


class InClass(Keeps):
    """In an attribute of the class."""

    c: Any = None

    def __init__(self) -> None:
        super().__init__()
        del self.c

    def kept(self, x: Tensor) -> Any:
        if InClass.c is None:
            InClass.c = x.mean()
        return self.c


class InListOfClass(Keeps):
    """In a list that all modules share."""

    every: ClassVar[list[Tensor]] = []

    def kept(self, x: Tensor) -> Any:
        self.every.append(x.mean())
        return self.every[0]


GLOBAL: Tensor | None = None


class InGlobal(Keeps):
    """In a global variable."""

    def kept(self, x: Tensor) -> Any:
        global GLOBAL
        GLOBAL = x.mean() if GLOBAL is None else GLOBAL
        return GLOBAL


class Remembers(Keeps):
    """Caches what is the same for every input."""

    def kept(self, x: Tensor) -> Any:
        if self.c is None:
            self.c = torch.arange(4.0)
        self.last = x
        return self.c


class RemembersWithLock(Remembers):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


KEEPS: tuple[type[nn.Module], ...] = (Keeps, AsNumber, AsSign, AsSize, InList, InDict, InObject)
KEEPS += (InLateBuffer, InBuffer, InWeight, WithLock, WithClosure)


#: Those that keep it outside of the module, and the place.
SHARED = {InClass: "InClass.c", InListOfClass: "InListOfClass.every", InGlobal: "GLOBAL"}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    module: nn.Module = globals()[name]()
    return nn.Sequential(nn.Linear(4, 4), module)


def export(kind: type[nn.Module], folder: Path) -> None:
    torch.save(build(kind.__name__).state_dict(), folder / "m.pt")
    api.export(
        folder / "m.pt",
        format="torchscript",
        model=FACTORY,
        model_kwargs={"name": kind.__name__},
        input=["x:FP32[4]"],
        repository=folder / "repository",
        name="m",
        samples=16,
    )


@pytest.mark.parametrize("kind", KEEPS)
def test_a_module_that_keeps_its_first_input_is_refused(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match=r"depends on inputs of earlier calls.* keeps '1\.c'"):
        export(kind, tmp_path)
    assert not (tmp_path / "repository" / "m").exists()


@pytest.mark.parametrize("kind", SHARED)
def test_a_module_that_keeps_its_first_input_elsewhere_is_refused(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(Unsupported, match=f"depends on inputs .* keeps '{SHARED[kind]}'"):
        export(kind, tmp_path)


@pytest.mark.parametrize("kind", [Remembers, RemembersWithLock])
def test_a_cache_that_no_answer_depends_on_is_accepted(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    export(kind, tmp_path)


def test_a_copy_shares_large_weights_and_nothing_else() -> None:
    module = nn.Sequential(nn.Linear(512, 256), nn.BatchNorm1d(256))
    copy = first_call.copied(module)
    assert copy is not None
    shared = [a is b for a, b in zip(module.parameters(), copy.parameters(), strict=True)]
    assert shared == [True, False, False, False]
    assert not any(first_call.differences(module, copy))
    module(torch.rand(8, 512))
    found = list(first_call.differences(module, copy))
    assert found == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
