"""Wrong lowerings, made from the right ones by one small change of their source each."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from modelport.exporters.lowering import operators, registry

#: Modules that are changed. Wrong sizes of a convolution or of a pool end the process in oneDNN.
MODULES = (
    *("activations", "arithmetic", "attention", "comparison", "creation", "normalization"),
    *("padding", "products", "reductions", "shapes", "symbolic"),
)

#: Functions that are easily taken for each other; each is replaced by its neighbour.
SIBLINGS = {
    name: other
    for pair in (
        ("acos", "asin"),
        ("argmax", "argmin"),
        ("bitwise_and", "bitwise_or"),
        ("ceil", "floor"),
        ("cos", "sin"),
        ("cosh", "sinh"),
        ("cumsum", "cumprod"),
        ("equal", "not_equal"),
        ("erf", "tanh"),
        ("exp", "expm1"),
        ("floordiv", "truncatediv"),
        ("greater", "greater_equal"),
        ("larger", "smaller"),
        ("left_shift", "right_shift"),
        ("less", "less_equal"),
        ("log", "log1p"),
        ("logical_and", "logical_or"),
        ("maximum", "minimum"),
        ("reduce_all", "reduce_any"),
        ("reduce_max", "reduce_min"),
        ("reduce_mean", "reduce_sum"),
        ("rsqrt", "sqrt"),
        ("zeros_like", "ones_like"),
    )
    for name, other in (pair, pair[::-1])
} | {"abs": "identity", "floormod": "floordiv", "round": "floor", "square": "identity"}

ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
}

#: Calls whose first two arguments cannot be swapped without another result.
ORDERED = frozenset(("atan2", "matmul", "mod", "multiplied", "pow", "subtract", "truncatediv"))


@dataclass(frozen=True, slots=True)
class WrongLowering:
    """One change of one function.

    Attributes:
        module: the module of operators that it changes.
        place: the function and the line in it, counted from the function's first.
        change: the change in words.
        tree: the changed module.
    """

    module: ModuleType
    place: str
    change: str
    tree: ast.Module

    def __repr__(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.place}: {self.change}"

    def lowerings(self) -> Mapping[str, Callable[..., Any]]:
        """The module's operators, compiled from the changed source."""
        found: dict[str, Callable[..., Any]] = {}

        def lowers(*names: str) -> Any:
            return lambda function: [found.update({name: function}) for name in names] and function

        namespace = {"__name__": self.module.__name__, "__package__": self.module.__package__}
        kept, registry.lowers = registry.lowers, lowers
        try:
            exec(compile(self.tree, f"<{self!r}>", "exec"), namespace)
        finally:
            registry.lowers = kept
        return found

    def affected(self) -> list[str]:
        """The operators whose functions are changed, or call the changed one.

        All of the module, if the change is in a function that makes others.
        """
        function = self.place.partition(" ")[0]
        callers = _callers(self.tree)
        reached, waiting = set(), [function]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting += callers.get(name, ())
        names = []
        for definition in self.tree.body:
            if isinstance(definition, ast.FunctionDef) and definition.name in reached:
                for decorator in definition.decorator_list:
                    if isinstance(decorator, ast.Call):
                        names += [each.value for each in decorator.args]  # type: ignore[attr-defined]
        return [str(name) for name in names] or sorted(self.lowerings())


def _callers(tree: ast.Module) -> dict[str, set[str]]:
    """The functions of a module that mention each of its functions."""
    callers: dict[str, set[str]] = {}
    for definition in tree.body:
        if isinstance(definition, ast.FunctionDef):
            for node in ast.walk(definition):
                if isinstance(node, ast.Name):
                    callers.setdefault(node.id, set()).add(definition.name)
    return callers


def wrong_lowerings() -> Iterator[WrongLowering]:
    """All changes of ``MODULES``, in the order of the source."""
    for name in MODULES:
        module = getattr(operators, name)
        tree = ast.parse(inspect.getsource(module))
        for i, definition in enumerate(tree.body):
            if isinstance(definition, ast.FunctionDef):
                yield from _changes_of(module, tree, i)


def _changes_of(module: ModuleType, tree: ast.Module, index: int) -> Iterator[WrongLowering]:
    definition = tree.body[index]
    assert isinstance(definition, ast.FunctionDef)
    for number, node in enumerate(ast.walk(definition)):
        for change, apply in _changes(node):
            changed = copy.copy(tree)
            changed.body = list(tree.body)
            function = copy.deepcopy(definition)
            changed.body[index] = function
            apply(next(each for i, each in enumerate(ast.walk(function)) if i == number))
            line = getattr(node, "lineno", definition.lineno) - definition.lineno
            yield WrongLowering(module, f"{definition.name} +{line}", change, changed)


def _changes(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Changes of one node: words, and the function that makes them on a copy."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        other = ARITHMETIC[type(node.op)]
        yield (
            f"{type(node.op).__name__} becomes {other.__name__}: {ast.unparse(node)}",
            lambda each: setattr(each, "op", other()),
        )
    if isinstance(node, ast.Attribute) and node.attr in SIBLINGS:
        sibling = SIBLINGS[node.attr]
        yield (
            f"{node.attr} becomes {sibling}",
            lambda each: setattr(each, "attr", sibling),
        )
    if isinstance(node, ast.Call) and _name(node.func) in ORDERED and len(node.args) > 1:
        yield f"swapped arguments: {ast.unparse(node)}", _swap


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _swap(call: ast.Call) -> None:
    call.args[:2] = call.args[1::-1]
