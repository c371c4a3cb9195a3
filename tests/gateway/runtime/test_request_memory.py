"""The memory that requests may hold."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

import numpy as np
import pytest

from modelport.gateway.errors import InvalidArgument, MemoryExhausted
from modelport.gateway.protocols.response_encoding import JSON_BYTES, encode
from modelport.gateway.runtime import request_memory
from modelport.gateway.runtime.request_memory import CURRENT, Lease, RequestMemory
from modelport.gateway.settings import MIN_REQUEST_MEMORY, Settings, request_memory_bytes
from modelport.gateway.telemetry.metrics import memory_families
from modelport.gateway.types import NO_DEADLINE, Datatype, Tensor
from modelport.gateway.wire import (
    incremental_json,
    json_text,
    raw_tensors,
    tensor_contents,
    tensor_proto,
)
from modelport.gateway.wire.long_array import LongArray
from modelport.gateway.wire.proto import grpc_service_pb2, tensorflow_pb2


def test_a_request_past_the_budget_is_refused_and_holds_nothing_more() -> None:
    memory = RequestMemory(1000)
    lease = Lease(memory.connection())
    lease.reserve(400)
    with pytest.raises(MemoryExhausted):
        lease.reserve(101)  # the connection's share is one half
    assert (memory.used_bytes, memory.refused, lease.size) == (400, 1, 400)
    lease.release()
    lease.release()
    assert memory.used_bytes == 0


def test_connections_share_the_budget_of_the_process() -> None:
    memory = RequestMemory(1000)
    leases = [Lease(memory.connection()) for _ in range(3)]
    leases[0].reserve(500)
    leases[1].reserve(500)
    with pytest.raises(MemoryExhausted):
        leases[2].reserve(1)
    leases[0].release()
    leases[2].reserve(500)
    assert memory.used_bytes == 1000


def test_work_that_outlives_its_request_holds_nothing() -> None:
    memory = RequestMemory(1000)
    lease = Lease(memory.connection())
    lease.reserve(100)
    lease.release()
    lease.reserve(100)
    lease.reserve_response(100)
    assert (memory.used_bytes, memory.rendering, lease.size) == (0, 0, 0)
    lease.return_response(100)
    assert (memory.used_bytes, memory.rendering) == (0, 0)


def test_what_is_released_is_the_connections_again() -> None:
    connection = RequestMemory(1000).connection()
    for _ in range(100):
        lease = Lease(connection)
        lease.reserve(500)
        lease.release()
    assert connection.used_bytes == 0


def test_decoders_reserve_for_the_request_of_the_running_task() -> None:
    request_memory.reserve(1 << 60)  # outside of a request nobody counts
    memory = RequestMemory(1000)
    lease = Lease(memory.connection())
    token = CURRENT.set(lease)
    try:
        request_memory.reserve(300)
        with pytest.raises(MemoryExhausted, match="--max-request-memory"):
            request_memory.reserve(300)
    finally:
        CURRENT.reset(token)
    assert lease.size == 300


def test_long_arrays_of_json_are_reserved_as_they_are_decoded() -> None:
    array = LongArray()
    array.add([0] * 100)
    lease = Lease(RequestMemory(2000).connection())
    token = CURRENT.set(lease)
    try:
        assert array.array(np.dtype(np.float64)).shape == (100,)
        assert lease.size == 800
        with pytest.raises(MemoryExhausted):
            array.array(np.dtype(np.float64))
    finally:
        CURRENT.reset(token)


def test_threads_lose_no_byte() -> None:
    memory = RequestMemory(1 << 40)

    def work() -> None:
        connection = memory.connection()
        for _ in range(2000):
            lease = Lease(connection)
            lease.reserve(3)
            lease.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.used_bytes == 0


def test_workers_share_what_is_given() -> None:
    settings = Settings((), max_request_memory_bytes=4000, workers=4)
    assert request_memory_bytes(settings) == 1000
    assert request_memory_bytes(Settings((), workers=2)) >= MIN_REQUEST_MEMORY


def test_use_and_refusals_are_metrics() -> None:
    memory = RequestMemory(1000)
    lease = Lease(memory.connection())
    lease.reserve(10)
    with pytest.raises(MemoryExhausted):
        lease.reserve(1000)
    values = {
        sample.name: sample.value for family in memory_families(memory) for sample in family.samples
    }
    assert values == {
        "modelport_request_memory_used_bytes": 10,
        "modelport_request_memory_limit_bytes": 1000,
        "modelport_request_memory_refused_total": 1,
    }


async def test_a_large_reply_is_reserved_while_it_is_written_and_refused_without_memory() -> None:
    tensor = Tensor("y", Datatype.FP32, np.zeros(100_000, np.float32))
    memory = RequestMemory(2 * 100_000 * JSON_BYTES)
    lease = Lease(memory.connection())
    token = CURRENT.set(lease)
    try:
        held = await encode(lambda: lease.size, [tensor], NO_DEADLINE)
        assert (held, lease.size) == (100_000 * JSON_BYTES, 0)
        lease.reserve(1)
        await encode(lambda: lease.size, [tensor], NO_DEADLINE)  # the only one
        with request_memory.rendering(1), pytest.raises(MemoryExhausted):
            await encode(lambda: lease.size, [tensor], NO_DEADLINE)
        small = Tensor("y", Datatype.FP32, np.zeros(4, np.float32))
        assert await encode(lambda: lease.size, [small], NO_DEADLINE) == 1
    finally:
        CURRENT.reset(token)


def rows_of_json(count: int) -> int:
    rows = [{"x": number} for number in range(count)]
    assert len(json_text.loads(json.dumps(rows).encode(), count)) == count
    return count * incremental_json.OBJECT_BYTES


def typed_contents(count: int) -> int:
    content = grpc_service_pb2.InferTensorContents(int64_contents=[1] * count).SerializeToString()
    return tensor_contents.decode_bytes("x", Datatype.INT64, (count,), content).nbytes


def strings_of_a_tensor(count: int) -> int:
    message = tensorflow_pb2.TensorProto(dtype=tensorflow_pb2.DT_STRING, string_val=[b"a"] * count)
    message.tensor_shape.dim.add(size=count)
    tensor_proto.decode_large("x", memoryview(message.SerializeToString()))
    return count * raw_tensors.STRING_BYTES


@pytest.mark.parametrize("decode", [rows_of_json, typed_contents, strings_of_a_tensor])
def test_what_a_large_request_is_decoded_to_is_reserved(decode: Callable[[int], int]) -> None:
    memory = RequestMemory(1 << 30)
    lease = Lease(memory.connection())
    token = CURRENT.set(lease)
    try:
        assert decode(50_000) == lease.size
        memory.limit_bytes = 2 * lease.size
        with pytest.raises(MemoryExhausted):
            decode(50_000)
    finally:
        CURRENT.reset(token)


def test_more_objects_than_a_fair_multiple_of_the_text_are_refused() -> None:
    rows = b"[" + b'{"x":1},' * 400_000 + b"{}]"
    with pytest.raises(InvalidArgument, match=r"more than 172\d{3} objects; .* send columns"):
        json_text.loads(rows, 500_000)
