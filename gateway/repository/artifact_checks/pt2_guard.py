"""Check of a ``torch.export`` program before torch reads it.

The program is JSON, but torch turns parts of it into Python code: names become identifiers of
generated functions, sizes are evaluated by sympy, guards are executed, constants may be pickles,
and a node may call any function of ``torch``. So every string must be valid for its place.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository.artifact_checks import operator_lists
from modelport.gateway.repository.artifact_checks.torch_archive import Archive
from modelport.gateway.repository.artifact_checks.torch_operators import is_pure_target

PROGRAM = "models/model.json"
PAYLOADS = {"data/weights/": "weight", "data/constants/": "tensor"}

#: Records of ``torch.export.save``, and those that torch writes to every archive.
_RECORD = re.compile(
    r"archive_format|archive_version|version|byteorder|\.(format_version|storage_alignment)"
    r"|\.data/[\w.]+|extra/.+|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)",
    re.ASCII,
)
#: Names of tensors, weights and fields, which cannot end a string or a name in Python code.
_NAME = re.compile(r"[\w.\-]*", re.ASCII)
_TREES = frozenset({None, "builtins.tuple", "builtins.list", "builtins.dict"}) | {
    "collections.OrderedDict"
}
#: Values that torch quotes as strings, or notes for people.
_TEXTS = frozenset({"as_string", "as_strings", "torch_version", "stack_trace"})

#: Maps from names of values, which the model's author chooses: ``target`` may be an input.
_BY_NAME = frozenset({"tensor_values", "sym_int_values", "sym_float_values", "sym_bool_values"})

#: Sympy expands and compares expressions, at a cost that grows with the product of their sums.
MAX_EXPRESSION = 4000
MAX_LEAVES = 64
MAX_TERMS = 100
MAX_NUMBER = 2**64
MAX_POWER = 64

#: Functions for sizes; any other name creates only symbols.
_FUNCTIONS = operator_lists.read("sizes_allowed")
_ATOMS = frozenset({"Symbol", "Float", "Integer"})
_SUMS = frozenset({"Add", "And", "Or", "Piecewise", "ExprCondPair"})
#: As sympy writes numbers that are not whole, in double precision.
_FLOAT = re.compile(r"-?\d{1,20}(\.\d{0,40})?(e[+-]?\d{1,2})?", re.ASCII)
_FLOAT_BITS = 53
_METHODS = frozenset({"size", "stride", "storage_offset", "dim", "numel", "item"})
_PLAIN = (
    ast.Expression, ast.Load, ast.UnaryOp, ast.USub, ast.UAdd, ast.Not, ast.BoolOp, ast.And, ast.Or,
    ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.Compare,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Tuple,
)  # fmt: skip


def check(archive: Archive, native: bool = False) -> None:
    """Refuse a program that would do more than compute when it is loaded or run.

    Args:
        native: do not check operators.

    Raises:
        IntegrityError: naming the record or the operator.
    """
    try:
        for folder, kind in PAYLOADS.items():
            for name in archive.below(folder, "_config.json"):
                _check_payloads(archive, name, folder, kind)
        for name in archive.names():
            _check_record(archive, name)
        _ProgramCheck(archive.path.name, native).check("", archive.json(PROGRAM))
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"'{archive.path.name}' is damaged ({type(error).__name__}: {error}); export the model "
            "again"
        ) from error


def _check_record(archive: Archive, name: str) -> None:
    if name.endswith(".pt") and name.startswith("data/") and archive.size(name) > 0:
        raise _pickled(archive, name)
    if not _RECORD.fullmatch(name):
        raise IntegrityError(
            f"'{archive.path.name}' holds '{name}', which no exported program has: refused; export "
            "the model again with modelport"
        )


def _pickled(archive: Archive, name: str) -> IntegrityError:
    return IntegrityError(
        f"'{archive.path.name}' holds pickled objects in '{name}', which run code when they are "
        "loaded; export the model again with modelport"
    )


def _check_payloads(archive: Archive, name: str, folder: str, kind: str) -> None:
    """Require raw tensors; any other payload is a pickle."""
    for payload in archive.json(name).get("config", {}).values():
        path, meta = payload.get("path_name"), payload.get("tensor_meta")
        plain = isinstance(path, str) and re.fullmatch(rf"{kind}_\d+", path, re.ASCII)
        if payload.get("use_pickle") is not False or meta is None or not plain:
            raise _pickled(archive, name)
        if not archive.size(folder + str(path)) and all(
            size != {"as_int": 0} for size in meta["sizes"]
        ):
            raise IntegrityError(
                f"'{archive.path.name}': '{path}' has a shape, but no content; copy it again"
            )
        _ProgramCheck(archive.path.name, native=True).check("", meta)


class _ProgramCheck:
    """The check of one program."""

    def __init__(self, file: str, native: bool) -> None:
        self._file, self._native = file, native

    def check(self, key: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in ("as_custom_obj", "custom_obj") or (
                    name in ("custom_obj_values", "treespec_namedtuple_fields") and inner
                ):
                    raise self._refused(name, "needs native code or Python classes")
                self._check_member(name, inner)
        elif isinstance(value, list):
            for inner in value:
                self.check(key, inner)
        elif isinstance(value, str) and key not in _TEXTS and not _NAME.fullmatch(value):
            raise self._refused(value, "is not a name")

    def _check_member(self, name: str, value: Any) -> None:
        if name in ("target", "as_operator"):
            if not self._native and not is_pure_target(str(value)):
                raise self._refused(str(value), "is not an operator that only computes")
        elif name in _BY_NAME:
            self.check("", [*value.keys(), *value.values()])
        elif name == "expr_str":
            self._check_expression(value)
        elif name in ("guards_code", "range_constraints"):
            for expression in value:  # the keys of the latter
                self._check_expression(expression)
        elif name in ("in_spec", "out_spec"):
            self._check_tree(json.loads(value), names=name == "in_spec")
        elif name == "metadata":
            self._check_metadata(value)
        else:
            self.check(name, name)
            self.check(name, value)

    def _check_metadata(self, metadata: dict[str, Any]) -> None:
        """Check notes about a node's origin, because torch looks up functions by the names in
        them."""
        functions = metadata.get("source_fn_stack", "")
        if not re.fullmatch(r"[\w.,;<>\[\]\-]*", functions, re.ASCII) or "__" in functions:
            raise self._refused(functions, "is not a name")
        if not all(isinstance(text, str) for text in metadata.values()):
            raise self._refused("metadata", "is not text")

    def _check_tree(self, tree: Any, names: bool) -> None:
        """Check the nesting of inputs or outputs; keys of inputs become names of arguments."""
        if isinstance(tree, list):
            for inner in tree:
                self._check_tree(inner, names)
        elif isinstance(tree, dict):
            keys = json.loads(tree["context"] or "null")
            plain = keys is None or (
                isinstance(keys, list) and all(isinstance(key, str | int) for key in keys)
            )
            if tree["type"] not in _TREES or not plain:
                raise self._refused(str(tree["type"]), "is not a plain container")
            if names:
                self.check("", keys)
            self._check_tree(tree["children_spec"], names)
        elif not isinstance(tree, int):
            raise self._refused(str(tree), "is not a plain container")

    def _check_expression(self, text: str) -> None:
        try:
            if len(text) > MAX_EXPRESSION:
                raise ValueError("it is too long")
            tree = ast.parse(text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._refused(str(text)[:100], "is not a size") from error
        quoted = set[ast.AST]()
        power = 1
        for node in ast.walk(tree):
            if not self._is_plain(node, quoted):
                raise self._refused(text[:100], "is not a size")
            power *= _exponent(node)
        try:
            if _leaves(tree) > MAX_LEAVES or power > MAX_POWER:
                raise ValueError("it costs too much")
            _terms(tree)
        except (ValueError, RecursionError) as error:
            raise self._refused(text[:100], "is too complex for a size") from error

    def _is_plain(self, node: ast.AST, quoted: set[ast.AST]) -> bool:
        """Whether a node is a plain expression; ``quoted``: strings used as names or numbers."""
        match node:
            case ast.Constant(value=str(value)):
                return node in quoted and _NAME.fullmatch(value) is not None
            case ast.Constant(value=int() | float() as number):
                return not abs(number) > MAX_NUMBER
            case ast.Name(id=name) | ast.keyword(arg=str(name)):
                return not name.startswith("__")
            case ast.Subscript(slice=ast.Constant() as place):
                quoted.add(place)
                return True
            case ast.Call(func=ast.Name(id=name), args=arguments):
                if name == "Float":
                    return _is_float(node, quoted)
                if name == "Symbol":
                    quoted.update(arguments)
                return name in _FUNCTIONS
            case ast.Call(func=ast.Attribute(), keywords=[]):
                return True  # the attribute itself is checked below
            case ast.Attribute(value=ast.Name(id="math"), attr=name):
                return name in ("ceil", "floor", "trunc", "inf")
            case ast.Attribute(attr=name):
                return name in _METHODS
        return isinstance(node, _PLAIN)

    def _refused(self, what: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"'{self._file}': {what!r} {why}: refused and not loaded; export the model's "
            "computation alone, or sign the version"
        )


def _is_float(call: ast.Call, quoted: set[ast.AST]) -> bool:
    """Whether a call is a number of double precision; its text is added to ``quoted``."""
    match call:
        case ast.Call(args=[ast.Constant(value=str(text)) as number]):
            quoted.add(number)
        case _:
            return False
    bits = [keyword.value for keyword in call.keywords if keyword.arg == "precision"]
    return (
        _FLOAT.fullmatch(text) is not None
        and len(bits) == len(call.keywords)
        and all(isinstance(each, ast.Constant) and each.value == _FLOAT_BITS for each in bits)
    )


def _leaves(tree: ast.AST) -> int:
    """The number of symbols and numbers in an expression."""
    count, inner = 0, set[ast.AST]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name) as function, args=args, keywords=keywords):
                inner.add(function)
                values = [*args, *(keyword.value for keyword in keywords)]
                if name in _ATOMS and all(isinstance(value, ast.Constant) for value in values):
                    inner.update(values)
                    count += 1
            case ast.Name() | ast.Constant() if node not in inner:
                count += 1
    return count


def _terms(node: ast.AST) -> int:
    """The most terms of an expression, once its products and powers of sums are expanded.

    Raises:
        ValueError: there may be more than ``MAX_TERMS``.
    """
    match node:
        case (
            ast.BinOp(op=ast.Pow(), left=base)
            | ast.Call(func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow"), args=[base, _])
        ):
            terms = int(_terms(base) ** _exponent(node))
        case ast.Call(func=ast.Name(id=name), args=parts) if name in _SUMS:
            terms = sum(map(_terms, parts))
        case ast.BinOp(op=ast.Add() | ast.Sub()) | ast.BoolOp() | ast.Compare() | ast.Tuple():
            terms = sum(map(_terms, _operands(node)))
        case _:
            terms = math.prod(map(_terms, _operands(node)))
    if terms > MAX_TERMS:
        raise ValueError("it has too many terms")
    return terms


def _operands(node: ast.AST) -> Iterator[ast.AST]:
    return (child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr))


def _exponent(node: ast.AST) -> int:
    """The factor by which a power lengthens a number; an exponent must be a number."""
    match node:
        case (
            ast.BinOp(op=ast.Pow(), right=exponent)
            | ast.Call(func=ast.Name(id="Pow" | "PowByNatural" | "FloatPow"), args=[_, exponent])
        ):
            pass
        case _:
            return 1
    match exponent:
        case (
            ast.Constant(value=int(value))
            | ast.UnaryOp(operand=ast.Constant(value=int(value)))
            | ast.Call(func=ast.Name(id="Integer"), args=[ast.Constant(value=int(value))])
            | ast.UnaryOp(operand=ast.Call(args=[ast.Constant(value=int(value))]))
        ):
            return max(1, abs(value))
    return MAX_POWER + 1
