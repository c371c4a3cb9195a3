"""The models as requests find them; ``manager`` changes what there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modelport.gateway.backends.base import RoutedBackend
from modelport.gateway.errors import NotFound, Unavailable
from modelport.gateway.models.model import UNLOADED, ModelRecord, ServedVersion, VersionState


class ModelRegistry:
    """Looking, and the handles of the hot path."""

    def __init__(self) -> None:
        #: Added to and taken from by the manager alone.
        self._models: dict[str, ModelRecord] = {}

    # -- the hot path ---------------------------------------------------------------------------

    def acquire(self, name: str, number: int = 0) -> ServedVersion:
        """A handle on a READY version; the caller releases it. ``number`` 0: the default.

        Raises:
            NotFound: no such model or version.
            Unavailable: the version is known but not READY.
        """
        version = self.get(name, number)
        version.in_flight += 1
        return version

    def get(self, name: str, number: int = 0) -> ServedVersion:
        """As ``acquire``, without a handle: for looking, not for running."""
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        version = model.served.get(number) if number else model.default
        if version is not None:
            return version
        if not number:
            raise Unavailable(f"Request for unknown model: '{name}' has no available versions")
        if number in model.states:
            raise Unavailable(
                f"Request for unknown model: '{name}' version {number} is not at ready state"
            )
        raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")

    def find(self, name: str, number: int = 0) -> ServedVersion | None:
        """As ``get``, where there is such a version."""
        model = self._models.get(name)
        if model is None:
            return None
        return model.served.get(number) if number else model.default

    # -- looking --------------------------------------------------------------------------------

    def require_ready(self, name: str, number: int = 0) -> ServedVersion:
        """As ``get``, where the backend can answer just now.

        Raises:
            NotFound, Unavailable: as ``get``; or the backend has a problem, which is the message.
        """
        version = self.get(name, number)
        if version.backend.problem:
            raise Unavailable(version.backend.problem)
        return version

    def names(self) -> list[str]:
        """Every model that is known, served or not."""
        return sorted(self._models)

    def versions(self, name: str) -> list[int]:
        """Those that are READY, ascending."""
        return sorted(self._models[name].served) if name in self._models else []

    def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        """Version, state and reason of a model's versions, ascending.

        Raises:
            NotFound: no such model.
        """
        return list(self._model(name).rows())

    def labels(self, name: str) -> Mapping[str, int]:
        """The version labels of a model, of versions that are served.

        Raises:
            NotFound: no such model.
        """
        return self._model(name).labels

    def version_of(self, name: str, label: str) -> int:
        """The version that ``label`` names.

        Raises:
            NotFound: no such model, no such label, or its version is not served.
        """
        labels = self._model(name).labels
        if label not in labels:
            raise NotFound(f"Unrecognized servable version label: {label}")
        return labels[label]

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """The rows of the repository index."""
        models = (self._models[name] for name in sorted(self._models))
        return [row for model in models for row in model.index(ready_only)]

    def model_states(self) -> Iterator[tuple[str, str]]:
        """Model and state of each row of the index, less what was unloaded on purpose."""
        for row in self.index():
            if "state" in row and row.get("reason") != UNLOADED:
                yield row["name"], row["state"]

    def endpoints(self) -> Iterator[tuple[str, str, str, bool]]:
        """Model, version, ``host:port`` of every server asked, and whether it is ejected."""
        for name in sorted(self._models):
            for number, served in sorted(self._models[name].served.items()):
                if isinstance(served.backend, RoutedBackend):
                    for endpoint, ejected in served.backend.endpoints():
                        yield name, str(number), endpoint, ejected

    def _model(self, name: str) -> ModelRecord:
        if name not in self._models:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self._models[name]
