"""Published versions of small models, and ``modelport package`` run on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from torch import nn

from modelport.exporters.cli.package import package_command
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.sources import pytorch
from modelport.gateway.repository import config, manifest
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec

X = TensorSpec("x", Datatype.FP32, (4,))
PLAIN = ModelSignature((X,), (TensorSpec("y", Datatype.FP32, (4,)),), 8)


def put(
    repository: Path,
    name: str,
    format_name: str,
    signature: ModelSignature = PLAIN,
    version: int = 1,
    change: Callable[[Any], None] = lambda wanted: None,
) -> Path:
    """A version whose artifact is nothing that a runtime would load."""
    row = next(row for row in config.PLATFORMS if row.format == format_name)
    folder = repository / name / str(version)
    artifact = folder / row.default_filename
    if artifact.suffix == ".savedmodel":
        (artifact / "variables").mkdir(parents=True)
        (artifact / "saved_model.pb").write_bytes(b"graph of " + str(version).encode())
        (artifact / "variables" / "variables.index").write_bytes(b"index")
    else:
        folder.mkdir(parents=True)
        artifact.write_bytes(f"{format_name} {version}".encode())
    (folder / "certificate.json").write_text("{}")
    (folder / "certificate.json.sig").write_text("{}")
    wanted = config.build(name, row, signature)
    change(wanted)
    (folder.parent / config.FILENAME).write_text(config.to_text(wanted))
    manifest.write(folder)
    return folder


def put_torchscript(
    repository: Path, name: str, module: nn.Module, signature: ModelSignature
) -> Path:
    """A version with a real artifact."""
    folder = put(repository, name, "torchscript", signature)
    source = pytorch.source(module, ModelSpec(name, lambda *_: signature), signature)
    FORMATS.builtin["torchscript"].export(source, folder / "model.pt", ExportTarget())
    manifest.write(folder)
    return folder


def run(path: Path, server: str, output: Path, *more: str) -> Result:
    arguments = [str(path), "--for", server, "--output", str(output), *more]
    return CliRunner().invoke(package_command, arguments)


def packaged(path: Path, server: str, output: Path, *more: str) -> Path:
    result = run(path, server, output, *more)
    assert result.exit_code == 0, result.output
    return output


def refused(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.count("\n") == 1
    assert all(word in result.stderr for word in words), result.stderr
