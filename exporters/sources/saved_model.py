"""What a SavedModel's graph may do, judged before TensorFlow loads it.

A graph is a program: it can read and write files, open connections and call into Python, and some
of it runs while it is loaded. A served model computes outputs from its inputs and its variables, so
any operator with another effect is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import exporters.tensorflow_runtime  # noqa: F401  # before TensorFlow: it keeps it quiet

# isort: split
from google.protobuf.message import DecodeError
from tensorflow.core.framework import node_def_pb2, op_def_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework import op_def_registry

from exporters.errors import UsageError
from gateway.errors import IntegrityError

FILENAME = "saved_model.pb"
SIGNATURE = "serving_default"

#: Stateful operators that touch nothing but the model's own variables, tables and random state, or
#: only call other functions. Any other stateful operator has an effect outside of the model.
STATEFUL = re.compile(
    r"(Stateful)?PartitionedCall|If|While|Case|Assert|Empty|Variable(V2)?|VarHandleOp|VariableShape"
    r"|ReadVariableOp|Assign(Add|Sub)?VariableOp|VarIsInitializedOp|DisableCopyOnRead"
    r"|Resource(Gather|Scatter|Apply|StridedSlice|CountUpTo)\w*|TensorArray\w*|Stack\w*"
    r"|(Mutable)?(Dense)?HashTable\w*|AnonymousHashTable|LookupTable\w*|InitializeTableV2"
    r"|Random(Uniform|UniformInt|StandardNormal|Gamma|PoissonV2|Shuffle)|TruncatedNormal|Multinomial"
    r"|Stateful(Uniform|UniformInt|UniformFullInt|StandardNormalV2|TruncatedNormal|RandomBinomial)"
    r"|Rng\w+|StatelessRandomGetAlg|GuaranteeConst|CheckNumerics(V2)?|CudnnRNN\w*|_Arg|_Retval"
)

#: Operators that are declared stateless and yet run Python, native code or a data pipeline, or read
#: or write files (``DecodeProtoV2`` takes its descriptors from one, ``DebugIdentity`` writes to a
#: URL).
FORBIDDEN = re.compile(
    r"PyFuncStateless|XlaCustomCall\w*|ReadFile|MatchingFiles|Reader\w+|Debug\w+|\w*Dataset\w*"
    r"|Snapshot\w*|InitializeTableFromTextFile|GenerateVocabRemapping|(En|De)codeProto\w*"
    r"|CustomAggregator|CopyHost"
)

#: Every SavedModel has a function that saves and one that restores its variables. Nothing that
#: loading or the signature runs may reach them: the path would be the graph's to choose.
CHECKPOINT = re.compile(r"(Save|Restore)(V2|Slices?)?|MergeV2Checkpoints|LoadAndRemapMatrix")


def check(folder: Path) -> None:
    """Read the graph in ``folder`` without loading it.

    Raises:
        UsageError: it has no signature ``serving_default``, or no graph or several.
        IntegrityError: it is damaged, or it reaches out of the model.
    """
    saved = saved_model_pb2.SavedModel()
    try:
        saved.ParseFromString((folder / FILENAME).read_bytes())
    except (OSError, DecodeError) as error:
        raise IntegrityError(
            f"'{folder.name}/{FILENAME}' is damaged ({error}); save or copy it again"
        ) from error
    graphs = saved.meta_graphs
    if len(graphs) != 1:
        raise UsageError(
            f"'{folder.name}' holds {len(graphs)} graphs, one is needed; save it again for serving"
        )
    if SIGNATURE not in graphs[0].signature_def:
        there = [name for name in sorted(graphs[0].signature_def) if not name.startswith("__")]
        raise UsageError(
            f"'{folder.name}' has no signature '{SIGNATURE}', only "
            f"{', '.join(there) or 'none at all'}; save it with signatures={{'{SIGNATURE}': ...}}"
        )
    _check_operators(folder, graphs[0])


def _check_operators(folder: Path, graph: Any) -> None:
    library = {function.signature.name: function for function in graph.graph_def.library.function}
    nodes = [*graph.graph_def.node, *(n for f in library.values() for n in f.node_def)]
    for node in nodes:
        if node.op not in library and not CHECKPOINT.fullmatch(node.op):
            _check_operator(folder, node)
    for node in _run_by_others_than_the_saver(graph, library):
        if CHECKPOINT.fullmatch(node.op):
            raise _refused(folder, node, "reads or writes files")


def _check_operator(folder: Path, node: node_def_pb2.NodeDef) -> None:
    declared: op_def_pb2.OpDef | None = op_def_registry.get(node.op)
    if declared is None:
        raise _refused(folder, node, "is not TensorFlow's own and needs a library of native code")
    if FORBIDDEN.fullmatch(node.op) or (declared.is_stateful and not STATEFUL.fullmatch(node.op)):
        raise _refused(folder, node, "runs code or reaches files, devices or the network")


def _refused(folder: Path, node: node_def_pb2.NodeDef, why: str) -> IntegrityError:
    return IntegrityError(
        f"SavedModel '{folder.name}': operator {node.op} ('{node.name}') {why}: refused and not "
        "loaded; export the model's computation alone"
    )


def _run_by_others_than_the_saver(
    graph: Any, library: dict[str, Any]
) -> Iterator[node_def_pb2.NodeDef]:
    """Every node that loading the model or calling a signature can run."""
    nodes = {node.name: node for node in graph.graph_def.node}
    fetched = [
        tensor.name
        for signature in graph.signature_def.values()
        for tensor in signature.outputs.values()
    ]
    for collection in graph.collection_def.values():
        fetched += collection.node_list.value
    calls = [name for name in graph.object_graph_def.concrete_functions if name in library]
    seen: set[str] = set()
    names = [_node_name(tensor) for tensor in fetched]
    while names:
        node = nodes.get(names.pop())
        if node is None or node.name in seen:
            continue
        seen.add(node.name)
        names += [_node_name(tensor) for tensor in node.input]
        calls += _calls(node, library)
        yield node
    called: set[str] = set()
    while calls:
        name = calls.pop()
        if name in called:
            continue
        called.add(name)
        for node in library[name].node_def:
            calls += _calls(node, library)
            yield node


def _node_name(tensor: str) -> str:
    return tensor.removeprefix("^").partition(":")[0]


def _calls(node: node_def_pb2.NodeDef, library: dict[str, Any]) -> Iterable[str]:
    yield from (node.op,) if node.op in library else ()
    for value in node.attr.values():
        functions = [value.func, *value.list.func]
        yield from (function.name for function in functions if function.name in library)
