"""Auto-completion of ``config.pbtxt`` from the artifact's own signature, as in Triton.

Fields that the configuration omits are taken from the artifact; the others must agree with it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Datatype, TensorSpec, fits
from modelport.gateway.wire.proto import model_config_pb2 as pb

#: Triton's ``default-max-batch-size`` for models whose first dimensions are all dynamic.
DEFAULT_MAX_BATCH_SIZE = 4


class ArtifactTensor(NamedTuple):
    """A tensor as the artifact declares it: the whole shape, -1 for dynamic dims."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]


def complete(
    config: ModelConfig, inputs: Sequence[ArtifactTensor], outputs: Sequence[ArtifactTensor]
) -> ModelConfig:
    """Complete inputs, outputs and ``max_batch_size`` of ``config`` from the artifact.

    Raises:
        InvalidArgument: the two contradict each other; the message names the tensor.
    """
    completed = copy.deepcopy(config)
    if not completed.input and not completed.output and completed.max_batch_size == 0:
        tensors = [*inputs, *outputs]
        if tensors and all(t.shape and t.shape[0] == -1 for t in tensors):
            completed.max_batch_size = DEFAULT_MAX_BATCH_SIZE
    batched = completed.max_batch_size > 0
    hidden = scheduler_tensors.declared(config)
    scheduled = {t.name for t in (*hidden.input, *hidden.output)}
    for declared, actual in ((completed.input, inputs), (completed.output, outputs)):
        if not declared:
            for tensor in actual:
                if tensor.name not in scheduled:
                    declare(declared.add(), tensor, batched)
    scheduler_tensors.check_batch_tensors(completed)
    full = scheduler_tensors.declared(completed)
    _check("input", full, full.input, inputs)
    _check("output", full, full.output, outputs)
    taken = {t.name for t in full.input}
    for tensor in inputs:
        if tensor.name not in taken:
            raise InvalidArgument(
                f"the model takes input '{tensor.name}', which the configuration does not declare"
            )
    return completed


def declared(
    config: ModelConfig,
) -> tuple[Mapping[str, ArtifactTensor], Mapping[str, ArtifactTensor]]:
    """The inputs and outputs of ``config`` as tensors of a matching artifact.

    For artifacts that do not declare all of them.
    """
    signature = configuration.signature(scheduler_tensors.declared(config))
    batch = (-1,) if signature.max_batch_size else ()
    flat = scheduler_tensors.flat(config)

    def tensors(specs: Sequence[TensorSpec]) -> dict[str, ArtifactTensor]:
        shapes = {s.name: (-1,) if s.name in flat else (*batch, *s.model_dims) for s in specs}
        return {s.name: ArtifactTensor(s.name, s.datatype, shapes[s.name]) for s in specs}

    return tensors(signature.inputs), tensors(signature.outputs)


def with_ranks(config: ModelConfig, ranks: Mapping[str, int]) -> ModelConfig:
    """Replace dims of outputs whose real rank differs from the declared one by dynamic dims.

    A runtime may report an output of unknown rank as a scalar; a run shows the real one.
    """
    known = copy.deepcopy(config)
    batch = int(config.max_batch_size > 0)
    for output in known.output:
        dims = output.reshape.shape if output.HasField("reshape") else output.dims
        rank = ranks.get(output.name, len(dims) + batch)
        if rank != len(dims) + batch and rank > batch:
            output.ClearField("reshape")
            del output.dims[:]
            output.dims.extend([-1] * (rank - batch))
    return known


def declare(declaration: Any, tensor: ArtifactTensor, batched: bool) -> None:
    """Fill in ``declaration``, an input or output of a configuration, from ``tensor``."""
    declaration.name = tensor.name
    declaration.data_type = configuration.data_type(tensor.datatype)
    dims = tensor.shape[1:] if batched else tensor.shape
    if dims:
        declaration.dims.extend(dims)
    else:  # the schema has no empty dims, so a scalar is sent as [1]
        declaration.dims.append(1)
        declaration.reshape.SetInParent()


def _check(
    kind: str, config: ModelConfig, declared: Sequence[Any], actual: Sequence[ArtifactTensor]
) -> None:
    batch = [-1] if config.max_batch_size > 0 else []
    known = {tensor.name: tensor for tensor in actual}
    flat = scheduler_tensors.flat(config)
    for declaration in declared:
        where = f"{kind} '{declaration.name}'"
        if declaration.name not in known:
            raise InvalidArgument(
                f"the configuration declares {where}, but the model has "
                f"{', '.join(repr(name) for name in sorted(known)) or 'none'}"
            )
        tensor = known[declaration.name]
        if declaration.data_type != configuration.data_type(tensor.datatype):
            stated = pb.DataType.Name(declaration.data_type)
            raise InvalidArgument(
                f"the configuration declares {where} as {stated}, but the model has "
                f"TYPE_{'STRING' if tensor.datatype is Datatype.BYTES else tensor.datatype}"
            )
        if declaration.name in flat:
            _check_flat(where, tensor)
            continue
        dims = declaration.reshape.shape if declaration.HasField("reshape") else declaration.dims
        shape = [*batch, *dims]
        if not tensor.shape and (kind == "output" or not declaration.HasField("reshape")):
            continue  # a scalar or an unknown rank, which the runtime reports alike
        if batch and tensor.shape and tensor.shape[0] != -1:
            raise InvalidArgument(
                f"max_batch_size is {config.max_batch_size}, but the model's {where} has a fixed "
                f"first dimension of {tensor.shape[0]}; export it with a dynamic batch, or set "
                "max_batch_size to 0"
            )
        if not fits(shape, tensor.shape):
            raise InvalidArgument(
                f"the configuration declares {where} with shape {shape}, but the model has "
                f"{list(tensor.shape)}"
            )


def _check_flat(where: str, tensor: ArtifactTensor) -> None:
    """Check a tensor whose one dimension is that of all elements of a batch."""
    if tensor.shape and not fits((-1,), tensor.shape):
        raise InvalidArgument(
            f"{where} is ragged or of a batch, so the model must have it with shape [-1], but has "
            f"{list(tensor.shape)}; remove 'allow_ragged_batch', or export it so"
        )
