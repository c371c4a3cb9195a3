"""TorchServe's side of a handler, in this process."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from modelport.exporters.loaded_model import Source
from modelport.exporters.runtime.output_capture import quiet
from tests.torchserve.clients import read


@dataclass
class Context:
    """The parts of TorchServe 0.12.0's ``ts/context.py`` that handlers use."""

    folder: Path
    headers: list[dict[str, Any]] = field(default_factory=list)
    statuses: dict[int, int] = field(default_factory=dict)
    answered: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def system_properties(self) -> dict[str, Any]:
        return {"model_dir": str(self.folder), "gpu_id": None}

    @property
    def manifest(self) -> Any:
        return json.loads((self.folder / "MAR-INF" / "MANIFEST.json").read_text())

    def get_all_request_header(self, index: int) -> dict[str, Any]:
        return self.headers[index]

    def set_response_status(self, code: int, phrase: str, idx: int) -> None:
        self.statuses[idx] = code

    def set_response_content_type(self, index: int, value: str) -> None:
        self.set_response_header(index, "content-type", value)

    def set_response_header(self, index: int, key: str, value: str) -> None:
        self.answered.setdefault(index, {})[key] = value


@dataclass
class ServedArchive:
    """An unpacked archive whose handler is loaded; calling it with rows is one TorchServe batch."""

    folder: Path
    handle: Any
    source: Source
    batches: list[int] = field(default_factory=list)

    def __call__(
        self, *rows: Any, headers: Mapping[str, str] | None = None
    ) -> list[tuple[int, Any]]:
        """Status, and outputs by name or the error, for each row's body."""
        context = Context(self.folder, [dict(headers or {}) for _ in rows])
        answers = self.handle([{"body": row} for row in rows], context)
        return [
            read(context.statuses.get(index, 200), context.answered[index], bytes(answer))
            for index, answer in enumerate(answers)
        ]


@contextmanager
def unpacked(archive: Path, source: Source) -> Iterator[ServedArchive]:
    """Loads what the archive's manifest names as handler, in a folder of its own."""
    folder = archive.with_suffix("")
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)
    sys.path.insert(0, str(folder))
    try:
        name = Context(folder).manifest["model"]["handler"].removesuffix(".py")
        with quiet():  # torch says that TorchScript is deprecated
            handle = importlib.import_module(name).handle
            assert handle(None, Context(folder)) is None
        loaded: Any = sys.modules["modelport_torchserve.torchserve_handler"]
        served, model = ServedArchive(folder, handle, source), loaded._handler._model

        def counted(*inputs: torch.Tensor) -> Any:
            served.batches.append(len(inputs[0]))
            return model(*inputs)

        loaded._handler._model = counted
        yield served
    finally:
        sys.path.remove(str(folder))
        for module in [m for m in sys.modules if m.startswith("modelport_")]:
            del sys.modules[module]
