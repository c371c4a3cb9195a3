"""Shared memory extensions over gRPC: status, register, unregister."""

from __future__ import annotations

from typing import Any

from modelport.gateway.access.operations import Operation
from modelport.gateway.protocols.grpc_method import Method
from modelport.gateway.protocols.oip.shared_memory import SharedMemory, cuda_status, refuse_cuda
from modelport.gateway.types import Deadline
from modelport.gateway.wire.proto import grpc_service_pb2 as pb


class SharedMemoryGrpc:
    """The methods of ``inference.GRPCInferenceService`` for both kinds of shared memory."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared

    def methods(self) -> dict[str, Method]:
        handlers = {
            "SystemSharedMemoryStatus": self._status,
            "SystemSharedMemoryRegister": self._register,
            "SystemSharedMemoryUnregister": self._unregister,
            "CudaSharedMemoryStatus": self._cuda_status,
            "CudaSharedMemoryRegister": self._cuda_register,
            "CudaSharedMemoryUnregister": self._cuda_unregister,
        }
        return {
            name: Method(
                getattr(pb, f"{name}Request"),
                getattr(pb, f"{name}Response"),
                handler,
                Operation.SHARED_MEMORY,
            )
            for name, handler in handlers.items()
        }

    async def _status(self, message: Any, _: Deadline) -> Any:
        reply = pb.SystemSharedMemoryStatusResponse()
        for row in self._shared.status(message.name):
            region = reply.regions[row["name"]]
            region.MergeFrom(pb.SystemSharedMemoryStatusResponse.RegionStatus(**row))
        return reply

    async def _register(self, message: Any, _: Deadline) -> Any:
        await self._shared.register(message.name, message.key, message.offset, message.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def _unregister(self, message: Any, _: Deadline) -> Any:
        await self._shared.unregister(message.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def _cuda_status(self, message: Any, _: Deadline) -> Any:
        cuda_status(message.name)
        return pb.CudaSharedMemoryStatusResponse()

    async def _cuda_register(self, message: Any, _: Deadline) -> Any:
        refuse_cuda()

    async def _cuda_unregister(self, message: Any, _: Deadline) -> Any:
        self._shared.require_allowed()
        return pb.CudaSharedMemoryUnregisterResponse()
