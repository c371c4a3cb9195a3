"""The system shared memory extension: tensors of requests, and registration of regions.

Specification: Triton's ``docs/protocol/extension_shared_memory.md``. Of the CUDA extension only the
calls that every client makes are supported; it registers nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import structlog

from modelport.gateway.access.context import CURRENT, audited, required
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import (
    AlreadyExists,
    InvalidArgument,
    ModelportError,
    NotFound,
    Unsupported,
)
from modelport.gateway.inference.shared_memory import Region, Row, SharedMemoryRegions
from modelport.gateway.models.control import Control
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Parameter, Tensor
from modelport.gateway.wire import raw_tensors

log = structlog.get_logger("modelport.shared_memory")

REGION = "shared_memory_region"
_OFFSET, _BYTE_SIZE = "shared_memory_offset", "shared_memory_byte_size"
_REGISTER, _UNREGISTER = "shared_memory.register", "shared_memory.unregister"
_WITHDRAW = "shared_memory.withdraw"


class SharedTensors:
    """Tensors that one request passes in shared memory.

    The total size of its inputs has the limit of a body. Otherwise a small request could make the
    server copy one region any number of times.
    """

    __slots__ = ("_left_bytes", "_max_bytes", "_regions", "_used", "places")

    def __init__(self, regions: SharedMemoryRegions, max_bytes: int) -> None:
        self._regions = regions
        self._left_bytes = self._max_bytes = max_bytes
        #: The regions of inputs: they are listed until the end of the request.
        self._used: list[Region] = []
        #: Region, offset and size for each output.
        self.places: dict[str, tuple[Region, int, int]] = {}

    def read(
        self,
        name: str,
        datatype: Datatype,
        shape: tuple[int, ...],
        parameters: Mapping[str, Parameter],
        model: str = "",
    ) -> Array:
        """Read the input ``name`` of ``model`` with one copy.

        Raises:
            Unsupported: Shared memory is not enabled.
            NotFound: There is no such region.
            InvalidArgument: The parameters, the place in the region or its bytes are invalid.
        """
        region, offset, byte_size = self._place(f"input '{name}'", parameters)
        if datatype is not Datatype.BYTES:
            expected = math.prod(shape) * NUMPY_DTYPES[datatype].itemsize
            if byte_size != expected:  # before anything is allocated
                raise raw_tensors.size_mismatch(name, expected, byte_size, model)
        if byte_size > self._left_bytes:
            raise InvalidArgument(
                f"inputs in shared memory are too large for the limit of {self._max_bytes} bytes "
                "a request (--http-max-input-size)"
            )
        self._left_bytes -= byte_size
        self._used.append(region)
        return raw_tensors.decode(name, datatype, shape, region.read(offset, byte_size), model)

    def expect(self, name: str, parameters: Mapping[str, Parameter]) -> None:
        """Note the place for the output ``name``.

        Raises:
            Unsupported: Shared memory is not enabled.
            NotFound: There is no such region.
            InvalidArgument: The parameters are invalid.
        """
        region, offset, byte_size = self._place(f"output '{name}'", parameters)
        for other in ("classification", "binary_data"):
            if parameters.get(other):
                raise InvalidArgument(f"output can't set both '{REGION}' and '{other}'")
        region.check(offset, byte_size)
        self.places[name] = region, offset, byte_size

    def write(self, tensor: Tensor) -> bool:
        """Write an output to its place; return False if it has none.

        As with Triton, the response then has its name, datatype and shape only: NVIDIA's C++ client
        takes any ``parameters`` of an output for those of binary data.

        Raises:
            InvalidArgument: The output is larger than its place.
        """
        place = self.places.get(tensor.name)
        if place is None:
            return False
        region, offset, byte_size = place
        data = memoryview(raw_tensors.encode(tensor))
        if len(data) > byte_size:
            raise InvalidArgument(
                f"shared memory size specified with the request for output '{tensor.name}' "
                f"({byte_size} bytes) should be at least {len(data)} bytes to hold the results"
            )
        if len(data):
            region.write(offset, data)
        return True

    def _place(self, what: str, parameters: Mapping[str, Parameter]) -> tuple[Region, int, int]:
        region = self._regions.get(str(parameters[REGION]))
        if _BYTE_SIZE not in parameters:
            raise InvalidArgument(
                f"{what} has '{REGION}' and no '{_BYTE_SIZE}'; both must be specified"
            )
        return region, int(parameters.get(_OFFSET, 0)), int(parameters[_BYTE_SIZE])


#: For servers that do not enable it, and dialects without it.
NO_SHARED_MEMORY = SharedTensors(SharedMemoryRegions(allowed=False), 0)


class SharedMemory:
    """The registered regions, kept equal in all worker processes."""

    def __init__(
        self, regions: SharedMemoryRegions, control: Control, max_input_bytes: int
    ) -> None:
        self.regions = regions
        self._control = control
        self._max_input_bytes = max_input_bytes
        control.register(_REGISTER, self._register, state=regions.registered, restore=self._restore)
        control.register(_UNREGISTER, self._unregister)
        control.register(_WITHDRAW, self._withdraw)

    def require_allowed(self) -> None:
        """Raise ``Unsupported`` if shared memory is not enabled."""
        self.regions.require_allowed()

    def transfer(self) -> SharedTensors:
        """Make the transfer of a new request.

        To a caller without the operation, shared memory is not enabled.
        """
        if not self.regions.allowed:
            return NO_SHARED_MEMORY
        context = CURRENT.get()
        if context is not None and not context.may(Operation.SHARED_MEMORY):
            return NO_SHARED_MEMORY
        return SharedTensors(self.regions, self._max_input_bytes)

    def status(self, name: str = "") -> list[Row]:
        """List the regions; raise ``NotFound`` if there is none of that name."""
        _require_operation()
        return self.regions.status(name)

    async def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a region in all worker processes or in none."""
        row = {"name": name, "key": key, "offset": offset, "byte_size": byte_size}
        _require_operation()
        self.require_allowed()
        with audited("register shared memory"):
            try:
                await self._control.broadcast(_REGISTER, row)
            except AlreadyExists:
                raise
            except ModelportError:
                await self._control.broadcast(_WITHDRAW, row)
                raise

    async def unregister(self, name: str = "") -> None:
        """Unregister one region, or all, in all worker processes."""
        _require_operation()
        self.require_allowed()
        with audited("unregister shared memory"):
            await self._control.broadcast(_UNREGISTER, {"name": name})

    async def _register(self, row: Row) -> None:
        self.regions.register(**row)

    async def _unregister(self, arguments: dict[str, Any]) -> None:
        if arguments["name"]:
            self.regions.unregister(arguments["name"])
        else:
            self.regions.unregister_all()

    async def _withdraw(self, row: Row) -> None:
        """Undo a registration that failed, but keep another region of that name."""
        if row in self.regions.registered():
            self.regions.unregister(row["name"])

    async def _restore(self, arguments: dict[str, Any]) -> None:
        """Restore the regions of another worker; a region that no longer exists is skipped."""
        wanted = {row["name"]: row for row in arguments["state"]}
        have = {row["name"]: row for row in self.regions.registered()}
        for name in have:
            if have[name] != wanted.get(name):
                self.regions.unregister(name)
        for name, row in wanted.items():
            if have.get(name) != row:
                try:
                    self.regions.register(**row)
                except ModelportError as error:
                    log.warning("shared memory region not restored", region=name, reason=str(error))


def _require_operation() -> None:
    """Require that a request under ``--access`` has entered the operation."""
    if CURRENT.get() is not None:
        required(Operation.SHARED_MEMORY)


class CudaSharedMemory:
    """The CUDA regions: there are none."""

    def __init__(self, shared: SharedMemory) -> None:
        self._regions = shared.regions

    def require_allowed(self) -> None:
        """Raise ``Unsupported``: CUDA regions cannot be registered."""
        raise Unsupported("CUDA shared memory is not supported; register system shared memory")

    def status(self, name: str = "") -> list[Row]:
        """List no region; raise ``NotFound`` if one is named."""
        if name:
            raise NotFound(f"Unable to find cuda shared memory region: '{name}'")
        return []

    async def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        self.require_allowed()

    async def unregister(self, name: str = "") -> None:
        """Do nothing, for clients that always call it."""
        self._regions.require_allowed()
