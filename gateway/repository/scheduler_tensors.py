"""Tensors that a scheduler gives to a model, and takes from it, beside those of the clients.

The controls and states of sequences, and the batch inputs of ragged batches, are inputs and outputs
of the artifact, but not of the configuration. The checks have Triton's messages.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import Datatype
from modelport.gateway.wire.proto import model_config_pb2 as pb

_KINDS = pb.ModelSequenceBatching.Control.Kind
START, END = "CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_END"
READY, CORRELATION_ID = "CONTROL_SEQUENCE_READY", "CONTROL_SEQUENCE_CORRID"
_PAIRS = {
    "int32_false_true": Datatype.INT32,
    "fp32_false_true": Datatype.FP32,
    "bool_false_true": Datatype.BOOL,
}
_IDS = (Datatype.UINT64, Datatype.INT64, Datatype.UINT32, Datatype.INT32, Datatype.BYTES)
#: The only kind of batch input that has a batch dimension.
_ITEM_SHAPE = pb.BatchInput.BATCH_ITEM_SHAPE


class SequenceControl(NamedTuple):
    """An input that tells the model about a request of a sequence, by one of two ``values``.

    The correlation id has no values.
    """

    name: str
    datatype: Datatype
    values: tuple[Any, Any] | None


def controls(config: ModelConfig) -> Mapping[str, SequenceControl]:
    """The controls of ``config`` by kind.

    Raises:
        InvalidArgument: a control is invalid.
    """
    found: dict[str, SequenceControl] = {}
    names: set[str] = set()
    for tensor in config.sequence_batching.control_input:
        if not tensor.name:
            raise InvalidArgument(
                f"sequence batching control tensor must have a name for {config.name}"
            )
        if tensor.name in names or len(tensor.control) > 1:
            raise InvalidArgument(
                f"sequence batching control tensor '{tensor.name}' is specified for multiple "
                f"control kinds for {config.name}"
            )
        names.add(tensor.name)
        for control in tensor.control:
            kind = _KINDS.Name(control.kind)
            if kind in found:
                raise InvalidArgument(
                    f"sequence batching specifies multiple {kind} tensors for {config.name}"
                )
            found[kind] = _control(tensor.name, kind, control, config.name)
    return found


def _control(name: str, kind: str, control: Any, model: str) -> SequenceControl:
    where = f"for {kind} for {model}"
    given = [field for field in _PAIRS if len(getattr(control, field))]
    if kind == CORRELATION_ID:
        if given:
            raise InvalidArgument(
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' "
                f"or 'bool_false_true' {where}"
            )
        if control.data_type not in map(configuration.data_type, _IDS):
            raise InvalidArgument(
                f"unexpected data type for control {kind} for {model}. Allowed data types are "
                "TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return SequenceControl(name, configuration.datatype(control.data_type, kind), None)
    if not given:
        raise InvalidArgument(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or "
            f"'bool_false_true' {where}"
        )
    if len(given) > 1:
        raise InvalidArgument(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' "
            f"and 'bool_false_true' {where}"
        )
    values = tuple(getattr(control, given[0]))
    if len(values) != 2:
        raise InvalidArgument(
            f"sequence batching control '{given[0]}' must have exactly 2 entries {where}"
        )
    return SequenceControl(name, _PAIRS[given[0]], values)


def is_ragged(config: ModelConfig) -> bool:
    """Whether the batches of the model are more than rows of its inputs."""
    return bool(config.batch_input or config.batch_output) or bool(ragged_inputs(config))


def ragged_inputs(config: ModelConfig) -> frozenset[str]:
    """The inputs whose elements are joined regardless of their shapes."""
    return frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)


def flat(config: ModelConfig) -> frozenset[str]:
    """The tensors of the artifact with a single dimension, which is not the batch's."""
    names = set(ragged_inputs(config))
    for batch in config.batch_input:
        if batch.kind != _ITEM_SHAPE:
            names.update(batch.target_name)
    for batch in config.batch_output:
        names.update(batch.target_name)
    return frozenset(names)


def check_batch_tensors(config: ModelConfig) -> None:
    """Raise ``InvalidArgument`` if ``batch_input`` or ``batch_output`` is invalid."""
    inputs = {tensor.name for tensor in config.input}
    outputs = {tensor.name for tensor in config.output}
    if is_ragged(config) and config.max_batch_size < 1:
        raise InvalidArgument(
            f"'allow_ragged_batch', 'batch_input' and 'batch_output' of '{config.name}' need a "
            "batch: raise 'max_batch_size' above 0, or remove them"
        )
    for word, batches, kinds in (
        ("input", config.batch_input, pb.BatchInput.Kind),
        ("output", config.batch_output, pb.BatchOutput.Kind),
    ):
        for batch in batches:
            if len(batch.source_input) != 1:
                raise InvalidArgument(
                    f"batch {word} kind '{kinds.Name(batch.kind)}' expects 1 source input, got "
                    f"{len(batch.source_input)}"
                )
            if batch.source_input[0] not in inputs:
                raise InvalidArgument(f"unknown source input name '{batch.source_input[0]}'")
            if not batch.target_name or not all(batch.target_name):
                raise InvalidArgument(f"batch {word} must specify 'target_name'")
    for batch in config.batch_input:
        if batch.data_type not in (pb.TYPE_INT32, pb.TYPE_FP32):
            raise InvalidArgument("batch input data type must be TYPE_INT32 or TYPE_FP32")
    for batch in config.batch_output:
        for name in batch.target_name:
            if name not in outputs:
                raise InvalidArgument(f"unknown target output name '{name}'")


def declared(config: ModelConfig) -> ModelConfig:
    """``config`` with all inputs and outputs of the artifact."""
    if not config.HasField("sequence_batching") and not config.batch_input:
        return config
    full = copy.deepcopy(config)
    for side, added in ((full.input, _inputs(config)), (full.output, _outputs(config))):
        have = {tensor.name for tensor in side}
        for name, data_type, dims in added:
            if name not in have:
                have.add(name)
                side.add(name=name, data_type=data_type, dims=dims)
    return full


def _inputs(config: ModelConfig) -> Iterator[tuple[str, int, Any]]:
    for control in controls(config).values():
        yield control.name, configuration.data_type(control.datatype), [1]
    for state in config.sequence_batching.state:
        yield state.input_name, state.data_type, state.dims
    ranks = {tensor.name: len(tensor.dims) for tensor in config.input}
    for batch in config.batch_input:
        item = batch.kind == _ITEM_SHAPE and batch.source_input
        for name in batch.target_name:
            yield name, batch.data_type, [ranks.get(batch.source_input[0], -1) if item else -1]


def _outputs(config: ModelConfig) -> Iterator[tuple[str, int, Any]]:
    for state in config.sequence_batching.state:
        yield state.output_name, state.data_type, state.dims
