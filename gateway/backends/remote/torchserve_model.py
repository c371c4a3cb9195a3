"""Conversions shared by the HTTP and gRPC clients for TorchServe.

The sources are ``frontend/server`` of pytorch/serve 0.12 and the generated handler,
``exporters/packaging/torchserve_handler.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelport.gateway.backends.remote.signature_negotiation import Metadata
from modelport.gateway.errors import Internal, InvalidArgument, ModelportError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig, Platform
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from modelport.gateway.upstream.outlier_detection import EndpointFailed, FailureKind
from modelport.gateway.wire.proto import model_config_pb2 as pb

RAW_INPUT, RAW_OUTPUT = "data", "output"
#: TorchServe's archiver writes version 1 as 1.0.
_NUMBER = re.compile(r"([1-9][0-9]{0,18})(?:\.0)*\Z")
_PLATFORM = Platform("", "", "torchserve", "")
#: TorchServe's messages for a missing worker, sent with the status INTERNAL or 500.
_UNREADY = ("has no worker to serve", "Worker died", "did not respond in given time")
_MISSING = ("Model not found", "Model version")
_UNAUTHORIZED = "Token Authorization failed"
#: The handler's message if the model failed and not the request; gRPC has no status for it.
MODEL_FAILED = "the model failed"


def number(word: object) -> str:
    """The number of a version that TorchServe calls ``word``; empty: it is not a number."""
    match = _NUMBER.match(word) if isinstance(word, str) else None
    return match[1] if match else ""


def raw_signature(config: ModelConfig) -> bool:
    """Whether the body of a prediction is sent unchanged."""
    sides = ((config.input, RAW_INPUT), (config.output, RAW_OUTPUT))
    return not config.max_batch_size and all(
        [(t.name, t.data_type, list(t.dims)) for t in tensors] == [(name, pb.TYPE_STRING, [1])]
        for tensors, name in sides
    )


def undescribed(versions: tuple[str, ...]) -> Metadata:
    """The description of a model without a known signature."""
    inputs = ArtifactTensor(RAW_INPUT, Datatype.BYTES, (1,))
    outputs = ArtifactTensor(RAW_OUTPUT, Datatype.BYTES, (1,))
    return Metadata(versions, (inputs,), (outputs,))


def described(versions: tuple[str, ...], config: ModelConfig) -> Metadata:
    """The description of a model with ``config``, in the wire shapes of modelport's handler."""
    signature = configuration.signature(config)
    batch = (-1,) if signature.max_batch_size else ()

    def tensors(specs: Sequence[TensorSpec]) -> tuple[ArtifactTensor, ...]:
        return tuple(ArtifactTensor(s.name, s.datatype, (*batch, *s.wire_dims)) for s in specs)

    return Metadata(versions, tensors(signature.inputs), tensors(signature.outputs))


def described_by_handler(document: Any) -> ModelConfig | None:
    """Read the ``signature.json`` of modelport's handler; None: another handler's."""
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
    reshape = document.get("reshape")  # TorchServe omits null values
    return TensorSpec(
        document["name"],
        Datatype(document["datatype"]),
        tuple(document["dims"]),
        document.get("minimum"),
        document.get("maximum"),
        None if reshape is None else tuple(reshape),
    )


def cause_of(error: ModelportError) -> Exception:
    """The cause of ``error``, with which TorchServe answered a request."""
    said = str(error)
    if _UNAUTHORIZED in said:
        return EndpointFailed(
            FailureKind.UNREADY, "it requires a token; disable_token_authorization"
        )
    if isinstance(error, Internal) and any(words in said for words in _UNREADY):
        return EndpointFailed(FailureKind.UNREADY, said)
    if isinstance(error, Internal) and said.startswith(_MISSING):
        return EndpointFailed(FailureKind.MISSING, said)
    return error
