"""TorchServe archives as torch-model-archiver 0.12 lays them out, and ``migrate`` run on them."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from torch import nn

from modelport.cli import modelport
from modelport.exporters.runtime.output_capture import quiet

MANIFEST = "MAR-INF/MANIFEST.json"
Files = Mapping[str, bytes | str]


def manifest(name: str, serialized: str = "model.pt", **model: str) -> str:
    """``handler`` and so on are the archiver's names, ``modelVersion`` is 1.0 by default."""
    fields = {"modelName": name, "modelVersion": "1.0", "handler": "base_handler"}
    fields |= {"serializedFile": serialized} if serialized else {}
    return json.dumps(
        {
            "createdOn": "01/01/2025 00:00:00",
            "runtime": "python",
            "model": fields | model,
            "archiverVersion": "0.12.0",
        }
    )


def mar(path: Path, name: str, files: Files, **model: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(file, content)
        archive.writestr(MANIFEST, manifest(name, **model))
    return path


def tgz(path: Path, name: str, files: Files, **model: str) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for file, content in {**files, MANIFEST: manifest(name, **model)}.items():
            data = content.encode() if isinstance(content, str) else content
            member = tarfile.TarInfo(f"{name}/{file}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def folder(path: Path, name: str, files: Files, **model: str) -> Path:
    for file, content in {**files, MANIFEST: manifest(name, **model)}.items():
        target = path / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def torchscript(module: nn.Module) -> bytes:
    """Script ``module`` and return the archive that ``torch.jit.save`` writes."""
    buffer = io.BytesIO()
    script: Any = torch.jit.script
    with quiet():  # it is deprecated
        torch.jit.save(script(module.eval()), buffer)
    return buffer.getvalue()


def state_dict(module: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    return buffer.getvalue()


def migrate(path: Path, repository: Path, *more: str) -> Result:
    arguments = ["migrate", "torchserve", str(path), "--model-repository", str(repository), *more]
    return CliRunner().invoke(modelport, arguments)


def refused(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr
