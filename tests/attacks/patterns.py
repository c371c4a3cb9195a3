"""The regular expressions of the packages, and texts that are dear to each of them.

Patterns are found in the syntax trees of all modules, with the ways in which they are used. For
each, hostile texts are made of what it repeats: a run of it, behind what must come before, in front
of what does not match.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import _constants as constants  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FUNCTIONS = (
    "compile",
    "search",
    "match",
    "fullmatch",
    "sub",
    "subn",
    "split",
    "findall",
    "finditer",
)
#: Of the length of a text, in units. The first finds exponential patterns.
LENGTHS = (22, 1000, 4000)
#: A linear pattern takes four times as long for four times as much, a quadratic one 16 times.
RATIO, LEAST_SECONDS = 8.0, 0.002
SUFFIXES = ("", "\n!", "x\x7f")


class FoundPattern(NamedTuple):
    """A regular expression, where it is, and the methods that are called on it."""

    place: str
    pattern: re.Pattern[Any]
    methods: frozenset[str]


def modules(packages: Sequence[str]) -> Iterator[tuple[str, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def _functions(tree: ast.Module) -> dict[ast.AST, str]:
    """Every call of the module ``re``, and the name of its function."""
    return {
        node: node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in FUNCTIONS
    }


def found(packages: Sequence[str]) -> tuple[list[FoundPattern], list[str]]:
    """All patterns that are constants, and the places of those that are made at run time."""
    trees = dict(modules(packages))
    everywhere, patterns, dynamic = _uses(trees.values()), [], []
    for path, tree in trees.items():
        calls = _functions(tree)
        if not calls:
            continue
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        name = name if name.startswith("modelport") else f"modelport.{name}"
        space = vars(importlib.import_module(name))
        names = {
            id(node.value): target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        for call, function in calls.items():
            assert isinstance(call, ast.Call)
            variable = names.get(id(call), "")
            place = f"{path} {variable or call.lineno}"
            try:
                made = ast.Expression(ast.Call(ast.Name("compile_", ast.Load()), call.args[:1], []))
                flags = _flags(call, function, space)
                code = compile(ast.fix_missing_locations(made), path, "eval")
                pattern = eval(code, {**space, "compile_": lambda text: re.compile(text, flags)})  # noqa: B023
            except NameError:
                dynamic.append(place)
                continue
            methods = {function}
            if function == "compile":
                used = _uses([tree]) if variable[:1] == "_" else everywhere
                methods = used.get(variable, set())
            known = methods - {"compile"} or {"search"}
            patterns.append(FoundPattern(place, pattern, frozenset(known)))
    return patterns, dynamic


def _flags(call: ast.Call, function: str, space: dict[str, Any]) -> int:
    given = [word.value for word in call.keywords if word.arg == "flags"]
    if function == "compile":
        given += call.args[1:2]
    elif function in ("search", "match", "fullmatch", "findall", "finditer"):
        given += call.args[2:3]
    flags = 0
    for node in given:
        flags |= int(eval(compile(ast.Expression(node), "flags", "eval"), dict(space)))
    return flags


def _uses(trees: Any) -> dict[str, set[str]]:
    """The methods that are looked up on a name, anywhere."""
    used: dict[str, set[str]] = {}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in FUNCTIONS:
                owner = node.value
                name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
                used.setdefault(name, set()).add(node.attr)
    return used


# -- hostile texts ---------------------------------------------------------------------------------


def texts(pattern: re.Pattern[Any]) -> set[tuple[str, str, str]]:
    """Beginnings, repeated units, and ends."""
    tree = parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    units: dict[str, None] = {}
    starts: dict[str, None] = {"": None}
    _walk(tree, "", units, starts)
    return set(itertools.product(list(starts)[:3], list(units)[:14], SUFFIXES))


def _walk(tree: Any, before: str, units: dict[str, None], starts: dict[str, None]) -> str:
    """Collect what ``tree`` repeats, and what comes before; return a text that it matches."""
    at = before
    for operation, argument in tree:
        if operation in (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT):
            least, most, inner = argument
            once = _walk(inner, at, units, starts)
            if most > 20:
                starts[at] = None
                for each in (*_choices(inner), once):
                    if each:
                        units[each] = None
                        units[at + each] = None
            at += once * max(least, 1 if most <= 20 else least)
        elif operation is constants.SUBPATTERN:
            at += _walk(argument[3], at, units, starts)
        elif operation is constants.ATOMIC_GROUP:
            at += _walk(argument, at, units, starts)
        elif operation is constants.BRANCH:
            branches = [_walk(each, at, units, starts) for each in argument[1]]
            at += branches[0]
        elif operation in (constants.ASSERT, constants.ASSERT_NOT):
            _walk(argument[1], at, units, starts)
        else:
            at += next(iter(_choices([(operation, argument)])), "")
    return at[len(before) :]


def _choices(tree: Any) -> list[str]:
    """Some of the characters with which ``tree`` may begin."""
    operation, argument = next(iter(tree), (None, None))
    if operation is constants.LITERAL:
        return [chr(argument)]
    if operation is constants.NOT_LITERAL:
        return ["a" if argument != ord("a") else "b", " "]
    if operation is constants.ANY:
        return ["a", " ", "1"]
    if operation is constants.IN:
        wanted = re.compile(_class(argument))
        likely = " a1:./-_,[{\"'\t\n(A=%x;\xffé\x1b"
        rare = [chr(number) for number in range(256)]
        return [each for each in (*likely, *rare) if wanted.fullmatch(each)][:6]
    if operation in (constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT):
        return _choices(argument[2])
    if operation is constants.SUBPATTERN:
        return _choices(argument[3])
    if operation is constants.BRANCH:
        return [each for branch in argument[1] for each in _choices(branch)[:2]]
    return []


_CATEGORIES = {
    constants.CATEGORY_DIGIT: r"\d", constants.CATEGORY_NOT_DIGIT: r"\D",
    constants.CATEGORY_SPACE: r"\s", constants.CATEGORY_NOT_SPACE: r"\S",
    constants.CATEGORY_WORD: r"\w", constants.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _class(items: Sequence[Any]) -> str:
    parts = []
    for operation, argument in items:
        if operation is constants.NEGATE:
            parts.append("^")
        elif operation is constants.LITERAL:
            parts.append(re.escape(chr(argument)))
        elif operation is constants.RANGE:
            parts.append("-".join(re.escape(chr(end)) for end in argument))
        elif operation is constants.CATEGORY:
            parts.append(_CATEGORIES[argument])
    return f"[{''.join(parts)}]"


# -- time ------------------------------------------------------------------------------------------


def superlinear(pattern: re.Pattern[Any], methods: Sequence[str]) -> str:
    """The text for which the time grows faster than its length, or nothing."""
    kinds = {name if name in ("match", "fullmatch") else "finditer" for name in methods}
    for kind, (start, unit, end) in itertools.product(sorted(kinds), texts(pattern)):
        before = 0.0
        for length in LENGTHS:
            seconds = _seconds(pattern, kind, start + unit * length + end)
            if seconds > LEAST_SECONDS and (length == LENGTHS[0] or seconds > RATIO * before):
                again = _seconds(pattern, kind, start + unit * length + end)
                if again > LEAST_SECONDS and again > RATIO * before:
                    return f"{kind} of {start!r} + {unit!r} * {length} + {end!r}: {again:.4f} s"
            before = seconds
    return ""


def _seconds(pattern: re.Pattern[Any], kind: str, text: str) -> float:
    value: Any = text if isinstance(pattern.pattern, str) else text.encode("latin-1", "replace")
    run = getattr(pattern, kind)
    started = time.thread_time()
    if kind == "finditer":
        for _ in run(value):
            pass
    else:
        run(value)
    return time.thread_time() - started
