"""Model description and requests for TensorFlow Serving, shared by the gRPC and REST clients.

Both APIs use the same messages; REST uses their JSON form. The source is tensorflow/serving,
``apis/*.proto`` and ``model_servers/``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence

from modelport.gateway.backends import parameters
from modelport.gateway.backends.remote.signature_negotiation import (
    Metadata,
    NegotiatedSignature,
    RemoteClient,
    RemoteResponse,
)
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import autocomplete
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.repository.scan import VERSION_NAME
from modelport.gateway.types import (
    Datatype,
    Deadline,
    InferRequest,
    ModelSignature,
    Tensor,
    TensorSpec,
)
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire import tensor_proto
from modelport.gateway.wire.proto import model_config_pb2, tensorflow_pb2
from modelport.gateway.wire.proto import serving_pb2 as pb

SIGNATURE_PARAMETER, DEFAULT_SIGNATURE = "TF_SIGNATURE_DEF", "serving_default"
METADATA_FIELD = "signature_def"
#: TensorFlow Serving has no limit; this one applies without a configuration.
MAX_BATCH_SIZE = 65536
#: Errors of the route or the server that are reported as errors of the request.
_NOT_THE_REQUEST = ("Unrecognized servable version label", "Serving signature key")

_States = pb.ModelVersionStatus.State


class TfServingClient(RemoteClient):
    """A ``RemoteClient`` without its transport."""

    #: Datatypes that the transport does not carry.
    unsupported: frozenset[Datatype] = frozenset()

    def __init__(self, route: ModelRoute, model: str, config: ModelConfig | None) -> None:
        if route.version and not VERSION_NAME.match(route.version):
            raise InvalidArgument(
                f"the route's version of '{model}' must be a number, not '{route.version}': "
                "TensorFlow Serving has only numbers"
            )
        self.model, self.label = model, route.label
        #: Empty: only versions are requested.
        self.signature = ""
        if config is not None:
            self.signature = parameters.text(config, SIGNATURE_PARAMETER, DEFAULT_SIGNATURE)
        #: As the configuration declares them, in the model's shapes.
        self._inputs, self._outputs = autocomplete.declared(
            config or model_config_pb2.ModelConfig()
        )
        self._declares = bool(self._inputs or self._outputs or (config and config.max_batch_size))
        self.agreement: NegotiatedSignature
        self.version = ""
        self.told: Metadata | None = None

    def spec(self, version: str, signature: str = "") -> pb.ModelSpec:
        spec = pb.ModelSpec(name=self.model, signature_name=signature)
        if self.label:
            spec.version_label = self.label
        elif version:
            spec.version.value = int(version)
        return spec

    @abstractmethod
    async def status(
        self, address: str, version: str, limit: Deadline
    ) -> pb.GetModelStatusResponse: ...

    @abstractmethod
    async def describe(
        self, address: str, version: str, limit: Deadline
    ) -> tuple[pb.ModelSpec, pb.SignatureDefMap]:
        """The version that the server would use, and its signatures."""

    async def metadata(self, address: str, version: str, limit: Deadline) -> Metadata:
        if not self.label:
            versions = available(await self.status(address, version, limit))
            if not self.signature:
                return Metadata(versions, (), ())
        spec, signatures = await self.describe(address, version, limit)
        if self.label:
            versions = (str(spec.version.value),)
            if not self.signature:
                return Metadata(versions, (), ())
        if self.signature not in signatures.signature_def:
            there = ", ".join(f"'{name}'" for name in sorted(signatures.signature_def)) or "none"
            raise InvalidArgument(
                f"the model has no signature '{self.signature}'; set the parameter "
                f"{SIGNATURE_PARAMETER} to one of {there}"
            )
        signature = signatures.signature_def[self.signature]
        inputs = _tensors("input", signature.inputs, self._inputs)
        outputs = _tensors("output", signature.outputs, self._outputs)
        unranked = frozenset(
            name
            for side in (signature.inputs, signature.outputs)
            for name, info in side.items()
            if info.tensor_shape.unknown_rank
        )
        self.told = Metadata(versions, inputs, outputs, of_model=True, unranked=unranked)
        self.signature_defs = signatures.SerializeToString()
        self.signatures = dict(self._named_signatures(signatures))
        return self.told

    def _named_signatures(
        self, signatures: pb.SignatureDefMap
    ) -> Iterator[tuple[str, ModelSignature]]:
        for name, definition in sorted(signatures.signature_def.items()):
            if name == self.signature and self._inputs:
                continue  # shapes declared in the configuration bind every dialect
            try:
                inputs = _specs(_tensors("input", definition.inputs, {}))
                outputs = _specs(_tensors("output", definition.outputs, {}))
            except Unsupported:  # no dense tensors, such as an initialiser
                continue
            if not self.unsupported.isdisjoint(s.datatype for s in (*inputs, *outputs)):
                continue
            yield name, ModelSignature(inputs, outputs, any_shape=True)

    def named_output(self, request: InferRequest, name: str) -> Datatype:
        """The datatype of an output of the signature that ``request`` names.

        Raises:
            EndpointFailed: the signature has no such output.
        """
        for spec in self.signatures[request.signature].outputs:
            if spec.name == name:
                return spec.datatype
        raise EndpointFailed(FailureKind.DAMAGED, "it has an output unknown to the signature")

    def named_answer(self, request: InferRequest, outputs: Mapping[str, Tensor]) -> RemoteResponse:
        """The outputs that ``request`` wants, in order.

        Raises:
            EndpointFailed: an output is missing.
        """
        known = [spec.name for spec in self.signatures[request.signature].outputs]
        names = request.outputs or known
        missing = [name for name in names if name not in outputs]
        if missing:
            raise EndpointFailed(FailureKind.DAMAGED, f"output '{missing[0]}' is missing")
        return RemoteResponse([outputs[name] for name in names])

    async def config(self, address: str, version: str, limit: Deadline) -> ModelConfig | None:
        """A batch size if all tensors begin with a dynamic dim; the server has no configuration."""
        if self._declares or self.told is None:
            return None
        tensors = (*self.told.inputs, *self.told.outputs)
        if self.told.unranked or not all(tensor.shape[:1] == (-1,) for tensor in tensors):
            return None
        return model_config_pb2.ModelConfig(max_batch_size=MAX_BATCH_SIZE)

    async def ready(self, address: str, version: str, limit: Deadline) -> None:
        if self.label:
            await self.describe(address, version, limit)
        else:
            available(await self.status(address, version, limit))

    async def loading(self, address: str, limit: Deadline) -> bool:
        if self.label:
            return False
        rows = (await self.status(address, "", limit)).model_version_status
        return any(row.state in (_States.START, _States.LOADING) for row in rows)

    async def serve(self, address: str, version: str, agreement: NegotiatedSignature) -> None:
        self.agreement, self.version = agreement, version


def available(status: pb.GetModelStatusResponse) -> tuple[str, ...]:
    """The AVAILABLE versions, ascending.

    Raises:
        EndpointFailed: there are none; with the server's reason.
    """
    rows = status.model_version_status
    numbers = sorted(row.version for row in rows if row.state == _States.AVAILABLE)
    if not numbers:
        reasons = [row.status.error_message for row in rows if row.status.error_message]
        states = [_States.Name(row.state) for row in rows if row.state in _States.values()]
        said = reasons[:1] or [f"it is in state {state}" for state in states[:1]] or [""]
        raise EndpointFailed(FailureKind.UNREADY, said[0])
    return tuple(map(str, numbers))


def cause_of(error: InvalidArgument) -> Exception:
    """The cause of ``error``, with which the server answered a request."""
    if str(error).startswith(_NOT_THE_REQUEST):
        return EndpointFailed(FailureKind.UNREADY, str(error))
    return error


def _tensors(
    kind: str, infos: Mapping[str, tensorflow_pb2.TensorInfo], known: Mapping[str, ArtifactTensor]
) -> tuple[ArtifactTensor, ...]:
    return tuple(_tensor(f"{kind} '{n}'", n, infos[n], known.get(n)) for n in sorted(infos))


def _tensor(
    where: str, name: str, info: tensorflow_pb2.TensorInfo, known: ArtifactTensor | None
) -> ArtifactTensor:
    datatype = tensor_proto.DATATYPES.get(info.dtype)
    if datatype is None or info.WhichOneof("encoding") != "name":
        raise Unsupported(f"{where} of the model is not a dense tensor of a supported datatype")
    if not info.tensor_shape.unknown_rank:
        shape = tuple(-1 if dim.size < 0 else dim.size for dim in info.tensor_shape.dim)
    else:  # a vector, unless declared otherwise
        shape = (-1,) if known is None else known.shape
    return ArtifactTensor(name, datatype, shape)


def _specs(tensors: Sequence[ArtifactTensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, t.datatype, t.shape) for t in tensors)


def check_version(spec: pb.ModelSpec, version: str) -> None:
    """Raises ``EndpointFailed`` if a response is from another version than requested."""
    if version and spec.HasField("version") and spec.version.value != int(version):
        raise EndpointFailed(FailureKind.DAMAGED, "it is from another version of the model")


def wanted(agreement: NegotiatedSignature, request: InferRequest) -> Sequence[str]:
    return request.outputs or agreement.outputs
