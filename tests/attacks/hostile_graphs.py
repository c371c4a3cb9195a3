"""SavedModels, TensorFlow Lite, ONNX and OpenVINO files that want to do more than compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import onnx
from ai_edge_litert import schema_py_generated as schema
from onnx import ModelProto, TensorProto, helper

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.wire.protobuf import varint

TENSORFLOW = 'backend: "tensorflow" platform: "tensorflow_savedmodel"\n'
LITE = 'backend: "tflite"\n'
OPENVINO = 'backend: "openvino"\n'
ONNX = 'backend: "onnxruntime" platform: "onnxruntime_onnx"\n'

Fill = Callable[[Any, Any], str]


def _text(text: str) -> Any:
    return tf.make_tensor_proto(text)


def _node(holder: Any, name: str, op: str, *inputs: str, **attributes: Any) -> Any:
    node = holder.add(name=name, op=op, input=inputs)
    for key, value in attributes.items():
        if isinstance(value, str):
            node.attr[key].s = value.encode()
        elif isinstance(value, int):
            node.attr[key].type = value
        elif isinstance(value, list):
            node.attr[key].list.type.extend(value)
        elif hasattr(value, "tensor_shape"):
            node.attr[key].tensor.CopyFrom(value)
        else:
            node.attr[key].func.CopyFrom(value)
    return node


def _constant(holder: Any, name: str, text: str) -> str:
    _node(holder, name, "Const", dtype=tf.string.as_datatype_enum, value=_text(text))
    return name


def saved_model(folder: Path, fill: Callable[[Any], str]) -> Path:
    """A SavedModel of ``y = x``, after what ``fill`` adds to its graph and names."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel(saved_model_schema_version=1)
    meta = saved.meta_graphs.add()
    meta.meta_info_def.tags.append("serve")
    meta.graph_def.versions.producer = 1882
    nodes, real = meta.graph_def.node, tf.float32.as_datatype_enum
    x = _node(nodes, "x", "Placeholder", dtype=real)
    x.attr["shape"].shape.unknown_rank = True
    after = fill(meta)
    _node(nodes, "y", "Identity", "x", *([f"^{after}"] if after else []), T=real)
    signature = meta.signature_def["serving_default"]
    signature.method_name = "tensorflow/serving/predict"
    for name, holder in (("x", signature.inputs), ("y", signature.outputs)):
        holder[name].name, holder[name].dtype = f"{name}:0", real
        holder[name].tensor_shape.dim.add(size=4)
    folder.mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(saved.SerializeToString())
    return folder


def _writing(nodes: Any, mark: Path) -> str:
    name = _constant(nodes, "name", str(mark))
    content = _constant(nodes, "content", "hi")
    _node(nodes, "write", "WriteFile", name, content)
    return "write"


def graphs(mark: Path) -> dict[str, tuple[Callable[[Any], str], str]]:
    """Hostile changes to a SavedModel's graph, each with the text expected in the error."""
    string, real = tf.string.as_datatype_enum, tf.float32.as_datatype_enum

    def with_file(op: str, **attributes: Any) -> Callable[[Any], str]:
        def fill(meta: Any) -> str:
            name = _constant(meta.graph_def.node, "name", str(mark))
            _node(meta.graph_def.node, "op", op, name, **attributes)
            return "op"

        return fill

    def plain(op: str, **attributes: Any) -> Callable[[Any], str]:
        def fill(meta: Any) -> str:
            _node(meta.graph_def.node, "op", op, "x", **attributes)
            return "op"

        return fill

    def at_load(meta: Any) -> str:
        initial = meta.signature_def["__saved_model_init_op"]
        initial.outputs["__saved_model_init_op"].name = _writing(meta.graph_def.node, mark)
        return ""

    def at_load_of_old(meta: Any) -> str:
        meta.collection_def["legacy_init_op"].node_list.value.append(
            _writing(meta.graph_def.node, mark)
        )
        return ""

    def at_restore(meta: Any) -> str:
        meta.saver_def.restore_op_name = _writing(meta.graph_def.node, mark)
        meta.saver_def.filename_tensor_name = "name:0"
        return ""

    def function(meta: Any, name: str) -> Any:
        added = meta.graph_def.library.function.add()
        added.signature.name = name
        _writing(added.node_def, mark)
        return added

    def in_a_function(meta: Any) -> str:
        function(meta, "evil")
        _node(meta.graph_def.node, "call", "evil")
        return "call"

    def in_a_branch(meta: Any) -> str:
        function(meta, "evil")
        node = _node(meta.graph_def.node, "branch", "StatelessIf", "x")
        node.attr["then_branch"].func.name = node.attr["else_branch"].func.name = "evil"
        return "branch"

    def in_an_object(meta: Any) -> str:
        function(meta, "evil")
        meta.object_graph_def.concrete_functions["evil"].bound_inputs.extend([])
        return ""

    def calling(levels: int, times: int) -> Callable[[Any], str]:
        def fill(meta: Any) -> str:
            functions = meta.graph_def.library.function
            _node(functions.add(signature={"name": "f0"}).node_def, "y", "Identity", "x")
            for level in range(levels):
                body = functions.add(signature={"name": f"f{level + 1}"}).node_def
                for time in range(times):
                    called = functions[0].node_def[0].attr["f"].func.__class__(name=f"f{level}")
                    _node(body, f"y{time}", "PartitionedCall", f=called)
            _node(meta.graph_def.node, "call", f"f{levels}")
            return "call"

        return fill

    def asset(meta: Any) -> str:
        added = meta.asset_file_def.add(filename="../../../secret")
        added.tensor_info.name = "name:0"
        return ""

    def vocabulary(meta: Any) -> str:
        nodes = meta.graph_def.node
        _node(nodes, "table", "HashTableV2", key_dtype=string, value_dtype=string)
        _node(
            nodes, "fill", "InitializeTableFromTextFileV2", "table",
            _constant(nodes, "name", "/etc/passwd"),
        )  # fmt: skip
        meta.collection_def["table_initializer"].node_list.value.append("fill")
        return ""

    def vocabulary_by_variable(meta: Any) -> str:
        nodes = meta.graph_def.node
        _node(nodes, "v", "VarHandleOp", dtype=string, shared_name="v")
        for name, path in (("good", "asset"), ("evil", "/etc/passwd")):
            _node(nodes, f"set_{name}", "AssignVariableOp", "v", _constant(nodes, name, path))
        meta.asset_file_def.add(filename="asset").tensor_info.name = "good:0"
        _node(nodes, "read", "ReadVariableOp", "v", dtype=string)
        _node(nodes, "table", "HashTableV2", key_dtype=string, value_dtype=string)
        _node(nodes, "fill", "InitializeTableFromTextFileV2", "table", "read")
        meta.collection_def["table_initializer"].node_list.value.append("fill")
        return ""

    def checkpoint(meta: Any) -> str:
        nodes = meta.graph_def.node
        names = [_constant(nodes, key, str(mark)) for key in ("prefix", "names", "slices")]
        _node(nodes, "restore", "RestoreV2", *names, dtypes=[real])
        return "restore"

    return {
        "writes a file": (lambda m: _writing(m.graph_def.node, mark), "WriteFile"),
        "writes a file while it loads": (at_load, "WriteFile"),
        "writes a file in an old initialiser": (at_load_of_old, "WriteFile"),
        "writes a file where it restores": (at_restore, "WriteFile"),
        "writes a file in a function": (in_a_function, "WriteFile"),
        "writes a file in a branch": (in_a_branch, "WriteFile"),
        "writes a file in an object's function": (in_an_object, "WriteFile"),
        "calls functions that double": (calling(30, 2), "inline to more than"),
        "calls functions too deeply": (calling(250, 1), "levels deep"),
        "reads a file": (with_file("ReadFile"), "ReadFile"),
        "lists files": (with_file("MatchingFiles"), "MatchingFiles"),
        "maps a file": (with_file("ImmutableConst"), "ImmutableConst"),
        "opens a TFRecord": (with_file("TFRecordReaderV2"), "TFRecordReaderV2"),
        "merges checkpoints": (with_file("MergeV2Checkpoints"), "MergeV2Checkpoints"),
        "saves a checkpoint": (with_file("SaveV2"), "SaveV2"),
        "restores another checkpoint": (checkpoint, "not an asset"),
        "takes an asset from elsewhere": (asset, "outside its folder"),
        "takes a vocabulary from elsewhere": (vocabulary, "not an asset"),
        "takes a vocabulary by a variable": (vocabulary_by_variable, "not an asset"),
        "calls Python": (plain("PyFunc", token="evil"), "PyFunc"),
        "calls Python eagerly": (plain("EagerPyFunc", token="evil"), "EagerPyFunc"),
        "calls Python without state": (plain("PyFuncStateless", token="evil"), "PyFuncStateless"),
        "prints to a file": (plain("PrintV2", output_stream=f"file://{mark}"), "PrintV2"),
        "debugs to a file": (plain("DebugIdentityV2"), "DebugIdentityV2"),
        "samples words of a file": (plain("FixedUnigramCandidateSampler"), "FixedUnigram"),
        "talks to a queue": (plain("QueueDequeueV2"), "QueueDequeueV2"),
        "talks to a server": (plain("RpcCall"), "RpcCall"),
        "ends the process": (plain("Abort"), "Abort"),
        "compiles": (plain("XlaCallModule"), "XlaCallModule"),
        "uses a library": (plain("SimpleMLInferenceOp"), "SimpleMLInferenceOp"),
    }


def large(kind: str, count: int) -> bytes:
    """A SavedModel of ``count`` variables that are read, or of as many nodes one after another."""
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    meta = saved.meta_graphs.add()
    nodes = meta.graph_def.node
    if kind == "variables":
        for number in range(count):
            _node(nodes, f"v{number}", "VarHandleOp", shared_name=f"v{number}")
            _node(nodes, f"r{number}", "ReadVariableOp", f"v{number}")
        _node(nodes, "y", "AddN", *(f"r{number}" for number in range(count)))
    else:
        _node(nodes, "i0", "Const")
        for number in range(1, count):
            _node(nodes, f"i{number}", "Identity", f"i{number - 1}")
        _node(nodes, "y", "Identity", f"i{count - 1}")
    meta.signature_def["serving_default"].outputs["y"].name = "y:0"
    content: bytes = saved.SerializeToString()
    return content


def lites() -> dict[str, tuple[bytes, str]]:
    """TensorFlow Lite files, and what the refusal names."""

    def model(code: Any, external: bool = False) -> bytes:
        made = schema.ModelT()
        made.version, made.description = 3, "hostile"
        made.operatorCodes, made.subgraphs, made.buffers = [code], [], [schema.BufferT()]
        if external:
            group = schema.ExternalBufferGroupT()
            group.name = "/etc/passwd"
            made.externalBufferGroups = [group]
        builder = flatbuffers.Builder(1024)
        builder.Finish(made.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def custom(name: str, builtin: int = schema.BuiltinOperator.CUSTOM) -> Any:
        code = schema.OperatorCodeT()
        code.deprecatedBuiltinCode, code.builtinCode = min(builtin, 127), builtin
        code.customCode = name.encode()
        return code

    delegate = custom("d", schema.BuiltinOperator.DELEGATE)
    hidden = custom("FlexWriteFile")
    hidden.deprecatedBuiltinCode = 0
    return {
        "runs TensorFlow": (model(custom("FlexWriteFile")), "FlexWriteFile"),
        "hides that it runs TensorFlow": (model(hidden), "FlexWriteFile"),
        "runs a custom operator": (model(custom("Evil")), "Evil"),
        "brings a delegate": (model(delegate), "not TensorFlow Lite's own"),
        "keeps weights elsewhere": (model(custom("Mfcc"), external=True), "in other files"),
    }


def intermediate_representation(constant: str = "", extra: str = "", before: str = "") -> str:
    """The XML of ``y = x + w`` over one OpenVINO constant of 16 bytes."""
    constant = constant or 'element_type="f32" shape="4" offset="0" size="16"'

    def layer(number: int, kind: str, data: str, inputs: int, outputs: str, more: str = "") -> str:
        port = '<port id="{}" precision="FP32" {}><dim>4</dim></port>'
        taken = "".join(port.format(index, "") for index in range(inputs))
        given = f"<output>{port.format(inputs, outputs)}</output>" if kind != "Result" else ""
        ports = (f"<input>{taken}</input>" if inputs else "") + given
        return (
            f'<layer id="{number}" name="{kind}{number}" type="{kind}" version="opset1" {more}>'
            f"<data {data}/>{ports}</layer>"
        )

    layers = (
        layer(0, "Parameter", 'shape="4" element_type="f32"', 0, 'names="x"')
        + layer(1, "Const", constant, 0, "")
        + layer(2, "Add", 'auto_broadcast="numpy"', 2, 'names="y"')
        + layer(3, "Result", "", 1, "", 'output_names="y"')
    )
    edges = "".join(
        f'<edge from-layer="{a}" from-port="{b}" to-layer="{c}" to-port="{d}"/>'
        for a, b, c, d in ((0, 0, 2, 0), (1, 0, 2, 1), (2, 2, 3, 0))
    )
    return (
        f'<?xml version="1.0"?>{before}<net name="m" version="11"><layers>{layers}{extra}</layers>'
        f"<edges>{edges}</edges></net>"
    )


def openvinos() -> dict[str, tuple[bytes, str]]:
    """OpenVINO IRs beside a constant of 16 bytes, and what the refusal names."""
    graph = intermediate_representation

    def constant(offset: str, size: str) -> str:
        return graph(f'element_type="f32" shape="4" offset="{offset}" size="{size}"')

    entity = '<!DOCTYPE net [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    bomb = '<!DOCTYPE net [<!ENTITY a "aaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
    foreign = '<layer id="9" name="e" type="Evil" version="extension"/>'
    body = f'<layer id="8" name="l" type="Loop" version="opset5"><body>{foreign}</body></layer>'
    copy = (
        '<layer id="7" name="c" type="Const" version="opset1"><data offset="0" size="16"/></layer>'
    )
    cases = {
        "names another file as an entity": (graph(before=entity), "declares a document type"),
        "defines entities of entities": (graph(before=bomb), "declares a document type"),
        "uses an operation of an extension": (graph(extra=foreign), "'Evil' of 'extension'"),
        "uses an extension in a loop": (graph(extra=body), "'Evil' of 'extension'"),
        "takes a constant beyond its file": (constant("8", "16"), "beyond the end"),
        "takes a constant before its file": (constant("-8", "16"), "no valid offset"),
        "takes a constant whose end wraps": (constant("8", str(2**64 - 8)), "no valid offset"),
        "nests without end": (graph(extra="<body>" * 100 + "</body>" * 100), "levels deep"),
        "takes a size that is not a number": (
            graph().replace("<dim>4</dim>", "<dim>4x</dim>", 1),
            "'4x' is not a size",
        ),
        "is another document": ("<html></html>", "root is 'html'"),
        "is in another encoding": (graph().encode("utf-16"), "does not load"),
        "repeats its constant": (graph(extra=copy * 8), "constants of"),
    }
    return {
        what: (text if isinstance(text, bytes) else text.encode(), reason)
        for what, (text, reason) in cases.items()
    }


def onnxes(folder: Path) -> dict[str, tuple[bytes, str]]:
    """ONNX files, and what the refusal names; ``folder`` is where they will lie."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])

    def calling(levels: int, times: int) -> bytes:
        opsets = [helper.make_opsetid("mine", 1)]
        functions = [helper.make_function("mine", "f0", ["x"], ["y"], [], opsets)]
        for level in range(levels):
            calls = [
                helper.make_node(f"f{level}", ["x"], [f"y{time}"], domain="mine")
                for time in range(times)
            ]
            name = f"f{level + 1}"
            functions.append(helper.make_function("mine", name, ["x"], ["y0"], calls, opsets))
        call = helper.make_node(f"f{levels}", ["x"], ["y"], domain="mine")
        return model(call, functions=functions)

    def model(*nodes: Any, weights: Any = None, functions: Any = ()) -> bytes:
        graph = helper.make_graph(nodes, "g", [x], [y], initializer=weights or [])
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
        made = helper.make_model(graph, opset_imports=opsets, functions=functions)
        content: bytes = made.SerializeToString()
        return content

    def uses(op: str, domain: str = "") -> bytes:
        return model(helper.make_node(op, ["x"], ["y"], domain=domain))

    def takes(location: str) -> bytes:
        weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value=location)
        return model(helper.make_node("Add", ["x", "w"], ["y"]), weights=[weight])

    def hidden(content: bytes) -> bytes:
        """The graph under a tag of 33 bits, of which protobuf in C++ takes the lower 32."""
        made = ModelProto.FromString(content)
        graph = made.graph.SerializeToString()
        made.ClearField("graph")
        tag = varint(7 << 3 | 2 | 1 << 32)
        return bytes(made.SerializeToString() + tag + varint(len(graph)) + graph)

    inner = helper.make_graph([helper.make_node("Evil", [], ["z"], domain="evil")], "i", [], [y])
    branch = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    body = [helper.make_node("Evil", ["a"], ["b"], domain="evil")]
    function = helper.make_function("mine", "F", ["a"], ["b"], body, [])
    context = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft")
    itself = helper.make_node("F", ["a"], ["b"], domain="mine")
    recursive = helper.make_function("mine", "F", ["a"], ["b"], [itself], [])
    namesake = helper.make_function("com.microsoft", "EPContext", ["a"], ["b"], [], [])
    (folder / "link").symlink_to("/etc/passwd")
    return {
        "uses a custom operator": (uses("Evil", "evil"), "evil.Evil"),
        "uses an extension": (uses("PyOp", "ai.onnx.contrib"), "ai.onnx.contrib.PyOp"),
        "runs a compiled context": (uses("EPContext", "com.microsoft"), "EPContext"),
        "hides a compiled context behind a function": (
            model(context, functions=[namesake]),
            "EPContext",
        ),
        "runs Python": (uses("PythonOp", "com.microsoft"), "PythonOp"),
        "uses a custom operator in a branch": (model(branch), "evil.Evil"),
        "uses a custom operator in a function": (
            model(helper.make_node("F", ["x"], ["y"], domain="mine"), functions=[function]),
            "evil.Evil",
        ),
        "calls functions that double": (calling(30, 2), "inline to more than"),
        "calls functions too deeply": (calling(250, 1), "levels deep"),
        "calls a function that calls itself": (
            model(itself, functions=[recursive]),
            "call themselves",
        ),
        "takes weights from elsewhere": (takes("/etc/passwd"), "not a file beside it"),
        "takes weights from above": (takes("../../../secret"), "not a file beside it"),
        "takes weights behind a link": (takes("link"), "not a file beside it"),
        "takes weights from memory": (takes("*/_ORT_MEM_ADDR_/*"), "not a file beside it"),
        "takes weights from a folder": (takes("."), "not a file beside it"),
        "hides its graph": (hidden(uses("EPContext", "com.microsoft")), "does not load"),
        "is of another format": (b"\x18\0\0\0ORTM" + bytes(64), "does not load"),
    }


def check_honest(folder: Path) -> bytes:
    """A plain ONNX file, as the ground of the others."""
    node = helper.make_node("Identity", ["x"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    content: bytes = helper.make_model(graph).SerializeToString()
    assert onnx.load_from_string(content).graph.node
    return content
