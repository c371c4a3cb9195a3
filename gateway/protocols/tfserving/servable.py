"""A served version as TensorFlow Serving's clients see it: its signatures, its name, its state.

They send and get the shapes of the model itself. Where ``config.pbtxt`` has Triton's ``reshape``
those differ from the wire's, in which tensors enter and leave the data plane.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from modelport.gateway.backends import parameters
from modelport.gateway.errors import (
    AlreadyExists,
    InvalidArgument,
    ModelportError,
    NotFound,
    QueueFull,
    TimedOut,
    Unavailable,
    Unsupported,
)
from modelport.gateway.inference.images import Decoder
from modelport.gateway.inference.signatures import UsualShapes
from modelport.gateway.inference.validation import Reshape
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols import image_decoding
from modelport.gateway.runtime import offload
from modelport.gateway.types import Array, Datatype, InferRequest, InferResponse, Tensor, TensorSpec
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import tensorflow_pb2

#: The signature of a request that names none. A model that is no SavedModel has no other.
SIGNATURE = "serving_default"
#: Triton's parameter for another one.
_SIGNATURE_PARAMETER = "TF_SIGNATURE_DEF"

#: Characters of a client's word that a message repeats.
MAX_NAME = 256

#: At a time, where the model does not say how many batch elements it takes.
MAX_PICTURES = 64


class FailedPrecondition(InvalidArgument):
    """gRPC's FAILED_PRECONDITION, which TensorFlow Serving answers to an unknown signature."""


#: The canonical code of an error; TensorFlow Serving's, in gRPC's words. The first match decides.
_CODES: tuple[tuple[type[ModelportError], str], ...] = (
    (QueueFull, "RESOURCE_EXHAUSTED"),
    (TimedOut, "DEADLINE_EXCEEDED"),
    (Unavailable, "UNAVAILABLE"),
    (FailedPrecondition, "FAILED_PRECONDITION"),
    (InvalidArgument, "INVALID_ARGUMENT"),
    (NotFound, "NOT_FOUND"),
    (AlreadyExists, "ALREADY_EXISTS"),
    (Unsupported, "UNIMPLEMENTED"),
)
#: What gRPC's table of methods needs of it.
STATUSES = dict(_CODES)
_TYPE_NAMES = {
    Datatype.FP16: "half",
    Datatype.FP32: "float",
    Datatype.FP64: "double",
    Datatype.BF16: "bfloat16",
    Datatype.BYTES: "string",
}


def code(error: ModelportError) -> str:
    """The canonical code of ``error``."""
    return next((name for kind, name in _CODES if isinstance(error, kind)), "INTERNAL")


def type_name(datatype: Datatype) -> str:
    """As TensorFlow's messages call it: ``float``, ``int64``, ``string``."""
    return _TYPE_NAMES.get(datatype, datatype.value.lower())


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An input or output in the model's own shape.

    Attributes:
        shape: with the batch dimension; -1: dynamic.
        convert: input: model's shape → wire's; output: the other way. None: they are the same.
        picture: JPEG or PNG bytes → one batch element; None: the input is no image.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    convert: Callable[[Array], Array] | None = None
    picture: Decoder | None = None
    most_pictures: int = 0

    def to_wire(self, data: Array) -> Array:
        """``data`` as the data plane takes it; what already has the wire's shape stays."""
        if self.convert is None or not _fits(data.shape, self.shape):
            return data
        return self.convert(data)

    def to_model(self, data: Array) -> Array:
        return data if self.convert is None else self.convert(data)

    def pictures(self, encoded: Sequence[bytes], leading: Sequence[int]) -> Array:
        """JPEG or PNG bytes as an array whose first dimensions are ``leading``.

        Takes milliseconds for each.

        Raises:
            InvalidArgument: they are no such pictures, too many, or of sizes that do not go
                together.
        """
        assert self.picture is not None
        if len(encoded) > self.most_pictures:  # before they are decoded
            raise InvalidArgument(
                f"input '{self.name}' takes at most {self.most_pictures} pictures at a time"
            )
        decoded = []
        for data in encoded:
            offload.checkpoint()
            decoded.append(self.picture(data))
        try:
            if decoded and decoded[0].ndim == len(self.shape):  # with the batch dimension, if any
                return np.concatenate(decoded)
            return np.stack(decoded).reshape(*leading, *decoded[0].shape)
        except (ValueError, IndexError) as error:
            raise InvalidArgument(
                f"the pictures of input '{self.name}' must all be of one size"
            ) from error


def _fits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        w in (-1, s) for s, w in zip(shape, wanted, strict=True)
    )


class Servable:
    """What requests for one signature of a version need, and its replies, computed once.

    Attributes:
        declared: the signature is the one that the model's configuration declares.
        named: the model has it by this name too, in any shape that its graph takes.
    """

    def __init__(self, served: ServedVersion, signature_name: str) -> None:
        default = parameters.text(served.config, _SIGNATURE_PARAMETER, SIGNATURE)
        self.signature_name = signature_name or default
        self.declared = self.signature_name == default
        self.named = self.signature_name in served.signatures.known
        signature = served.signature
        if not self.declared:
            signature = served.signatures.known[self.signature_name]
        self.name, self.number = served.name, served.number
        self.max_batch_size = signature.max_batch_size
        #: Class names by output, from the configuration's ``label_filename``.
        self.labels: Mapping[str, tuple[str, ...]] = served.labels if self.declared else {}
        decoders = image_decoding.decoders(served) if self.declared else {}
        self.inputs = {
            spec.name: self._input(spec, decoders.get(spec.name)) for spec in signature.inputs
        }
        self.outputs = {spec.name: self._output(spec) for spec in signature.outputs}
        self.has_pictures = any(e.picture is not None for e in self.inputs.values())
        self.required = frozenset(e.name for e in self.inputs.values() if not e.optional)
        #: The most bytes of a valid request; None: any number.
        self.max_bytes = None if self.named else served.validator.max_bytes
        self._usual = UsualShapes(signature)

    def _input(self, spec: TensorSpec, picture: Decoder | None) -> Endpoint:
        batched, dims, convert = self.max_batch_size > 0, spec.wire_dims, None
        if spec.reshape is not None:
            dims, convert = spec.reshape, Reshape(spec.reshape, spec.wire_dims, batched)
        return Endpoint(
            spec.name,
            spec.datatype,
            self._shape(dims),
            spec.optional,
            convert,
            picture,
            self.max_batch_size or MAX_PICTURES,
        )

    def _output(self, spec: TensorSpec) -> Endpoint:
        batched, dims, convert = self.max_batch_size > 0, spec.wire_dims, None
        if spec.reshape is not None:
            dims, convert = spec.reshape, Reshape(spec.wire_dims, spec.reshape, batched)
        return Endpoint(spec.name, spec.datatype, self._shape(dims), convert=convert)

    def _shape(self, dims: tuple[int, ...]) -> tuple[int, ...]:
        return (-1, *dims) if self.max_batch_size else dims

    def request(self, inputs: list[Tensor], wanted: tuple[str, ...], trace: str) -> InferRequest:
        """The request for ``inputs``, which have the shapes of the model.

        What the configuration declares goes the way of every other dialect, and is batched with
        its requests. Other shapes are left to the graph, where the model is a SavedModel.
        """
        request = InferRequest(self.name, inputs, wanted, self.number, trace=trace)
        if self.declared and not (self.named and not self._usual.fit(request)):
            for tensor in inputs:
                tensor.data = self.inputs[tensor.name].to_wire(tensor.data)
        else:
            request.signature = self.signature_name
        return request

    def answered(self, request: InferRequest, response: InferResponse) -> list[Tensor]:
        """The outputs in the model's shapes."""
        if not request.signature:
            for tensor in response.outputs:
                tensor.data = self.outputs[tensor.name].to_model(tensor.data)
        return response.outputs

    def check_inputs(self, given: Collection[str]) -> None:
        """Raise unless ``given`` are the model's inputs, all but optional ones.

        Raises:
            InvalidArgument: in TensorFlow Serving's words.
        """
        if self.required <= set(given) <= self.inputs.keys():
            return
        sent, wanted = sorted(set(given)), sorted(self.inputs)
        extra = ",".join(name for name in sent if name not in self.inputs)
        missing = ",".join(name for name in wanted if name in self.required - set(given))
        raise InvalidArgument(
            f"input size does not match signature: {len(sent)}!={len(wanted)} "
            f"len({{{','.join(sent)}}}) != len({{{','.join(wanted)}}}). Sent extra: {{{extra}}}. "
            f"Missing but required: {{{missing}}}."
        )


class UnknownSignature(InvalidArgument):
    """The model has no signature of that name; each method says so in words of its own."""

    def __init__(self, name: str) -> None:
        self.name = name[:MAX_NAME]
        super().__init__(f'Serving signature name: "{self.name}" not found in signature def')


class Selected(NamedTuple):
    """What a request names: neither version nor label is the model's default version."""

    name: str
    version: int | None = None
    label: str | None = None
    signature: str = ""


def _describe(info: tensorflow_pb2.TensorInfo, endpoint: Endpoint, name: str) -> None:
    info.name, info.dtype = name, tensor_proto.DTYPES[endpoint.datatype]
    info.tensor_shape.SetInParent()
    for size in endpoint.shape:
        info.tensor_shape.dim.add(size=size)


class Decoded(NamedTuple):
    """A request for ``servable``: inputs in the model's shapes, and the outputs wanted (none: all).

    ``by_row``: it came as REST's ``instances``.
    """

    servable: Servable
    inputs: list[Tensor]
    wanted: tuple[str, ...] = ()
    by_row: bool = False


class ServableVersion:
    """One READY version. It does not hold the version itself, with which it goes."""

    def __init__(self, served: ServedVersion) -> None:
        self.name, self.number = served.name, served.number
        self._default = Servable(served, "")
        self._servables = {name: Servable(served, name) for name in served.signatures.known}
        self._servables.setdefault(self._default.signature_name, self._default)
        self._definitions = served.signatures.definitions
        self.has_pictures = self._default.has_pictures
        #: The most bytes of a valid request; None: any number, as of pictures, and of a SavedModel,
        #: whose graph decides.
        self.max_bytes = served.validator.max_bytes
        if self.has_pictures or served.signatures.known:
            self.max_bytes = None

    def servable(self, signature: str) -> Servable:
        """The signature of that name; empty: the configuration's.

        Raises:
            UnknownSignature: the version has none such.
        """
        servable = self._servables.get(signature) if signature else self._default
        if servable is None:
            raise UnknownSignature(signature)
        return servable

    @functools.cached_property
    def signature_map(self) -> pb.SignatureDefMap:
        """All signatures: the SavedModel's own, else one as Keras writes it."""
        signatures = pb.SignatureDefMap()
        signatures.ParseFromString(self._definitions)
        servable = self._default
        if servable.signature_name not in signatures.signature_def:
            signature = signatures.signature_def[servable.signature_name]
            signature.method_name = "tensorflow/serving/predict"
            for endpoint in servable.inputs.values():
                name = f"{SIGNATURE}_{endpoint.name}:0"
                _describe(signature.inputs[endpoint.name], endpoint, name)
            for index, endpoint in enumerate(servable.outputs.values()):
                name = f"StatefulPartitionedCall:{index}"
                _describe(signature.outputs[endpoint.name], endpoint, name)
        return signatures
