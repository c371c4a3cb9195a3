"""Tests of what the garbage collector visits, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

VISITED = """
import gc
from modelport.gateway.backends.registry import find_loader
from modelport.gateway.runtime import collector
from modelport.gateway.server import app
collector.exempt_modules = {exempt}
find_loader("pytorch")
print(len(gc.get_objects()))
"""


def visited(exempt: str) -> int:
    """The objects that a full collection visits once PyTorch is imported."""
    code = VISITED.format(exempt=exempt)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)


@pytest.mark.parametrize(("exempt", "few"), [("collector.exempt_modules", True), ("int", False)])
def test_a_full_collection_does_not_visit_the_modules_of_a_backend(exempt: str, few: bool) -> None:
    """The known-bad variant visits them: that takes a tenth of a second and more."""
    assert (visited(exempt) < 10_000) is few
