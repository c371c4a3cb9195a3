"""PyTorch to ONNX through ``torch.export``, which keeps dimensions symbolic."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from onnxscript import opset18
from onnxscript.function_libs.torch_lib.ops import core
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.onnx import ONNXProgram
from torch.onnx._internal.exporter import _decomp

from modelport.exporters.decompositions import DECOMPOSITIONS
from modelport.exporters.decompositions.complex_parts import with_parts
from modelport.exporters.formats import (
    onnx_difference,
    onnx_kernels,
    onnx_opsets,
    open_sizes,
    pt2,
    tracing,
)
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.requests.random_inputs import model_dims
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import torch_errors
from modelport.exporters.sources.torch_eager import inference_mode
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import Array, ModelSignature

#: The version of files with the oldest operator set.
OLDEST_IR = 10
CPU = "CPUExecutionProvider"
#: Operators of complex tensors that ONNX has.
_COMPLEX_IN_ONNX = (
    *(torch.ops.aten._fft_r2c.default, torch.ops.aten._fft_c2c.default),
    *(torch.ops.aten._fft_c2r.default, torch.ops.aten.view_as_complex.default),
)
#: Operators of convolution that torch turns into one, which has a decomposition for open groups.
_CONVOLUTIONS = {getattr(torch.ops.aten, f"conv{axes}d").default for axes in (1, 2, 3)}

#: Larger weights go to ``<file>.data`` beside the model, as a protobuf message ends at 2 GiB.
EXTERNAL_DATA_BYTES = 1 << 30


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``, and ``<path>.data`` beside it if the weights are large.

    Inputs and outputs have the signature's names; batch and axes are symbolic, unless the module
    itself fixes one: torch.onnx then silently bakes in the example's size, and the proof
    fails.

    Raises:
        Unsupported: the opset, an operator or a name has no conversion.
    """
    oldest, newest = onnx_opsets.TORCH_OLDEST, newest_opset()
    if target.opset is not None and not oldest <= target.opset <= newest:
        raise Unsupported(
            f"--opset {target.opset} is not supported; use {oldest} to {newest}, the newest "
            "that this ONNX Runtime runs"
        )
    inputs, outputs = source.signature.inputs, source.signature.outputs
    if shared := sorted({spec.name for spec in inputs} & {spec.name for spec in outputs}):
        raise Unsupported(
            f"output '{shared[0]}' has the name of an input, which ONNX cannot have; rename the "
            "outputs with --output-name"
        )
    with quiet():
        module = tracing.at_precision(source.model, target.dtype, source.signature)
    size = _size_of(module)
    with torch_errors.translated("torch.onnx"), quiet(), inference_mode(module):
        program = _convert(source, module, target)
        _check_opset(program.model.opset_imports.get(""), target.opset)
        # Every node carries the stack trace of its Python line: local paths, and half of the file.
        ClearMetadataAndDocStringPass()(program.model)
        program.save(path, external_data=size > EXTERNAL_DATA_BYTES)


def _size_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.state_dict().values())


def _convert(source: Source, module: nn.Module, target: ExportTarget) -> ONNXProgram:
    signature = source.signature
    with (
        open_sizes.kept_by(module),
        _subtraction_of_integers(),
        _exact_constants(),
        _decompositions(),
        pt2.recurrent_layers(),
        _recurrent_shapes(),
    ):
        program = torch.onnx.export(
            module,
            tracing.example_inputs(signature, source.spec.masks),
            dynamo=True,
            dynamic_shapes=tracing.dynamic_shapes(signature, module),
            opset_version=target.opset,
            custom_translation_table=_translations(),
            verbose=False,
        )
    assert program is not None  # the other exporter returns None
    onnx_kernels.cast_around_gaps(program.model)
    _declare(program.model, signature)
    return program


def _translations() -> dict[Any, Any]:
    """Operators whose exponentials overflow in onnxscript 0.7 from 89 on, a selection whose size
    depends on values, the place of a scalar, batch normalisation, whose statistics PyTorch leaves
    out, and products with a vector, which ONNX Runtime 1.31 takes with the matrix untransposed
    where it fuses the two."""
    op: Any = opset18  # its types allow no number in CastLike

    def logaddexp(self: Any, other: Any) -> Any:
        larger, smaller = op.Max(self, other), op.Min(self, other)
        equal = op.Equal(larger, smaller)  # infinity less infinity is none
        zero, one = op.CastLike(0.0, self), op.CastLike(1.0, self)
        below = op.Where(equal, zero, op.Sub(smaller, larger))
        return op.Add(larger, op.Log(op.Add(op.Exp(below), one)))

    def logaddexp2(self: Any, other: Any) -> Any:
        unit = op.CastLike(math.log(2), self)
        scaled = op.Mul(self, unit), op.Mul(other, unit)
        return op.Div(logaddexp(*scaled), unit)

    def log_sigmoid(self: Any) -> Any:
        return op.Neg(logaddexp(op.Neg(self), op.CastLike(0.0, self)))

    def masked_select(self: Any, mask: Any) -> Any:
        chosen = op.Reshape(op.Expand(mask, op.Shape(self)), op.Constant(value_ints=[-1]))
        elements = op.Reshape(op.Expand(self, op.Shape(mask)), op.Constant(value_ints=[-1]))
        return op.Compress(elements, chosen, axis=0)

    def nonzero(self: Any) -> Any:
        if self.shape is None or len(self.shape):
            return op.Transpose(op.NonZero(self), perm=[1, 0])
        none = op.Constant(value_ints=[0])  # ONNX gives a scalar's place one coordinate
        places = op.NonZero(op.Reshape(self, op.Constant(value_ints=[1])))
        return op.Transpose(op.Slice(places, none, none, none), perm=[1, 0])

    def matmul(self: Any, other: Any) -> Any:
        if len(other.shape) > 1:
            return op.MatMul(self, other)
        last = op.Constant(value_ints=[-1])
        return op.Squeeze(op.MatMul(self, op.Unsqueeze(other, last)), last)

    def batch_norm(
        self: Any, weight: Any, bias: Any, mean: Any, variance: Any, momentum: Any, eps: Any
    ) -> Any:
        given = self, weight, bias, mean, variance, momentum, eps
        result = core.aten__native_batch_norm_no_training(*given)[0]
        nothing = op.CastLike(op.Constant(value=onnx_ir.tensor(np.zeros(0, np.float32))), self)
        return result, nothing, nothing

    operators = torch.ops.aten
    return {
        operators._native_batch_norm_legit_no_training.default: batch_norm,
        operators.masked_select.default: masked_select,
        operators.nonzero.default: nonzero,
        operators.matmul.default: matmul,
        operators.mv.default: matmul,
        operators.logaddexp.default: logaddexp,
        operators.logaddexp2.default: logaddexp2,
        operators.log_sigmoid.default: log_sigmoid,
    }


def _declare(model: onnx_ir.Model, signature: ModelSignature) -> None:
    """Give inputs and outputs the names of ``signature``, and outputs its sizes.

    torch.onnx would leave values inside the graph the names that outputs get, such as ``mean``.
    """
    ends = {
        id(value): (value, spec)
        for values, specs in (
            (model.graph.inputs, signature.inputs),
            (model.graph.outputs, signature.outputs),
        )
        for value, spec in zip(values, specs, strict=True)
    }
    wanted = {spec.name for _, spec in ends.values()}
    inside = [value for value in _values(model.graph) if id(value) not in ends]
    taken = wanted | {str(value.name) for value in inside}
    for value in inside:
        if value.name in wanted:
            names = (f"{value.name}_{number}" for number in itertools.count(1))
            value.name = next(name for name in names if name not in taken)
            taken.add(value.name)
    for value, spec in ends.values():
        value.name = spec.name
    for value, spec in zip(model.graph.outputs, signature.outputs, strict=True):
        batch = list(value.shape or ())[: int(signature.max_batch_size > 0)]
        value.shape = onnx_ir.Shape([*batch, *(None if d == -1 else d for d in model_dims(spec))])


def _values(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """The values of ``graph``, and of the graphs of its branches and loops."""
    for each in (graph, *graph.subgraphs()):
        yield from each.inputs
        yield from each.initializers.values()
        for node in each:
            yield from node.outputs


@contextlib.contextmanager
def _subtraction_of_integers() -> Iterator[None]:
    """Trace ``1.0 - x`` of integers as ``-x + 1.0``; torch.onnx cannot promote a number on the left
    (torch 2.13)."""
    subtract = Tensor.__rsub__

    def reversed_subtraction(x: Tensor, other: Any) -> Any:
        if isinstance(other, float) and not x.is_floating_point() and not x.is_complex():
            return torch.neg(x) + other
        return subtract(x, other)

    Tensor.__rsub__ = reversed_subtraction  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.__rsub__ = subtract  # type: ignore[method-assign]


@contextlib.contextmanager
def _decompositions() -> Iterator[None]:
    """Decompose operators that torch.onnx has no translation of, or a wrong one, in its own way."""
    create = _decomp.create_onnx_friendly_decomposition_table

    def with_ours(translated: Any) -> dict[Any, Any]:
        table = {**create(set(translated) - _CONVOLUTIONS), **DECOMPOSITIONS}
        return with_parts(table, besides=_COMPLEX_IN_ONNX)

    _decomp.create_onnx_friendly_decomposition_table = with_ours  # type: ignore[assignment]
    try:
        yield
    finally:
        _decomp.create_onnx_friendly_decomposition_table = create


@contextlib.contextmanager
def _recurrent_shapes() -> Iterator[None]:
    """Tell recurrent layers' shapes without a run of their steps, which would fix their number."""

    def shapes(x: Tensor, hx: Any, *given: Any) -> tuple[Tensor, ...]:
        states = hx if isinstance(hx, list | tuple) else [hx]
        *_, bidirectional, _ = given
        width = states[0].shape[-1] * (2 if bidirectional else 1)
        return x.new_empty(*x.shape[:-1], width), *(x.new_empty(each.shape) for each in states)

    operators: tuple[Any, ...] = torch.ops.aten.lstm.input, torch.ops.aten.gru.input
    originals = {each: decomposition_table[each] for each in operators}
    decomposition_table.update(dict.fromkeys(operators, shapes))
    try:
        yield
    finally:
        decomposition_table.update(originals)


@contextlib.contextmanager
def _exact_constants() -> Iterator[None]:
    """Rewrite only constants that equal a rule's: onnxscript 0.7 takes ``x + 1e-9`` for ``x + 0``,
    and ``x * 1.000005`` for ``x``."""
    matches = SimplePatternMatcher._match_constant

    def exactly(self: Any, pattern: Any, value: Any) -> bool:
        return matches(self, pattern, value) and (
            np.array_equal(value.const_value.numpy(), pattern.value)
            or self.fail(f"the constant {value.name} is not exactly {pattern.value}")
        )

    SimplePatternMatcher._match_constant = exactly  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        SimplePatternMatcher._match_constant = matches  # type: ignore[method-assign]


def first_difference(
    source: Source, path: Path, target: ExportTarget, inputs: Mapping[str, Array]
) -> str:
    """Describe the operator at which the file at ``path`` and ``source`` part; empty if unknown.

    Large models are not converted twice.
    """
    if target.precision != "fp32" or _size_of(source.model) > EXTERNAL_DATA_BYTES:
        return ""
    with quiet(), inference_mode(source.model):
        program = _convert(source, source.model, target).exported_program
    if program is None:
        return ""
    return onnx_difference.find(program, path, source.signature, inputs)


@functools.cache
def newest_opset() -> int:
    """The newest operator set that this ONNX Runtime runs."""
    x, y = (onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    for opset in range(onnx.defs.onnx_opset_version(), onnx_opsets.TORCH_OLDEST, -1):
        opsets = [onnx.helper.make_opsetid("", opset)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=OLDEST_IR)
        with contextlib.suppress(Exception):  # the runtime raises a class of its own for each
            onnxruntime.InferenceSession(model.SerializeToString(), providers=[CPU])
            return opset
    return onnx_opsets.TORCH_OLDEST


def _check_opset(written: int | None, wanted: int | None) -> None:
    """Refuse a model that its conversion to the wanted operator set has left as it was."""
    if wanted is not None and written != wanted:
        raise Unsupported(
            f"torch.onnx cannot convert an operator of this model to operator set {wanted} and "
            f"stays at {written}; use a lower --opset"
        )
