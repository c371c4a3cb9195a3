"""Named signatures of a loaded version, besides the one that its configuration declares.

TensorFlow Serving requests may name a signature of a SavedModel. Each has its own validator and
batcher, so that requests for different signatures are never joined. The text interface of a version
is one, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from modelport.gateway.backends.capabilities import SignatureBackend
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.inference.validation import Validator
from modelport.gateway.types import (
    Answer,
    Deadline,
    Infer,
    InferRequest,
    ModelSignature,
    fits,
)


class NamedSignatures:
    """The named signatures of a backend; empty if it has none."""

    def __init__(self, model_name: str, schedulers: Schedulers) -> None:
        backend = schedulers.backend
        known: Mapping[str, ModelSignature] = {}
        self.definitions = b""
        if isinstance(backend, SignatureBackend):
            known, self.definitions = backend.signatures, backend.signature_defs
        self._model = model_name
        self._validators = {name: Validator(model_name, s) for name, s in known.items()}
        self._infers = {name: _chain(schedulers, signature) for name, signature in known.items()}
        self.known = known

    def add(self, name: str, signature: ModelSignature, infer: Infer) -> None:
        """Add a signature that the backend does not have."""
        self.known = {**self.known, name: signature}
        self._validators[name] = Validator(self._model, signature)
        self._infers[name] = infer

    def validator(self, name: str) -> Validator:
        """The validator of requests for the signature ``name``.

        Raises:
            InvalidArgument: the model has no such signature.
        """
        validator = self._validators.get(name)
        if validator is None:
            raise InvalidArgument(f"model '{self._model}' has no signature '{name[:256]}'")
        return validator

    def before(self, infer: Infer) -> Infer:
        """``infer`` for requests without a signature name; others go to their signature's
        batcher."""
        infers = self._infers
        if not infers:
            return infer

        def dispatch(request: InferRequest, deadline: Deadline) -> Answer:
            chosen = infers[request.signature] if request.signature else infer
            return chosen(request, deadline)

        return dispatch


def _chain(schedulers: Schedulers, signature: ModelSignature) -> Infer:
    """A batcher for requests with the declared shapes; other requests run alone."""
    alone = schedulers.alone()
    if not signature.max_batch_size:
        return alone
    batched = schedulers.batched(signature)
    if batched is schedulers.backend:
        return batched
    usual = UsualShapes(signature)

    def infer(request: InferRequest, deadline: Deadline) -> Answer:
        return (batched if usual.fit(request) else alone)(request, deadline)

    return infer


class UsualShapes:
    """The shapes that a signature declares, as a batch of at most ``max_batch_size`` elements."""

    def __init__(self, signature: ModelSignature) -> None:
        self._most = signature.max_batch_size
        self._dims = {spec.name: spec.model_dims for spec in signature.inputs}

    def fit(self, request: InferRequest) -> bool:
        """Whether the inputs have the declared shapes and equal, valid batch sizes."""
        batch = 0
        for tensor in request.inputs:
            shape, dims = tensor.data.shape, self._dims.get(tensor.name)
            if self._most:
                if not shape or batch not in (0, shape[0]) or not 1 <= shape[0] <= self._most:
                    return False
                batch, shape = shape[0], shape[1:]
            if dims is None or not fits(shape, dims):
                return False
        return True
