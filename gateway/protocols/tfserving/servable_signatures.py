"""A model version and its signatures, as TensorFlow Serving's clients see them.

They use the shapes of the model itself. If ``config.pbtxt`` has Triton's ``reshape``, those differ
from the wire's shapes, which the inference service uses.
"""

from __future__ import annotations

import copy
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
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    TimedOut,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from modelport.gateway.inference.image_decoding import Decoder
from modelport.gateway.inference.signatures import UsualShapes
from modelport.gateway.models.model import ServedVersion
from modelport.gateway.protocols import encoded_inputs
from modelport.gateway.runtime import offload
from modelport.gateway.types import (
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    Reshape,
    Tensor,
    TensorSpec,
    fits,
)
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import serving_pb2 as pb
from modelport.gateway.wire.proto import tensorflow_pb2

#: Default signature, and the only one of models other than SavedModels.
SIGNATURE = "serving_default"
#: Triton's parameter for another default signature.
_SIGNATURE_PARAMETER = "TF_SIGNATURE_DEF"
#: Characters of a client's name that an error message repeats.
MAX_NAME = 256
#: Limit of images in a request if the model has no maximum batch size.
MAX_IMAGES = 64


class FailedPrecondition(InvalidArgument):
    """FAILED_PRECONDITION, TensorFlow Serving's status for an unknown signature."""


#: TensorFlow Serving's statuses by error class; the most specific class decides.
STATUSES: dict[type[ModelportError], str] = {
    QueueFull: "RESOURCE_EXHAUSTED",
    QuotaExceeded: "RESOURCE_EXHAUSTED",
    Unauthenticated: "UNAUTHENTICATED",
    PermissionDenied: "PERMISSION_DENIED",
    TimedOut: "DEADLINE_EXCEEDED",
    Unavailable: "UNAVAILABLE",
    FailedPrecondition: "FAILED_PRECONDITION",
    InvalidArgument: "INVALID_ARGUMENT",
    NotFound: "NOT_FOUND",
    AlreadyExists: "ALREADY_EXISTS",
    Unsupported: "UNIMPLEMENTED",
}
_TYPE_NAMES = {
    Datatype.FP16: "half",
    Datatype.FP32: "float",
    Datatype.FP64: "double",
    Datatype.BF16: "bfloat16",
    Datatype.BYTES: "string",
}


def code(error: ModelportError) -> str:
    """The canonical code of ``error``."""
    return next((STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES), "INTERNAL")


def type_name(datatype: Datatype) -> str:
    """Return TensorFlow's name of a datatype: ``float``, ``int64``, ``string``."""
    return _TYPE_NAMES.get(datatype, datatype.value.lower())


@dataclass(frozen=True, slots=True)
class SignatureTensor:
    """An input or output of a signature, in the model's own shape.

    Attributes:
        shape: With the batch dimension; -1 is dynamic.
        convert: Reshapes an input to the wire's shape, or an output from it; None if equal.
        image: Decodes JPEG or PNG bytes to a batch element; None if the input is not an image.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    optional: bool = False
    convert: Callable[[Array], Array] | None = None
    image: Decoder | None = None
    max_images: int = 0

    def to_wire(self, data: Array) -> Array:
        """Reshape an input to the wire's shape, unless it has that already."""
        if self.convert is None or not fits(data.shape, self.shape):
            return data
        return self.convert(data)

    def to_model(self, data: Array) -> Array:
        return data if self.convert is None else self.convert(data)

    def images(self, encoded: Sequence[bytes], leading: Sequence[int]) -> Array:
        """Decode JPEG or PNG images to an array whose first dimensions are ``leading``.

        Each takes milliseconds.

        Raises:
            InvalidArgument: The images are invalid, too many, or of different sizes.
        """
        assert self.image is not None
        if len(encoded) > self.max_images:  # before they are decoded
            raise InvalidArgument(
                f"input '{self.name}' takes at most {self.max_images} images at a time"
            )
        decoded = []
        for data in encoded:
            offload.checkpoint()
            decoded.append(self.image(data))
        try:
            if decoded and decoded[0].ndim == len(self.shape):  # with the batch dimension, if any
                return np.concatenate(decoded)
            return np.stack(decoded).reshape(*leading, *decoded[0].shape)
        except (ValueError, IndexError) as error:
            raise InvalidArgument(
                f"the images of input '{self.name}' must all be of one size"
            ) from error


class ServableSignature:
    """A signature of a model version.

    Attributes:
        declared: Whether the model's configuration declares it.
        named: Whether the SavedModel has it, with any shapes that its graph accepts.
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
        decoders = encoded_inputs.decoders(served) if self.declared else {}
        self.inputs = {
            spec.name: self._tensor(spec, spec.reshape, spec.wire_dims, decoders.get(spec.name))
            for spec in signature.inputs
        }
        self.outputs = {
            spec.name: self._tensor(spec, spec.wire_dims, spec.reshape)
            for spec in signature.outputs
        }
        self.has_images = any(e.image is not None for e in self.inputs.values())
        self.required = frozenset(e.name for e in self.inputs.values() if not e.optional)
        #: The input that a request without names means; None: there are several.
        self.only_input: SignatureTensor | None = None
        if len(self.inputs) == 1 or len(self.required) == 1:
            self.only_input = self.inputs[next(iter(self.required or self.inputs))]
        #: Size limit of valid requests, or None.
        self.max_bytes = None if self.named else served.validator.max_bytes
        self._usual = UsualShapes(signature)

    def _tensor(
        self,
        spec: TensorSpec,
        source: tuple[int, ...] | None,
        target: tuple[int, ...] | None,
        image: Decoder | None = None,
    ) -> SignatureTensor:
        """Describe a tensor that is reshaped from ``source`` to ``target``, unless one is None."""
        batched, dims, convert = self.max_batch_size > 0, spec.wire_dims, None
        if spec.reshape is not None and source is not None and target is not None:
            dims, convert = spec.reshape, Reshape(source, target, batched)
        shape = (-1, *dims) if batched else dims
        max_images = self.max_batch_size or MAX_IMAGES
        return SignatureTensor(
            spec.name, spec.datatype, shape, spec.optional, convert, image, max_images
        )

    def request(self, inputs: list[Tensor], wanted: tuple[str, ...], trace: str) -> InferRequest:
        """Make the request for ``inputs`` in the model's shapes.

        Inputs that the configuration declares are batched with the requests of other dialects.
        Other signatures and shapes are left to the graph of a SavedModel.
        """
        request = InferRequest(self.name, inputs, wanted, self.number, trace=trace)
        if self.declared and not (self.named and not self._usual.fit(request)):
            for tensor in inputs:
                tensor.data = self.inputs[tensor.name].to_wire(tensor.data)
        else:
            request.signature = self.signature_name
        return request

    def answered_by(self, number: int) -> ServableSignature:
        """This signature of version ``number``, which a rollout chose in place of this version."""
        if number == self.number:
            return self
        servable = copy.copy(self)
        servable.number = number
        return servable

    def outputs_of(self, request: InferRequest, response: InferResponse) -> list[Tensor]:
        """Convert the outputs to the model's shapes."""
        if not request.signature:
            for tensor in response.outputs:
                tensor.data = self.outputs[tensor.name].to_model(tensor.data)
        return response.outputs

    def check_inputs(self, given: Collection[str]) -> None:
        """Check that ``given`` are the model's inputs; optional ones may be missing.

        Raises:
            InvalidArgument: They are not, in TensorFlow Serving's words.
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
    """The model has no signature of that name; each method has its own message for it."""

    def __init__(self, name: str) -> None:
        self.name = name[:MAX_NAME]
        super().__init__(f'Serving signature name: "{self.name}" not found in signature def')


class Selected(NamedTuple):
    """The requested model; with neither version nor label its default version."""

    name: str
    version: int | None = None
    label: str | None = None
    signature: str = ""

    @property
    def request_label(self) -> str | None:
        """The ``label`` of an ``InferRequest``."""
        return self.label or ("" if self.version is None else None)


def _describe(info: tensorflow_pb2.TensorInfo, spec: SignatureTensor, name: str) -> None:
    info.name, info.dtype = name, tensor_proto.DTYPES[spec.datatype]
    info.tensor_shape.SetInParent()
    for size in spec.shape:
        info.tensor_shape.dim.add(size=size)


class Decoded(NamedTuple):
    """A decoded request: inputs in the model's shapes, and requested outputs (none for all).

    ``by_row`` tells whether it had REST's ``instances``.
    """

    servable: ServableSignature
    inputs: list[Tensor]
    wanted: tuple[str, ...] = ()
    by_row: bool = False


class ServableVersion:
    """The signatures of a READY version, without a reference to it."""

    def __init__(self, served: ServedVersion) -> None:
        self.name, self.number = served.name, served.number
        self._default = ServableSignature(served, "")
        self._servables = {
            name: ServableSignature(served, name) for name in served.signatures.known
        }
        self._servables.setdefault(self._default.signature_name, self._default)
        self._definitions = served.signatures.definitions
        self.has_images = self._default.has_images
        #: The inputs of its text interface.
        self.text_names = frozenset[str]() if served.text is None else served.text.names
        #: Size limit of valid requests; None for images, and for SavedModels, whose graph decides.
        self.max_bytes = served.validator.max_bytes
        if self.has_images or served.signatures.known:
            self.max_bytes = None

    def servable(self, signature: str) -> ServableSignature:
        """Return the signature of that name; the configuration's if it is empty.

        Raises:
            UnknownSignature: There is no such signature.
        """
        servable = self._servables.get(signature) if signature else self._default
        if servable is None:
            raise UnknownSignature(signature)
        return servable

    @functools.cached_property
    def signature_map(self) -> pb.SignatureDefMap:
        """All signatures: the SavedModel's own, or one in the format of Keras."""
        signatures = pb.SignatureDefMap()
        signatures.ParseFromString(self._definitions)
        servable = self._default
        if servable.signature_name not in signatures.signature_def:
            signature = signatures.signature_def[servable.signature_name]
            signature.method_name = "tensorflow/serving/predict"
            for spec in servable.inputs.values():
                name = f"{SIGNATURE}_{spec.name}:0"
                _describe(signature.inputs[spec.name], spec, name)
            for index, spec in enumerate(servable.outputs.values()):
                name = f"StatefulPartitionedCall:{index}"
                _describe(signature.outputs[spec.name], spec, name)
        return signatures
