"""gRPC server reflection, v1 and v1alpha, of the table of methods.

The files have the messages of ``wire.proto``. The services are described from the table, so that
what is described is what is served.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from functools import cached_property
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from modelport.gateway.access.operations import Operation
from modelport.gateway.protocols.grpc_method import Method, Methods, RefusedMessage, Rows
from modelport.gateway.types import Deadline
from modelport.gateway.wire.proto import reflection_pb2 as pb

#: The messages of both versions are the same.
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_NOT_FOUND = 5
_SHOWN = 100


class GrpcReflection:
    """The reflection services over ``methods`` and over themselves."""

    def __init__(self, methods: Methods) -> None:
        info = Method(
            *(pb.ServerReflectionRequest, pb.ServerReflectionResponse, self._answers),
            Operation.METADATA,
            request_streams=True,
            reply_streams=True,
        )
        self._own = {name: {"ServerReflectionInfo": info} for name in SERVICES}
        self._methods = {**methods, **self._own}

    def methods(self) -> dict[str, Rows]:
        """Return the methods by service and name."""
        return dict(self._own)

    async def _answers(
        self, messages: AsyncIterator[Any], _: Deadline
    ) -> AsyncGenerator[Any, None]:
        async for message in messages:
            if type(message) is RefusedMessage:
                raise message.error
            answer = pb.ServerReflectionResponse(valid_host=message.host, original_request=message)
            try:
                self._fill(answer, message)
            except KeyError:
                kind = message.WhichOneof("message_request")
                asked = str(getattr(message, kind)).strip() if kind else ""
                answer.error_response.error_code = _NOT_FOUND
                answer.error_response.error_message = f"not found: '{asked[:_SHOWN]}'"
            yield answer

    def _fill(self, answer: Any, message: Any) -> None:
        """Set the response to ``message``.

        Raises:
            KeyError: There is no such file, symbol or type.
        """
        kind = message.WhichOneof("message_request")
        if kind == "list_services":
            for name in sorted(self._methods):
                answer.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            found = self._pool.FindFileByName(message.file_by_filename)
            answer.file_descriptor_response.file_descriptor_proto.extend(_with_imports(found))
        elif kind == "file_containing_symbol":
            symbol: str = message.file_containing_symbol
            service, _, method = symbol.rpartition(".")
            if method in self._methods.get(service, ()):
                symbol = service  # the pool knows no methods by their names
            found = self._pool.FindFileContainingSymbol(symbol)
            answer.file_descriptor_response.file_descriptor_proto.extend(_with_imports(found))
        elif kind == "all_extension_numbers_of_type":
            extended = self._pool.FindMessageTypeByName(message.all_extension_numbers_of_type)
            answer.all_extension_numbers_response.base_type_name = extended.full_name
        else:  # no message has extensions
            raise KeyError

    @cached_property
    def _pool(self) -> DescriptorPool:
        """The files of all messages, and one for each service."""
        pool, added = DescriptorPool(), set[str]()
        for service, rows in self._methods.items():
            package, _, name = service.rpartition(".")
            described = FileDescriptorProto(name=f"{service}.proto", package=package)
            described.syntax = "proto3"
            methods = described.service.add(name=name).method
            for method, row in rows.items():
                request, reply = row.request.DESCRIPTOR, row.reply.DESCRIPTOR
                methods.add(
                    name=method,
                    input_type=f".{request.full_name}",
                    output_type=f".{reply.full_name}",
                    client_streaming=row.request_streams,
                    server_streaming=row.reply_streams,
                )
                for file in (request.file, reply.file):
                    _add(pool, file, added)
                    if file.name not in described.dependency:
                        described.dependency.append(file.name)
            pool.Add(described)
        return pool


def _add(pool: DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    """Add ``file`` and its imports to ``pool``, without services, which the table describes."""
    if file.name in added:
        return
    added.add(file.name)
    for imported in file.dependencies:
        _add(pool, imported, added)
    described = FileDescriptorProto()
    file.CopyToProto(described)
    described.ClearField("service")
    pool.Add(described)


def _with_imports(file: FileDescriptor) -> list[bytes]:
    """Serialize ``file`` and then all that it imports."""
    found, todo = {file.name: file}, [file]
    while todo:
        for imported in todo.pop().dependencies:
            if imported.name not in found:
                found[imported.name] = imported
                todo.append(imported)
    return [each.serialized_pb for each in found.values()]
