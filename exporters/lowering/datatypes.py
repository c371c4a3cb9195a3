"""Datatypes of PyTorch in TensorFlow, and PyTorch's rules of promotion."""

from __future__ import annotations

from typing import Any

import torch

from modelport.exporters.runtime.tensorflow_runtime import tf
from modelport.gateway.errors import Unsupported

TF_DTYPES = {
    torch.bool: tf.bool,
    torch.uint8: tf.uint8,
    torch.int8: tf.int8,
    torch.int16: tf.int16,
    torch.int32: tf.int32,
    torch.int64: tf.int64,
    torch.float16: tf.float16,
    torch.bfloat16: tf.bfloat16,
    torch.float32: tf.float32,
    torch.float64: tf.float64,
    torch.complex64: tf.complex64,
    torch.complex128: tf.complex128,
}
TORCH_DTYPES = {theirs: ours for ours, theirs in TF_DTYPES.items()}


def tf_dtype(dtype: Any) -> Any:
    """TensorFlow's datatype for a ``torch.dtype``; TensorFlow's own are returned as they are.

    Raises:
        Unsupported: TensorFlow does not have it.
    """
    if isinstance(dtype, tf.DType):
        return dtype
    if dtype not in TF_DTYPES:
        raise Unsupported(f"TensorFlow has no datatype {dtype}")
    return TF_DTYPES[dtype]


def torch_dtype(x: Any) -> torch.dtype:
    """PyTorch's datatype for a tensor of TensorFlow."""
    return TORCH_DTYPES[x.dtype.base_dtype]


def is_tensor(x: Any) -> bool:
    """Whether ``x`` is a tensor or a variable, and not a number of Python."""
    return bool(tf.is_tensor(x))


def is_symbolic_size(x: Any) -> bool:
    """Whether ``x`` is a size that is known only at run time: a scalar of int32."""
    return is_tensor(x) and x.dtype == tf.int32 and x.shape.rank == 0


def cast(x: Any, dtype: Any) -> Any:
    """``x`` in ``dtype``, a ``torch.dtype`` or TensorFlow's; numbers become tensors."""
    wanted = tf_dtype(dtype)
    if not is_tensor(x):
        if not wanted.is_floating and not wanted.is_complex:
            x = bool(x) if wanted == tf.bool else int(x)
        return tf.constant(x, wanted)
    if x.dtype == wanted:
        return x
    if wanted == tf.bool:
        return tf.not_equal(x, tf.zeros([], x.dtype))
    if x.dtype.is_complex and not wanted.is_complex:
        x = tf.math.real(x)
    return tf.cast(x, wanted)


def floating(x: Any) -> Any:
    """``x`` itself if it is floating or complex; otherwise in PyTorch's default datatype."""
    return x if x.dtype.is_floating or x.dtype.is_complex else cast(x, torch.get_default_dtype())


def result_type(*operands: Any) -> torch.dtype:
    """The datatype that PyTorch computes an elementwise operator of ``operands`` in.

    Numbers and symbolic sizes promote weakly, as PyTorch's scalars do.
    """
    found = [_representative(x) for x in operands]
    result = found[0]
    dtype = torch.result_type(result, found[0])
    for other in found[1:]:
        dtype = torch.result_type(result, other)
        if isinstance(result, torch.Tensor) or isinstance(other, torch.Tensor):
            ranks = [x.ndim for x in (result, other) if isinstance(x, torch.Tensor)]
            result = torch.empty([1] * max(ranks), dtype=dtype, device="meta")
        else:
            result = type(result)() + type(other)()
    return dtype


def _representative(x: Any) -> Any:
    """A value without data that promotes like ``x``."""
    if is_symbolic_size(x):
        return 1
    if not is_tensor(x):
        return x
    return torch.empty([1] * min(1, x.shape.rank), dtype=torch_dtype(x), device="meta")


def promoted(*operands: Any) -> tuple[Any, ...]:
    """``operands`` as tensors of the datatype that PyTorch computes in."""
    dtype = result_type(*operands)
    return tuple(cast(x, dtype) for x in operands)
