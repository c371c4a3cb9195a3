"""``TensorProto`` ↔ tensors, against TensorFlow's own reading of the same bytes."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.types import NUMPY_DTYPES, Datatype, Tensor
from modelport.gateway.wire import repeated_values, tensor_proto
from modelport.gateway.wire.proto import serving_pb2
from modelport.gateway.wire.proto import tensorflow_pb2 as pb

CASES = int(os.environ.get("MODELPORT_FUZZ_CASES", "20000")) // 10
ROOT = Path(__file__).parents[3]
NUMERIC = [datatype for datatype in Datatype if datatype is not Datatype.BYTES]


def proto(dtype: int, shape: tuple[int, ...], **values: object) -> pb.TensorProto:
    dims = [pb.TensorShapeProto.Dim(size=size) for size in shape]
    return pb.TensorProto(dtype=dtype, tensor_shape=pb.TensorShapeProto(dim=dims), **values)


def any_tensor(datatype: Datatype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    chance = random.Random(seed)
    count = math.prod(shape)
    if datatype is Datatype.BYTES:
        data = np.empty(count, object)
        data[:] = [chance.randbytes(chance.choice((0, 1, 5, 200))) for _ in range(count)]
        return Tensor("x", datatype, data.reshape(shape))
    dtype = NUMPY_DTYPES[datatype]
    bits = np.frombuffer(chance.randbytes(count * dtype.itemsize), np.uint8).copy()
    if datatype is Datatype.BOOL:
        bits = bits & 1
    return Tensor("x", datatype, bits.view(dtype).reshape(shape))


def encode_values(tensor: Tensor) -> pb.TensorProto:
    return pb.TensorProto.FromString(b"".join(tensor_proto.values(tensor)))


def same(one: Tensor, other: Tensor) -> bool:
    if one.datatype is not other.datatype or one.data.shape != other.data.shape:
        return False
    if one.datatype is Datatype.BYTES:
        return one.data.tolist() == other.data.tolist()
    return one.data.tobytes() == other.data.tobytes()


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (3, 0, 2)])
@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_and_shape_comes_back_bit_for_bit(
    datatype: Datatype, shape: tuple[int, ...]
) -> None:
    tensor = any_tensor(datatype, shape)
    if datatype in (Datatype.FP32, Datatype.FP64):
        tensor.data.reshape(-1)[:1] = np.nan
    for encode in (tensor_proto.encode, encode_values):
        message = pb.TensorProto.FromString(encode(tensor).SerializeToString())
        assert same(tensor_proto.decode("x", message), tensor), encode.__name__


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (300, 30)])
@pytest.mark.parametrize("datatype", list(Datatype))
def test_an_entry_in_parts_is_the_same_message(datatype: Datatype, shape: tuple[int, ...]) -> None:
    tensor = any_tensor(datatype, shape)
    field = serving_pb2.PredictRequest.DESCRIPTOR.fields_by_name["inputs"].number << 3 | 2
    parts = tensor_proto.entry(field, tensor)
    message = serving_pb2.PredictRequest.FromString(b"".join(parts))
    assert message.inputs == {"x": tensor_proto.encode(tensor)}
    if datatype is not Datatype.BYTES and tensor.data.nbytes > 4096:
        assert np.shares_memory(np.frombuffer(parts[-1], np.uint8), tensor.data)


def test_values_answer_in_the_field_that_clients_of_tensorflow_serving_read() -> None:
    tensor = Tensor("x", Datatype.FP32, np.array([[1.5, -2.0]], np.float32))
    message = encode_values(tensor)
    assert list(message.float_val) == [1.5, -2.0]
    assert not message.tensor_content
    assert tensor_proto.encode(tensor).tensor_content == tensor.data.tobytes()


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (proto(pb.DT_FLOAT, (2, 2), float_val=[1.5]), [[1.5, 1.5], [1.5, 1.5]]),
        (proto(pb.DT_INT64, (4,), int64_val=[1, 2]), [1, 2, 2, 2]),
        (proto(pb.DT_INT8, (3,), int_val=[-128, 127]), [-128, 127, 127]),
        (proto(pb.DT_BOOL, (2,), bool_val=[True]), [True, True]),
        (proto(pb.DT_UINT64, (2,), uint64_val=[2**64 - 1]), [2**64 - 1] * 2),
        (proto(pb.DT_HALF, (2,), half_val=[0x3C00]), [1.0, 1.0]),
        (proto(pb.DT_BFLOAT16, (2,), half_val=[0x3F80]), [0x3F80, 0x3F80]),
        (proto(pb.DT_DOUBLE, (2,)), [0.0, 0.0]),
        (proto(pb.DT_FLOAT, (2,), float_val=[1.5, 2], int_val=[3]), [1.5, 2.0]),
        (proto(pb.DT_DOUBLE, (3,), float_val=[1.5, 2], double_val=[3, 4]), [3.0, 4.0, 4.0]),
        (proto(pb.DT_STRING, (2,)), [b"", b""]),
        (proto(pb.DT_STRING, (3,), string_val=[b"a", b"b\0"]), [b"a", b"b\0", b"b\0"]),
        (proto(pb.DT_STRING, (2,), tensor_content=b"\x01\x02abc"), [b"a", b"bc"]),
        (proto(pb.DT_INT32, (0,)), []),
        (proto(pb.DT_INT32, ()), 0),
        (pb.TensorProto(dtype=pb.DT_INT32, int_val=[7]), 7),
    ],
)
def test_the_last_value_stands_for_those_that_are_missing(
    message: pb.TensorProto, expected: object
) -> None:
    assert tensor_proto.decode("x", message).data.tolist() == expected


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (pb.TensorProto(), "dtype DT_INVALID"),
        (pb.TensorProto(dtype=133), "dtype 133"),  # type: ignore[arg-type]
        (proto(pb.DT_COMPLEX64, (1,)), "dtype DT_COMPLEX64"),
        (proto(pb.DT_FLOAT, (-1,)), "must be an integer >= 0, not -1"),
        (proto(pb.DT_FLOAT, (16, 2**60)), "exceed"),
        (proto(pb.DT_FLOAT, (2**62, 4)), "exceed"),
        (proto(pb.DT_FLOAT, (1,) * 1000), "1000 dimensions"),
        (
            pb.TensorProto(dtype=1, tensor_shape=pb.TensorShapeProto(unknown_rank=True)),  # type: ignore[arg-type]
            "unknown rank",
        ),
        (proto(pb.DT_FLOAT, (2,), tensor_content=b"1234567"), "Expected 8, got 7"),
        (proto(pb.DT_BOOL, (1,), tensor_content=b"\x02"), "must be 0 or 1"),
        (proto(pb.DT_FLOAT, (1,), float_val=[1, 2]), "has 1 elements, but 2 values"),
        (proto(pb.DT_STRING, (1,), string_val=[b"", b""]), "has 1 elements, but 2 values"),
        (proto(pb.DT_INT8, (1,), int_val=[128]), "does not fit INT8"),
        (proto(pb.DT_UINT8, (1,), int_val=[-1]), "does not fit UINT8"),
        (proto(pb.DT_HALF, (1,), half_val=[65536]), "does not fit FP16"),
        (proto(pb.DT_FLOAT, (2**40,), float_val=[1]), "must be sent"),
        (proto(pb.DT_FLOAT, (2**40,)), "must be sent"),
        (proto(pb.DT_STRING, (2**40,)), "must be sent"),
        (proto(pb.DT_STRING, (2**40,), tensor_content=b"x"), "not its shape's strings"),
        (proto(pb.DT_STRING, (2,), tensor_content=b"\x01\x02ab"), "not its shape's strings"),
        (proto(pb.DT_STRING, (1,), tensor_content=b"\xff" * 20), "not its shape's strings"),
    ],
)
def test_what_is_wrong_is_refused_and_names_the_input(message: pb.TensorProto, said: str) -> None:
    with pytest.raises(InvalidArgument, match=r"input 'x'") as caught:
        tensor_proto.decode("x", message)
    assert said in str(caught.value)


def test_pieces_of_a_message_give_the_tensor_that_the_message_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance = random.Random(1)
    decoded = refused = 0
    for case in range(CASES):
        monkeypatch.setattr(repeated_values, "PIECE_BYTES", 8 * chance.randrange(1, 8))
        datatype = chance.choice(list(Datatype))
        shape = tuple(chance.choice((0, 1, 2, 5)) for _ in range(chance.randrange(4)))
        encode = chance.choice((tensor_proto.encode, encode_values))
        message = encode(any_tensor(datatype, shape, case))
        for _ in range(chance.randrange(3)):
            mutate(chance, message)
        content = memoryview(message.SerializeToString())
        try:
            expected = tensor_proto.decode("x", message)
        except InvalidArgument:
            refused += 1
            with pytest.raises(InvalidArgument):
                tensor_proto.decode_large("x", content)
            continue
        decoded += 1
        found = tensor_proto.decode_large("x", content)
        # Bits of a NaN go lost in messages whose values are not their last field.
        if not same(found, expected):
            np.testing.assert_array_equal(found.data, expected.data, f"{case}", strict=True)
    assert decoded > CASES // 10
    assert refused > CASES // 10


def test_values_before_the_shape_and_damaged_ones_are_refused() -> None:
    shape = proto(pb.DT_FLOAT, (2,)).SerializeToString()
    values = pb.TensorProto(float_val=[1, 2]).SerializeToString()
    found = tensor_proto.decode_large("x", memoryview(shape + values))
    assert found.data.tolist() == [1, 2]
    for content in (values + shape, shape + values[:-1], shape + values + b"\x2a\x03abc"):
        with pytest.raises(InvalidArgument, match="input 'x' "):
            tensor_proto.decode_large("x", memoryview(content))


def test_mutated_messages_are_a_tensor_of_their_shape_or_refused() -> None:
    chance = random.Random(0)
    decoded = refused = 0
    for case in range(CASES):
        datatype = chance.choice(list(Datatype))
        shape = tuple(chance.choice((0, 1, 2, 5)) for _ in range(chance.randrange(4)))
        encode = chance.choice((tensor_proto.encode, encode_values))
        message = encode(any_tensor(datatype, shape, case))
        for _ in range(chance.randrange(3)):
            mutate(chance, message)
        try:
            tensor = tensor_proto.decode("x", message)
        except InvalidArgument:
            refused += 1
            continue
        decoded += 1
        assert tensor.data.shape == tuple(dim.size for dim in message.tensor_shape.dim), case
        assert tensor.data.dtype == NUMPY_DTYPES[tensor.datatype], case
        if tensor.datatype is Datatype.BYTES:
            assert all(type(item) is bytes for item in tensor.data.reshape(-1)), case
    assert decoded > CASES // 10
    assert refused > CASES // 10


def mutate(chance: random.Random, message: pb.TensorProto) -> None:
    kind = chance.randrange(6)
    if kind == 0:
        message.dtype = chance.randrange(30)  # type: ignore[assignment]
    elif kind == 1:
        message.tensor_shape.dim.add(size=chance.choice((-1, 0, 1, 3, 2**31, 2**62)))
    elif kind == 2 and message.tensor_shape.dim:
        del message.tensor_shape.dim[chance.randrange(len(message.tensor_shape.dim))]
    elif kind == 3:
        message.tensor_content = message.tensor_content[:-1] + chance.randbytes(chance.randrange(3))
    elif kind == 4:
        message.int_val.append(chance.choice((-1, 0, 255, 2**31 - 1)))
    else:
        message.ClearField(chance.choice(("tensor_content", "float_val", "string_val", "int_val")))


#: Runs in a process of its own, which imports both sides in the order of its arguments.
BOTH = """
import importlib, json, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
import numpy as np
from google.protobuf import any_pb2, descriptor_pool
from tensorflow.core.example import example_pb2
from tensorflow.core.framework import tensor_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.python.framework import tensor_util
from modelport.gateway.types import Datatype
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import pool, serving_pb2, tensorflow_pb2
from tests.gateway.wire.test_tensor_proto import any_tensor, encode_values, same

said = {}
for datatype in Datatype:
    tensor = any_tensor(datatype, (2, 3), 7)
    for encode in (tensor_proto.encode, encode_values):
        content = encode(tensor).SerializeToString(deterministic=True)
        theirs = tensor_pb2.TensorProto.FromString(content)
        assert theirs.SerializeToString(deterministic=True) == content, datatype
        array = tensor_util.MakeNdarray(theirs)
        if datatype is Datatype.BYTES:
            assert array.tolist() == tensor.data.tolist()
        else:
            assert array.tobytes() == tensor.data.tobytes(), datatype
        back = tensor_util.make_tensor_proto(array).SerializeToString()
        assert same(tensor_proto.decode("x", tensorflow_pb2.TensorProto.FromString(back)), tensor)
signature = meta_graph_pb2.SignatureDef(method_name="m")
signature.inputs["a"].dtype = 1
signature.inputs["a"].tensor_shape.dim.add(size=-1)
mine = tensorflow_pb2.SignatureDef.FromString(signature.SerializeToString())
assert mine.inputs["a"].tensor_shape.dim[0].size == -1 and mine.method_name == "m"
example = example_pb2.Example()
example.features.feature["f"].float_list.value.extend([1.5, 2.5])
read = tensorflow_pb2.Example.FromString(example.SerializeToString())
assert list(read.features.feature["f"].float_list.value) == [1.5, 2.5]
default = descriptor_pool.Default().FindMessageTypeByName("tensorflow.TensorProto")
assert default is tensor_pb2.TensorProto.DESCRIPTOR
assert default is not pool.POOL.FindMessageTypeByName("tensorflow.TensorProto")
print("both")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["modelport.gateway.wire.proto.serving_pb2", "tensorflow"])
def test_ours_and_tensorflows_messages_live_in_one_process(first: str) -> None:
    pytest.importorskip("tensorflow")
    modules = ["tensorflow", "modelport.gateway.wire.proto.serving_pb2"]
    modules.sort(key=lambda module: module != first)
    run = subprocess.run(
        [sys.executable, "-c", BOTH, *modules],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert run.stdout == "both\n", run.stderr[-2000:]


def test_a_signature_is_packed_as_tensorflow_serving_does() -> None:
    packed = serving_pb2.SignatureDefMap()
    packed.signature_def["serving_default"].inputs["x"].dtype = pb.DT_FLOAT
    response = serving_pb2.GetModelMetadataResponse()
    response.metadata["signature_def"].Pack(packed)
    read = serving_pb2.GetModelMetadataResponse.FromString(response.SerializeToString())
    held = read.metadata["signature_def"]
    assert held.type_url == "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    unpacked = serving_pb2.SignatureDefMap()
    assert held.Unpack(unpacked)
    assert unpacked == packed


def test_the_generated_files_are_those_that_make_protos_writes(tmp_path: Path) -> None:
    """``make protos`` must be run after each edit of a ``.proto``."""
    pytest.importorskip("grpc_tools")
    subprocess.run(
        [sys.executable, "-m", "modelport.gateway.wire.proto", tmp_path], check=True, cwd=ROOT
    )
    folder = Path("modelport/gateway/wire/proto")
    made, here = tmp_path / folder, ROOT / folder
    names = sorted(path.name for path in here.glob("*_pb2.py*"))
    assert names == sorted(path.name for path in made.iterdir())
    for name in names:
        assert (made / name).read_bytes() == (here / name).read_bytes(), name


@pytest.mark.parametrize("bytes_each", [0, 60_000])
def test_repetition_of_a_string_is_limited(bytes_each: int) -> None:
    message = pb.TensorProto(dtype=pb.DT_STRING)
    message.string_val.append(b"x" * bytes_each)
    size = message.tensor_shape.dim.add(size=100)
    assert len(tensor_proto.decode("x", message).data) == 100
    size.size = 8_000_000
    with pytest.raises(InvalidArgument, match="each must be sent"):
        tensor_proto.decode("x", message)
