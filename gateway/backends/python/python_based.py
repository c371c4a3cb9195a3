"""Triton's Python-based backends: models of one ``model.py``, which is the backend's.

``--backend-directory`` has a folder for each of them. The files of its models are data.
"""

from __future__ import annotations

from pathlib import Path

FILE = "model.py"


def folder_of(backend: str, directory: Path | None) -> Path | None:
    """The folder of a Python-based backend in ``directory``; None: it has none of that name."""
    if directory is None or not backend or Path(backend).name != backend:
        return None
    folder = directory / backend
    return folder if (folder / FILE).is_file() else None
