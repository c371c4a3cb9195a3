"""SageMaker's multi-model endpoints: archives that the platform unpacks, loaded on request.

SageMaker unpacks the archive of a model to ``/opt/ml/models/HASH/model`` and asks the container to
load it under a name. The folder is a model's, or a repository of several: of these, the ensemble
gets the name. Codes and texts are those of Triton's ``sagemaker_server.cc``.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi import Path as UrlPath

from modelport.gateway.errors import AlreadyExists, InvalidArgument, ModelportError, NotFound
from modelport.gateway.protocols import request_body
from modelport.gateway.protocols.dialect_host import DialectHost
from modelport.gateway.protocols.http_operations import CONTROL, METADATA
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scan
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.wire import json_text

_UNPACKED = re.compile(r"/[0-9A-Za-z._-]+/model(/[0-9A-Za-z._-]+)?")
#: What runtimes say when memory is short, which SageMaker answers by unloading other models.
_NO_MEMORY = re.compile(
    r"(?i:out.of.memory|memoryerror|(dst|src) tensor is not initialized|"
    r"failed to allocate memory|no memory for|no space left on device)|OutOfMemory|\bOOM\b"
)
_Name = Annotated[str, UrlPath(description="Name of a loaded model")]


def out_of_memory(error: ModelportError) -> bool:
    """Whether memory was short, so that SageMaker may unload other models and try again."""
    is_about_name = isinstance(error, NotFound | AlreadyExists)  # of a model that may be "OOM"
    return not is_about_name and _NO_MEMORY.search(str(error)) is not None


class MultiModelEndpoint:
    """``/models`` of a multi-model endpoint."""

    def __init__(self, host: DialectHost) -> None:
        self._manager, self._control = host.manager, host.control
        self._folder = host.settings.sagemaker_models

    def add_routes(self, app: FastAPI) -> None:
        @app.get("/models", dependencies=METADATA, include_in_schema=False)
        async def list_models() -> Response:
            rows = [_row(name, source) for name, source in self._loaded().items()]
            return _answer({"models": rows})

        @app.post("/models", dependencies=CONTROL, include_in_schema=False)
        async def load_model(request: Request) -> Response:
            document = json_text.loads(await request_body.read_control(request))
            name, url = (_text(document, key) for key in ("model_name", "url"))
            source = await asyncio.to_thread(_model_folder, url, self._folder)
            await self._control.load(name, source=source)
            return _answer({})

        @app.get("/models/{model}", dependencies=METADATA, include_in_schema=False)
        async def get_model(model: _Name) -> Response:
            return _answer(_row(model, self._source(model)))

        @app.delete("/models/{model}", dependencies=CONTROL, include_in_schema=False)
        async def unload_model(model: _Name) -> Response:
            self._source(model)
            await self._control.unload(model, dependents=True)
            return _answer({})

    def _loaded(self) -> dict[str, str]:
        """The folders of the models that SageMaker has loaded, by name."""
        found = ((name, self._manager.find(name)) for name in self._manager.names())
        return {
            name: version.source
            for name, version in found
            if version is not None and version.source.startswith("/")
        }

    def _source(self, name: str) -> str:
        version = self._manager.find(name)
        if version is None or not version.source.startswith("/"):
            raise NotFound(f"model '{name}' is not loaded")
        return version.source


def _model_folder(url: str, archives: str) -> str:
    """The folder of the model that an unpacked archive has; blocking.

    Raises:
        InvalidArgument: the path is none of SageMaker's, or has not one model.
    """
    path = posixpath.normpath(url)
    if not path.startswith(archives) or not _UNPACKED.fullmatch(path.removeprefix(archives)):
        raise InvalidArgument(
            f"Invalid \"url\" '{url[:256]}': expected a path of the form "
            f"{archives}/<hash>/model[/<subdir>]"
        )
    folder = Path(path)
    if (folder / configuration.FILENAME).is_file():
        return path
    try:
        entries = [each for each in scan.scan_folder(folder).values() if each.is_model]
    except OSError as error:
        reason = error.strerror or "unreadable"
        raise InvalidArgument(f"\"url\" '{path}' cannot be read: {reason}") from None
    chosen = entries if len(entries) == 1 else [each for each in entries if _is_ensemble(each)]
    if len(chosen) != 1:
        raise InvalidArgument(
            f"\"url\" '{path}' has {len(entries)} models and {len(chosen)} ensembles; it must "
            "have one model, or one ensemble beside the models of its steps"
        )
    return str(folder / chosen[0].name)


def _is_ensemble(entry: ModelEntry) -> bool:
    try:
        config = configuration.parse(entry.config_text or "")
    except InvalidArgument:
        return False
    return bool(config.platform == configuration.ENSEMBLE)


def _row(name: str, source: str) -> dict[str, str]:
    return {"modelName": name, "modelUrl": posixpath.dirname(source)}


def _text(document: Any, key: str) -> str:
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"the body must be a JSON object with the text '{key}'")
    return value


def _answer(document: dict[str, Any]) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")
