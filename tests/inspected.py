"""``modelport inspect`` in this process, and files that are damaged at random."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from modelport.exporters.cli.inspect import inspect

KEYS = [
    "format",
    "inputs",
    "outputs",
    "size_bytes",
    "opset",
    "format_version",
    "producer",
    "dynamic_axes",
    "weights",
    "operators",
    "external_data",
    "notes",
    "certificate",
    "parameters",
    "quantized_share",
]


def run(path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(inspect, [str(path), *arguments])


def show(path: Path) -> dict[str, Any]:
    """The JSON object, after the same as a table."""
    table = run(path)
    assert table.exit_code == 0, table.output
    result = run(path, "--json")
    assert result.stderr == ""
    shown: dict[str, Any] = json.loads(result.stdout)
    assert list(shown) == KEYS
    for tensor in (*shown["inputs"], *shown["outputs"]):
        assert tensor["name"] in table.stdout
    return shown


def refused(path: Path, exit_code: int, reason: str) -> None:
    result = run(path)
    assert result.exit_code == exit_code, result.output
    assert result.stdout == ""
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def survives_damage(path: Path, file: Path) -> None:
    """Cut short and with bytes changed, ``file``, of artifact ``path``, costs one line at most."""
    content, chance = file.read_bytes(), random.Random(0)
    for kept in (0, 1, 7, len(content) // 3, len(content) - 9):
        file.write_bytes(content[:kept])
        result = run(path)
        assert result.exit_code in (0, 5) if kept > 7 else result.exit_code == 5, (kept, result)
        assert len(result.stderr.splitlines()) <= 1
    for _ in range(12):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 8, 64))):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        file.write_bytes(damaged)
        result = run(path)
        assert result.exit_code in (0, 2, 5), result.output
        assert len(result.stderr.splitlines()) <= 1
