"""Rewriting of loops along an axis of open length.

``for t in range(x.shape[1])`` repeats its body for the length that the example has. A regular loop
gets a variant for open lengths beside it: its body becomes a function of the step and of the
variables that the loop carries, and the lists that it appends to become stacked tensors.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, TypeVar

Node = TypeVar("Node", bound=ast.AST)

_IRREGULAR = (
    *(ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.While, ast.Try),
    *(ast.With, ast.Raise, ast.Delete, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.NamedExpr),
)
_LOOPS = frozenset({"range", "unbind"})
_JOINS = {"stack": "stack", "cat": "cat", "concat": "cat"}
#: Prefix of the names in rewritten code that are not the user's.
PREFIX = "_open_loop_"


def rewritten(function: Any) -> Callable[..., Any] | None:
    """``function`` with a variant of each regular loop; None if it has none, or no source."""
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    if _LOOPS.isdisjoint(function.__code__.co_names):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return None
    rewriter = _Rewriter(definition)
    definition.body = [rewriter.visit(statement) for statement in definition.body]
    if not rewriter.loops:
        return None
    definition.returns = None
    for argument in _of_type(ast.arg, definition.args):
        argument.annotation = None
    ast.increment_lineno(ast.fix_missing_locations(tree), function.__code__.co_firstlineno - 1)
    outer = compile(tree, function.__code__.co_filename, "exec", dont_inherit=True)
    code = next(part for part in outer.co_consts if inspect.iscode(part))
    new = FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
    new.__kwdefaults__ = function.__kwdefaults__
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    return new


def _of_type(kind: type[Node], *nodes: ast.AST) -> Iterator[Node]:
    return (part for node in nodes for part in ast.walk(node) if isinstance(part, kind))


def _names(context: type[ast.expr_context], *nodes: ast.AST) -> Iterator[ast.Name]:
    return (name for name in _of_type(ast.Name, *nodes) if isinstance(name.ctx, context))


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(PREFIX + function, ast.Load()), list(arguments), [])


class _Irregular(Exception):
    """The steps of a loop differ, or one reads what has no fixed size."""


class _Rewriter(ast.NodeTransformer):
    """Puts a variant for open lengths beside each regular loop of a function."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.loops = 0
        self._definition = copy.deepcopy(definition)
        self._lists: set[str] = set()

    def visit_For(self, node: ast.For) -> Any:
        try:
            loop = _Loop(node, self._definition)
            variant = loop.variant(self.loops)
        except _Irregular:
            return self.generic_visit(node)
        self.loops += 1
        self._lists |= set(loop.lists)
        return variant

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        first, function = (*node.args, None)[0], node.func
        is_list = isinstance(first, ast.Name) and first.id in self._lists
        if is_list and isinstance(function, ast.Attribute) and function.attr in _JOINS:
            node.func = ast.Name(PREFIX + _JOINS[function.attr], ast.Load())
        return node


class _LaterSteps(ast.NodeTransformer):
    """The steps of a loop from which on tests such as ``t == 0`` and ``t > 1`` come out the same.

    Attributes:
        first: the number of steps before.
        body: the statements of the others, without these tests.
    """

    def __init__(self, loop: ast.For) -> None:
        self.first = 0
        self._step = ast.unparse(loop.target)
        given = [ast.unparse(x) for x in loop.iter.args] if isinstance(loop.iter, ast.Call) else []
        self._start = given[0] if len(given) > 1 else "0"
        self._stride = {"1": 1, "-1": -1}.get(given[2] if len(given) > 2 else "1")
        self.body = self._visited(copy.deepcopy(loop.body))
        if self.first and any(_of_type(ast.Break, *loop.body)):
            raise _Irregular

    def _visited(self, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
        found = (self.visit(each) for each in statements)
        return [part for x in found for part in (x if isinstance(x, list) else [x])]

    def visit_If(self, node: ast.If) -> Any:
        node.test = self._decided(node.test)
        if isinstance(node.test, ast.Constant):
            return self._visited(node.body if node.test.value else node.orelse)
        node.body = self._visited(node.body) or [ast.Pass()]
        node.orelse = self._visited(node.orelse)
        return node

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        node.test = self._decided(node.test)
        if isinstance(node.test, ast.Constant):
            return self.visit(node.body if node.test.value else node.orelse)
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        return self._decided(node)

    def _decided(self, test: ast.expr) -> ast.expr:
        if isinstance(test, ast.Name) and test.id == self._step:
            test = ast.Compare(test, [ast.NotEq()], [ast.Constant(0)])
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test.operand = self._decided(test.operand)
            if isinstance(test.operand, ast.Constant):
                return ast.Constant(not test.operand.value)
            return test
        if isinstance(test, ast.BoolOp):
            values = [self._decided(each) for each in test.values]
            decisive = isinstance(test.op, ast.Or)  # one such value decides the whole test
            if any(isinstance(x, ast.Constant) and bool(x.value) is decisive for x in values):
                return ast.Constant(decisive)
            test.values = [x for x in values if not isinstance(x, ast.Constant)]
            return test if len(test.values) > 1 else (*test.values, ast.Constant(not decisive))[0]
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._compared(test, test.left, test.ops[0], test.comparators[0])
        return test

    def _compared(
        self, test: ast.Compare, left: ast.expr, operator: ast.cmpop, right: ast.expr
    ) -> ast.expr:
        name = type(operator)
        if ast.unparse(right) == self._step:
            left, right, name = right, left, _MIRRORED.get(name, name)
        if ast.unparse(left) != self._step or name not in _FROM or self._stride is None:
            return test
        if self._stride < 0:
            name = _MIRRORED.get(name, name)
        if ast.unparse(right) == self._start:
            place = 0
        elif self._start.isdecimal() and ast.unparse(right).isdecimal():
            place = (int(ast.unparse(right)) - int(self._start)) * self._stride
        else:
            return test
        value, after = _FROM[name]
        self.first = max(self.first, place + after)
        return ast.Constant(value)


#: Comparisons with a step: how they come out in the end, and how many steps after it they do.
_FROM: dict[type[ast.cmpop], tuple[bool, int]] = {
    ast.Eq: (False, 1),
    ast.NotEq: (True, 1),
    ast.Gt: (True, 1),
    ast.GtE: (True, 0),
    ast.Lt: (False, 0),
    ast.LtE: (False, 1),
}
_MIRRORED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}


class _Loop:
    """A loop over numbers or slices of a tensor: what it carries, and the lists it appends to.

    Raises:
        _Irregular: it has no variant.
    """

    def __init__(self, node: ast.For, function: ast.FunctionDef) -> None:
        if not isinstance(node.target, ast.Name) or node.orelse:
            raise _Irregular
        self._node, self.step = node, node.target.id
        self.element = ""
        self._bounds = self._bounds_of(node.iter)
        later = _LaterSteps(node)
        self._later, self._first = later.body, later.first
        if any(_irregular(self._later)):
            raise _Irregular
        arguments = {argument.arg for argument in _of_type(ast.arg, function.args)}
        before = {n.id for n in _names(ast.Store, function) if n.lineno < node.lineno} | arguments
        stored = {n.id for n in _names(ast.Store, *self._later)} - {self.step}
        for part in _of_type(ast.Subscript, *self._later):
            if isinstance(part.ctx, ast.Store):
                if not isinstance(part.value, ast.Name):
                    raise _Irregular
                stored.add(part.value.id)
        used_later = set(self._used_later(function))
        if self._first:  # these steps have set the variables that the others begin with
            before |= _read_first(self._later) | used_later
        if used_later & {*(stored - before), node.target.id}:
            raise _Irregular
        self.carried = sorted(stored & before)
        self.lists = [name for each in self._later if (name := _appended(each))]
        uses = [n.id for n in _names(ast.Load, *self._later)]
        lasts = [ast.unparse(part) for part in _of_type(ast.Subscript, *self._later)]
        self.last = [name for name in self.lists if f"{name}[-1]" in lasts]
        for name in self.lists:  # appended to once, and read at its end alone
            if uses.count(name) != lasts.count(f"{name}[-1]") + 1 or name in self.carried:
                raise _Irregular

    def _bounds_of(self, loop: ast.expr) -> str:
        """The arguments of ``range``, as a tuple."""
        function = loop.func if isinstance(loop, ast.Call) else None
        if not isinstance(loop, ast.Call) or len(loop.args) + len(loop.keywords) > 3:
            raise _Irregular
        if isinstance(function, ast.Name) and function.id == "range" and not loop.keywords:
            return f"({', '.join(map(ast.unparse, loop.args))},)"
        if isinstance(function, ast.Attribute) and function.attr == "unbind":
            given = [*loop.args, *(keyword.value for keyword in loop.keywords)]
            dim, tensor = ast.unparse(given[0]) if given else "0", ast.unparse(function.value)
            place = f"{PREFIX}place"
            slices = f"{tensor}.index_select({dim}, {place}.view(1))"
            self.element, self.step = f"{self.step} = {slices}.squeeze({dim})", place
            return f"({tensor}.shape[{dim}],)"
        raise _Irregular

    def _used_later(self, function: ast.FunctionDef) -> Iterator[str]:
        """Names that code after the loop reads before it sets them."""
        end = self._node.end_lineno or self._node.lineno
        set_again: dict[str, int] = {}
        for name in sorted(_names(ast.Store, function), key=lambda name: -name.lineno):
            if name.lineno > end:
                set_again[name.id] = name.lineno
        for name in _names(ast.Load, function):
            first = set_again.get(name.id, name.lineno + 1)
            if name.lineno > end and first > name.lineno:
                yield name.id

    def variant(self, number: int) -> ast.If:
        """The loop, and its variant where the bounds are open."""
        news = [f"{PREFIX}new_{name}" for name in self.lists]
        lasts = [f"{PREFIX}last_{name}" for name in self.last]
        carried, results = ", ".join([*self.carried, *lasts]), ", ".join(news)
        step = f"{PREFIX}step_{number}"
        text = f"if {PREFIX}is_open({self._bounds}):\n"
        if self._first:
            text += f"  for {ast.unparse(self._node.target)} in "
            text += f"{PREFIX}first({self._first}, {self._bounds}):\n    pass\n"
        text += "".join(f"  {PREFIX}last_{name} = {name}[-1]\n" for name in self.last)
        text += f"  def {step}({', '.join([self.step, *self.carried, *lasts])}):\n"
        text += f"    {self.element}\n    return [{carried}], [{results}]\n"
        text += f"  [{carried}], [{results}] = "
        text += f"{PREFIX}run({step}, {self._bounds}, [{carried}], {self._first})\n"
        for name in self.lists:
            text += f"  {name} = {PREFIX}Steps({name}, {PREFIX}new_{name})\n"
        written = ast.parse(text).body[0]
        for part in ast.walk(written):
            ast.copy_location(part, self._node)
        assert isinstance(written, ast.If)
        definition = next(_of_type(ast.FunctionDef, written))
        definition.body[-1:-1] = list(self._body())
        if isinstance(first := written.body[0], ast.For):
            first.body = copy.deepcopy(self._node.body)
        written.orelse = [self._node]
        return written

    def _body(self) -> Iterator[ast.stmt]:
        body = _LoopBody(self)
        for statement in self._later:
            if name := _appended(statement):
                value = body.visit(next(_of_type(ast.Call, statement)).args[0])
                targets = [f"new_{name}", *([f"last_{name}"] if name in self.last else [])]
                stored: list[ast.expr] = [ast.Name(PREFIX + t, ast.Store()) for t in targets]
                yield ast.copy_location(ast.Assign(stored, value), statement)
            else:
                yield body.visit(statement)

    def has_step(self, *nodes: ast.AST) -> bool:
        return any(name.id == self.step for name in _names(ast.Load, *nodes))


def _irregular(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    return (part for part in _of_type(ast.AST, *body) if isinstance(part, _IRREGULAR))


def _read_first(body: Sequence[ast.stmt]) -> set[str]:
    """Names that ``body`` reads before it sets them."""
    read: set[str] = set()
    known: set[str] = set()
    for statement in body:
        changed = [part.target for part in _of_type(ast.AugAssign, statement)]
        read |= {name.id for name in _of_type(ast.Name, *changed)} - known
        read |= {n.id for n in _names(ast.Load, statement)} - known
        known |= {n.id for n in _names(ast.Store, statement)}
    return read


def _appended(statement: ast.AST) -> str:
    """The list that a statement appends to; empty if it appends to none."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr == "append":
            return function.value.id if isinstance(function.value, ast.Name) else ""
    return ""


class _LoopBody(ast.NodeTransformer):
    """Rewrites the body of a loop: a step is a tensor, and nothing is written in place."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def visit_If(self, node: ast.If) -> Any:
        if self._loop.has_step(node.test):
            raise _Irregular
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        for name in self._loop.last:
            if ast.unparse(node) == f"{name}[-1]":
                return ast.Name(f"{PREFIX}last_{name}", ast.Load())
        if not self._loop.has_step(node.slice):
            return self.generic_visit(node)
        return ast.copy_location(_call("at", self.visit(node.value), *self._parts(node)), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if not isinstance(target, ast.Subscript) or not self._loop.has_step(target.slice):
            return self.generic_visit(node)
        assert isinstance(target.value, ast.Name)
        read, name = ast.Name(target.value.id, ast.Load()), ast.Name(target.value.id, ast.Store())
        value = _call("put", read, self.visit(node.value), *self._parts(target))
        return ast.copy_location(ast.Assign([name], value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        read = copy.deepcopy(node.target)
        read.ctx = ast.Load()
        plain = ast.Assign([node.target], ast.BinOp(read, node.op, node.value))
        return self.visit(ast.copy_location(plain, node))

    def _parts(self, node: ast.Subscript) -> list[ast.expr]:
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return [self._part(part) for part in parts]

    def _part(self, part: ast.expr) -> ast.expr:
        if not isinstance(part, ast.Slice):
            found: ast.expr = self.visit(part)
            return found
        ends = [end or ast.Constant(None) for end in (part.lower, part.upper, part.step)]
        if not self._loop.has_step(*ends):
            return ast.Call(ast.Name("slice", ast.Load()), ends, [])
        lower, upper = part.lower, part.upper
        if lower is None or not isinstance(upper, ast.BinOp) or part.step is not None:
            raise _Irregular
        if ast.unparse(upper) != f"{ast.unparse(lower)} + {ast.unparse(upper.right)}":
            raise _Irregular
        return _call("StepSpan", self.visit(lower), upper.right)
