"""Rewriting of loops along an axis of open length.

``for t in range(x.shape[1])`` repeats its body for the length that the example has. A regular loop
gets a variant for open lengths beside it: its body becomes a function of the step and of the
variables that the loop carries, and the lists that it appends to become stacked tensors, which
later loops may go through in either direction.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple, TypeGuard, TypeVar

Node = TypeVar("Node", bound=ast.AST)

_IRREGULAR = (
    *(ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.While, ast.Try),
    *(ast.With, ast.Raise, ast.Delete, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.NamedExpr),
)
_LOOPS = frozenset({"range", "unbind", "reversed", "enumerate", "zip"})
_JOINS = {"stack": "stack", "cat": "cat", "concat": "cat"}
#: Functions that give a tensor with its axes in another order.
_VIEWS = frozenset({"transpose", "permute", "flip", "movedim", "swapaxes", "contiguous", "t"})
#: Functions of sequences that are given stacked tensors, too.
_SEQUENCES = frozenset({"reversed", "zip", "list"})
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
    if any(_is_mangled(part.attr) for part in _of_type(ast.Attribute, definition)):
        return None
    rewriter = _Rewriter(definition)
    definition.body = [
        part for statement in definition.body for part in _listed(rewriter.visit(statement))
    ]
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


def _is_mangled(name: str) -> bool:
    """Whether a class renames its private attribute ``name``."""
    return name.startswith("__") and not name.endswith("__")


def _of_type(kind: type[Node], *nodes: ast.AST) -> Iterator[Node]:
    return (part for node in nodes for part in ast.walk(node) if isinstance(part, kind))


def _placed(written: Node, node: ast.AST) -> Node:
    """``written`` at the line of ``node``."""
    for part in ast.walk(written):
        ast.copy_location(part, node)
    return written


def _names(context: type[ast.expr_context], *nodes: ast.AST) -> Iterator[ast.Name]:
    """Names that are read or set, but for those that a comprehension sets for itself."""
    own = set()
    for whole in _of_type(ast.AST, *nodes):
        given = [_of_type(ast.Name, part.target) for part in getattr(whole, "generators", ())]
        targets = {name.id for names in given for name in names}
        own |= {id(name) for name in _of_type(ast.Name, whole) if name.id in targets}
    every = _of_type(ast.Name, *nodes)
    return (name for name in every if isinstance(name.ctx, context) and id(name) not in own)


def _call(function: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(PREFIX + function, ast.Load()), list(arguments), [])


class _Irregular(Exception):
    """The steps of a loop differ, or one reads what has no fixed size."""


class _Rewriter(ast.NodeTransformer):
    """Puts a variant for open lengths beside each regular loop of a function."""

    def __init__(self, definition: ast.FunctionDef) -> None:
        self.loops = 0
        self._definition = copy.deepcopy(definition)

    def visit_For(self, node: ast.For) -> Any:
        try:
            iterated = _Iterated(node.target, self.visit(copy.deepcopy(node.iter)), self.loops)
            variant = _Loop(node, self._definition, iterated).variant(self.loops)
        except _Irregular:
            return self.generic_visit(node)
        self.loops += 1
        return variant

    def visit_ListComp(self, node: ast.ListComp) -> Any:
        first, *others = node.generators
        if others or first.ifs or first.is_async or any(_of_type(ast.NamedExpr, node)):
            return self.generic_visit(node)
        try:
            iterated = _Iterated(first.target, self.visit(copy.deepcopy(first.iter)), self.loops)
            element = ast.unparse(_LoopBody(iterated.step).visit(copy.deepcopy(node.elt)))
        except _Irregular:
            return self.generic_visit(node)
        if iterated.sequence is not None:
            return self.generic_visit(node)
        self.loops += 1
        whole = f"lambda: {ast.unparse(self.generic_visit(node))}"
        text = f"{PREFIX}listed({whole}, lambda {iterated.step}: {element}, {iterated.bounds})"
        return _placed(ast.parse(text, mode="eval").body, node)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id in _SEQUENCES:
            node.func = ast.Name(PREFIX + function.id, ast.Load())
        if isinstance(function, ast.Attribute):
            of_torch = ast.unparse(function.value) == "torch"
            if of_torch and function.attr in _JOINS:
                node.func = ast.Name(PREFIX + _JOINS[function.attr], ast.Load())
            if function.attr == "unbind":
                node.func = ast.Name(PREFIX + "unbind", ast.Load())
                node.args = node.args if of_torch else [function.value, *node.args]
        return node


class _Iterated:
    """The numbers, or the elements of sequences, that a loop goes through.

    Attributes:
        step: the name of the number of a step.
        bounds: the arguments of ``range`` as a tuple, or the name of the sequence.
        sequence: the sequence; None: there are numbers alone.
        target: what an element is assigned to; None: there is none.
        start, stride: the first step, and how steps follow each other.

    Raises:
        _Irregular: a loop through it has no variant.
    """

    def __init__(self, target: ast.expr, given: ast.expr, number: int) -> None:
        self.names = {name.id for name in _of_type(ast.Name, target)}
        self.sequence: ast.expr | None = None
        self.target: ast.expr | None = None
        self.counted = False
        self.start, self.stride = "0", 1
        if _is_call(given, "range"):
            if not isinstance(target, ast.Name) or given.keywords or len(given.args) > 3:
                raise _Irregular
            texts = [ast.unparse(argument) for argument in given.args]
            self.step, self.bounds = target.id, f"({', '.join(texts)},)"
            self.start = texts[0] if len(texts) > 1 else "0"
            self.stride = {"1": 1, "-1": -1}.get(texts[2] if len(texts) > 2 else "1", 0)
            return
        self.step, self.bounds = f"{PREFIX}place", f"{PREFIX}over_{number}"
        if _is_call(given, "enumerate") and len(given.args) == 1 and not given.keywords:
            if not isinstance(target, ast.Tuple) or not isinstance(target.elts[0], ast.Name):
                raise _Irregular
            self.counted = True
            self.step, target, given = target.elts[0].id, target.elts[1], given.args[0]
        if not _may_be_open(given):
            raise _Irregular
        self.sequence, self.target = given, target

    def loop_over(self, elements: str) -> str:
        """The iterable of a loop through ``elements``, with numbers if the user's has them."""
        return f"enumerate({elements})" if self.counted else elements


def _is_call(node: ast.expr, name: str) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


def _may_be_open(node: ast.expr) -> bool:
    """Whether an iterable may have a number of elements that is open, as no attribute has."""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name == f"{PREFIX}unbind":
            return True
        if name.removeprefix(PREFIX) in _SEQUENCES:
            return any(map(_may_be_open, node.args))
        return name.rpartition(".")[2] in _VIEWS
    if isinstance(node, ast.Subscript):
        return _may_be_open(node.value)
    return isinstance(node, ast.Name)


class _LaterSteps(ast.NodeTransformer):
    """The steps of a loop from which on tests such as ``t == 0`` and ``t > 1`` come out the same.

    Attributes:
        first: the number of steps before.
        body: the statements of the others, without these tests.
    """

    def __init__(self, loop: ast.For, iterated: _Iterated) -> None:
        self.first = 0
        self._step, self._start, self._stride = iterated.step, iterated.start, iterated.stride
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
        if ast.unparse(left) != self._step or name not in _FROM or not self._stride:
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
    """A loop over numbers or elements: what it carries, and the lists it appends to.

    Raises:
        _Irregular: it has no variant.
    """

    def __init__(self, node: ast.For, function: ast.FunctionDef, iterated: _Iterated) -> None:
        if node.orelse:
            raise _Irregular
        self._node, self._iterated = node, iterated
        later = _LaterSteps(node, iterated)
        self._later, self._first = later.body, later.first
        if any(_irregular(self._later)):
            raise _Irregular
        arguments = {argument.arg for argument in _of_type(ast.arg, function.args)}
        before = {n.id for n in _names(ast.Store, function) if n.lineno < node.lineno} | arguments
        stored = {n.id for n in _names(ast.Store, *self._later)} - iterated.names
        for part in _of_type(ast.Subscript, *self._later):
            if isinstance(part.ctx, ast.Store):
                if not isinstance(part.value, ast.Name):
                    raise _Irregular
                stored.add(part.value.id)
        used_later = set(self._used_later(function))
        if self._first:  # these steps have set the variables that the others begin with
            before |= _read_first(self._later) | used_later
        if used_later & {*(stored - before), *iterated.names}:
            raise _Irregular
        self.carried = sorted(stored & before)
        self.lists = [appended.name for each in self._later if (appended := _appended(each))]
        uses = [n.id for n in _names(ast.Load, *self._later)]
        lasts = [ast.unparse(part) for part in _of_type(ast.Subscript, *self._later)]
        self.last = [name for name in self.lists if f"{name}[-1]" in lasts]
        for name in self.lists:  # appended to once, and read at its end alone
            if uses.count(name) != lasts.count(f"{name}[-1]") + 1 or name in self.carried:
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

    def variant(self, number: int) -> list[ast.stmt]:
        """The loop, and its variant where the bounds are open."""
        iterated, node = self._iterated, self._node
        news = [f"{PREFIX}new_{name}" for name in self.lists]
        lasts = [f"{PREFIX}last_{name}" for name in self.last]
        carried, results = ", ".join([*self.carried, *lasts]), ", ".join(news)
        step, target = f"{PREFIX}step_{number}", ast.unparse(node.target)
        text = ""
        if iterated.sequence is not None:
            text = f"{iterated.bounds} = {PREFIX}over({ast.unparse(iterated.sequence)})\n"
        text += f"if {PREFIX}is_open({iterated.bounds}):\n"
        if self._first:
            text += f"  for {target} in "
            text += iterated.loop_over(f"{PREFIX}first({self._first}, {iterated.bounds})")
            text += ":\n    pass\n"
        text += "".join(f"  {PREFIX}last_{name} = {name}[-1]\n" for name in self.last)
        text += f"  def {step}({', '.join([iterated.step, *self.carried, *lasts])}):\n"
        if iterated.target is not None:
            element = f"{iterated.bounds}.at({iterated.step})"
            text += f"    {ast.unparse(iterated.target)} = {element}\n"
        text += f"    return [{carried}], [{results}]\n"
        text += f"  [{carried}], [{results}] = "
        text += f"{PREFIX}run({step}, {iterated.bounds}, [{carried}], {self._first})\n"
        for name, in_front in dict(filter(None, map(_appended, self._later))).items():
            text += f"  {name} = {PREFIX}Steps({name}, {PREFIX}new_{name}, {in_front})\n"
        text += f"else:\n  for {target} in {iterated.loop_over(iterated.bounds)}:\n    pass\n"
        written = [_placed(statement, node) for statement in ast.parse(text).body]
        branches = written[-1]
        assert isinstance(branches, ast.If)
        definition = next(_of_type(ast.FunctionDef, branches))
        definition.body[-1:-1] = list(self._body())
        if isinstance(first := branches.body[0], ast.For):
            first.body = copy.deepcopy(node.body)
        if iterated.sequence is None:
            branches.orelse = [node]
        elif isinstance(rest := branches.orelse[0], ast.For):
            rest.body = node.body
        return written

    def _body(self) -> Iterator[ast.stmt]:
        known = {*self.carried, *self._iterated.names}
        body = _LoopBody(self._iterated.step, self.last, known)
        for statement in self._later:
            if appended := _appended(statement):
                value = body.visit(next(_of_type(ast.Call, statement)).args[-1])
                name = appended.name
                targets = [f"new_{name}", *([f"last_{name}"] if name in self.last else [])]
                stored: list[ast.expr] = [ast.Name(PREFIX + t, ast.Store()) for t in targets]
                yield ast.copy_location(ast.Assign(stored, value), statement)
            else:
                yield from _listed(body.visit(statement))


def _listed(statements: Any) -> list[ast.stmt]:
    return statements if isinstance(statements, list) else [statements]


def _is_stored(part: ast.expr) -> bool:
    return isinstance(getattr(part, "ctx", None), ast.Store)


def _writes_in_place(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and re.fullmatch(r"\w*[a-z0-9]_", function.attr) is not None
    )


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


class _Appended(NamedTuple):
    """A list that a statement puts an element into, at its end or in front."""

    name: str
    in_front: bool


def _appended(statement: ast.AST) -> _Appended | None:
    """The list that a statement puts an element into."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call, function = statement.value, statement.value.func
        if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
            in_front = function.attr == "insert" and ast.unparse(call.args[0]) == "0"
            if function.attr == "append" or in_front:
                return _Appended(function.value.id, in_front)
    return None


class _LoopBody(ast.NodeTransformer):
    """Rewrites the body of a loop: a step is a tensor, and nothing is written in place.

    Args:
        step: the name of the step.
        last: lists that the body appends to, and whose last element it reads.
        known: the variables that are set before the body.
    """

    def __init__(self, step: str, last: Sequence[str] = (), known: Iterable[str] = ()) -> None:
        self._step, self._last, self._known = step, last, set(known)
        self._selections = 0

    def _has_step(self, *nodes: ast.AST) -> bool:
        return any(name.id == self._step for name in _names(ast.Load, *nodes))

    def visit_If(self, node: ast.If) -> Any:
        """Run both branches if the step decides, and select what they have set."""
        if not self._has_step(node.test):
            return self.generic_visit(node)
        if any(map(_appended, _of_type(ast.stmt, *node.body, *node.orelse))):
            raise _Irregular
        if any(map(_writes_in_place, _of_type(ast.Call, *node.body, *node.orelse))):
            raise _Irregular
        number, self._selections = self._selections, self._selections + 1
        test, known = self._condition(node.test), set(self._known)
        then, other = (
            [part for each in branch for part in _listed(self.visit(each))]
            for branch in (node.body, node.orelse)
        )
        stored = {type(part) for part in _of_type(ast.expr, *then, *other) if _is_stored(part)}
        if stored - {ast.Name, ast.Tuple}:
            raise _Irregular
        names = sorted({name.id for name in _names(ast.Store, *then, *other)} - {self._step})
        names = [name for name in names if not name.startswith(PREFIX)]
        if not names:
            raise _Irregular
        in_then, in_other = ({name.id for name in _names(ast.Store, *x)} for x in (then, other))
        saved = [name for name in names if name in known]
        chosen = [name for name in names if name in saved or name in in_then & in_other]
        before, first = (f"{PREFIX}{side}_{number}_" for side in ("before", "first"))
        kept = [f"{before}{name} = {name}" for name in saved]
        restored = [f"{first}{name} = {name}" for name in chosen]
        restored += [f"{name} = {before}{name}" for name in saved]
        selected = [
            f"{name} = {PREFIX}select({PREFIX}test_{number}, {first}{name}, {name})"
            for name in chosen
        ]
        self._known |= set(names)

        def lines(texts: Sequence[str]) -> list[ast.stmt]:
            return [_placed(each, node) for each in ast.parse("\n".join(texts)).body]

        decided = ast.Assign([ast.Name(f"{PREFIX}test_{number}", ast.Store())], test)
        return [
            ast.copy_location(decided, node),
            *lines(kept),
            *then,
            *lines(restored),
            *other,
            *lines(selected),
        ]

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        if not self._has_step(node.test):
            return self.generic_visit(node)
        sides = self.visit(node.body), self.visit(node.orelse)
        return ast.copy_location(_call("select", self._condition(node.test), *sides), node)

    def _condition(self, test: ast.expr) -> ast.expr:
        if any(_of_type(ast.BoolOp, test)) or any(
            len(c.ops) > 1 for c in _of_type(ast.Compare, test)
        ):
            raise _Irregular
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return _call("select", self._condition(test.operand), *map(ast.Constant, (False, True)))
        visited: ast.expr = self.visit(test)
        return visited

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        for name in self._last:
            if ast.unparse(node) == f"{name}[-1]":
                return ast.Name(f"{PREFIX}last_{name}", ast.Load())
        if not self._has_step(node.slice):
            return self.generic_visit(node)
        return ast.copy_location(_call("at", self.visit(node.value), *self._parts(node)), node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        written: list[ast.stmt] = []
        value = self.visit(node.value)
        self._known |= {name.id for name in _names(ast.Store, *node.targets)}
        targets = [self._target(target, written) for target in node.targets]
        return [ast.copy_location(ast.Assign(targets, value), node), *written]

    def _target(self, target: ast.expr, written: list[ast.stmt]) -> ast.expr:
        """``target``, or a name in place of a part of a tensor that a statement then writes."""
        if isinstance(target, ast.Tuple | ast.List):
            return ast.Tuple([self._target(part, written) for part in target.elts], ast.Store())
        if not isinstance(target, ast.Subscript) or not self._has_step(target.slice):
            return target
        assert isinstance(target.value, ast.Name)
        self._selections += 1
        value = f"{PREFIX}value_{self._selections}"
        read, name = ast.Name(target.value.id, ast.Load()), ast.Name(target.value.id, ast.Store())
        put = _call("put", read, ast.Name(value, ast.Load()), *self._parts(target))
        written.append(ast.copy_location(ast.Assign([name], put), target))
        return ast.Name(value, ast.Store())

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
        if not self._has_step(*ends):
            return ast.Call(ast.Name("slice", ast.Load()), ends, [])
        lower, upper = part.lower, part.upper
        if lower is None or not isinstance(upper, ast.BinOp) or part.step is not None:
            raise _Irregular
        if ast.unparse(upper) != f"{ast.unparse(lower)} + {ast.unparse(upper.right)}":
            raise _Irregular
        return _call("StepSpan", self.visit(lower), upper.right)
