"""Seeded warm-up requests, stored as Triton does beside ``config.pbtxt``.

    <model>/config.pbtxt             model_warmup { name: "batch_8" batch_size: 8 inputs { ... } }
    <model>/warmup/batch_8_input_0   one batch element's bytes, little-endian, row-major

Triton makes ``batch_size`` requests of one element each, all with the same bytes, and runs them as
one batch before it calls a model ready (``GenerateWarmupData`` in core's
``src/backend_model_instance.cc``). Dims are the wire's, without the batch dimension: Triton applies
``reshape`` to warm-up requests as to any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from modelport.exporters.model_spec import Sampler
from modelport.exporters.requests.random_inputs import name_axes, sizes_of
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import NUMPY_DTYPES, Array, ModelSignature, Tensor, TensorSpec
from modelport.gateway.wire import raw_tensors

FOLDER = configuration.WARMUP


def requests(signature: ModelSignature, sample: Sampler, seed: int) -> list[dict[str, Array]]:
    """The largest batch with every axis at its longest, then one element at middle sizes.

    The largest comes first, so that a runtime's memory grows once. Arrays have the model's own
    shapes, batch dimension first; a model that does not batch gets one request.

    Raises:
        Unsupported: an input's datatype cannot be drawn.
    """
    signature = name_axes(signature)
    rng = np.random.default_rng(seed)
    sizes = {name: sizes_of(axis) for name, axis in signature.axes.items()}
    longest = {name: choices[-1] for name, choices in sizes.items()}
    middle = {name: choices[len(choices) // 2] for name, choices in sizes.items()}
    cases = [(max(1, signature.max_batch_size), longest)]
    if signature.max_batch_size > 1:
        cases.append((1, middle))
    return [sample(signature, batch, chosen, rng) for batch, chosen in cases]


def add(config: ModelConfig, folder: Path, requests: Sequence[Mapping[str, Array]]) -> None:
    """Add ``requests`` to ``config`` and write their bytes to ``folder / "warmup"``.

    Args:
        config: a model's configuration, completed in place.
        folder: the model's folder, with ``config.pbtxt``.
        requests: from ``requests()``; only the first element of a batch is kept.
    """
    signature = configuration.signature(config)
    batched = signature.max_batch_size > 0
    (folder / FOLDER).mkdir(exist_ok=True)
    for request in requests:
        batch = len(next(iter(request.values()))) if batched else 1
        warmup = config.model_warmup.add(name=f"batch_{batch}", batch_size=batch, count=1)
        for index, spec in enumerate(signature.inputs):
            given = request[spec.name][0] if batched else request[spec.name]
            element = np.asarray(given, NUMPY_DTYPES[spec.datatype])  # one text has no shape
            file = f"{warmup.name}_input_{index}"  # a tensor's name may not be a valid file name
            tensor = Tensor(spec.name, spec.datatype, np.ascontiguousarray(element))
            (folder / FOLDER / file).write_bytes(raw_tensors.encode(tensor))
            wanted = warmup.inputs[spec.name]
            wanted.data_type = configuration.data_type(spec.datatype)
            wanted.dims.extend(_wire_dims(spec, element.shape))
            wanted.input_data_file = file


def _wire_dims(spec: TensorSpec, shape: Sequence[int]) -> list[int]:
    """The wire's dims of ``shape``, which is the model's own; dynamic sizes keep their order."""
    if spec.reshape is None:
        return list(shape)
    dynamic = (size for size, dim in zip(shape, spec.reshape, strict=True) if dim == -1)
    return [next(dynamic) if dim == -1 else dim for dim in spec.wire_dims]
