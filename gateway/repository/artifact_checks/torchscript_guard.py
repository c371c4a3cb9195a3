"""Check of TorchScript: of the archive before torch reads it, and of the module before it runs.

Loading runs ``__setstate__`` of the archive's classes and of native ones, so archives with either
are refused unread. The operators are those of the graph that torch has compiled of the code: torch
is the only reader of that language, and compiling runs nothing.
"""

from __future__ import annotations

import pickletools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository.artifact_checks import inlined_size
from modelport.gateway.repository.artifact_checks.torch_archive import DAMAGE, Archive
from modelport.gateway.repository.artifact_checks.torch_operators import is_pure

#: Looks up a module's function or method by its qualified name; None: there is none.
Functions = Callable[[str], Any]

_RECORD = re.compile(
    r"(data|constants|traced_inputs)(\.pkl|/\d+)|code/.+\.(py|debug_pkl)|version|byteorder"
    r"|\.(format_version|storage_alignment)|\.data/[\w.]+|extra/.+",
    re.ASCII,
)
#: In code and in names of classes: constructs that run while the archive is loaded.
_RUNS = {
    b"__setstate__": "has a class with __setstate__, which runs while it is loaded",
    b"torch.classes": "uses a class of native code",
}
#: An operator as torch writes it; other notations are found in the graph.
_CALL = re.compile(rb"\b(?:torch|ops\.(\w+))\.(\w+)\(")
#: Global names that torch writes; the archive's classes are below ``__torch__``.
_GLOBAL = re.compile(
    r"collections OrderedDict|torch (\w*Storage|device|dtype|Size|[bcfiqu]\w+|per_\w+)"
    r"|torch\._utils _rebuild_\w+|torch\.jit\._pickle \w+|torch\.serialization _get_layout"
    r"|__torch__(?!\.torch\.classes)[\w.]* \w+",
    re.ASCII,
)
_OTHER_WAYS = frozenset({"INST", "OBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1"}) | {
    "EXT2", "EXT4", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER",
}  # fmt: skip


def check_archive(archive: Archive) -> None:
    """Refuse an archive that runs code while it is loaded.

    Raises:
        IntegrityError: naming the record.
    """
    for name in archive.names():
        if not _RECORD.fullmatch(name):
            raise _refused(archive.path.name, f"holds '{name}', which no TorchScript archive has")
        if name.endswith("pkl"):
            _check_pickle(archive, name)
        elif name.startswith("code/"):
            code = archive.read(name)
            for word, why in _RUNS.items():
                if word in code:
                    raise _refused(archive.path.name, f"{why} ('{name}')")
            for namespace, operator in _CALL.findall(code):
                kind = f"{namespace.decode() or 'aten'}::{operator.decode()}"
                if not is_pure(kind):
                    raise _impure(archive.path.name, kind)


def _check_pickle(archive: Archive, name: str) -> None:
    content = archive.read(name)
    try:
        for opcode, argument, _ in pickletools.genops(content):
            named = opcode.name == "GLOBAL" and not _GLOBAL.fullmatch(str(argument))
            if named or opcode.name in _OTHER_WAYS:
                what = str(argument or opcode.name).replace(" ", ".")
                raise _refused(archive.path.name, f"names '{what}' in '{name}'")
    except DAMAGE as error:
        raise IntegrityError(
            f"'{archive.path.name}' is damaged ('{name}': {error}); export the model again, or "
            "copy it again"
        ) from error


def load(path: Path, device: Any = "cpu") -> tuple[Any, Functions]:
    """Load the module in ``path`` as ``torch.jit.load`` does, and also return its functions.

    The steps are those of ``torch.jit.load``, which does not return the functions.
    """
    import torch
    from torch.jit._recursive import wrap_cpp_module

    unit = torch._C.CompilationUnit()
    where = torch.device(device)
    module = torch._C.import_ir_module(unit, str(path), where, {}, False)  # type: ignore[call-arg]
    return wrap_cpp_module(module), unit.find_function  # type: ignore[no-untyped-call]


def check_operators(module: Any, functions: Functions, file: str) -> None:
    """Refuse a loaded module that does more than compute, before it runs.

    Raises:
        IntegrityError: naming the operator; or its functions inline to too many operators.
    """
    graphs = {"": module.forward.graph}
    bodies: dict[str, Counter[str]] = {}
    while graphs:
        name, graph = graphs.popitem()
        bodies[name] = Counter()
        for node in nodes(graph):
            used = _called(node)
            callee = functions(used) if used else None
            if callee is None:
                used = node.kind()
                if not is_pure(used):
                    raise _impure(file, used)
            elif used not in bodies:
                graphs[used] = callee.graph
            bodies[name][used] += 1
    inlined_size.check(f"'{file}'", bodies)


def use_device(graph: Any, device: Any) -> None:
    """Make all constants of ``graph`` that are devices ``device``.

    A trace keeps the device of its example, for tensors that the model makes.
    """
    for node in nodes(graph):
        if node.kind() == "prim::Constant" and str(node.output().type()) == "Device":
            node.s_("value", str(device))


def _called(node: Any) -> str:
    """The name of the function that ``node`` calls; empty: none."""
    if node.kind() == "prim::CallMethod":
        return f"{next(node.inputs()).type()}.{node.s('name')}"
    if node.kind() == "prim::CallFunction":
        return str(next(node.inputs()).type())
    return ""


def nodes(graph: Any) -> Iterator[Any]:
    """Every node of ``graph`` and its nested graphs, without functions that are constants."""
    waiting = list(graph.nodes())
    while waiting:
        node = waiting.pop()
        yield node
        for block in node.blocks():
            waiting += block.nodes()
        for name in node.attributeNames():
            if node.kindOf(name) == "g":
                waiting += node.g(name).nodes()
            elif node.kindOf(name) == "gs":
                waiting += (inner for graph in node.gs(name) for inner in graph.nodes())


def _impure(file: str, kind: str) -> IntegrityError:
    return _refused(file, f"uses operator {kind}, which does more than compute")


def _refused(file: str, what: str) -> IntegrityError:
    return IntegrityError(
        f"'{file}' {what}: refused and not run; export the model's computation alone, or sign the "
        "version"
    )
