"""A TensorFlow model as a graph of operations that TFLite's converter takes.

Loops over time, as of recurrent layers, write their results into lists. The converter makes a
tensor of each, and refuses elements with an open size; a batch is open. So the size is computed.

The converter refuses a new axis, ``x[..., tf.newaxis]``, of a tensor with two open sizes. So that
becomes ``ExpandDims``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from modelport.exporters.formats import savedmodel
from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.exporters.sources.tensorflow_module import TensorFlowModule

#: The operation that makes a list, of elements in the shape of its first input.
RESERVE = "TensorListReserve"
SLICE = "StridedSlice"


def rewritten(source: Source) -> TensorFlowModule:
    """The model of ``source``, as a graph of other operations if it has some of the above."""
    model: TensorFlowModule = source.model
    try:
        with quiet():
            function = savedmodel.signature_function(model, source.signature)
            if not _is_affected(function.graph.as_graph_def()):
                return model
            frozen = convert_variables_to_constants_v2(
                function, lower_control_flow=False, aggressive_inlining=True
            )
    except Exception:  # saving the model fails alike, or the converter refuses it, with a reason
        return model
    graph = frozen.graph.as_graph_def()
    constants = {
        node.name: tf.make_ndarray(node.attr["value"].tensor)
        for node in graph.node
        if node.op == "Const"
    }
    for node in [node for node in graph.node if node.op == SLICE]:
        _expand(graph, node, constants)
    shapes = _open_shapes(graph, constants) if source.signature.max_batch_size else {}
    taken = [tensor.name for tensor in frozen.inputs]
    given = [tensor.name for tensor in frozen.outputs]
    names = sorted(spec.name for spec in source.signature.outputs)  # as TensorFlow flattens them

    def call(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        tensors = {name: inputs[name.partition(":")[0]] for name in taken}
        batch = tf.shape(tensors[taken[0]])[0]
        sizes = {f"{name}:0": tf.stack([batch, *rest]) for name, rest in shapes.items()}
        results = tf.graph_util.import_graph_def(graph, {**tensors, **sizes}, given)
        return dict(zip(names, results, strict=True))

    return TensorFlowModule(call, None)


def _is_affected(graph: Any) -> bool:
    functions = (function.node_def for function in graph.library.function)
    nodes = (node for nodes in (graph.node, *functions) for node in nodes)
    return any(
        node.op == RESERVE or (node.op == SLICE and node.attr["new_axis_mask"].i) for node in nodes
    )


def _open_shapes(graph: Any, constants: Mapping[str, Any]) -> dict[str, list[int]]:
    """For each constant that is the shape of a list's elements, the sizes after an open first."""
    used = {node.input[0] for node in graph.node if node.op == RESERVE} & constants.keys()
    return {
        name: [int(size) for size in constants[name][1:]]
        for name in used
        if constants[name].ndim and constants[name][0] < 0 and (constants[name][1:] >= 0).all()
    }


def _expand(graph: Any, node: Any, constants: Mapping[str, Any]) -> None:
    """Make ``ExpandDims`` of a slice that only adds axes."""
    strides = constants.get(node.input[3])
    if strides is None or (strides != 1).any() or node.attr["shrink_axis_mask"].i:
        return
    new, ellipsis = node.attr["new_axis_mask"].i, node.attr["ellipsis_mask"].i
    whole = node.attr["begin_mask"].i & node.attr["end_mask"].i | ellipsis | new
    count = len(strides)
    if not new or whole != (1 << count) - 1:
        return
    # Axes after an ellipsis count from the end.
    middle = ellipsis.bit_length() - 1 if ellipsis else count
    places = [place for place in range(count) if new >> place & 1]
    axes = [place for place in places if place < middle]
    axes += [place - count for place in reversed(places) if place > middle]
    dtype, given = node.attr["T"].type, node.input[0]
    name = node.name
    node.Clear()
    for number, axis in enumerate(axes):
        place = graph.node.add(name=f"{name}/axis_{number}", op="Const")
        place.attr["dtype"].type = tf.int32.as_datatype_enum
        place.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(axis, tf.int32))
        last = number == len(axes) - 1
        added = node if last else graph.node.add()
        added.name, added.op = name if last else f"{name}/expanded_{number}", "ExpandDims"
        added.input.extend([given, place.name])
        added.attr["T"].type = dtype
        added.attr["Tdim"].type = tf.int32.as_datatype_enum
        given = added.name
