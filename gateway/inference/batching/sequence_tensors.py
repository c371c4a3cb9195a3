"""Controls and implicit states: tensors that the gateway gives to the requests of sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors, untrusted_files
from modelport.gateway.repository.config import INITIAL_STATE, ModelConfig
from modelport.gateway.repository.untrusted_files import Companion
from modelport.gateway.types import (
    NUMPY_DTYPES,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    Parameter,
    Tensor,
)
from modelport.gateway.wire import raw_tensors

#: Current value of each state, by its input.
States = Mapping[str, Array]

#: Triton's limit of a string as the id of a sequence.
MAX_ID_BYTES = 128
_FLAGS = (scheduler_tensors.START, scheduler_tensors.END, scheduler_tensors.READY)
#: A file of strings has no size in the configuration.
_MAX_STRING_BYTES = 1 << 20


class ImplicitState(NamedTuple):
    """A state of the model that the gateway keeps between the requests of a sequence."""

    output: str
    #: The input with its first value.
    first: Tensor


class SequenceTensors:
    """The tensors of one model.

    Raises:
        InvalidArgument: a control or a state is invalid.
    """

    def __init__(self, config: ModelConfig, companion: Companion) -> None:
        self._model = config.name
        self._shape = (1, 1) if config.max_batch_size else (1,)
        controls = dict(scheduler_tensors.controls(config))
        self._id = controls.pop(scheduler_tensors.CORRELATION_ID, None)
        declared = {tensor.name for tensor in config.input}
        self._states = _implicit_states(config, companion)
        added = [each.name for each in controls.values()] + [
            each.first.name for each in self._states
        ]
        for name in added:
            if name in declared:
                raise InvalidArgument(
                    f"'{name}' is an input and a tensor of 'sequence_batching' of "
                    f"'{self._model}'; remove the input"
                )
        #: By START, END and READY.
        self._controls = {
            flags: [
                self._tensor(each.name, each.datatype, each.values[values[kind]])
                for kind, each in controls.items()
                if each.values is not None
            ]
            for flags in product((False, True), repeat=3)
            for values in (dict(zip(_FLAGS, flags, strict=True)),)
        }
        self._public = tuple(output.name for output in config.output)
        self.first: States = {each.first.name: each.first.data for each in self._states}

    def check_id(self, sequence: Parameter) -> None:
        """Raise ``InvalidArgument`` if the model cannot be given the id of a sequence."""
        if isinstance(sequence, str) and len(sequence.encode()) > MAX_ID_BYTES:
            raise InvalidArgument(
                f"the string correlation ID of a request to model '{self._model}' is longer than "
                f"{MAX_ID_BYTES} bytes; shorten it"
            )
        if self._id is None:
            return
        name, wanted = self._id.name, self._id.datatype
        if isinstance(sequence, str) is not (wanted is Datatype.BYTES):
            given = "BYTES" if isinstance(sequence, str) else "UINT64"
            raise InvalidArgument(
                f"sequence batching control '{name}' data-type is '{given}', but model "
                f"'{self._model}' expects '{wanted}'"
            )
        if isinstance(sequence, int) and sequence > np.iinfo(NUMPY_DTYPES[wanted]).max:
            raise InvalidArgument(
                f"sequence id {sequence} is too large for control '{name}' of model "
                f"'{self._model}', which is {wanted}"
            )

    def request(
        self, request: InferRequest, sequence: Parameter, states: States, start: bool, end: bool
    ) -> InferRequest:
        """``request`` as the model takes it."""
        inputs = [*request.inputs, *self._controls[start, end, True]]
        if self._id is not None:
            value = sequence.encode() if isinstance(sequence, str) else sequence
            inputs.append(self._tensor(self._id.name, self._id.datatype, value))
        if not self._states:
            return replace(request, inputs=inputs)
        for _, first in self._states:
            inputs.append(Tensor(first.name, first.datatype, states[first.name]))
        wanted = dict.fromkeys(request.outputs or self._public)
        wanted.update((each.output, None) for each in self._states)
        return replace(request, inputs=inputs, outputs=tuple(wanted))

    def empty(self, like: InferRequest) -> InferRequest:
        """The request of a slot that has none: zeros in the shapes of ``like``, and not READY."""
        controls = {tensor.name: tensor for tensor in self._controls[False, False, False]}
        inputs = [
            controls.get(tensor.name) or Tensor(tensor.name, tensor.datatype, _zeros_like(tensor))
            for tensor in like.inputs
        ]
        return InferRequest(like.model_name, inputs, like.outputs, like.model_version)

    def response(
        self, response: InferResponse, request: InferRequest, states: States
    ) -> tuple[InferResponse, States]:
        """The response to the client's ``request``, and the states after it."""
        if not self._states:
            return response, states
        outputs = {tensor.name: tensor for tensor in response.outputs}
        # A view would keep the whole batch. A decoupled model may leave states as they are.
        after = {
            each.first.name: outputs[each.output].data.copy()
            for each in self._states
            if each.output in outputs
        }
        wanted = request.outputs or self._public
        response.outputs = [outputs[name] for name in wanted if name in outputs]
        return response, {**states, **after}

    def _tensor(self, name: str, datatype: Datatype, value: Any) -> Tensor:
        return Tensor(name, datatype, np.full(self._shape, value, NUMPY_DTYPES[datatype]))


def _zeros_like(tensor: Tensor) -> Array:
    zero = b"" if tensor.datatype is Datatype.BYTES else 0
    return np.full(tensor.data.shape, zero, tensor.data.dtype)


def _implicit_states(config: ModelConfig, companion: Companion) -> list[ImplicitState]:
    """The implicit states of ``config`` with their first values.

    Raises:
        InvalidArgument: a state is invalid, or the file of its first value.
    """
    found: dict[str, ImplicitState] = {}
    for state in config.sequence_batching.state:
        name = state.input_name
        if not name or not state.output_name:
            raise InvalidArgument("a sequence state must specify 'input_name' and 'output_name'")
        if name in found or any(state.output_name == each.output for each in found.values()):
            raise InvalidArgument(f"State input name '{name}' specified more than once.")
        datatype = configuration.datatype(state.data_type, f"sequence state '{name}'")
        value = _first_value(state, datatype, companion)
        batched = value.reshape(1, *value.shape) if config.max_batch_size else value
        batched.flags.writeable = False
        found[name] = ImplicitState(state.output_name, Tensor(name, datatype, batched))
    return list(found.values())


def _first_value(state: Any, datatype: Datatype, companion: Companion) -> Array:
    if not state.initial_state:  # as in Triton, dynamic dimensions begin with 1
        return _zeros([1 if size == -1 else size for size in state.dims], datatype)
    initial, name = state.initial_state[0], state.input_name
    if len(state.initial_state) > 1:
        raise InvalidArgument(
            f"initial_state field for state input '{name}' must contain exactly one or zero "
            f"element. Found '{len(state.initial_state)}' elements."
        )
    _check_initial_state(state, initial, name)
    if initial.WhichOneof("state_data") == "zero_data":
        return _zeros(initial.dims, datatype)
    return _read(initial.data_file, name, datatype, tuple(initial.dims), companion)


def _check_initial_state(state: Any, initial: Any, name: str) -> None:
    if initial.data_type != state.data_type:
        raise InvalidArgument(
            f"The data type used for 'initial_state' field of state '{name}' does not match the "
            "state data type."
        )
    if not initial.name:
        raise InvalidArgument(
            f"Field 'name' must be set when using initial_state for state input '{name}'."
        )
    if len(initial.dims) != len(state.dims):
        raise InvalidArgument(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions "
            f"for state input '{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for given, declared in zip(initial.dims, state.dims, strict=True):
        if given < 0:
            raise InvalidArgument(
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        if declared not in (-1, given):
            raise InvalidArgument(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim "
                f"description. {given} != {declared}"
            )
    if initial.WhichOneof("state_data") is None:
        raise InvalidArgument(
            f"initial_state setting expects state '{name}' to have state_data set"
        )


def _zeros(dims: Any, datatype: Datatype) -> Array:
    zero = b"" if datatype is Datatype.BYTES else 0
    try:
        return np.full(tuple(dims), zero, NUMPY_DTYPES[datatype])
    except (MemoryError, ValueError) as error:
        raise InvalidArgument(f"a sequence state of dims {list(dims)} does not fit") from error


def _read(
    filename: str, name: str, datatype: Datatype, dims: tuple[int, ...], companion: Companion
) -> Array:
    """The first value in a file of raw data, which may be longer."""
    size = math.prod(dims) * NUMPY_DTYPES[datatype].itemsize
    strings = datatype is Datatype.BYTES
    most = max(size, _MAX_STRING_BYTES)
    data = untrusted_files.read_companion(
        companion, INITIAL_STATE, filename, f"state '{name}'", most, "zero_data"
    )
    if not strings and len(data) < size:
        raise InvalidArgument(
            f"initial_state setting expects {size} bytes, but the data provided from "
            f"{filename[:256]} only has {len(data)} bytes."
        )
    return np.array(raw_tensors.decode(name, datatype, dims, data if strings else data[:size]))
