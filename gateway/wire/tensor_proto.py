"""Encoding and decoding of TensorFlow's ``TensorProto``.

It follows TensorFlow's ``Tensor::FromProto``: values are in ``tensor_content``, else in the
``*_val`` field of the type, whose last value fills the rest; no value means zeros or empty strings.
Unlike TensorFlow, which wraps or drops them, values out of range and surplus values are refused,
and so is a tensor that a few values would fill beyond ``expansion_limit``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload, request_memory
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, Tensor
from modelport.gateway.wire import incremental_protobuf, raw_tensors, repeated_values
from modelport.gateway.wire.proto import tensorflow_pb2 as pb
from modelport.gateway.wire.protobuf import nested, read_varint, tag, varint
from modelport.gateway.wire.raw_tensors import Buffer

#: Datatypes that have other names in TensorFlow.
_OTHER_NAMES = {
    Datatype.FP16: "HALF",
    Datatype.FP32: "FLOAT",
    Datatype.FP64: "DOUBLE",
    Datatype.BF16: "BFLOAT16",
    Datatype.BYTES: "STRING",
}
DTYPES = {each: pb.DataType.Value(f"DT_{_OTHER_NAMES.get(each, each)}") for each in Datatype}
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}

#: What a request may fill with repeated values, and beyond that, the ratio to its own size.
FREE_BYTES, RATIO = 8 * 1024 * 1024, 100
#: Size of a reference to a string.
_ITEM_BYTES = 8
#: The ``*_val`` field of each datatype, and the dtype of that field.
_VALUES = {
    Datatype.BOOL: ("bool_val", np.dtype("?")),
    Datatype.UINT8: ("int_val", np.dtype("<i4")),
    Datatype.UINT16: ("int_val", np.dtype("<i4")),
    Datatype.UINT32: ("uint32_val", np.dtype("<u4")),
    Datatype.UINT64: ("uint64_val", np.dtype("<u8")),
    Datatype.INT8: ("int_val", np.dtype("<i4")),
    Datatype.INT16: ("int_val", np.dtype("<i4")),
    Datatype.INT32: ("int_val", np.dtype("<i4")),
    Datatype.INT64: ("int64_val", np.dtype("<i8")),
    Datatype.FP16: ("half_val", np.dtype("<i4")),  # bit patterns
    Datatype.FP32: ("float_val", np.dtype("<f4")),
    Datatype.FP64: ("double_val", np.dtype("<f8")),
    Datatype.BF16: ("half_val", np.dtype("<i4")),  # bit patterns
}
#: Tags of the fields whose packed encoding equals the array's memory.
_PACKED = {Datatype.FP32: b"\x2a", Datatype.FP64: b"\x32", Datatype.BOOL: b"\x5a"}
_CONTENT_TAG = tag(pb.TensorProto, "tensor_content")
_CONTENT = bytes((_CONTENT_TAG,))
#: Numbers of the fields that serializers write before the values.
_HEAD_FIELDS = frozenset(
    pb.TensorProto.DESCRIPTOR.fields_by_name[field].number
    for field in ("dtype", "tensor_shape", "version_number")
)
_NOT_VALUES = _HEAD_FIELDS | {_CONTENT_TAG >> 3}
#: Tags of key and value in a map entry.
_KEY, _VALUE = b"\x0a", b"\x12"
#: Number of cached headers, each of some ten bytes.
KEPT = 1024
_BITS = {Datatype.FP16: np.dtype("<u2"), Datatype.BF16: np.dtype("<u2")}


def decode(name: str, message: pb.TensorProto) -> Tensor:
    """Decode ``message``; the data may be a view of its bytes.

    Raises:
        InvalidArgument: The type is not supported, the shape is incomplete or too large, or the
            values do not fit type and shape. The message names the input.
    """
    datatype, shape = _datatype(name, message), _shape(name, message.tensor_shape)
    content = message.tensor_content
    if datatype is Datatype.BYTES:
        items = _strings(name, shape, content) if content else message.string_val
        data = raw_tensors.object_array(_repeated(name, shape, items, message), shape)
    elif content:
        data = raw_tensors.decode(name, datatype, shape, content)
    else:
        data = _from_values(name, datatype, shape, message)
    return Tensor(name, datatype, data)


def decode_large(name: str, content: memoryview) -> Tensor:
    """Decode a serialized ``TensorProto`` in pieces.

    Raises:
        InvalidArgument: As ``decode``, or dtype and shape are not its first fields.
    """
    try:
        start = len(content)
        for field in incremental_protobuf.fields(content):
            if field.tag >> 3 not in _HEAD_FIELDS:
                start = field.begin
                break
        head = incremental_protobuf.parse(pb.TensorProto, content[:start])
        datatype, shape = _datatype(name, head), _shape(name, head.tensor_shape)
        if start < len(content) and field.tag == _CONTENT_TAG:
            found = content[field.start : field.end]
            if datatype is Datatype.BYTES:
                items = _strings(name, shape, bytes(found))
                return Tensor(name, datatype, raw_tensors.object_array(items, shape))
            return Tensor(name, datatype, raw_tensors.decode(name, datatype, shape, found))
        return Tensor(name, datatype, _from_pieces(name, datatype, shape, content[start:]))
    except DecodeError as error:
        raise InvalidArgument(
            f"input '{name}' is not a valid TensorProto, whose values follow its dtype and shape"
        ) from error


def _datatype(name: str, message: pb.TensorProto) -> Datatype:
    dtype = message.dtype
    if dtype not in DATATYPES:
        word = pb.DataType.Name(dtype) if dtype in pb.DataType.values() else str(dtype)
        raise InvalidArgument(f"input '{name}' has dtype {word}, which is not a tensor's")
    return DATATYPES[dtype]


def _shape(name: str, shape: pb.TensorShapeProto) -> tuple[int, ...]:
    if shape.unknown_rank:
        raise InvalidArgument(f"input '{name}' has a shape of unknown rank; send its dimensions")
    return raw_tensors.parse_shape(name, [dim.size for dim in shape.dim])


def _from_values(
    name: str, datatype: Datatype, shape: tuple[int, ...], message: pb.TensorProto
) -> Array:
    field, held = _VALUES[datatype]
    values = getattr(message, field)
    dtype = _BITS.get(datatype, NUMPY_DTYPES[datatype])
    missing = _missing(name, shape, dtype.itemsize, len(values), message.ByteSize)
    array = _at_once(datatype, len(values), held, message)
    if array is None:
        array = np.fromiter(values, held, len(values))
    array = _narrowed(name, datatype, array, dtype)
    if missing:
        last = array[-1:] if array.size else np.zeros(1, dtype)
        array = np.concatenate([array, np.broadcast_to(last, missing)])
    array = array.view(NUMPY_DTYPES[datatype]).reshape(shape)
    return array if array.flags.aligned else array.copy()


def _narrowed(name: str, datatype: Datatype, array: Array, dtype: np.dtype[Any]) -> Array:
    if array.dtype == dtype:
        return array
    limits = np.iinfo(dtype)
    if array.size and (array.min() < limits.min or array.max() > limits.max):
        raise InvalidArgument(f"a value of input '{name}' does not fit {datatype}")
    return array.astype(dtype)


def _from_pieces(
    name: str, datatype: Datatype, shape: tuple[int, ...], content: memoryview
) -> Array:
    """Decode the serialized values of a large tensor."""
    text = datatype is Datatype.BYTES
    field, held = ("string_val", np.dtype(object)) if text else _VALUES[datatype]
    dtype = _BITS.get(datatype, NUMPY_DTYPES[datatype])
    item_bytes = raw_tensors.STRING_BYTES if text else dtype.itemsize
    count, given = math.prod(shape), 0
    if count > len(content):  # a value takes at least one byte
        _missing(name, shape, item_bytes, 0, lambda: len(content))
    request_memory.reserve(count * item_bytes)
    array = np.empty(count, dtype)
    last: Any = b"" if text else 0
    for values in repeated_values.pieces(pb.TensorProto, field, content, _NOT_VALUES):
        end = given + len(values)
        if end > count:
            raise InvalidArgument(
                f"input '{name}' of shape {list(shape)} has {count} elements, but more values"
            )
        if text:
            array[given:end] = list(values)
        else:
            piece = values if isinstance(values, np.ndarray) else np.fromiter(values, held)
            array[given:end] = _narrowed(name, datatype, piece, dtype)
        if end > given:
            given, last = end, array[end - 1]
    item_bytes = _ITEM_BYTES + len(last) if text else item_bytes
    _missing(name, shape, item_bytes, given, lambda: len(content))
    array[given:] = last
    return array.view(NUMPY_DTYPES[datatype]).reshape(shape)


def _at_once(
    datatype: Datatype, count: int, held: np.dtype[Any], message: pb.TensorProto
) -> Array | None:
    """Read the values of a packed field from the serialized message, where they are normally last.

    This is thirty times as fast as reading them one by one.
    """
    tag = _PACKED.get(datatype)
    if tag is None or not count:
        return None
    content = message.SerializeToString()
    start = len(content) - count * held.itemsize
    head = tag + varint(count * held.itemsize)
    if not content.startswith(head, max(0, start - len(head))):
        return None
    return np.frombuffer(content, held, count, start)


def expansion_limit(sent_bytes: int) -> int:
    """Return the size to which repeated values may expand a request of ``sent_bytes``."""
    return max(FREE_BYTES, RATIO * sent_bytes)


def _missing(
    name: str, shape: tuple[int, ...], item_bytes: int, given: int, size: Callable[[], int]
) -> int:
    """Count the elements beyond the ``given`` values, within ``expansion_limit``."""
    count = math.prod(shape)
    if given > count:
        raise InvalidArgument(
            f"input '{name}' of shape {list(shape)} has {count} elements, but {given} values"
        )
    if given < count and count * item_bytes > FREE_BYTES:
        most_bytes = expansion_limit(size())
        if count * item_bytes > most_bytes:
            raise InvalidArgument(
                f"input '{name}' of shape {list(shape)} has {count} elements; beyond {most_bytes} "
                "bytes each must be sent"
            )
    return count - given


def _repeated(
    name: str, shape: tuple[int, ...], items: Sequence[bytes], message: pb.TensorProto
) -> list[bytes]:
    last = items[-1] if items else b""
    missing = _missing(name, shape, _ITEM_BYTES + len(last), len(items), message.ByteSize)
    return [*items, *[last] * missing]


def _strings(name: str, shape: tuple[int, ...], content: bytes) -> list[bytes]:
    """Decode TensorFlow's ``EncodeStringList``: all lengths as 32-bit varints, then all strings."""
    count, at, lengths, items = math.prod(shape), 0, [], []
    if count > len(content):  # a length takes at least one byte
        raise _damaged(name)
    try:
        for _ in range(count):
            length, at = read_varint(content, at)
            lengths.append(length)
    except IndexError as error:
        raise _damaged(name) from error
    if sum(lengths) != len(content) - at:
        raise _damaged(name)
    for length in lengths:
        items.append(content[at : at + length])
        at += length
    return items


def _damaged(name: str) -> InvalidArgument:
    return InvalidArgument(f"the 'tensor_content' of input '{name}' is not its shape's strings")


def encode(tensor: Tensor, into: pb.TensorProto | None = None) -> pb.TensorProto:
    """Encode ``tensor`` with its values in ``tensor_content``, strings in ``string_val``.

    ``into`` is an empty message to fill, which saves a copy.
    """
    message = _heading(tensor, into)
    if tensor.datatype is Datatype.BYTES:
        message.string_val.extend(tensor.data.reshape(-1).tolist())
    else:
        message.tensor_content = bytes(raw_tensors.encode(tensor))
    return message


def entry(field: int, tensor: Tensor) -> list[Buffer]:
    """Encode an entry of a map of tensors by name, like ``encode``.

    The last part is the tensor's data in memory. ``field`` is the map's tag.
    """
    content: Buffer = b""
    if tensor.datatype is Datatype.BYTES:
        head = encode(tensor).SerializeToString()
    else:
        head, content = _head(tensor.datatype, tensor.data.shape), raw_tensors.encode(tensor)
        head += _CONTENT + varint(len(content))
    name = tensor.name.encode()
    head = b"".join((_KEY, varint(len(name)), name, _VALUE, varint(len(head) + len(content)), head))
    return [bytes((field,)) + varint(len(head) + len(content)) + head, content]


@lru_cache(KEPT)
def _head(datatype: Datatype, shape: tuple[int, ...]) -> bytes:
    empty = np.broadcast_to(np.zeros((), NUMPY_DTYPES[datatype]), shape)
    return bytes(_heading(Tensor("", datatype, empty), None).SerializeToString())


def values_entry(field: int, tensor: Tensor) -> list[Buffer]:
    """Encode an entry of a map of tensors by name, like ``values``."""
    name = tensor.name.encode()
    head = b"".join((_KEY, varint(len(name)), name))
    return nested(field, [head, *nested(_VALUE[0], values(tensor))])


def values(tensor: Tensor) -> list[Buffer]:
    """Encode ``tensor`` with its values in the ``*_val`` field of its type.

    TensorFlow Serving does so by default (``kAsProtoField``), and its clients read those fields.
    """
    head: Buffer = _head(tensor.datatype, tensor.data.shape)
    packed = _PACKED.get(tensor.datatype)
    if packed is None:
        return [head, *_pieces(tensor)]
    content = raw_tensors.encode(tensor)
    return [head, packed + varint(len(content)), content]


def _pieces(tensor: Tensor) -> Iterator[bytes]:
    """Encode the values in pieces: a repeated field may be split."""
    if tensor.datatype is Datatype.BYTES:
        field, data = "string_val", tensor.data.reshape(-1)
    else:
        data = np.ascontiguousarray(tensor.data, NUMPY_DTYPES[tensor.datatype]).reshape(-1)
        data = data.view(_BITS.get(tensor.datatype, data.dtype))
        field, _ = _VALUES[tensor.datatype]
    for start in range(0, len(data), raw_tensors.PIECE):
        message = pb.TensorProto()
        getattr(message, field).extend(data[start : start + raw_tensors.PIECE].tolist())
        yield message.SerializeToString()
        offload.checkpoint()


def _heading(tensor: Tensor, into: pb.TensorProto | None) -> pb.TensorProto:
    message = pb.TensorProto() if into is None else into
    message.dtype = DTYPES[tensor.datatype]
    shape = message.tensor_shape
    shape.SetInParent()  # a scalar has a shape too
    for size in tensor.data.shape:
        shape.dim.add(size=size)
    return message
