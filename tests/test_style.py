"""Lint for names and docstrings; the rules are in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = ("modelport", "gateway", "exporters", "loadtests", "benchmarks")
#: First words that make a docstring a riddle: it says what the thing is or does, subject first.
BANNED_OPENINGS = frozenset(
    [
        "as",
        "how",
        "of",
        "that",
        "those",
        "what",
        "when",
        "where",
        "which",
        "whoever",
        "who",
        "whom",
        "whose",
        "whether",
        "why",
    ]
)
#: Words of a private dialect.
BANNED_WORDS = re.compile(
    r"\b(anew|whoever|in earnest|of which|of whom|the house|of the house|so many|"
    r"what there is|for ever|over here|it is told|is told of|are told of|"
    r"everybody|does not answer|cannot go on|stands still|in the place of|leave --\w+|"
    r"(?<!there )is no (file|folder|number|text|size|name|list|object|datatype|model|tensor))\b",
    re.IGNORECASE,
)

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith("_pb2.py")
        and not (folder == "modelport" and path.relative_to(ROOT / folder).parts[1:])
    ]


class Documented(NamedTuple):
    """A module, class or function."""

    place: str
    kind: type[ast.AST]
    name: str
    docstring: str | None
    empty: bool


@cache
def documented(path: Path) -> list[Documented]:
    """Modules, classes and functions of a file, each with the place to name in a message."""
    gc.disable()  # a syntax tree has no cycles, and is gone before the next one is made
    try:
        found = []
        for node in _statements(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = "module" if isinstance(node, ast.Module) else node.name
                place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {name}"
                docstring = ast.get_docstring(node)
                found.append(Documented(place, type(node), name, docstring, not node.body))
        return found
    finally:
        gc.enable()


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The node and what stands in its blocks; expressions hold no docstrings, and are many more."""
    yield node
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        inner = getattr(node, block, ())
        for statement in inner if isinstance(inner, list) else ():
            yield from _statements(statement)


def test_no_docstring_begins_with_a_relative_clause() -> None:
    wrong = [
        f"{each.place}: {text.splitlines()[0]}"
        for path in sources(*PACKAGES, "tests")
        for each in documented(path)
        if (text := each.docstring)
        and text.split()[0].strip("`,:.").lower() in BANNED_OPENINGS
        # "Whether …" is how a predicate says what it returns.
        and not (each.kind in FUNCTIONS and text.startswith("Whether "))
    ]
    assert wrong == []


def test_no_docstring_or_comment_uses_words_of_a_private_dialect() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources(*PACKAGES)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if BANNED_WORDS.search(line)
    ]
    assert wrong == []


def test_class_names_are_unique() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(*PACKAGES, "tests", "deploy"):
        for each in documented(path):
            if each.kind is ast.ClassDef:
                found[each.name].append(each.place)
    del found["TritonPythonModel"]  # Triton's name
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_every_public_module_class_and_function_of_the_public_package_has_a_docstring() -> None:
    wrong = [
        each.place
        for path in sources("modelport")
        for each in documented(path)
        if not each.name.startswith("_") and not each.docstring
    ]
    assert wrong == []


def test_every_module_and_public_class_has_a_docstring() -> None:
    wrong = [
        each.place
        for path in sources(*PACKAGES)
        for each in documented(path)
        if each.kind not in FUNCTIONS
        and not each.name.startswith("_")
        and not each.docstring
        and (each.kind is ast.ClassDef or not each.empty)
    ]
    assert wrong == []
