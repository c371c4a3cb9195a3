"""Path arguments of all commands: a wrong one costs no slow import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import modelport

#: Imports of these take from half a second to many.
SLOW = (
    *("torch", "tensorflow", "keras", "onnx", "onnxruntime", "onnxscript", "transformers", "jax"),
    *("sklearn", "scipy", "matplotlib", "locust", "gevent", "openvino", "executorch"),
)
#: Reads the commands, and gives each path parameter in turn a wrong value, all others right ones.
#: With an argument, paths are not checked when the command line is read: the known-bad variant.
_PROGRAM = """
import builtins, importlib.abc, json, sys
import click
from click.testing import CliRunner
from modelport import cli
from modelport.gateway.cli import paths
from modelport.gateway.repository.storage.location import Repository

SLOW = {slow}
imported = []

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in SLOW:
            imported.append(name)
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)

sys.meta_path.insert(0, Finder())
if sys.argv[1:]:
    paths.EXISTING.exists = False
    paths.WrittenPath.convert = click.Path.convert

def commands(name, command):
    if isinstance(command, click.Group):
        for each in command.list_commands(click.Context(command)):
            yield from commands([*name, each], command.get_command(click.Context(command), each))
    else:
        yield name, command

#: What commands write; in some, the repository.
WRITES = {{
    "--output", "--html", "--json-report", "--junit", "--markdown", "--prometheus", "--report",
    "--samples-file",
    "--cache", "--file", "--repository-cache", "--python-environments", "target",
    ("export", "--repository"),
    ("certify", "--repository"), ("publish", "--repository"), ("migrate", "--repository"),
}}
VALUES = {{"--as": "ci", "--candidate": "2", "--model": "fraud", "operation": "infer"}}

def right(option):
    if isinstance(option.type, click.Path | Repository):
        return "new/file.keras" if isinstance(option.type, paths.WrittenPath) else "file.onnx"
    if isinstance(option.type, click.Choice):
        return option.type.choices[0]
    return VALUES.get(option.opts[0], "1")

def given(option, value):
    return [value] if isinstance(option, click.Argument) else [option.opts[-1], value]

rows = []
for name, command in commands([], cli.modelport):
    for wrong in command.params:
        if not isinstance(wrong.type, click.Path | Repository) or name == ["serve"]:
            continue
        writes = any(o in WRITES or (name[0], o) in WRITES for o in wrong.opts)
        # A file that is written must not be asked to exist, and the other way round.
        assert isinstance(wrong.type, paths.WrittenPath | paths.WrittenRepository) == writes, wrong
        value = "file.onnx/below/it" if writes else "absent.pt"
        arguments = [*name]
        for option in command.params:
            if option is wrong:
                arguments += given(option, value)
            elif option.required:
                arguments += given(option, right(option))
        imported.clear()
        done = CliRunner().invoke(cli.modelport, arguments)
        rows.append([" ".join(arguments), done.exit_code, done.stderr, list(imported)])
print(json.dumps(rows))
"""


def rows(folder: Path, *flags: str) -> list[Any]:
    (folder / "file.onnx").touch()
    program = _PROGRAM.format(slow=SLOW)
    command = [sys.executable, "-c", program, *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def test_a_wrong_path_is_refused_by_name_before_slow_imports(tmp_path: Path) -> None:
    found = rows(tmp_path)
    assert len(found) > 60
    for arguments, status, said, imported in found:
        wrong = "absent.pt" if "absent.pt" in arguments else "file.onnx/below/it"
        assert status in (2, 3), (arguments, said)  # 3: ``gate`` has not decided
        assert said.count("\n") == 1, (arguments, said)
        assert wrong in said, (arguments, said)
        assert not imported, (arguments, imported)


def test_the_demo_needs_a_folder_that_it_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_repository").touch()
    done = modelport("demo")
    assert done.returncode == 2
    assert "'model_repository' is not a folder; run the demo in" in done.stderr.replace(
        f"{tmp_path}/", ""
    )
    (tmp_path / "model_repository").unlink()
    monkeypatch.setattr("os.access", lambda *_: False)
    done = modelport("demo")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"you may not write to '{tmp_path}'" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_enumeration_finds_paths_that_are_not_checked(tmp_path: Path) -> None:
    assert sum(bool(imported) or status != 2 for _, status, _, imported in rows(tmp_path, "x")) > 9
