"""JSON serialisation of a comparison, in both directions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import untrusted_files
from modelport.gateway.runtime import checked_json
from modelport.loadtests import marked_block
from modelport.loadtests.compare.result import Comparison

FORMAT = "modelport-comparison/1"
MOST_BYTES = 1 << 28


class BadDocument(ValueError):
    """The file is not a comparison; the message names the file and the problem."""


def to_dict(comparison: Comparison) -> dict[str, Any]:
    return {"format": FORMAT, **dataclasses.asdict(comparison)}


def write(comparison: Comparison, path: Path) -> None:
    """Write the comparison to ``path`` atomically; missing folders are made."""
    marked_block.write(path, json.dumps(to_dict(comparison), indent=1) + "\n")


def read(path: Path) -> Comparison:
    """Read a comparison from ``path``.

    Raises:
        BadDocument: the file cannot be read, or is not a comparison.
    """
    try:
        document = json.loads(untrusted_files.read_text(path, MOST_BYTES))
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise InvalidArgument(
                f"'format' is not {FORMAT}; 'modelport compare --json-report' writes it"
            )
        return checked_json.read(Comparison, json.dumps(document).encode())
    except OSError as error:
        raise BadDocument(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, InvalidArgument) as error:
        raise BadDocument(f"{path} is not a comparison of modelport: {error}") from error
