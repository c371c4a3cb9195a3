"""TorchServe's errors, with their names and HTTP statuses.

``{"code": 404, "type": "ModelNotFoundException", "message": "Model not found: m"}``
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing

from modelport.gateway.errors import (
    AlreadyExists,
    Internal,
    InvalidArgument,
    ModelportError,
    NotFound,
    PermissionDenied,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols.prediction.predictor import (
    PredictionCall,
    PredictionReply,
    Predictor,
)
from modelport.gateway.repository.scan import MAX_VERSION
from modelport.gateway.types import Deadline


class ModelNotFound(NotFound):
    """There is no such model."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Model not found: {name}")


class VersionNotFound(NotFound):
    """The model has no such version."""

    def __init__(self, name: str, version: str) -> None:
        super().__init__(f"Model version: {version} does not exist for model: {name}")


class UrlRefused(NotFound):
    """The URL is not allowed; TorchServe finds no model there."""


class Conflict(AlreadyExists):
    """The version is already registered."""


class DefaultVersion(InvalidArgument):
    """The default version cannot be removed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"Cannot remove default version for model {name}; make another one the default first"
        )


class WorkersNotStarted(Internal):
    """The model did not load within its ``startup_timeout``."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Failed to start workers for model {name} within its startup_timeout")


class ApiDisabled(Unsupported):
    """The control mode does not allow changes, as TorchServe without ``enable_model_api``."""

    def __init__(self) -> None:
        super().__init__(
            "Model API disabled; start the server with --model-control-mode=explicit to use it"
        )


_KINDS: dict[type[ModelportError], tuple[int, str]] = {
    VersionNotFound: (404, "ModelVersionNotFoundException"),
    NotFound: (404, "ModelNotFoundException"),
    Conflict: (409, "ConflictStatusException"),
    DefaultVersion: (400, "InvalidModelVersionException"),
    ApiDisabled: (405, "MethodNotAllowedException"),
    InvalidArgument: (400, "BadRequestException"),
    AlreadyExists: (409, "ConflictStatusException"),
    Unsupported: (501, "UnsupportedOperationException"),
    Unauthenticated: (401, "InvalidKeyException"),
    PermissionDenied: (403, "AccessDeniedException"),
    QuotaExceeded: (429, "TooManyRequestsException"),
    Unavailable: (503, "ServiceUnavailableException"),
    ModelportError: (500, "InternalServerException"),
}
STATUSES = frozenset(status for status, _ in _KINDS.values())
#: Errors of requests without a route.
REFUSALS = {
    404: (
        "ResourceNotFoundException",
        "Requested resource is not found, please refer to API document.",
    ),
    405: (
        "MethodNotAllowedException",
        "Requested method is not allowed, please refer to API document.",
    ),
}
#: ``1``, or ``1.0``, the default of TorchServe's archiver.
_VERSION = re.compile(r"([1-9][0-9]{0,18})(?:\.0)?")


def document(error: ModelportError) -> tuple[int, dict[str, object]]:
    """Return the status and the body of an error response."""
    status, name = next(_KINDS[kind] for kind in type(error).__mro__ if kind in _KINDS)
    return status, {"code": status, "type": name, "message": str(error)}


def refusal(status: int, message: str) -> dict[str, object]:
    name, text = REFUSALS.get(status, ("BadRequestException", message))
    return {"code": status, "type": name, "message": text}


def version_number(manager: ModelView, name: str, text: str) -> int:
    """Parse a version number or label; 0 if ``text`` is empty.

    Raises:
        ModelNotFound, VersionNotFound: There is no such version.
    """
    if not text:
        return 0
    found = _VERSION.fullmatch(text)
    if found is not None and int(found[1]) <= MAX_VERSION:
        return int(found[1])
    if name not in manager.names():
        raise ModelNotFound(name)
    try:
        return manager.version_of(name, text)
    except NotFound:
        raise VersionNotFound(name, text) from None


def label_of(text: str) -> str | None:
    """The label that ``text`` is, or None if it is a version number or empty."""
    return text if text and _VERSION.fullmatch(text) is None else None


def known_version(manager: ModelView, name: str, text: str) -> int:
    """Parse the version of a request for inference.

    Raises:
        ModelNotFound, VersionNotFound: There is no such version.
        Unavailable: It is not READY.
    """
    number = version_number(manager, name, text)
    try:
        manager.get(name, number)
    except NotFound as error:
        raise not_found(manager, name, text) from error
    return number


def not_found(manager: ModelView, name: str, version: str) -> NotFound:
    """Make TorchServe's error for a model or, if it names one, a version that is not served."""
    known = version and name in manager.names()
    return VersionNotFound(name, version) if known else ModelNotFound(name)


class TorchServePredictor(Predictor):
    """Raises TorchServe's errors for unknown models and versions."""

    async def __call__(self, call: PredictionCall, deadline: Deadline) -> PredictionReply:
        try:
            return await super().__call__(call, deadline)
        except NotFound as error:
            raise self._not_found(call) from error

    async def stream(
        self, call: PredictionCall, deadline: Deadline
    ) -> AsyncGenerator[PredictionReply, None]:
        try:
            async with aclosing(super().stream(call, deadline)) as replies:
                async for reply in replies:
                    yield reply
        except NotFound as error:
            raise self._not_found(call) from error

    def _not_found(self, call: PredictionCall) -> NotFound:
        return not_found(self._manager, call.model, str(call.version or ""))
