"""Tests of what the garbage collector visits, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

VISITED = """
import gc
from modelport.gateway.backend_registry import find_loader
from modelport.gateway.runtime import collector
from modelport.gateway.server import app
collector.exempt_modules = {exempt}
find_loader("onnxruntime")
print(len(gc.get_objects()))
"""


def visited(exempt: str) -> int:
    """The objects that a full collection visits once ONNX Runtime is imported."""
    code = VISITED.format(exempt=exempt)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


@pytest.mark.thorough
@pytest.mark.parametrize(("exempt", "few"), [("collector.exempt_modules", True), ("int", False)])
def test_a_full_collection_does_not_visit_the_modules_of_a_backend(exempt: str, few: bool) -> None:
    """The known-bad variant visits them: that takes a tenth of a second and more."""
    assert (visited(exempt) < 10_000) is few


@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_collected_during_imports_and_all_is_as_before_then(before: bool) -> None:
    code = f"""
import gc
from modelport.gateway.runtime import collector
if not {before}:
    gc.disable()
collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
with collector.paused():
    made = [[] for _ in range(100_000)]
    during = len(collections)
print(during, gc.isenabled(), len(gc.get_objects()) < 1_000)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.split() == ["0", str(before), "True"]


def test_a_command_is_imported_without_collections() -> None:
    code = """
import gc
import click
from modelport import cli
collections = []
gc.callbacks.append(lambda phase, _: collections.append(phase))
cli.modelport.get_command(click.Context(cli.modelport), "serve")
print(len(collections))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert int(found.stdout) < 10
