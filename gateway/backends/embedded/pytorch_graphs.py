"""ModuleState, randomness and loops of PyTorch modules, read from their graphs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from modelport.gateway.repository.artifact_checks import torchscript_guard

Place = tuple[Any, str]


class ModuleState:
    """The attributes that a run may change, with their first values.

    Args:
        places: modules, each with the name of an attribute.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = list(places)
        # One copy of all, so that attributes that share memory still do.
        self._first = copy.deepcopy([getattr(owner, name) for owner, name in self._places])
        self.names = ", ".join(sorted({name for _, name in self._places}))

    def reset(self) -> None:
        for (owner, name), value in zip(self._places, copy.deepcopy(self._first), strict=True):
            setattr(owner, name, value)


class Traits(NamedTuple):
    """The properties of a module's ``forward``.

    Attributes:
        state: what it changes.
        random: it draws random numbers.
        loops: a value may decide on a loop's turns; of our exports, only in TorchScript.
    """

    state: ModuleState
    random: bool = False
    loops: bool = False


# -- TorchScript ----------------------------------------------------------------------------------


def of_script(module: Any) -> Traits:
    """Read the graph of a module in evaluation mode."""
    graph = module.forward.inlined_graph
    loops = bool(graph.findAllNodes("prim::Loop"))
    return Traits(_script_state(module), _script_is_random(graph), loops)


def _script_state(module: Any) -> ModuleState:
    """The attributes that ``forward`` assigns or writes to."""
    graph = module.forward.inlined_graph.copy()
    for node in graph.findAllNodes("prim::GetAttr"):
        if node.s("name") == "training":  # batch normalisation counts its batches then
            graph.setInsertPoint(node)
            node.output().replaceAllUsesWith(graph.insertConstant(False))
    torch._C._jit_pass_constant_propagation(graph)
    # As ``torch.jit.freeze`` decides which attributes may become constants.
    aliases = graph.alias_db(isFrozen=True)
    nodes = [*graph.findAllNodes("prim::SetAttr"), *graph.findAllNodes("prim::GetAttr")]
    return ModuleState(
        dict.fromkeys(
            _place(node, module)
            for node in nodes
            if node.kind() == "prim::SetAttr" or _is_written(node.output(), aliases)
        )
    )


def _is_written(value: Any, aliases: Any) -> bool:
    values = [value]
    if isinstance(value.type(), torch.ListType | torch.DictType | torch.TupleType):
        values += [output for use in value.uses() for output in use.user.outputs()]
    return any(map(aliases.has_writers, values))


def _place(node: Any, module: Any) -> Place:
    """The module and the attribute of a node that reads or assigns one."""
    path: list[str] = [node.s("name")]
    owner = next(node.inputs()).node()
    while owner.kind() == "prim::GetAttr":
        path.append(owner.s("name"))
        owner = next(owner.inputs()).node()
    for name in reversed(path[1:]):
        module = getattr(module, name)
    return module, path[0]


def _script_is_random(graph: Any) -> bool:
    nodes = list(torchscript_guard.nodes(graph))
    names = {node.kind().partition("::")[2] for node in nodes if node.kind().startswith("aten::")}
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return any(
        _draws(getattr(packet, overload))
        for packet in packets
        if packet is not None
        for overload in packet.overloads()
    )


# -- torch.export ---------------------------------------------------------------------------------


def of_exported(module: torch.fx.GraphModule) -> Traits:
    return Traits(_exported_state(module), _exported_is_random(module))


def _exported_state(module: torch.fx.GraphModule) -> ModuleState:
    """The buffers and constants to which the graph writes."""
    places: dict[Place, None] = {}
    for node in module.graph.nodes:
        for value in _aliased(node, written=True):
            origin = _origin(value)
            if origin.op == "get_attr":
                owner, _, name = str(origin.target).rpartition(".")
                places[module.get_submodule(owner), name] = None
    return ModuleState(places)


def _origin(node: torch.fx.Node) -> torch.fx.Node:
    """The node whose memory ``node`` views, or itself."""
    while (base := next(_aliased(node), None)) is not None:
        node = base
    return node


def _aliased(node: torch.fx.Node, written: bool = False) -> Iterator[torch.fx.Node]:
    """The arguments whose memory an operator returns a view of, or to which it writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for index, argument in enumerate(node.target._schema.arguments):
        alias = argument.alias_info
        if alias is not None and (alias.is_write or not written):
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else [value]  # type: ignore[misc]


def _exported_is_random(module: torch.fx.GraphModule) -> bool:
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    targets = (node.target for graph in graphs for node in graph.nodes)
    return any(isinstance(t, torch._ops.OpOverload) and _draws(t) for t in targets)


def _draws(operator: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags
