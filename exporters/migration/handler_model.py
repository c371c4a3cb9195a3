"""A TorchServe handler, carried over as a Python model around the archive's own model.

The handler's code is copied, not run. ``handler_program`` runs it in the gateway.
"""

from __future__ import annotations

import ast
import json
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from modelport.exporters.inspection import torchscript
from modelport.exporters.migration import torchserve_settings
from modelport.exporters.migration.archive import TorchServeArchive
from modelport.exporters.migration.artifact import NAMED
from modelport.exporters.migration.handlers import MAX_SOURCE_BYTES, handler_file
from modelport.gateway.backend_registry import PYTHON
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import signing
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import refusal
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

#: Between the handler's model name and that of the archive's own model.
GRAPH = "-graph"
SETTINGS = "handler.json"
#: What ``handler_program`` has of TorchServe.
_PROVIDED = {"ts", "ts.context", "ts.torch_handler", "ts.torch_handler.base_handler"}
_RESERVED = {PYTHON.default_filename, SETTINGS, *signing.UNLISTED}


def obstacle(archive: TorchServeArchive) -> str:
    """The reason why the archive's own handler is not carried over; empty if it is.

    It is parsed, and not run.
    """
    file = handler_file(archive)
    if not file:
        return "it is not in the archive"
    if archive.files[file] > MAX_SOURCE_BYTES:
        return "it is too large to be parsed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as warnings about invalid escapes
            tree = ast.parse(archive.read(file))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"it does not parse ({type(error).__name__})"
    if unknown := sorted(set(_of_torchserve(tree)) - _PROVIDED):
        return f"it needs {unknown[0]} of TorchServe; derive it from BaseHandler alone"
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    if not classes:
        return "it loads its model itself; make it a class derived from BaseHandler"
    if any(map(_loads_itself, ast.walk(tree))):
        return "its initialize() loads the model itself; call super().initialize(context)"
    for name in _files(archive):
        if name in _RESERVED:
            return f"'{name}' in the archive has a reserved name; rename it"
        if problem := refusal(name):
            return problem
    return ""


def _of_torchserve(tree: ast.Module) -> list[str]:
    """The modules of TorchServe that the code imports."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
    return [name for name in found if name.partition(".")[0] == "ts"]


def _loads_itself(node: ast.AST) -> bool:
    """Whether ``node`` is an ``initialize`` that calls that of no other class."""
    if not isinstance(node, ast.FunctionDef) or node.name != "initialize":
        return False
    called = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return not any(isinstance(each, ast.Attribute) and each.attr == node.name for each in called)


def _files(archive: TorchServeArchive) -> list[str]:
    """The files that the handler may read: all but the model and TorchServe's own."""
    manifest = archive.manifest
    used = {manifest.serialized_file, manifest.requirements_file, manifest.config_file}
    return sorted(name for name in archive.files if name not in used)


class HandlerGraph(NamedTuple):
    """The archive's own model as it is served.

    Attributes:
        by_name: its outputs are a dict in TorchScript.
        batch_size: of the handler.
    """

    config: ModelConfig
    version: int
    by_name: bool
    batch_size: int


def answers_by_name(artifact: Path) -> bool:
    """Whether ``forward`` of a TorchScript file returns a dict."""
    return artifact.suffix == ".pt" and torchscript.forward(artifact).result == NAMED


def configuration_of(name: str, batch_size: int) -> ModelConfig:
    """The configuration of a handler's model: the bytes of a request, and those of its answer."""
    body, response = (TensorSpec(each, Datatype.BYTES, (1,)) for each in ("body", "response"))
    config = configuration.build(name, PYTHON, ModelSignature((body,), (response,), batch_size))
    config.parameters["raw_body"].string_value = "true"
    return config


def stage(archive: TorchServeArchive, staged: Path, name: str, graph: HandlerGraph) -> None:
    """Write the version of the handler's model ``name`` around ``graph`` to ``staged``."""
    for file in _files(archive):
        target = staged / file
        target.parent.mkdir(parents=True, exist_ok=True)
        archive.deliver(file, target)
    program = Path(__file__).with_name("handler_program.py")
    shutil.copyfile(program, staged / PYTHON.default_filename)
    manifest = archive.manifest
    _, _, function = manifest.handler.partition(":")
    settings = {
        "name": name,
        "file": handler_file(archive),
        "function": function or "handle",
        "manifest": {
            "model": {
                "modelName": manifest.model_name,
                "modelVersion": manifest.model_version,
                "serializedFile": manifest.serialized_file,
                "handler": manifest.handler,
            }
        },
        "yaml": torchserve_settings.document(archive),
        "batch_size": graph.batch_size,
        "model": graph.config.name,
        "version": graph.version,
        "inputs": [tensor.name for tensor in graph.config.input],
        "outputs": [tensor.name for tensor in graph.config.output],
        "by_name": graph.by_name,
    }
    (staged / SETTINGS).write_text(_json(settings, archive.name))


def _json(settings: Any, archive: str) -> str:
    try:
        return json.dumps(settings, indent=2) + "\n"
    except (TypeError, ValueError, RecursionError) as error:  # YAML has dates, and circles
        raise IntegrityError(f"the settings of '{archive}' cannot be written as JSON") from error
