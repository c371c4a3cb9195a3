"""Rewriting of views of views, so that data moves once or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from modelport.exporters.lowering.registry import name_of

aten = torch.ops.aten

COPIES = frozenset(("alias", "clone", "contiguous", "detach", "lift_fresh_copy"))
RESHAPES = frozenset(("_unsafe_view", "reshape", "view"))


@dataclass(frozen=True, slots=True)
class View:
    """Dimensions of ``root`` in another order; None is a dimension of size 1 that it lacks."""

    root: fx.Node
    dims: tuple[int | None, ...]

    @property
    def is_permutation(self) -> bool:
        rank = self.root.meta["val"].ndim
        return (
            sorted(dim for dim in self.dims if dim is not None) == list(range(rank))
            and len(self.dims) == rank
        )


def simplify(graph: fx.Graph) -> None:
    """Replace chains of views that only reorder dimensions by one ``permute``, or by nothing.

    A slice of reordered dimensions is taken before they are reordered.
    """
    _drop_copies(graph)
    views: dict[fx.Node, View] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        found = _view(node, views)
        if found is not None:
            views[node] = found
            if found.is_permutation:
                _replace(node, found)
        elif name_of(node.target) == "select.int":
            _select_first(graph, node, views)
    graph.eliminate_dead_code()


def _drop_copies(graph: fx.Graph) -> None:
    """Remove copies, and views whose result is only viewed again: values do not change."""
    for node in graph.nodes:
        if node.op != "call_function" or not node.args:
            continue
        name, source = name_of(node.target), node.args[0]
        if name in COPIES and isinstance(source, fx.Node):
            node.replace_all_uses_with(source)
        elif name in RESHAPES and isinstance(source, fx.Node):
            while source.op == "call_function" and name_of(source.target) in RESHAPES:
                source = source.args[0]
                node.update_arg(0, source)


def _view(node: fx.Node, views: dict[fx.Node, View]) -> View | None:
    """``node`` as a view of the first tensor in its chain; None if it is more than that."""
    name, args = name_of(node.target), node.args
    source = args[0] if args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    rank = source.meta["val"].ndim
    before = views.get(source) or View(source, tuple(range(rank)))
    dims = list(before.dims)
    if name == "unsqueeze":
        dims.insert(_axis(args[1], rank + 1), None)
    elif name == "transpose.int" and rank:
        first, second = _axis(args[1], rank), _axis(args[2], rank)
        dims[first], dims[second] = dims[second], dims[first]
    elif name == "permute":
        dims = [dims[_axis(dim, rank)] for dim in _listed(args[1])]
    elif name in ("squeeze.dim", "squeeze.dims"):
        removed = {_axis(dim, rank) for dim in _listed(args[1])} if rank else set()
        if any(dims[dim] is not None for dim in removed):
            return None
        dims = [each for i, each in enumerate(dims) if i not in removed]
    else:
        return None
    return View(before.root, tuple(dims))


def _axis(dim: object, rank: int) -> int:
    assert isinstance(dim, int)
    return dim % rank


def _listed(dims: object) -> Sequence[object]:
    return dims if isinstance(dims, tuple | list) else (dims,)


def _replace(node: fx.Node, view: View) -> None:
    """Compute ``node`` from the root of its view."""
    if view.dims == tuple(range(len(view.dims))):
        node.replace_all_uses_with(view.root)
    else:
        node.target = aten.permute.default
        node.args = (view.root, list(view.dims))


def _select_first(graph: fx.Graph, node: fx.Node, views: dict[fx.Node, View]) -> None:
    """Select from the root of a permutation instead of from its result."""
    source, dim, index = node.args
    view = views.get(source) if isinstance(source, fx.Node) else None
    if view is None or not view.is_permutation:
        return
    place = _axis(dim, len(view.dims))
    chosen = view.dims[place]
    assert chosen is not None
    rest = [each - (each > chosen) for each in view.dims if each not in (None, chosen)]
    with graph.inserting_before(node):
        selected = graph.call_function(aten.select.int, (view.root, chosen, index))
        selected.meta = {
            **node.meta,
            "val": node.meta["val"].permute([rest.index(i) for i in range(len(rest))]),
        }
        if rest == sorted(rest):
            node.replace_all_uses_with(selected)
            return
        node.target, node.args = aten.permute.default, (selected, rest)
    views[node] = View(selected, tuple(rest))
