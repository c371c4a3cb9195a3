"""TensorFlow to ONNX through ``tf2onnx``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from modelport.exporters.formats import onnx_opsets, tensorflow_spectra
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.loaded_model import Source
from modelport.exporters.requests.random_inputs import model_dims
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported
from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, TensorSpec

#: Constants of at least this size bypass the converter.
LARGE_CONSTANT_BYTES = 1 << 18

#: Larger weights go to ``<file>.data`` beside the model, as a protobuf message ends at 2 GiB.
EXTERNAL_DATA_BYTES = 1 << 30


def export(source: Source, path: Path, target: ExportTarget) -> None:
    """Write ``source`` to ``path``, and ``<path>.data`` beside it if the weights are large.

    Inputs and outputs have the signature's names; batch and axes are symbolic.

    Raises:
        Unsupported: the opset, or an operator, has no conversion.
    """
    supported = onnx_opsets.TENSORFLOW
    opset = supported[-1] if target.opset is None else target.opset
    if opset not in supported:
        raise Unsupported(
            f"--opset {opset} is not supported from TensorFlow; use {supported[0]} to "
            f"{supported[-1]}"
        )
    try:
        with quiet():
            model = _convert(source, opset)
    except Exception as error:
        raise _refusal(error) from error
    # Name the symbolic axes, which tf2onnx only numbers, as in the signature.
    batch = ["batch"] if source.signature.max_batch_size else []
    declared = {spec.name: spec for spec in (*source.signature.inputs, *source.signature.outputs)}
    for value in (*model.graph.input, *model.graph.output):
        dims = [*batch, *model_dims(declared[value.name])]
        for i, (shape, dim) in enumerate(zip(value.type.tensor_type.shape.dim, dims, strict=True)):
            if not shape.HasField("dim_value"):
                shape.dim_param = dim if isinstance(dim, str) else f"{value.name}_dim{i}"
    large = model.ByteSize() > EXTERNAL_DATA_BYTES
    onnx.save(
        model, path, save_as_external_data=large, location=f"{path.name}.data" if large else None
    )


def _convert(source: Source, opset: int) -> onnx.ModelProto:
    import tf2onnx  # importing it configures logging
    from tf2onnx.tf_loader import convert_variables_to_constants_large_model

    signature = source.signature
    inputs = [spec.name for spec in signature.inputs]
    outputs = [spec.name for spec in signature.outputs]
    specs = [_tensor_spec(spec, signature) for spec in signature.inputs]

    @tf.function(input_signature=specs)  # type: ignore[untyped-decorator]
    def serve(*tensors: Any) -> list[Any]:
        results = source.model(dict(zip(inputs, tensors, strict=True)))
        return [tf.identity(results[name]) for name in outputs]

    function = serve.get_concrete_function()
    graph = convert_variables_to_constants_large_model(function)
    weights = _set_apart(graph)
    captured = {tensor.name for tensor in function.graph.internal_captures}
    taken = [tensor.name for tensor in function.inputs if tensor.name not in captured]
    given = [tensor.name for tensor in function.outputs]
    names = dict(zip([*taken, *given], [*inputs, *outputs], strict=True))
    model: onnx.ModelProto
    model, _ = tf2onnx.convert.from_graph_def(
        graph,
        input_names=[*taken, *weights],
        output_names=given,
        opset=opset,
        tensors_to_rename={**names, **{name: name for name in weights}},
        custom_op_handlers=tensorflow_spectra.handlers(opset),
    )
    unknown = sorted(_unknown_operators(model.graph))
    if unknown:
        raise ValueError(f"ONNX has no {', '.join(unknown)}")
    _put_back(model.graph, weights)
    found = [value.name for value in (*model.graph.input, *model.graph.output)]
    if sorted(found) != sorted([*inputs, *outputs]):
        raise ValueError(f"inputs and outputs became {', '.join(found)}")
    return model


def _set_apart(graph: Any) -> dict[str, Array]:
    """Replace large constants by inputs; tf2onnx copies its graph, with weights, 50 times."""
    weights = {}
    for node in graph.node:
        if node.op == "Const" and node.attr["value"].tensor.ByteSize() > LARGE_CONSTANT_BYTES:
            value = tf.make_ndarray(node.attr["value"].tensor)
            weights[f"{node.name}:0"] = value
            node.op = "Placeholder"
            del node.attr["value"]
            node.attr["shape"].shape.CopyFrom(tf.TensorShape(value.shape).as_proto())
    return weights


def _put_back(graph: onnx.GraphProto, weights: Mapping[str, Array]) -> None:
    inputs = list(graph.input)
    del graph.input[:]
    for value in inputs:
        if value.name in weights:
            tensor = onnx.numpy_helper.from_array(weights[value.name], value.name)
            graph.initializer.append(tensor)
        else:
            graph.input.append(value)


def _unknown_operators(graph: onnx.GraphProto) -> set[str]:
    """Operators without a conversion, which tf2onnx keeps under TensorFlow's name."""
    unknown = set()
    for node in graph.node:
        if not onnx.defs.has(node.op_type, node.domain):
            unknown.add(node.op_type)
        for attribute in node.attribute:
            unknown |= _unknown_operators(attribute.g)
    return unknown


def _tensor_spec(spec: TensorSpec, signature: ModelSignature) -> Any:
    batch = [None] if signature.max_batch_size else []
    dims = [None if isinstance(dim, str) or dim == -1 else dim for dim in model_dims(spec)]
    return tf.TensorSpec([*batch, *dims], tf.as_dtype(NUMPY_DTYPES[spec.datatype]), name=spec.name)


def _refusal(error: Exception) -> Unsupported:
    reason = (" ".join(str(error).split()) or type(error).__name__)[:300]
    return Unsupported(f"tf2onnx cannot convert this model ({reason}); use --format savedmodel")
