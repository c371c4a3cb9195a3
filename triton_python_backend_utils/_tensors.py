"""Tensors, and the datatypes of Triton and numpy."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from triton_python_backend_utils._errors import TritonModelException

#: ``data_type`` of a model configuration → the type of numpy.
TRITON_STRING_TO_NUMPY: Mapping[str, Any] = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
#: Triton's numbers of datatypes, from 1.
_NUMBERED = tuple(TRITON_STRING_TO_NUMPY.values())
#: The types of numpy that a tensor may have → the datatype on the wire.
DATATYPES: Mapping[Any, str] = {
    **{
        np.dtype(kind): name.removeprefix("TYPE_")
        for name, kind in TRITON_STRING_TO_NUMPY.items()
        if name != "TYPE_STRING"
    },
    np.dtype(object): "BYTES",
}
BF16 = "BF16"
_LENGTH = struct.Struct("<I")
#: DLPack's numbers of the CPU, and of kinds of numbers.
_CPU, _UINT, _BFLOAT = 1, 1, 4
_POINTER = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class Tensor:
    """A named array, as an input or an output of a model."""

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str, array: np.ndarray[Any, Any], /) -> None:
        """Make a tensor of a numpy array.

        Raises:
            TypeError: an argument has the wrong type.
            TritonModelException: Triton has no datatype for the array's.
        """
        if not isinstance(name, str) or not isinstance(array, np.ndarray):
            raise TypeError(
                "__init__(): incompatible constructor arguments. The following argument types are "
                "supported:\n    1. c_python_backend_utils.Tensor(arg0: str, arg1: "
                f"numpy.ndarray)\n\nInvoked with: {name!r}, {array!r}"
            )
        datatype = DATATYPES.get(array.dtype)
        if datatype is None:
            if array.dtype.kind != "S":
                raise TritonModelException("NumPy dtype is not supported.")
            datatype = "BYTES"
        self._name, self._datatype = name, datatype
        self._array = array if array.flags.c_contiguous else array.copy(order="C")

    @classmethod
    def of_datatype(cls, name: str, array: np.ndarray[Any, Any], datatype: str) -> Tensor:
        """A tensor of a C-contiguous array whose datatype is known; of BF16, it has the bits."""
        made = cls.__new__(cls)
        made._name, made._array, made._datatype = name, array, datatype
        return made

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The array; a string is an object of type ``bytes``."""
        if self._datatype == BF16:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        return self._array

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def triton_dtype(self) -> str:
        """The datatype's name in a model configuration, such as ``TYPE_FP32``."""
        return f"TYPE_{'STRING' if self._datatype == 'BYTES' else self._datatype}"

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A DLPack capsule, which shares the tensor's memory."""
        return self.__dlpack__()

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        # An array from a capsule is read-only, which a capsule cannot say.
        array = self._array if self._array.flags.writeable else self._array.copy()
        capsule = array.__dlpack__()
        if self._datatype == BF16:
            _dltensor(capsule).code = _BFLOAT
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor that shares the memory of a DLPack capsule, or of an object that makes one."""
        source, bf16 = tensor, False
        try:
            if str(getattr(tensor, "dtype", "")).endswith("bfloat16"):
                source = tensor.__dlpack__()
            if not hasattr(source, "__dlpack__"):
                head, source = _dltensor(source), _Capsule(source)
                bf16 = (head.code, head.bits) == (_BFLOAT, 16)
                if bf16:  # which numpy does not have
                    head.code = _UINT
            array = np.from_dlpack(source)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"DLPack tensor cannot be imported: {error}") from error
        if bf16:
            return Tensor.of_datatype(name, np.ascontiguousarray(array), BF16)
        return Tensor(name, array)


class _DLTensor(ctypes.Structure):
    """The beginning of DLPack's ``DLTensor``, up to its datatype."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *(("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)),
        *(("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8)),
    )


def _dltensor(capsule: Any) -> _DLTensor:
    """The tensor in a capsule that has not been taken; raises ``ValueError`` for another object."""
    return _DLTensor.from_address(_POINTER(capsule, b"dltensor"))


class _Capsule:
    """A DLPack capsule as an object that numpy takes."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The type of numpy for a ``data_type``; raises ``KeyError`` for an unknown one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The type of numpy for a datatype's number; None for an unknown one."""
    return _NUMBERED[data_type - 1] if 0 < data_type <= len(_NUMBERED) else None


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of the datatype for a type of numpy; None for an unknown one."""
    if data_type == np.bytes_:
        data_type = np.object_
    return next((i for i, kind in enumerate(_NUMBERED, 1) if data_type == kind), None)


def string_bytes(value: Any) -> bytes:
    """A string's bytes; of any other object, those of its text."""
    if isinstance(value, bytes):
        return value
    return str(value).encode("utf-8")


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> bytes | tuple[()]:
    """Each element's length, 4 bytes, and its bytes; ``()`` if there is no element."""
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype != np.object_ and input_tensor.dtype.type != np.bytes_:
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    encoded = bytearray()
    for item in input_tensor.flat:
        data = string_bytes(item)
        encoded += _LENGTH.pack(len(data))
        encoded += data
    return bytes(encoded)


def deserialize_bytes_tensor(encoded_tensor: bytes | memoryview) -> np.ndarray[Any, Any]:
    """The one-dimensional array of what ``serialize_byte_tensor`` made.

    Raises:
        ValueError: the content ends within an element.
    """
    items, offset, end = [], 0, len(encoded_tensor)
    while offset < end:
        if end - offset < _LENGTH.size:
            raise ValueError("the tensor ends within the length of a string")
        (length,) = _LENGTH.unpack_from(encoded_tensor, offset)
        offset += _LENGTH.size
        if length > end - offset:
            raise ValueError("the tensor ends within a string")
        items.append(bytes(encoded_tensor[offset : offset + length]))
        offset += length
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array
