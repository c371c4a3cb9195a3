"""Model repositories of Triton's tests: its own, its generators', and equal ones of ``fake``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = "docs/examples/model_repository"
#: Backends of Triton's own tests that echo, and need nothing but a configuration here.
_ECHOES = re.compile(
    r'^\s*(backend|platform)\s*:\s*"(python|identity|repeat|custom)"', re.MULTILINE
)


def copy(source: Path, root: Path, *names: str) -> None:
    """Models ``names`` of the repository folder ``source``; those that echo run on ``fake``."""
    for name in names:
        folder = root / name
        shutil.copytree(source / name, folder, dirs_exist_ok=True)
        config = folder / "config.pbtxt"
        if config.is_file():
            config.write_text(_ECHOES.sub('backend: "fake"', config.read_text()))
        for code in folder.glob("*/model.py"):
            code.unlink()


def generate(source: Path, root: Path, generator: str, *flags: str) -> Path:
    """The models that a generator of ``qa/common`` makes for ONNX Runtime."""
    folder = root / generator
    folder.mkdir(parents=True)
    command = [sys.executable, f"{generator}.py", "--onnx", "--onnx_opset=17", *flags]
    common = source / "qa" / "common"
    subprocess.run(
        [*command, f"--models_dir={folder}"], cwd=common, check=True, capture_output=True
    )
    return folder


def edit(root: Path, name: str, *replacements: tuple[str, str], append: str = "") -> None:
    """Change ``config.pbtxt`` of ``name`` as ``sed`` does in ``test.sh``: regular expressions."""
    config = root / name / "config.pbtxt"
    text = config.read_text()
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    config.write_text(text + append)


def renamed(root: Path, name: str, copy_name: str, *replacements: tuple[str, str]) -> None:
    """A copy of the model ``name`` under another name."""
    shutil.copytree(root / name, root / copy_name)
    edit(root, copy_name, (f'name: "{name}"', f'name: "{copy_name}"'), *replacements)


def names(folder: Path, keep: Sequence[str] = ("*",)) -> list[str]:
    return sorted({path.name for pattern in keep for path in folder.glob(pattern)})
