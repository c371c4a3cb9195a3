"""Unloading Python models, all of them at once."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.python.backend import PythonBackend
from modelport.gateway.backends.python.environment import WorkerEnvironment
from modelport.gateway.repository import config as configuration
from modelport.gateway.settings import PythonModels


async def test_a_model_is_unloaded_by_the_last_thread_of_the_executor(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    (tmp_path / "copy").mkdir()
    config = configuration.parse('backend: "python" default_model_filename: "model.py"')
    (tmp_path / "model.py").touch()
    prepared = WorkerEnvironment("python", {}, tmp_path, None, (tmp_path / "copy",))
    host: Any = type("Host", (), {"loop": loop})
    backend = PythonBackend(
        Artifact("m", 1, tmp_path, config, 1), host, PythonModels(), prepared, tmp_path
    )
    await asyncio.wait_for(asyncio.to_thread(backend.unload), 10)
    assert not (tmp_path / "copy").exists()
