"""The environment's installer, ``.ci/install.py``: uv gets what pip is configured for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "install.py"
CONFIGURATION = """
[global]
index-url = https://mirror.test/simple
extra-index-url = file:///more/simple
    https://torch.test/whl/cpu
find-links = /wheels ~/mine
trusted-host = mirror.test
cert = /etc/ca.crt
constraint = /etc/pins.txt
timeout = 30
[install]
timeout = 40
[freeze]
timeout = 50
"""
WANTED = {
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_INDEX_URL": "https://mirror.test/simple",
    "UV_EXTRA_INDEX_URL": "file:///more/simple https://torch.test/whl/cpu",
    "UV_FIND_LINKS": f"/wheels,{Path.home()}/mine",
    "UV_INSECURE_HOST": "mirror.test",
    "SSL_CERT_FILE": "/etc/ca.crt",
    "UV_HTTP_TIMEOUT": "40",
}


@pytest.fixture(scope="module")
def installer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def listing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration as pip itself prints it."""
    file = tmp_path_factory.mktemp("pip") / "pip.conf"
    file.write_text(CONFIGURATION)
    others = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        env=others | {"PIP_CONFIG_FILE": str(file), "XDG_CONFIG_DIRS": "/none", "HOME": "/none"},
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout


def test_uv_gets_each_index_folder_and_certificate_that_pip_is_configured_for(
    installer: ModuleType, listing: str
) -> None:
    found = installer.options(listing)
    assert found["constraint"] == ["/etc/pins.txt"]
    made = installer.environment(found)
    assert {name: made[name] for name in WANTED} == WANTED


def test_variables_win_over_files_and_an_empty_option_sets_nothing(installer: ModuleType) -> None:
    listing = "global.index-url='https://a'\n:env:.index-url='https://b'\nglobal.proxy=''\n"
    made = installer.environment(installer.options(listing))
    assert made == {"UV_INDEX_URL": "https://b", "UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_uv_is_asked_with_pips_settings_unless_it_has_its_own(tmp_path: Path) -> None:
    """A resolution by the real uv: of two folders, it sees the one that pip is told of."""
    if importlib.util.find_spec("uv") is None:
        pytest.skip("an environment made by pip has no uv")
    for folder, version in (("pips", "1.0"), ("uvs", "2.0")):
        wheel = tmp_path / folder / f"acme_nothing-{version}-py3-none-any.whl"
        write_wheel(wheel, "acme_nothing", version)
    for variables, seen in (
        ({"PIP_FIND_LINKS": str(tmp_path / "pips")}, "+ acme-nothing==1.0"),
        ({"UV_FIND_LINKS": str(tmp_path / "uvs")}, "+ acme-nothing==2.0"),
        ({}, "not found"),
    ):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), "--dry-run", "acme-nothing"],
            env={**os.environ, "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1", **variables},
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert seen in done.stderr, done.stderr


def write_wheel(path: Path, name: str, version: str) -> None:
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as file:
        info = f"{name}-{version}.dist-info"
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        file.writestr(f"{info}/WHEEL", tags)
        file.writestr(f"{info}/RECORD", "")
