"""Model repositories of Triton's tests: its own, and its generators'."""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench

SERVER = PinnedSource("triton-inference-server/server", "e1db8a603d863b1317ee859bdeea2be19959462e")
EXAMPLES = "docs/examples/model_repository"
#: OpenVINO 2026 has the generators' names of ``openvino.runtime`` in ``openvino``.
_GENERATE = """
import importlib.util, runpy, sys
if importlib.util.find_spec("openvino"):
    import openvino
    sys.modules.setdefault("openvino.runtime", openvino)
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def copy(source: Path, root: Path, *names: str) -> None:
    """Models ``names`` of the repository folder ``source``; a name may be a pattern.

    A model without a version folder gets one, with its Python files.
    """
    for name in names:
        for folder in sorted(source.glob(name)):
            target = root / folder.name
            shutil.copytree(folder, target, dirs_exist_ok=True)
            if not any(path.is_dir() for path in target.iterdir()):
                (target / "1").mkdir()
                for code in target.glob("*.py"):
                    code.rename(target / "1" / code.name)


def generated(bench: Bench, generator: str, *flags: str) -> Path:
    """The models of a generator of ``qa/common``, made once for each run."""
    made = bench.common / "generated"
    made.mkdir(exist_ok=True)
    folder = made / "-".join([generator, *flags]).replace("--", "")
    with open(made / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _generate(bench, folder, generator, *flags)
    return folder


def _generate(bench: Bench, folder: Path, generator: str, *flags: str) -> None:
    if not folder.is_dir():
        folder.mkdir()
        code = _GENERATE.replace("sys.argv[0]", repr(f"{generator}.py"))
        command = [sys.executable, "-c", code, "--onnx_opset=17", *flags]
        subprocess.run(
            [*command, f"--models_dir={folder}"],
            cwd=bench.source(SERVER) / "qa" / "common",
            check=True,
            capture_output=True,
        )


def scripted(bench: Bench, root: Path, test_sh: str, *lines: tuple[int, int], made: str) -> None:
    """Run ``lines`` of a ``test.sh`` in its folder, and move the models that they have ``made``."""
    file = bench.work / SERVER.name / "qa" / test_sh
    text = file.read_text().splitlines()
    parts = ("\n".join(text[first - 1 : last]) for first, last in lines)
    subprocess.run(["bash", "-euc", "\n".join(parts)], cwd=file.parent, check=True)
    for model in (file.parent / made).iterdir():
        model.rename(root / model.name)


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
