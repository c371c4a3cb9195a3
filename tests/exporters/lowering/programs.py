"""Small programs for what calls of single operators do not reach: branches, loops, arithmetic of
sizes, and layouts between layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.export import ExportedProgram

from modelport.exporters.lowering.built_in import built_in_operators
from modelport.exporters.lowering.interpreter import FOLDED, Interpreter
from modelport.exporters.lowering.program import graphs, prepared
from modelport.exporters.lowering.registry import name_of
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf
from tests.exporters.lowering.oracle import to_tensorflow

AUTO = torch.export.Dim.AUTO


class ValueAndSizeBranches(nn.Module):
    """Branches on values and on a size, with operands and sizes as results."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        by_value = torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a * b, (x, y))
        by_size = torch.cond(x.shape[0] > 2, lambda a: a.sin(), lambda a: a.cos() - 2, (x,))
        return by_value, by_size


class Loop(nn.Module):
    """A loop that halves its value until it is small, and counts the turns."""

    def forward(self, x: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
        def goes_on(turn: Tensor, value: Tensor) -> Tensor:
            return (value.abs().max() > 0.1) & (turn < 12)

        def halve(turn: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return turn + 2, value * factor

        turns, value = while_loop(goes_on, halve, (torch.tensor(0), x))
        return turns, value


class Scan(nn.Module):
    """Sums of all rows so far, from either end, and a function of each row."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        def add(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            return total * 0.5 + row, total - row

        last, rows = scan(add, x[0] * 2, x, dim=0)
        back, reversed_rows = scan(add, x[0] * 2, x, dim=0, reverse=True)
        mapped = map_rows(lambda row, other: row.sin() * other.sum(), x, y)
        return last, rows, back, reversed_rows, mapped


class SmallConstants(nn.Module):
    """Constants that vanish if they are moved into the sum, product or quotient before them.

    Each expression has operands of its own: TensorFlow moves nothing into what is used twice.
    """

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        one, same = torch.isfinite(x).float(), torch.isfinite(y).float()
        sums = (
            (one * 2 - same * 2) + 1e-9,
            1e-9 + (one * 3 - same * 3),
            1e-9 - (one * 4 - same * 4),
            (one * 5 - same * 5) - 1e-9,
            (one * 6 - same * 6).add(torch.tensor(1e-9), alpha=2),
        )
        tiny, huge = one * 1e-25, same * 1e25
        products = (
            (tiny * (same * 2e-25)) * 1e30,
            1e30 * (tiny * (same * 3e-25)),
            (tiny / huge) / 1e-30,
        )
        return tuple(x * 1e9 for x in sums) + tuple(x * (same * 4e25) for x in products)


class Sizes(nn.Module):
    """Sizes computed from sizes, from values and by choice."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows, columns = x.shape
        first, second = torch.split(x, [rows - 1, 1])
        size = torch.sym_sum([rows, columns, 3])
        longest = torch.sym_ite(rows > 2, rows * 2, rows + 3)
        return (
            first + second,
            x.new_ones(size),
            x.new_zeros(longest),
            x.new_full((x.numel() - rows + 1,), 2.5),
            x.unbind(1)[1] * y.shape[0] ** 2,
            torch.arange(rows),
            torch.arange(1, rows * 3, 2),
            torch.arange(0.5, rows, 0.5),
            torch.full((2, 3), rows),
            torch.full((2, 3), rows * 0.5),
            nn.functional.pad(x, (1, 2, rows, 0)),
        )


class Items(nn.Module):
    """Numbers taken out of tensors."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        return x.new_ones(count + 1), y * x.amax().item()


class Squeezed(nn.Module):
    """An axis of one element between two of unknown sizes, and the one that a scalar lacks."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.squeeze(x.unsqueeze(2).sin(), 2), x.sum().squeeze(0) * 2


class Channels(nn.Module):
    """Convolutions with everything between them that can compute in their layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expand = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Hardswish())
        for statistic in ("weight", "bias", "running_mean", "running_var"):
            nn.init.uniform_(getattr(self.expand[1], statistic), 0.5, 2)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8)
        self.gate = nn.Conv2d(8, 8, 1)
        self.project = nn.Conv2d(16, 4, 1)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.row = nn.Parameter(torch.randn(1, 8, 1, 1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = self.expand(x)
        z = self.depthwise(nn.functional.pad(z * self.scale + self.row, (1, 0, 2, 1)))
        z = z * torch.sigmoid(self.gate(z.mean((2, 3), keepdim=True)))
        z = torch.cat([z, -z], 1) - 0.5
        z = z / z.amax(-3, keepdim=True).clamp_min(1.0)
        return (self.project(z),)


class ManyLayouts(nn.Module):
    """Values below a convolution that cannot all stay in its layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = self.convolution(x)
        width = torch.linspace(0.5, 2, 6)
        return (
            z * width,  # the last axis of a channels-first tensor
            z + x.mean(1, keepdim=True),  # not below a convolution
            torch.cat([z, x], 1),
            z.sum((2, 3)),
            z.sum((1, 3)),
            z.sum((0, 2)),
            z.mean(1),
            z.sum((0, 1), keepdim=True),
            nn.functional.pad(z, (1, 2, 0, 1, 1, 0)),
            z.permute(0, 2, 3, 1) * 2,
            z.flatten(2).transpose(1, 2),
            torch.stack([z, -z]).amax(0),
        )


class PooledConvolution(nn.Module):
    """Features of a convolution, without a place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (self.convolution(x).mean((2, 3)),)


class PaddedVolumes(nn.Module):
    """Convolutions of volumes, padded between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Conv3d(2, 4, 2), nn.Conv3d(4, 2, 2)])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return (self.layers[1](nn.functional.pad(self.layers[0](x), (1, 0, 0, 1, 1, 1))),)


@dataclass(frozen=True)
class ProgramCase:
    """A module with inputs of several sizes.

    Attributes:
        transposes: the transposes that its graph has at most; None if it may have any number.
        sizes: sizes of the first axis of both inputs.
        dynamic: axes whose sizes the program does not know.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    transposes: int | None = None
    sizes: Sequence[int] = (2, 5)
    dynamic: Sequence[int] = (0,)

    def __repr__(self) -> str:
        return self.build.__name__

    @property
    def operators(self) -> frozenset[str]:
        """The operators that the program calls."""
        nodes = (node for graph in graphs(_program(self)[0]) for node in graph.nodes)
        return frozenset(name_of(node.target) for node in nodes if node.op == "call_function")

    def differences(self) -> list[str]:
        """Compare the lowered program with the module: eagerly, traced, and for TFLite."""
        program, expected = _program(self)
        for graph in graphs(program):
            for node in graph.nodes:  # what an earlier run computed at export
                node.meta.pop(FOLDED, None)
        for module in program.graph_module.modules():
            getattr(module, "meta", {}).pop(FOLDED, None)
        run = Interpreter(program)
        specs = [
            tf.TensorSpec([None if i in self.dynamic else n for i, n in enumerate(x.shape)])
            for x in expected[0][0]
        ]
        traced = tf.function(run, input_signature=specs, autograph=False).get_concrete_function()
        with built_in_operators():
            built_in = tf.function(run, input_signature=specs, autograph=False)
            ways = (("traced", traced), ("built-in", built_in.get_concrete_function()))
        found = []
        for kind, function in (("eager", run), *ways):
            for inputs, outputs in expected:
                results = function(*map(to_tensorflow, inputs))
                found += [
                    f"{self}, {kind}, {tuple(inputs[0].shape)}, output {i}"
                    for i, (ours, theirs) in enumerate(zip(results, outputs, strict=True))
                    if not _same(ours, theirs)
                ]
        count = _transposes(traced.graph)
        if self.transposes is not None and count > self.transposes:
            found.append(f"{self}: {count} transposes")
        return found


def _same(ours: Any, theirs: Tensor) -> bool:
    return ours.shape == tuple(theirs.shape) and np.allclose(
        ours.numpy(), theirs.numpy(), rtol=1e-4, atol=1e-5
    )


def _transposes(graph: Any) -> int:
    """The transposes that the results of ``graph`` need."""
    seen: dict[str, str] = {}
    waiting = [x.op for x in graph.outputs]
    while waiting:
        each = waiting.pop()
        if each.name not in seen:
            seen[each.name] = each.type
            waiting += [x.op for x in each.inputs]
    return list(seen.values()).count("Transpose")


Expected = Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]]


@cache
def _program(case: ProgramCase) -> tuple[ExportedProgram, Expected]:
    module = case.build().eval()
    generator = torch.Generator().manual_seed(0)

    def inputs(rows: int) -> tuple[Tensor, ...]:
        x = torch.randn(rows, *case.shape, generator=generator)
        return x, x.flip(-1) * 0.5 if case.build is not Loop else torch.full((1,), 0.5)

    examples = inputs(3)
    dynamic = tuple(dict.fromkeys(case.dynamic, AUTO) if len(x) > 1 else {} for x in examples)
    with quiet(), torch.no_grad():
        program = torch.export.export(module, examples, dynamic_shapes=dynamic, strict=False)
        program = prepared(program)
        batches = [inputs(rows) for rows in case.sizes]
        batches += [tuple(-x for x in batch) for batch in batches]
        expected = [(batch, module(*batch)) for batch in batches]
    return program, expected


PROGRAMS = (
    ProgramCase(ValueAndSizeBranches, (4,)),
    ProgramCase(Loop, (3,)),
    ProgramCase(Scan, (4,)),
    ProgramCase(SmallConstants, (4,)),
    ProgramCase(Sizes, (4,)),
    ProgramCase(Items, (4,)),
    ProgramCase(Squeezed, (4, 3), dynamic=(0, 1)),
    ProgramCase(Channels, (3, 7, 6), transposes=2),
    ProgramCase(PooledConvolution, (3, 7, 6), transposes=1),
    ProgramCase(PaddedVolumes, (2, 3, 4, 5), transposes=2),
    ProgramCase(ManyLayouts, (3, 7, 6)),
)
