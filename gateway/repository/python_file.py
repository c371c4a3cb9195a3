"""The models that a Python file declares, found without running it."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import is_model_name

MAX_BYTES = 1 << 20
_TRITON = "TritonPythonModel"
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def declared(path: Path) -> list[str]:
    """The names of the functions and classes with ``@modelport.model``, outside of any block.

    None of a file with a class ``TritonPythonModel``, whose model has the name of its file.

    Raises:
        InvalidArgument: it cannot be read, is not Python, has no model, or two of one name.
    """
    if "." in path.stem:
        raise InvalidArgument(f"'{path}' cannot be imported; rename it, without a dot before '.py'")
    try:
        with warnings.catch_warnings(action="ignore"):  # they come when the model is loaded
            tree = ast.parse(untrusted_files.read(path, MAX_BYTES))
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from error
    except SyntaxError as error:
        raise InvalidArgument(f"'{path}' line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise InvalidArgument(f"'{path}' is not Python: {error or 'too deep'}") from error
    decorators = set(_decorators(tree))
    lines: dict[str, int] = {}
    for node in tree.body:
        if not isinstance(node, _DEFINITIONS):
            continue
        for decorator in node.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if ast.unparse(call) not in decorators:
                continue
            if decorator is not node.decorator_list[0]:
                raise InvalidArgument(
                    f"'{path}' line {decorator.lineno}: @modelport.model has to be the first "
                    "decorator, because it declares the function as it is there"
                )
            name = _name(path, node, decorator)
            if name in lines:
                raise InvalidArgument(
                    f"'{path}' declares two models '{name}', in the lines {lines[name]} and "
                    f"{node.lineno}; give one another name: @modelport.model(name=...)"
                )
            lines[name] = node.lineno
    if not lines and not any(getattr(node, "name", "") == _TRITON for node in tree.body):
        raise InvalidArgument(
            f"'{path}' declares no model; decorate a function or a class with @modelport.model, "
            f"outside of any block, or write a class {_TRITON}"
        )
    return list(lines)


def _decorators(tree: ast.Module) -> Iterator[str]:
    """The expressions that stand for the decorator in this file."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "modelport":
                    yield f"{alias.asname or alias.name}.model"
        elif isinstance(node, ast.ImportFrom) and node.module == "modelport" and not node.level:
            for alias in node.names:
                if alias.name == "model":
                    yield alias.asname or alias.name


def _name(path: Path, node: ast.stmt, decorator: ast.expr) -> str:
    name: object = getattr(node, "name", "")
    for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
        if keyword.arg == "name":
            name = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
    if not isinstance(name, str) or not is_model_name(name):
        raise InvalidArgument(
            f"'{path}' line {node.lineno}: the name of a model is a string in the code, without "
            "slashes"
        )
    return name
