"""Lookup of served versions for TensorFlow Serving's and KServe's requests."""

from __future__ import annotations

from typing import Any

from modelport.gateway.errors import InvalidArgument, NotFound
from modelport.gateway.models.control import Control
from modelport.gateway.models.model import UNLOADED, ServedVersion, VersionState
from modelport.gateway.models.model_view import ModelView
from modelport.gateway.protocols import explainer
from modelport.gateway.protocols.oip.metadata import ready_models
from modelport.gateway.protocols.tfserving.servable_signatures import (
    Selected,
    ServableSignature,
    ServableVersion,
)
from modelport.gateway.protocols.version_cache import VersionCache
from modelport.gateway.wire.proto import error_codes_pb2
from modelport.gateway.wire.proto import serving_pb2 as pb

#: Backends whose models TensorFlow Serving could run.
_TENSORFLOW = frozenset({"tensorflow", "tflite", "tfserving"})
_STATES = {
    VersionState.LOADING: pb.ModelVersionStatus.LOADING,
    VersionState.READY: pb.ModelVersionStatus.AVAILABLE,
    VersionState.UNLOADING: pb.ModelVersionStatus.UNLOADING,
    VersionState.UNAVAILABLE: pb.ModelVersionStatus.END,
}


def _listed(name: str) -> dict[str, Any]:
    """A model as OpenAI's API describes it; nobody knows when it was made."""
    return {"id": name, "object": "model", "created": 0, "owned_by": "modelport"}


class Servables:
    """Served versions by model, version number or label."""

    def __init__(self, manager: ModelView, control: Control) -> None:
        self._manager = manager
        self._control = control
        self._version = VersionCache(ServableVersion)

    def find(self, selected: Selected) -> ServableSignature:
        """Find the selected signature of a READY version.

        Raises:
            NotFound, InvalidArgument: There is none, in TensorFlow Serving's words.
            Unavailable: The version is not READY.
        """
        return self.version(selected).servable(selected.signature)

    def version(self, selected: Selected) -> ServableVersion:
        """Find the selected READY version; raise as ``find``."""
        return self._version(self._served(selected.name, self._number(selected)))

    def _served(self, name: str, version: int | None) -> ServedVersion:
        if not name:
            raise InvalidArgument("ModelSpec has no name specified.")
        try:
            if version is not None and version < 1:
                raise NotFound
            return self._manager.get(name, version or 0)
        except NotFound:
            wanted = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise NotFound(f"Servable not found for request: {wanted}") from None

    def _number(self, selected: Selected) -> int | None:
        name, version, label, _ = selected
        if not label:
            return version
        try:
            number = self._manager.labels(name).get(label)
        except NotFound:
            raise NotFound(f"Servable not found for request: Latest({name})") from None
        if number is None:
            self._served(name, None)
            raise InvalidArgument(f"Unrecognized servable version label: {label}")
        return number

    def explainer(self, selected: Selected) -> Selected:
        """Select the default version of the model's explainer.

        Raises:
            NotFound, InvalidArgument, Unavailable: As ``find``.
            Unsupported: The model has no explainer.
        """
        found = self.version(selected)
        return Selected(explainer.name_of(self._manager, found.name, found.number))

    def kserve(self, name: str) -> dict[str, Any]:
        """Return the members that KServe's clients read in addition to TensorFlow Serving's.

        There are none for models that TensorFlow runs: KServe uses TensorFlow Serving for those,
        and its clients compare the response with TensorFlow Serving's.
        """
        served = self._manager.find(name, 0)
        if served is not None and served.config.backend in _TENSORFLOW:
            return {}
        ready = served is not None and not served.backend.problem
        return {"name": name, "ready": ready, **(_listed(name) if self._has_texts(name) else {})}

    def listing(self) -> dict[str, Any]:
        """Return the models that have a READY version, as KServe lists them; and those that take
        texts, as OpenAI lists them."""
        names = ready_models(self._manager)
        texts = [_listed(name) for name in names if self._has_texts(name)]
        return {"models": names, **({"object": "list", "data": texts} if texts else {})}

    def _has_texts(self, name: str) -> bool:
        served = self._manager.find(name, 0)
        return served is not None and served.text is not None

    async def status(self, selected: Selected) -> pb.GetModelStatusResponse:
        """Return the states of a model's versions, or of one.

        Raises:
            NotFound, InvalidArgument: There is none, in TensorFlow Serving's words.
        """
        name = selected.name
        if not name:
            raise InvalidArgument("Missing model name in request.")
        version = self._number(selected)
        reply = pb.GetModelStatusResponse()
        for number, state, reason in await self._states(name):
            if version in (None, number):
                row = reply.model_version_status.add(version=number, state=_STATES[state])
                row.status.SetInParent()
                if state is VersionState.UNAVAILABLE and reason != UNLOADED:
                    row.status.error_code = error_codes_pb2.UNAVAILABLE
                    row.status.error_message = reason
        if not reply.model_version_status:
            wanted = "any versions" if version is None else f"version {version}"
            raise NotFound(f"Could not find {wanted} of model {name}")
        return reply

    async def _states(self, name: str) -> list[tuple[int, VersionState, str]]:
        try:
            return await self._control.states(name)
        except NotFound:
            return []
