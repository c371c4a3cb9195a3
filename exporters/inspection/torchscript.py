"""Inspection of a TorchScript archive from its code and its pickles; neither is run.

``torch.jit.load`` would run ``__setstate__`` of the archive's classes. The code has Python's
grammar and is parsed; the pickles are read with a stand-in for every class.
"""

from __future__ import annotations

import ast
import io
import math
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.exporters.inspection import AxisInfo, Inspection, TensorInfo, describe, tally, word
from modelport.gateway.repository.artifact_checks.torch_archive import Archive

CODE = "code/"
PICKLES = ("data.pkl", "constants.pkl")
VERSIONS = (".data/version", "version")

#: Calls that compute no tensor.
PASSIVE = frozenset({"device"})

#: Names of torch's storages that differ from those of datatypes.
STORAGES = {
    "LONG": "INT64",
    "INT": "INT32",
    "SHORT": "INT16",
    "CHAR": "INT8",
    "BYTE": "UINT8",
    "QINT8": "INT8",
    "QUINT8": "UINT8",
    "QINT32": "INT32",
    "QUINT4X2": "UINT4",
    "COMPLEXFLOAT": "COMPLEX64",
    "COMPLEXDOUBLE": "COMPLEX128",
}


def inspect(path: Path) -> Inspection:
    """Inspect a TorchScript file; raises as ``inspection.inspect``."""
    archive = Archive(path)
    stored = {name: _Unpickler(io.BytesIO(archive.read(name))).load() for name in PICKLES}
    program = _ArchiveCode(archive)
    forward = program.forward(stored[PICKLES[0]])
    signature = archive.signature()
    axes: tuple[AxisInfo, ...] = ()
    if signature is None:
        inputs, outputs = _arguments(forward.node), _results(forward.node)
    else:
        tensors, axes = describe(signature)
        inputs, outputs = tensors[: len(signature.inputs)], tensors[len(signature.inputs) :]
    return Inspection(
        format="torchscript",
        inputs=inputs,
        outputs=outputs,
        size_bytes=path.stat().st_size,
        format_version=archive.text(next(n for n in VERSIONS if n in archive)).strip(),
        dynamic_axes=axes,
        weights=tally(_tensors(stored)),
        operators=dict(program.operators(forward).most_common()),
        notes=("datatypes and sizes are not stored: modelport did not write it",)
        * (signature is None),
    )


@dataclass(frozen=True, slots=True)
class Forward:
    """The arguments and results of ``forward``, in TorchScript's types, such as
    ``Optional[Tensor]``.

    Attributes:
        arguments: name and type of each, in order.
        required: number of arguments without a default.
    """

    arguments: tuple[tuple[str, str], ...]
    required: int
    result: str


def forward(path: Path) -> Forward:
    """The types of the archive's ``forward``; raise one of ``exporters.inspection.DAMAGE``."""
    archive = Archive(path)
    module = _Unpickler(io.BytesIO(archive.read(PICKLES[0]))).load()
    node = _ArchiveCode(archive).forward(module).node
    arguments = tuple((a.arg, _word(a.annotation)) for a in node.args.args[1:])
    return Forward(arguments, len(arguments) - len(node.args.defaults), _word(node.returns))


def _word(annotation: ast.expr | None) -> str:
    return "Tensor" if annotation is None else ast.unparse(annotation)


def _arguments(forward: ast.FunctionDef) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(argument.arg, None, None) for argument in forward.args.args[1:])


def _results(forward: ast.FunctionDef) -> tuple[TensorInfo, ...]:
    """The results, which have no names; a tuple has as many as its type says."""
    returned = forward.returns
    several = isinstance(returned, ast.Subscript) and isinstance(returned.slice, ast.Tuple)
    count = len(returned.slice.elts) if several else 1  # type: ignore[union-attr]
    return tuple(TensorInfo(f"output_{i}", None, None) for i in range(count))


class _Standin:
    """An instance of any class named in a pickle: it keeps its arguments and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.content: list[Any] = list(arguments)

    def __setstate__(self, state: Any) -> None:
        self.content = [state]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.content.append(value)


class _Unpickler(pickle._Unpickler):
    """The unpickler in Python; the one in C allocates any size that a damaged pickle asks for."""

    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Standin,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Any:
        """Describe a storage by its datatype and the name of its record."""
        _, kind, key, *_ = pid
        name = kind.__name__.removesuffix("Storage").upper()
        return word(STORAGES.get(name, name)), str(key)


def _tensors(stored: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Datatype and size of every tensor; tensors that share their values count once."""
    seen: set[object] = set()
    for source, content in stored.items():
        waiting = [content]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                waiting.extend(value.values())
            elif isinstance(value, tuple | list):
                waiting.extend(value)
            elif isinstance(value, _Standin) and id(value) not in seen:
                seen.add(id(value))
                if type(value).__name__.startswith(("_rebuild_tensor", "_rebuild_qtensor")):
                    (datatype, key), offset, sizes, *rest = value.content
                    if type(value).__name__.endswith("_v3"):
                        datatype = word(rest[3].__name__.replace("_", ""))
                    if (source, key, offset, sizes) not in seen:
                        seen.add((source, key, offset, sizes))
                        yield datatype, math.prod(sizes)
                else:
                    waiting.extend(value.content)


@dataclass(frozen=True, slots=True)
class _Function:
    """A method of ``owner``, or a function, for which ``owner`` is empty."""

    owner: str
    node: ast.FunctionDef


class _ArchiveCode:
    """The code of an archive.

    Attributes:
        methods: by class and name.
        functions: by name.
        fields: the types of attributes, by class and name.
    """

    def __init__(self, archive: Archive) -> None:
        self.methods: dict[tuple[str, str], _Function] = {}
        self.functions: dict[str, _Function] = {}
        self.fields: dict[tuple[str, str], str] = {}
        self._known: dict[_Function, Counter[str]] = {}
        for record in archive.below(CODE, ".py"):
            module = record.removeprefix(CODE).removesuffix(".py").replace("/", ".")
            for node in ast.parse(archive.text(record)).body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[f"{module}.{node.name}"] = _Function("", node)
                elif isinstance(node, ast.ClassDef):
                    self._add_class(f"{module}.{node.name}", node)

    def _add_class(self, name: str, node: ast.ClassDef) -> None:
        for statement in node.body:
            match statement:
                case ast.FunctionDef():
                    self.methods[name, statement.name] = _Function(name, statement)
                case ast.AnnAssign(target=ast.Name(id=attribute), annotation=kind):
                    self.fields[name, attribute] = ast.unparse(kind)
                # An attribute whose name is not an identifier, such as a number.
                case ast.Assign(
                    targets=[ast.Subscript(slice=ast.Constant(value=attribute))], value=kind
                ):
                    self.fields[name, str(attribute)] = ast.unparse(kind)

    def forward(self, module: Any) -> _Function:
        """The method of the archive's main module, an instance of a stand-in."""
        main = type(module)
        return self.methods[f"{main.__module__}.{main.__name__}", "forward"]

    def operators(self, function: _Function) -> Counter[str]:
        """Count operator calls, including those in called functions; a loop counts once."""
        if function not in self._known:
            calls = _Calls(self, function)
            calls.visit(function.node)
            self._known[function] = calls.operators
        return self._known[function]


class _Calls(ast.NodeVisitor):
    """Counts the calls in one function, and tracks which of its variables are modules."""

    def __init__(self, program: _ArchiveCode, function: _Function) -> None:
        self.operators: Counter[str] = Counter()
        self._program = program
        self._types = {
            argument.arg: ast.unparse(argument.annotation)
            for argument in function.node.args.args
            if argument.annotation is not None
        }
        if function.owner:
            self._types[function.node.args.args[0].arg] = function.owner

    def visit_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            self._types[node.targets[0].id] = self._type(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                if name not in PASSIVE:
                    self.operators[f"aten::{name}"] += 1
            case ast.Attribute(
                value=ast.Attribute(value=ast.Name(id="ops"), attr=namespace), attr=name
            ):
                self.operators[f"{namespace}::{name}"] += 1
            case ast.Name(id=name):  # int(), or a function under a shorter name
                self._count(self._program.functions.get(self._types.get(name, "")))
            case ast.Attribute(value=value, attr=name):
                method = self._program.methods.get((self._type(value), name))
                self._count(method or self._program.functions.get(ast.unparse(node.func)))
        self.generic_visit(node)

    def _count(self, called: _Function | None) -> None:
        if called is not None:
            self.operators += self._program.operators(called)

    def _type(self, value: ast.expr) -> str:
        """The class of ``value``, or a function's name; empty for anything else."""
        match value:
            case ast.Name(id=name):
                return self._types.get(name, "")
            case ast.Attribute(value=owner, attr=attribute):
                kind = self._program.fields.get((self._type(owner), attribute))
                return ast.unparse(value) if kind is None else kind
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=attribute)]):
                return self._program.fields.get((self._type(owner), str(attribute)), "")
        return ""
