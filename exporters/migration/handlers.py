"""Python files of an archive, listed and parsed but never run."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from modelport.exporters.migration.archive import TorchServeArchive
from modelport.gateway.repository.manifest import sha256_of

#: Largest file to parse; parsing takes a hundred times its size in memory.
MAX_SOURCE_BYTES = 512 * 1024

#: TorchServe's own handlers (``ts/torch_handler``); any other name is a file in the archive.
DEFAULT_HANDLERS = (
    "base_handler",
    "image_classifier",
    "image_segmenter",
    "object_detector",
    "text_classifier",
    "dali_image_classifier",
    "densenet_handler",
    "text_handler",
    "vision_handler",
)
#: Methods of a handler that TorchServe calls.
METHODS = ("initialize", "preprocess", "inference", "postprocess", "handle")


@dataclass(frozen=True, slots=True)
class HandlerCode:
    """The outline of a Python file.

    Attributes:
        imports: top-level packages, without those in the archive itself.
        defines: functions and classes; a class with its bases.
        methods: the members of ``METHODS`` that it defines, in their order.
        problem: the reason that it could not be parsed.
    """

    file: str
    size_bytes: int
    sha256: str
    imports: tuple[str, ...] = ()
    defines: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    problem: str = ""


def listing(archive: TorchServeArchive) -> tuple[HandlerCode, ...]:
    """Describe every Python file of the archive."""
    own = {file.removesuffix(".py").partition("/")[0] for file in archive.files}
    return tuple(
        _describe(archive, file, own) for file in sorted(archive.files) if file.endswith(".py")
    )


def handler_file(archive: TorchServeArchive) -> str:
    """The file of the archive's own handler; empty if it uses TorchServe's."""
    name = archive.manifest.handler.partition(":")[0]
    for file in (name, f"{name}.py"):
        if name and file in archive.files:
            return file
    return ""


def default_handler(archive: TorchServeArchive) -> str:
    """The name of TorchServe's handler that the archive uses; empty if it has its own."""
    name = archive.manifest.handler.partition(":")[0].removesuffix(".py")
    return name if name in DEFAULT_HANDLERS and not handler_file(archive) else ""


def _describe(archive: TorchServeArchive, file: str, own: set[str]) -> HandlerCode:
    size, digest = archive.files[file], sha256_of(archive.root / file)
    if size > MAX_SOURCE_BYTES:
        return HandlerCode(file, size, digest, problem="it is too large to be parsed")
    content = archive.read(file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as warnings about invalid escapes
            tree = ast.parse(content)
        imports = sorted(set(_imports(tree)) - own)
        defines, functions = _definitions(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return HandlerCode(
            file, size, digest, problem=f"it does not parse ({type(error).__name__})"
        )
    methods = tuple(method for method in METHODS if method in functions)
    return HandlerCode(file, size, digest, tuple(imports), defines, methods)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _definitions(tree: ast.Module) -> tuple[tuple[str, ...], set[str]]:
    """The module's definitions, and the names of its functions and of its classes' methods."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    defines, functions = [], set()
    for node in tree.body:
        if isinstance(node, kinds):
            defines.append(node.name)
            functions.add(node.name)
        elif isinstance(node, ast.ClassDef):
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            defines.append(f"{node.name}({bases})" if bases else node.name)
            functions |= {child.name for child in node.body if isinstance(child, kinds)}
    return tuple(defines), functions
