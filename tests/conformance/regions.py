"""One of ``tritonclient``'s clients, with regions made by its own utilities."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype, shared_memory

from tests.conformance import repository, wire
from tests.conformance.clients import CALLERS, ControlCaller, integers
from tests.server import Gateway, serving

Array = NDArray[Any]
MAX_INPUT_BYTES = 2**20
ROW = np.float32([[1, 2, 3, 4]])
_numbers = itertools.count()


@contextlib.contextmanager
def allowing(root: Path, *flags: str) -> Iterator[Gateway]:
    """A server that lets clients register regions."""
    repository.build(root)
    limit = ("--http-max-input-size", str(MAX_INPUT_BYTES))
    with serving(root, "--allow-client-shm", "true", *limit, *flags) as gateway:
        yield gateway


class RegionClient:
    """One of the four clients, and the regions that it made."""

    def __init__(self, name: str, gateway: Gateway, runner: asyncio.Runner) -> None:
        self.gateway = gateway
        self.control = ControlCaller(CALLERS[name](gateway, runner), runner)
        self.transport = self.control.transport
        self._module = tritonclient.http if self.transport == "http" else tritonclient.grpc
        self._handles: list[Any] = []

    def region(self, size: int, data: Array | None = None) -> tuple[str, Any]:
        """A registered region that begins with ``data``."""
        name = f"test-{os.getpid()}-{next(_numbers)}"
        handle = shared_memory.create_shared_memory_region(name, f"/{name}", size, create_only=True)
        self._handles.append(handle)
        if data is not None:
            shared_memory.set_shared_memory_region(handle, [data])
        self.control("register_system_shared_memory", name, f"/{name}", size)
        return name, handle

    def input(self, name: str, array: Array, region: str = "", *place: int) -> Any:
        made = self._module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        if region:
            made.set_shared_memory(region, *place)
            return made
        return made.set_data_from_numpy(array)

    def output(self, name: str, region: str = "", *place: int) -> Any:
        made = self._module.InferRequestedOutput(name)
        if region:
            made.set_shared_memory(region, *place)
        return made

    def infer(self, model: str, inputs: list[Any], outputs: list[Any] | None = None) -> Any:
        return self.control("infer", model, inputs, outputs=outputs)

    def refusal(self, model: str, inputs: list[Any], outputs: list[Any] | None = None) -> Any:
        error = self.control.refusal("infer", model, inputs, outputs=outputs)
        wire.assert_public(error.message())
        return error

    def status(self, name: str = "") -> list[dict[str, Any]]:
        found = self.control("get_system_shared_memory_status", name)
        if self.transport == "http":
            return list(found)
        return [integers(row) for row in found.get("regions", {}).values()]

    def close(self) -> None:
        self.control("unregister_system_shared_memory")
        for handle in self._handles:
            with contextlib.suppress(FileNotFoundError):
                shared_memory.destroy_shared_memory_region(handle)
        self.control.close()


def wire_parameters(owner: Any, **parameters: Any) -> None:
    for key, value in parameters.items():
        kind = "string_param" if isinstance(value, str) else "int64_param"
        setattr(owner.parameters[key], kind, value)
