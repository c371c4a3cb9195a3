"""What TorchServe says of a model, and how its words become ours.

The sources are ``frontend/server`` of pytorch/serve 0.12 and the generated handler,
``exporters/packaging/torchserve_handler.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelport.gateway.backends.remote.negotiation import Metadata
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig, Platform
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from modelport.gateway.upstream import EndpointFailed, FailureKind
from modelport.gateway.wire.triton_messages import model_config_pb2 as pb

RAW_INPUT, RAW_OUTPUT = "data", "output"
#: What TorchServe's archiver makes of version 1, and how it is asked.
_NUMBER = re.compile(r"([1-9][0-9]{0,18})(?:\.0)*\Z")
_PLATFORM = Platform("", "", "torchserve", "")
#: TorchServe's words for a worker that is not there; the status beside them is INTERNAL or 500.
_UNREADY = ("has no worker to serve", "Worker died", "did not respond in given time")
_MISSING = ("Model not found", "Model version")
_UNAUTHORIZED = "Token Authorization failed"
#: Where the model of our handler failed, rather than the request; gRPC has no status for it.
MODEL_FAILED = "the model failed"


def number(word: object) -> str:
    """The canonical number of a version that TorchServe calls ``word``; empty: it has none."""
    match = _NUMBER.match(word) if isinstance(word, str) else None
    return match[1] if match else ""


def raw_signature(config: ModelConfig) -> bool:
    """Whether a prediction's body travels as it is."""
    sides = ((config.input, RAW_INPUT), (config.output, RAW_OUTPUT))
    return not config.max_batch_size and all(
        [(t.name, t.data_type, list(t.dims)) for t in tensors] == [(name, pb.TYPE_STRING, [1])]
        for tensors, name in sides
    )


def undescribed(versions: tuple[str, ...]) -> Metadata:
    """A model of which nobody tells anything."""
    inputs = ArtifactTensor(RAW_INPUT, Datatype.BYTES, (1,))
    outputs = ArtifactTensor(RAW_OUTPUT, Datatype.BYTES, (1,))
    return Metadata(versions, (inputs,), (outputs,))


def described(versions: tuple[str, ...], config: ModelConfig) -> Metadata:
    """What a server with ``config`` takes and gives: the wire's shapes, which our handler wants."""
    signature = configuration.signature(config)
    batch = (-1,) if signature.max_batch_size else ()

    def tensors(specs: Sequence[TensorSpec]) -> tuple[ArtifactTensor, ...]:
        return tuple(ArtifactTensor(s.name, s.datatype, (*batch, *s.wire_dims)) for s in specs)

    return Metadata(versions, tensors(signature.inputs), tensors(signature.outputs))


def described_by_handler(document: Any) -> ModelConfig | None:
    """The configuration that our handler's ``signature.json`` says; None: it is not ours."""
    if type(document) is not dict:
        return None
    try:
        padding = document.get("padding", {})
        axes = {
            name: Axis(name, low or 0, high, _padding(padding.get(name)))
            for name, (low, high) in document["axes"].items()
        }
        signature = ModelSignature(
            tuple(map(_spec, document["inputs"])),
            tuple(map(_spec, document["outputs"])),
            document["max_batch_size"],
            axes,
        )
        config = configuration.build("", _PLATFORM, signature)
        configuration.signature(config)
    except (KeyError, TypeError, ValueError, AttributeError, InvalidArgument):
        return None
    return config


def _padding(document: Any) -> Any:
    if type(document) is not list:  # a number, or nothing
        return document
    return tuple((str(name), float(value)) for name, value in document)


def _spec(document: Mapping[str, Any]) -> TensorSpec:
    reshape = document.get("reshape")  # TorchServe leaves out what is null
    return TensorSpec(
        document["name"],
        Datatype(document["datatype"]),
        tuple(document["dims"]),
        document.get("minimum"),
        document.get("maximum"),
        None if reshape is None else tuple(reshape),
    )


def blamed(error: ModelportError) -> Exception:
    """``error``, which TorchServe gave to a request, as what it is."""
    said = str(error)
    if _UNAUTHORIZED in said:
        return EndpointFailed(FailureKind.UNREADY, "it wants a token; disable_token_authorization")
    if isinstance(error, Internal) and any(words in said for words in _UNREADY):
        return EndpointFailed(FailureKind.UNREADY, said)
    if isinstance(error, Internal) and said.startswith(_MISSING):
        return EndpointFailed(FailureKind.MISSING, said)
    return error
