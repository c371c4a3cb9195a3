"""Lint for names and docstrings; the rules are in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("modelport", "gateway", "exporters", "loadtests")
#: First words that make a docstring a riddle: it says what the thing is or does, subject first.
BANNED_OPENINGS = frozenset(
    [
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
    r"what there is|for ever|over here|it is told|is told of|are told of)\b",
    re.IGNORECASE,
)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(*folders: str) -> list[Path]:
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith("_pb2.py")
        and not (folder == "modelport" and path.relative_to(ROOT / folder).parts[1:])
    ]


@cache
def nodes(path: Path) -> list[tuple[str, Documented]]:
    """Every module, class and function of a file, with the place to name in a message."""
    return [
        (f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)} {_name(node)}", node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, Documented)
    ]


def _name(node: Documented) -> str:
    return "module" if isinstance(node, ast.Module) else node.name


def test_no_docstring_begins_with_a_relative_clause() -> None:
    wrong = [
        f"{place}: {text.splitlines()[0]}"
        for path in sources(*PACKAGES, "tests")
        for place, node in nodes(path)
        if (text := ast.get_docstring(node))
        and text.split()[0].strip("`,:.").lower() in BANNED_OPENINGS
        # "Whether …" is how a predicate says what it returns.
        and not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and text.startswith("Whether ")
        )
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
    for path in sources(*PACKAGES):
        if "inside" in path.parts:
            continue  # programs for the environments of other servers
        for place, node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(place)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_every_public_module_class_and_function_of_the_public_package_has_a_docstring() -> None:
    wrong = [
        place
        for path in sources("modelport")
        for place, node in nodes(path)
        if not _name(node).startswith("_") and not ast.get_docstring(node)
    ]
    assert wrong == []


def test_every_module_and_public_class_has_a_docstring() -> None:
    wrong = [
        place
        for path in sources(*PACKAGES)
        for place, node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef)
        and not _name(node).startswith("_")
        and not ast.get_docstring(node)
        and (isinstance(node, ast.ClassDef) or node.body)
    ]
    assert wrong == []
