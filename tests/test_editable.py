"""The editable installation, as static tools see it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BUILD = "import setuptools.build_meta as b; print(b.build_editable('.'))"
_LINE = 'package-dir = { "" = "." }\n'


def paths(folder: Path, line: str = _LINE) -> list[str]:
    """The lines of the ``.pth`` file of an editable installation of this project."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert text.count(_LINE) == 1
    (folder / "pyproject.toml").write_text(text.replace(_LINE, line))
    for name in ("README.md", "modelport", "gateway", "exporters", "loadtests"):
        (folder / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "-c", _BUILD], cwd=folder, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".pth")]
        return archive.read(name).decode().splitlines()


@pytest.mark.thorough
def test_an_editable_installation_is_a_path_and_no_import_hook(tmp_path: Path) -> None:
    """Static tools run no code, and so do not see packages behind a hook."""
    assert paths(tmp_path) == [str(tmp_path)]


@pytest.mark.thorough
def test_without_package_dir_it_would_be_an_import_hook(tmp_path: Path) -> None:
    """The known-bad variant."""
    assert paths(tmp_path, "")[0].startswith("import ")


@pytest.mark.thorough
def test_mypy_finds_the_types_from_another_folder(tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "__editable__.modelport.pth").write_text(f"{ROOT}\n")
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in sys.path if path))
    program = "import modelport; reveal_type(modelport.Client); modelport.Client(1)"
    command = [
        *(sys.executable, "-m", "mypy", "--python-executable", str(environment / "bin" / "python")),
        *("--follow-imports", "silent", "-c", program),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "Revealed type is" in done.stdout, done.stdout
    assert "modelport.client.Client" in done.stdout
    assert 'has incompatible type "int"; expected "str"' in done.stdout
