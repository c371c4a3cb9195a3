"""Check of a SavedModel's graph before TensorFlow loads it.

A graph is a program: it can read and write files, open connections and call Python, and parts of it
run while it is loaded. Only the operators of ``tensorflow_allowed.txt`` may occur wherever loading
the model, a signature or a function may run them. Two kinds of operators read files nevertheless:
those that restore variables, and those that fill a table from a vocabulary. They are allowed if the
path is the one that the loader feeds: the checkpoint or an asset of this folder. Operators that
only save variables are in every SavedModel and never run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from google.protobuf.message import DecodeError

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.artifact_checks import inlined_size, operator_lists

FILENAME = "saved_model.pb"
#: Operators that only compute.
PURE = operator_lists.read("tensorflow_allowed")
#: Weights lie in other files, except those frozen into the graph.
MAX_BYTES = 1 << 29
#: The operation that the loader runs once, with the paths of the assets fed.
INITIAL = "__saved_model_init_op"

#: Operators that read a file → the index of the input with its path.
READERS: Mapping[str, int] = {
    "InitializeTableFromTextFile": 1,
    "InitializeTableFromTextFileV2": 1,
    "Restore": 0,
    "RestoreSlice": 0,
    "RestoreV2": 0,
}
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
#: Operators that pass a path on unchanged.
_PASSES = frozenset({"Identity", "PlaceholderWithDefault"})
#: Calls with distinct sets of path arguments; each has its function checked again.
MAX_CALLS_WITH_PATHS = 1000


def read(folder: Path) -> Any:
    """Parse the message in ``folder``; imports TensorFlow.

    Raises:
        IntegrityError: it is damaged.
    """
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString(untrusted_files.read(folder / FILENAME, MAX_BYTES))
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
        self._body = _Body(graph.graph_def.node)
        self._functions = {f.signature.name: f for f in graph.graph_def.library.function}
        #: Whether a function has variables of its own, which may be those of the graph.
        self._shares = any(
            node.op == "VarHandleOp" for f in self._functions.values() for node in f.node_def
        )
        self._seen: set[tuple[str, frozenset[str]]] = set()
        #: The checked parts of the graph, by the tensors that the loader feeds.
        self._fetched: dict[frozenset[str], _Paths] = {}
        #: Functions to check, with those of their arguments that are paths of the loader.
        self._waiting: list[tuple[str, frozenset[str]]] = []

    def check(self) -> None:
        graph = self._graph
        bodies = {name: _uses(f.node_def) for name, f in self._functions.items()}
        inlined_size.check(
            f"SavedModel '{self._folder.name}'", bodies | {"": _uses(graph.graph_def.node)}
        )
        for asset in graph.asset_file_def:
            path = PurePosixPath(asset.filename)
            if path.is_absolute() or ".." in path.parts or "\\" in asset.filename:
                raise IntegrityError(
                    f"SavedModel '{self._folder.name}' has an asset outside its folder, "
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
            body = _Body(self._functions[name].node_def)
            self._check(_Paths(body, arguments, self._shares), list(body.nodes))

    def _check_fetched(self, tensors: Iterable[str], fed: Iterable[str]) -> None:
        given = frozenset(name for tensor in fed if (name := _node_name(tensor)))
        if given not in self._fetched:
            self._fetched[given] = _Paths(self._body, given, self._shares)
        self._check(self._fetched[given], map(_node_name, tensors))

    def _add_objects(self) -> None:
        """Add functions of the model's objects, which ``tf.saved_model.load`` may call by
        itself."""
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
            if len(self._seen) > len(self._functions) + MAX_CALLS_WITH_PATHS:
                raise IntegrityError(
                    f"SavedModel '{self._folder.name}' passes paths to more than "
                    f"{MAX_CALLS_WITH_PATHS} functions: refused and not loaded; save it again"
                )
            self._seen.add(call)
            self._waiting.append(call)

    def _check(self, paths: _Paths, names: Iterable[str]) -> None:
        """Check ``names`` and everything from which they are computed."""
        waiting = list(names)
        while waiting:
            node = paths.body.nodes.get(waiting.pop())
            if node is not None and node.name not in paths.seen:
                paths.seen.add(node.name)
                if node.name not in paths.given:  # its value is fed
                    self._check_node(node, paths)
                    waiting += map(_node_name, node.input)

    def _check_node(self, node: Any, given: _Paths) -> None:
        called = node.op if node.op in self._functions else ""
        if node.op in _CALLS:
            called = node.attr["f"].func.name
        if called in self._functions:
            paths = [given.holds(name) for name in node.input]
            arguments = [each.name for each in self._functions[called].signature.input_arg]
            self._call(called, (a for a, path in zip(arguments, paths, strict=False) if path))
        elif node.op in READERS:
            if not any(map(given.holds, node.input[READERS[node.op] : READERS[node.op] + 1])):
                raise self._refused(node, "reads a file that is not an asset of the model")
        elif node.op not in PURE:
            raise self._refused(node, "may run code or reach files, devices or the network")
        for value in node.attr.values():
            for function in (value.func, *value.list.func):
                if function.name in self._functions and function.name != called:
                    self._call(function.name, ())

    def _refused(self, node: Any, why: str) -> IntegrityError:
        return IntegrityError(
            f"SavedModel '{self._folder.name}': operator {node.op} ('{node.name}') {why}: refused "
            "and not loaded; export the model's computation alone, or sign the version"
        )


class _Body:
    """The nodes of a graph or a function, and their connections."""

    def __init__(self, nodes: Iterable[Any]) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.users: Mapping[str, list[Any]] = defaultdict(list)
        for node in self.nodes.values():
            for name in set(map(_node_name, node.input)):
                self.users[name].append(node)
        #: A variable may have several nodes.
        self.handles = Counter(
            node.attr["shared_name"].s for node in self.nodes.values() if node.op == "VarHandleOp"
        )


class _Paths:
    """Follows the ``given`` paths through a body; each node is checked once.

    Args:
        shares: other bodies may also write the variables of this one.
    """

    def __init__(self, body: _Body, given: frozenset[str], shares: bool) -> None:
        self.body, self.given, self._shares = body, given, shares
        #: The checked nodes.
        self.seen: set[str] = set()
        self._sources: dict[str, str] = {}
        #: The value of each variable, by its handle.
        self._values: dict[str, str] = {}

    def holds(self, tensor: str) -> bool:
        """Whether ``tensor`` is one of the paths."""
        return self._source(_node_name(tensor)) in self.given

    def _source(self, name: str) -> str:
        """The node whose value the node ``name`` passes on, or ``name`` itself."""
        chain = dict.fromkeys([name])
        while name not in self._sources:
            node = self.body.nodes.get(name)
            if name in self.given or node is None:
                break
            if node.op in _PASSES and node.input:
                name = _node_name(node.input[0])
            elif node.op == "ReadVariableOp" and not self._shares:
                name = self._stored(_node_name(node.input[0])) or name
            if name in chain:
                break
            chain[name] = None
        source = self._sources.get(name, name)
        self._sources.update(dict.fromkeys(chain, source))
        return source

    def _stored(self, handle: str) -> str:
        """The only possible value of a variable if it is a path, as for Keras' vocabularies; or
        ''."""
        if handle not in self._values:
            self._values[handle] = self._only_value(handle)
        return self._values[handle]

    def _only_value(self, handle: str) -> str:
        variable = self.body.nodes.get(handle)
        if variable is None or variable.op != "VarHandleOp":
            return ""
        if self.body.handles[variable.attr["shared_name"].s] > 1:
            return ""  # the same variable under another name
        users = self.body.users[handle]
        values = {
            _node_name(node.input[1])
            for node in users
            if node.op == "AssignVariableOp" and _node_name(node.input[0]) == handle
        }
        others = {node.op for node in users} - {"AssignVariableOp", "ReadVariableOp"}
        known = len(values) == 1 and values <= self.given and others <= {"VarIsInitializedOp"}
        return values.pop() if known else ""


def _uses(nodes: Iterable[Any]) -> Counter[str]:
    """Count the uses of each operator and function in ``nodes``."""
    used: Counter[str] = Counter()
    for node in nodes:
        used[node.op] += 1
        for value in node.attr.values():
            kind = value.WhichOneof("value")
            if kind == "func":
                used[value.func.name] += 1
            elif kind == "list":
                used.update(function.name for function in value.list.func)
    return used


def _node_name(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]
