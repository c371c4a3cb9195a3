"""Wrong lowerings, made from the right ones by one small change of their source each."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import pytest

from modelport.exporters.lowering import loops, operators, registry
from modelport.exporters.lowering.operators import OPERATORS

#: Every module of operators, and the loops that some of them run.
MODULES: Mapping[str, ModuleType] = {
    **{
        name: module
        for name in operators.__all__
        if inspect.ismodule(module := getattr(operators, name))
    },
    "loops": loops,
}

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

#: A function: the name of its module among ``MODULES``, and its own.
Place = tuple[str, str]


@dataclass(frozen=True, slots=True)
class WrongLowering:
    """One change of one function.

    Attributes:
        module: the name of the changed module.
        function: the name of the changed function.
        line: the line in it, counted from its first.
        change: the change in words.
        tree: makes the changed module.
    """

    module: str
    function: str
    line: int
    change: str
    tree: Callable[[], ast.Module]

    def __repr__(self) -> str:
        return f"{self.module}.{self.function}: {self.change}"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the changed function into the place of the right one, for all that call it."""
        module = MODULES[self.module]
        namespace, lowered = _executed(module, self.tree(), f"<{self!r}>")
        right, wrong = getattr(module, self.function), namespace[self.function]
        for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
            patch.setattr(right, attribute, getattr(wrong, attribute))
        if self.function in _used_at_import(module):
            # Functions that it made when the module was imported are those of the right one.
            for name, function in lowered.items():
                patch.setitem(OPERATORS, name, function)
            if module is operators.layout:
                table = {name: _unwrapped(function)[-1] for name, function in OPERATORS.items()}
                namespace["keep_layouts"](table)
                for name in _wrapped():
                    patch.setitem(OPERATORS, name, table[name])

    def affected(self) -> list[str]:
        """The operators that the changed function computes or helps to compute."""
        reached: set[Place] = set()
        waiting = [(self.module, self.function)]
        while waiting:
            place = waiting.pop()
            if place not in reached:
                reached.add(place)
                waiting += _callers().get(place, ())
        # A function that is mentioned at import may compute any operator of its module.
        whole = {module for module, name in reached if name in _used_at_import(MODULES[module])}
        return [
            name
            for name, places in _places().items()
            if reached & set(places) or (places[-1][0] in whole and _is_made(name))
        ]


def _executed(
    module: ModuleType, tree: ast.Module, filename: str
) -> tuple[dict[str, Any], Mapping[str, Callable[..., Any]]]:
    """The names of a changed module, and the operators that it lowers."""
    found: dict[str, Callable[..., Any]] = {}

    def lowers(*names: str) -> Any:
        return lambda function: [found.update({name: function}) for name in names] and function

    namespace = {"__name__": module.__name__, "__package__": module.__package__}
    kept, registry.lowers = registry.lowers, lowers
    try:
        exec(compile(tree, filename, "exec"), namespace)
    finally:
        registry.lowers = kept
    return namespace, found


@cache
def _used_at_import(module: ModuleType) -> frozenset[str]:
    """The names that are mentioned outside of function bodies: decorators, tables and calls."""
    names: set[str] = set()
    for statement in ast.parse(inspect.getsource(module)).body:
        parts: Sequence[ast.AST] = (
            statement.decorator_list if isinstance(statement, ast.FunctionDef) else [statement]
        )
        for part in parts:
            names |= {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}
    return frozenset(names)


def _unwrapped(function: Any) -> list[Any]:
    """``function``, and what it wraps, inwards."""
    chain = [function]
    while hasattr(chain[-1], "__wrapped__"):
        chain.append(chain[-1].__wrapped__)
    return chain


@cache
def _wrapped() -> Sequence[str]:
    """The operators that keep the layout of their operands."""
    return [name for name, function in OPERATORS.items() if hasattr(function, "__wrapped__")]


@cache
def _places() -> Mapping[str, list[Place]]:
    """For each operator, the functions that made it; the last one computes it."""
    short = {module.__name__: name for name, module in MODULES.items()}
    found = {}
    for name, function in OPERATORS.items():
        codes = [
            (each.__globals__["__name__"], each.__code__.co_qualname)
            for each in _unwrapped(function)
            if isinstance(each, FunctionType)
        ]
        found[name] = [
            (short.get(module, ""), qualified.partition(".")[0]) for module, qualified in codes
        ] or [("", "")]
    return found


def _is_made(operator: str) -> bool:
    """Whether the function of an operator was made by another one."""
    code = getattr(_unwrapped(OPERATORS[operator])[-1], "__code__", None)
    return code is None or "<locals>" in code.co_qualname or code.co_name == "<lambda>"


@cache
def _callers() -> Mapping[Place, set[Place]]:
    """The functions that mention each function."""
    short = {module.__name__: name for name, module in MODULES.items()}
    callers: dict[Place, set[Place]] = {}
    for name, module in MODULES.items():
        for definition in ast.parse(inspect.getsource(module)).body:
            if not isinstance(definition, ast.FunctionDef | ast.ClassDef):
                continue
            for node in ast.walk(definition):
                found = _resolved(module, node)
                if isinstance(found, FunctionType | type) and found.__module__ in short:
                    place = (short[found.__module__], found.__name__)
                    callers.setdefault(place, set()).add((name, definition.name))
    return callers


def _resolved(module: ModuleType, node: ast.AST) -> Any:
    """The meaning of a name, or of an attribute of a module, in ``module``."""
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        owner = getattr(module, node.value.id, None)
        return getattr(owner, node.attr, None) if inspect.ismodule(owner) else None
    return None


def wrong_lowerings(modules: Iterable[str] = MODULES) -> Iterator[WrongLowering]:
    """All changes of ``modules``, in the order of the source."""
    for name in modules:
        tree = ast.parse(inspect.getsource(MODULES[name]))
        for i, definition in enumerate(tree.body):
            if isinstance(definition, ast.FunctionDef):
                yield from _changes_of(name, tree, i)


def _changes_of(module: str, tree: ast.Module, index: int) -> Iterator[WrongLowering]:
    definition = tree.body[index]
    assert isinstance(definition, ast.FunctionDef)
    for number, node in enumerate(ast.walk(definition)):
        for change, apply in _changes(node):
            line = getattr(node, "lineno", definition.lineno) - definition.lineno
            changed = partial(_changed, tree, index, number, apply)
            yield WrongLowering(module, definition.name, line, change, changed)


def _changed(tree: ast.Module, index: int, number: int, apply: Callable[[Any], None]) -> ast.Module:
    """Return a copy of ``tree`` in which ``apply`` has changed one node of one function."""
    changed = copy.copy(tree)
    changed.body = list(tree.body)
    function = changed.body[index] = copy.deepcopy(tree.body[index])
    apply(next(each for i, each in enumerate(ast.walk(function)) if i == number))
    return changed


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
    if isinstance(node, ast.If | ast.IfExp):
        yield f"negated: {ast.unparse(node.test)}", _negate


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _swap(call: ast.Call) -> None:
    call.args[:2] = call.args[1::-1]


def _negate(branch: Any) -> None:
    branch.test = ast.copy_location(ast.UnaryOp(ast.Not(), branch.test), branch.test)
    ast.fix_missing_locations(branch)
