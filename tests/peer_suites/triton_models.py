"""Model repositories of Triton's tests: its own, its generators', and equal ones of ``fake``."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench

SERVER = PinnedSource("triton-inference-server/server", "e1db8a603d863b1317ee859bdeea2be19959462e")
EXAMPLES = "docs/examples/model_repository"
#: Backends of Triton's own tests that echo, and need nothing but a configuration here.
_ECHOES = re.compile(r'^\s*(backend|platform)\s*:\s*"(python|identity|custom)"', re.MULTILINE)


def copy(source: Path, root: Path, *names: str) -> None:
    """Models ``names`` of the repository folder ``source``; those that echo run on ``fake``.

    A name may be a pattern. A model without a version folder gets one.
    """
    for name in names:
        for folder in sorted(source.glob(name)):
            target = root / folder.name
            shutil.copytree(folder, target, dirs_exist_ok=True)
            config = target / "config.pbtxt"
            text = config.read_text() if config.is_file() else ""
            if _ECHOES.search(text):
                config.write_text(_ECHOES.sub('backend: "fake"', text))
                for code in target.rglob("model.py"):
                    code.unlink()
            if not any(path.is_dir() for path in target.iterdir()):
                (target / "1").mkdir()


def generated(bench: Bench, generator: str, *flags: str) -> Path:
    """The models of a generator of ``qa/common``, made once for each run."""
    folder = bench.work / "generated" / "-".join([generator, *flags]).replace("--", "")
    if not folder.is_dir():
        folder.mkdir(parents=True)
        command = [sys.executable, f"{generator}.py", "--onnx_opset=17", *flags]
        subprocess.run(
            [*command, f"--models_dir={folder}"],
            cwd=bench.source(SERVER) / "qa" / "common",
            check=True,
            capture_output=True,
        )
    return folder


def without_commas(root: Path) -> None:
    """Rename the generators' ``nop_TYPE_FP32_-1,-1``: a gateway serves no name with a comma."""
    names = [folder.name for folder in root.iterdir() if "," in folder.name]
    for name in names:
        (root / name).rename(root / name.replace(",", "_"))
    for config in root.glob("*/config.pbtxt"):
        text = config.read_text()
        for name in names:
            text = text.replace(f'"{name}"', f'"{name.replace(",", "_")}"')
        config.write_text(text)


def edit(root: Path, name: str, *replacements: tuple[str, str], append: str = "") -> None:
    """Change ``config.pbtxt`` of ``name`` as ``sed`` does in ``test.sh``: regular expressions."""
    config = root / name / "config.pbtxt"
    text = config.read_text()
    for pattern, replacement in replacements:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    config.write_text(text + append)


def renamed(
    root: Path, name: str, new: str, *replacements: tuple[str, str], append: str = ""
) -> None:
    """A copy of the model ``name`` under another name."""
    shutil.copytree(root / name, root / new)
    edit(root, new, (f'^name: "{name}"', f'name: "{new}"'), *replacements, append=append)
