"""What a SavedModel's graph may do, judged before TensorFlow loads it.

A graph is a program: it can read and write files, open connections and call into Python, and some
of it runs while it is loaded. Only operators of ``tensorflow_operators.PURE`` pass, in whatever
loading the model, a signature or a function of it can run. Two kinds of operators read files all
the same: those that restore variables, and those that fill a table from a vocabulary. They pass
where the path is the one that the loader feeds: the checkpoint or an asset of this folder. What
only saves variables is in every SavedModel and never run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from gateway.errors import IntegrityError
from gateway.repository.tensorflow_operators import PURE

FILENAME = "saved_model.pb"
#: What the loader runs once, with the paths of the assets fed.
INITIAL = "__saved_model_init_op"

#: Operators that read the file whose path is this input of theirs.
READERS: Mapping[str, int] = {
    "InitializeTableFromTextFile": 1,
    "InitializeTableFromTextFileV2": 1,
    "Restore": 0,
    "RestoreSlice": 0,
    "RestoreV2": 0,
}
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
#: What hands a path on as it is.
_PASSES = frozenset({"Identity", "PlaceholderWithDefault"})


def read(folder: Path) -> Any:
    """The message in ``folder``; TensorFlow is imported.

    Raises:
        IntegrityError: it is damaged.
    """
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString((folder / FILENAME).read_bytes())
    except (OSError, DecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise IntegrityError(
            f"'{folder.name}' does not load: its {FILENAME} is damaged ({reason}); save or copy it "
            "again"
        ) from error
    return saved


def check(folder: Path) -> None:
    """Refuse a SavedModel that can do more than compute, in any of its graphs.

    Raises:
        IntegrityError: naming the operator; or it is damaged.
    """
    for meta_graph in read(folder).meta_graphs:
        _MetaGraph(folder, meta_graph).check()


class _MetaGraph:
    """The check of one graph with its functions."""

    def __init__(self, folder: Path, graph: Any) -> None:
        self._folder, self._graph = folder, graph
        self._nodes = {node.name: node for node in graph.graph_def.node}
        self._functions = {f.signature.name: f for f in graph.graph_def.library.function}
        #: Whether a function has variables of its own, which could be those of the graph.
        self._shares = any(
            node.op == "VarHandleOp" for f in self._functions.values() for node in f.node_def
        )
        self._seen: set[tuple[str, frozenset[str]]] = set()
        #: Functions to look at, with those of their arguments that are a path of the loader's.
        self._waiting: list[tuple[str, frozenset[str]]] = []

    def check(self) -> None:
        graph = self._graph
        for asset in graph.asset_file_def:
            path = PurePosixPath(asset.filename)
            if path.is_absolute() or ".." in path.parts or "\\" in asset.filename:
                raise IntegrityError(
                    f"SavedModel '{self._folder.name}' has an asset outside of its folder, "
                    f"'{asset.filename}': refused and not loaded; save it again"
                )
        saver = graph.saver_def
        assets = [asset.tensor_info.name for asset in graph.asset_file_def]
        self._check_fetched([saver.restore_op_name], [saver.filename_tensor_name])
        for collection in graph.collection_def.values():
            self._check_fetched(collection.node_list.value, assets)
        for name, signature in graph.signature_def.items():
            outputs = [tensor.name for tensor in signature.outputs.values()]
            self._check_fetched(outputs, assets if name == INITIAL else [])
        self._add_objects()
        while self._waiting:
            name, arguments = self._waiting.pop()
            nodes = {node.name: node for node in self._functions[name].node_def}
            self._check(nodes, list(nodes), arguments)

    def _check_fetched(self, tensors: Iterable[str], fed: Iterable[str]) -> None:
        paths = frozenset(name for tensor in fed if (name := _node_name(tensor)))
        self._check(self._nodes, map(_node_name, tensors), paths)

    def _add_objects(self) -> None:
        """Functions of the model's objects, which ``tf.saved_model.load`` may call by itself."""
        objects = self._graph.object_graph_def
        for name, function in objects.concrete_functions.items():
            if name in self._functions:
                arguments = [each.name for each in self._functions[name].signature.input_arg]
                bound = function.bound_inputs
                captured = zip(arguments[len(arguments) - len(bound) :], bound, strict=False)
                assets = (
                    argument
                    for argument, index in captured
                    if index < len(objects.nodes) and objects.nodes[index].HasField("asset")
                )
                self._call(name, assets)

    def _call(self, name: str, paths: Iterable[str]) -> None:
        call = name, frozenset(paths)
        if call not in self._seen:
            self._seen.add(call)
            self._waiting.append(call)

    def _check(self, nodes: Mapping[str, Any], names: Iterable[str], given: frozenset[str]) -> None:
        """``names`` and all that they are computed from."""
        waiting, seen = list(names), set[str]()
        while waiting:
            node = nodes.get(waiting.pop())
            if node is not None and node.name not in seen:
                seen.add(node.name)
                if node.name not in given:  # its value is fed
                    self._check_node(nodes, node, given)
                    waiting += map(_node_name, node.input)

    def _check_node(self, nodes: Mapping[str, Any], node: Any, given: frozenset[str]) -> None:
        paths = [self._source(nodes, name, given) in given for name in node.input]
        called = node.op if node.op in self._functions else ""
        if node.op in _CALLS:
            called = node.attr["f"].func.name
        if called in self._functions:
            arguments = [each.name for each in self._functions[called].signature.input_arg]
            self._call(called, (a for a, path in zip(arguments, paths, strict=False) if path))
        elif node.op in READERS:
            if not any(paths[READERS[node.op] : READERS[node.op] + 1]):
                raise self._refused(node, "reads a file that is not an asset of the model")
        elif node.op not in PURE:
            raise self._refused(node, "may run code or reach files, devices or the network")
        for value in node.attr.values():
            for function in (value.func, *value.list.func):
                if function.name in self._functions and function.name != called:
                    self._call(function.name, ())

    def _source(self, nodes: Mapping[str, Any], tensor: str, given: frozenset[str]) -> str:
        """The node whose value ``tensor`` is, whatever hands it on."""
        name = _node_name(tensor)
        for _ in range(len(nodes)):
            node = nodes.get(name)
            if name in given or node is None or node.op not in _PASSES or not node.input:
                break
            name = _node_name(node.input[0])
        node = nodes.get(name)
        if node is None or node.op != "ReadVariableOp" or name in given or self._shares:
            return name
        return _stored(nodes, _node_name(node.input[0]), given) or name

    def _refused(self, node: Any, why: str) -> IntegrityError:
        return IntegrityError(
            f"SavedModel '{self._folder.name}': operator {node.op} ('{node.name}') {why}: refused "
            "and not loaded; export the model's computation alone, or sign the version"
        )


def _stored(nodes: Mapping[str, Any], handle: str, given: frozenset[str]) -> str:
    """The path that is all that a variable can hold, as Keras keeps a vocabulary's; empty: none."""
    variable = nodes.get(handle)
    if variable is None or variable.op != "VarHandleOp":
        return ""
    key = variable.attr["shared_name"].s
    for node in nodes.values():
        if node.op == "VarHandleOp" and node.name != handle and node.attr["shared_name"].s == key:
            return ""  # the same variable under another name
    users = [node for node in nodes.values() if handle in map(_node_name, node.input)]
    values = [
        _node_name(node.input[1])
        for node in users
        if node.op == "AssignVariableOp" and _node_name(node.input[0]) == handle
    ]
    others = {node.op for node in users} - {"AssignVariableOp", "ReadVariableOp"}
    known = len(set(values)) == 1 and values[0] in given and others <= {"VarIsInitializedOp"}
    return values[0] if known else ""


def _node_name(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]
