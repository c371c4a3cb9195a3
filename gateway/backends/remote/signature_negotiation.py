"""Negotiation of a remote model's signature between the configuration and the server.

The server's metadata has *wire* shapes with the batch dimension first; a backend uses the *model's*
shapes, after ``reshape``. ``negotiate`` combines both when the model loads. The resulting
``NegotiatedSignature`` converts tensors and checks responses.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import (
    Array,
    Datatype,
    Deadline,
    InferRequest,
    ModelSignature,
    Parameter,
    Reshape,
    Tensor,
    fits,
)
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind

#: Configuration parameters that describe the inputs, not how a server runs the model.
SIGNATURE_PARAMETERS = ("axis.", "axes.", "range.", "padding.", "image.")


@dataclass(frozen=True, slots=True)
class Metadata:
    """A server's description of a model. ``versions`` are text, not always numbers.

    ``of_model``: the shapes are the model's own, regardless of ``reshape`` in the configuration.
    ``unranked``: outputs of unknown rank.
    """

    versions: tuple[str, ...]
    inputs: tuple[ArtifactTensor, ...]
    outputs: tuple[ArtifactTensor, ...]
    of_model: bool = False
    unranked: frozenset[str] = frozenset()


class RemoteClient(Protocol):
    """A client for the servers of a route, over one protocol; the caller chooses the endpoint.

    Methods raise ``EndpointFailed`` and ``ModelportError`` as in ``gateway.upstream``. They are
    called on the event loop.
    """

    #: As in ``SignatureBackend``, from the last description of the model.
    signatures: Mapping[str, ModelSignature] = MappingProxyType({})
    signature_defs: bytes = b""

    async def metadata(self, address: str, version: str, limit: Deadline) -> Metadata:
        """Describe the model; ``version`` empty: the server's default."""

    async def config(self, address: str, version: str, limit: Deadline) -> ModelConfig | None:
        """The model's configuration; None: the server does not have one."""

    async def ready(self, address: str, version: str, limit: Deadline) -> None:
        """Raise unless the model is READY on the server."""

    async def loading(self, address: str, limit: Deadline) -> bool:
        """Whether the server is loading models, so that more versions may become READY."""

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        """Prepare ``infer``; called once."""

    async def infer(
        self, address: str, request: InferRequest, limit: Deadline
    ) -> RemoteResponse: ...

    def reset(self, address: str) -> None:
        """Use a new connection for the next request. Requests in flight continue."""

    async def close(self) -> None: ...


@runtime_checkable
class StreamingClient(Protocol):
    """A ``RemoteClient`` whose protocol carries several responses to a request."""

    def stream(
        self, address: str, request: InferRequest, deadline: Deadline
    ) -> AsyncGenerator[RemoteResponse, None]:
        """Yield responses on request. Closing the generator cancels the request on the server."""


@dataclass(frozen=True, slots=True)
class RemoteResponse:
    """A response in the model's shapes; ``final``: the server says that it is the last one."""

    outputs: list[Tensor]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    final: bool = False


class NegotiatedSignature:
    """The valid requests and responses of a remote model, prepared at load time."""

    def __init__(
        self,
        config: ModelConfig,
        reshaped: Mapping[str, Collection[str]],
        unranked: frozenset[str],
    ) -> None:
        """``reshaped``: the inputs and outputs that the server itself reshapes."""
        self.config = config
        self.signature: ModelSignature = configuration.signature(config)
        self.outputs = tuple(spec.name for spec in self.signature.outputs)
        #: A response of a stream may contain only some outputs.
        self.decoupled: bool = config.model_transaction_policy.decoupled
        self._batched = batched = self.signature.max_batch_size > 0
        self._to_wire = {
            spec.name: Reshape(spec.reshape, spec.wire_dims, batched)
            for spec in self.signature.inputs
            if spec.reshape is not None and spec.name in reshaped["input"]
        }
        self._expected: dict[str, _ExpectedOutput] = {}
        for spec in self.signature.outputs:
            dims, to_model = spec.wire_dims, None
            if spec.reshape is not None:
                if spec.name in reshaped["output"]:
                    to_model = Reshape(spec.wire_dims, spec.reshape, batched)
                else:
                    dims = spec.reshape
            ranked = spec.name not in unranked
            self._expected[spec.name] = _ExpectedOutput(spec.datatype, dims, to_model, ranked)

    def refuse(self, datatypes: Collection[Datatype], reason: str) -> None:
        """Raise ``Unsupported`` if an input or output has one of ``datatypes``."""
        for spec in (*self.signature.inputs, *self.signature.outputs):
            if spec.datatype in datatypes:
                raise Unsupported(f"'{spec.name}' is {spec.datatype}, which {reason}")

    def to_wire(self, request: InferRequest) -> list[Tensor]:
        """The inputs in wire shapes; the request's own tensors stay unchanged."""
        if not self._to_wire:
            return request.inputs
        return [
            Tensor(t.name, t.datatype, self._to_wire[t.name](t.data))
            if t.name in self._to_wire
            else t
            for t in request.inputs
        ]

    def batch_size(self, request: InferRequest) -> int | None:
        """The number of batch elements expected; None: the model does not batch."""
        return request.inputs[0].data.shape[0] if self._batched and request.inputs else None

    def expect(
        self, name: object, datatype: object, shape: Sequence[Any], batch: int | None
    ) -> tuple[str, Datatype, tuple[int, ...]]:
        """Check name, datatype and shape of an output in a response.

        Raises:
            EndpointFailed: the signature has no such output, or another datatype or shape.
        """
        expected = self._expected.get(name) if isinstance(name, str) else None
        if expected is None or not isinstance(name, str):
            raise EndpointFailed(FailureKind.DAMAGED, "it has an output unknown to the model")
        dims = expected.dims if batch is None else (batch, *expected.dims)
        sizes = tuple(shape)
        own = dims[: len(dims) - len(expected.dims)]
        if _is_empty(sizes) and sizes[: len(own)] == own and expected.to_model is None:
            return name, expected.datatype, sizes  # Triton ignores the datatype of empty outputs
        if datatype != expected.datatype.value:
            raise EndpointFailed(FailureKind.DAMAGED, f"output '{name}' is not {expected.datatype}")
        if not all(type(size) is int and size >= 0 for size in sizes) or (
            expected.ranked and not fits(sizes, dims)
        ):
            raise EndpointFailed(
                FailureKind.DAMAGED, f"output '{name}' does not have shape {list(dims)}"
            )
        return name, expected.datatype, sizes

    def ordered(
        self,
        arrays: Mapping[str, Array],
        announced: int,
        request: InferRequest,
        *,
        omits: bool = False,
    ) -> list[Tensor]:
        """Order ``arrays``, of wire shapes, as ``request`` wants the outputs.

        ``omits``: the server may omit outputs, as Triton's backends do.

        Raises:
            EndpointFailed: an output is missing, or one of those ``announced`` occurs twice.
        """
        if len(arrays) != announced:
            raise EndpointFailed(FailureKind.DAMAGED, "it repeats an output")
        outputs = []
        for name in request.outputs or self.outputs:
            if name not in arrays:
                if self.decoupled or omits:
                    continue
                raise EndpointFailed(FailureKind.DAMAGED, f"output '{name}' is missing")
            expected = self._expected[name]
            data = arrays[name]
            if expected.to_model is not None:
                data = expected.to_model(data)
            outputs.append(Tensor(name, expected.datatype, data))
        return outputs


def damaged(name: str) -> EndpointFailed:
    return EndpointFailed(FailureKind.DAMAGED, f"output '{name}' does not match its shape")


def _is_empty(sizes: Sequence[Any]) -> bool:
    return all(type(size) is int and size >= 0 for size in sizes) and 0 in sizes


@dataclass(frozen=True, slots=True)
class _ExpectedOutput:
    """The expected output; ``dims`` are those of the wire, without the batch dimension."""

    datatype: Datatype
    dims: tuple[int, ...]
    to_model: Reshape | None
    ranked: bool


def negotiate(
    declared: ModelConfig, metadata: Metadata, theirs: ModelConfig | None
) -> NegotiatedSignature:
    """Complete ``declared`` from the server's metadata; both must agree.

    ``theirs`` is the server's configuration of the model, if it has one.

    Raises:
        InvalidArgument: they contradict each other, or neither declares inputs and outputs.
    """
    config = copy.deepcopy(declared)
    if theirs is not None:
        _adopt(config, theirs)
    if not (config.input or metadata.inputs) or not (config.output or metadata.outputs):
        raise InvalidArgument(
            "the server does not describe inputs and outputs; declare them in a config.pbtxt and "
            "set it as 'config' of the route"
        )
    batched = config.max_batch_size > 0
    optional = {tensor.name for tensor in theirs.input if tensor.optional} if theirs else set()
    inputs = [t for t in metadata.inputs if not config.input or t.name not in optional or
              t.name in {declaration.name for declaration in config.input}]  # fmt: skip
    reshaped: dict[str, set[str]] = {}
    sides = []
    for kind, declarations, tensors in (
        ("input", config.input, inputs),
        ("output", config.output, metadata.outputs),
    ):
        if not declarations:
            for tensor in tensors:
                autocomplete.declare(declarations.add(), tensor, batched)
        behind = list(tensors)
        if not metadata.of_model:
            behind = [_behind_reshape(config, declarations, tensor) for tensor in tensors]
        pairs = zip(tensors, behind, strict=True)
        reshaped[kind] = {tensor.name for tensor, model in pairs if model is not tensor}
        sides.append(behind)
    # Without metadata the declaration holds; responses are checked against it.
    completed = (
        autocomplete.complete(config, *sides) if metadata.inputs and metadata.outputs else config
    )
    unranked = metadata.unranked - {tensor.name for tensor in declared.output}
    return NegotiatedSignature(completed, reshaped, unranked)


def _adopt(config: ModelConfig, theirs: ModelConfig) -> None:
    if theirs.model_transaction_policy.decoupled:
        config.model_transaction_policy.decoupled = True
    if not config.input and not config.output and not config.max_batch_size:
        config.max_batch_size = max(0, theirs.max_batch_size)
    if 0 < theirs.max_batch_size < config.max_batch_size:
        raise InvalidArgument(
            f"max_batch_size is {config.max_batch_size}, but the server's is "
            f"{theirs.max_batch_size}"
        )
    config.platform = config.platform or theirs.platform
    for scheduler in ("dynamic_batching", "sequence_batching"):
        if theirs.HasField(scheduler) and not config.HasField(scheduler):
            getattr(config, scheduler).CopyFrom(getattr(theirs, scheduler))
    same = bool(config.max_batch_size) == bool(theirs.max_batch_size)
    if not config.input and same:
        config.input.extend(theirs.input)
    if not config.output and same:
        config.output.extend(theirs.output)
        for declaration in config.output:
            declaration.label_filename = ""  # the file is on the server
    for tensor in theirs.input:
        for declaration in config.input:
            if declaration.name == tensor.name and tensor.optional:
                declaration.optional = True
    names = {tensor.name for tensor in (*config.input, *config.output)}
    for key in theirs.parameters:
        kind, _, name = key.partition(".")
        known = key.startswith(SIGNATURE_PARAMETERS) and (
            kind not in ("axes", "range") or name in names
        )
        if known and key not in config.parameters:
            config.parameters[key].CopyFrom(theirs.parameters[key])


def _behind_reshape(
    config: ModelConfig, declarations: Sequence[Any], tensor: ArtifactTensor
) -> ArtifactTensor:
    """``tensor`` in the model's own shape, if the server reshapes it."""
    for declaration in declarations:
        if declaration.name == tensor.name and declaration.HasField("reshape"):
            batch = (-1,) if config.max_batch_size > 0 else ()
            wire = (*batch, *declaration.dims)
            fits = len(wire) == len(tensor.shape) and all(
                has in (-1, says) for says, has in zip(wire, tensor.shape, strict=True)
            )
            if fits:
                shape = (*batch, *declaration.reshape.shape)
                return ArtifactTensor(tensor.name, tensor.datatype, shape)
    return tensor
