"""The model registry: look up models and versions. ``manager`` changes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from modelport.gateway.backends.capabilities import RoutedBackend
from modelport.gateway.errors import ModelportError, NotFound, Unavailable
from modelport.gateway.models.model import UNLOADED, ModelRecord, ServedVersion, VersionState


class ModelRegistry:
    """Models by name, and handles on their versions."""

    def __init__(self) -> None:
        #: Only the manager adds and removes models.
        self._models: dict[str, ModelRecord] = {}
        #: What is in the repositories and no model, and the reasons.
        self._beside: dict[str, str] = {}
        #: Whether the repositories have been read: until then, any model may exist.
        self._scanned = False

    # -- the hot path ---------------------------------------------------------------------------

    def acquire(self, name: str, number: int = 0) -> ServedVersion:
        """Acquire a handle on a READY version; the caller releases it. ``number`` 0: the default.

        Raises:
            NotFound: no such model or version, or it is not loaded.
            Unavailable: the version is loading, or its load is retried, or the server is starting.
        """
        version = self.get(name, number)
        version.in_flight += 1
        return version

    def get(self, name: str, number: int = 0) -> ServedVersion:
        """The version that ``acquire`` returns, without a handle: for inspection, not inference."""
        model = self._models.get(name)
        if model is None:
            raise self._unknown(name)
        version = model.served.get(number) if number else model.default
        if version is not None:
            return version
        # Clients and meshes retry UNAVAILABLE, so it needs an end in sight.
        kind = Unavailable if model.is_coming(number) else NotFound
        if not number:
            raise kind(f"Request for unknown model: '{name}' has no available versions")
        known = number in model.states or kind is Unavailable
        state = "at ready state" if known else "found"
        raise kind(f"Request for unknown model: '{name}' version {number} is not {state}")

    def find(self, name: str, number: int = 0) -> ServedVersion | None:
        """The version that ``get`` returns; None if there is no such version."""
        model = self._models.get(name)
        if model is None:
            return None
        return model.served.get(number) if number else model.default

    # -- inspection -----------------------------------------------------------------------------

    def require_ready(self, name: str, number: int = 0) -> ServedVersion:
        """The version that ``get`` returns, if its backend can answer now.

        Raises:
            NotFound, Unavailable: as ``get``; or the backend has a problem, which is the
                message.
        """
        version = self.get(name, number)
        if version.backend.problem:
            raise Unavailable(version.backend.problem)
        return version

    def names(self) -> list[str]:
        """Every known model, served or not."""
        return sorted(self._models)

    def versions(self, name: str) -> list[int]:
        """The READY versions of a model, ascending."""
        return sorted(self._models[name].served) if name in self._models else []

    def states(self, name: str) -> list[tuple[int, VersionState, str]]:
        """Version, state and reason of a model's versions, ascending.

        Raises:
            NotFound: no such model.
        """
        return list(self._model(name).rows())

    def is_retried(self, name: str, number: int) -> bool:
        """Whether the load of a version failed and is going to be retried."""
        model = self._models.get(name)
        failure = model.failed.get(number) if model is not None else None
        return failure is not None and failure.is_retried

    def labels(self, name: str) -> Mapping[str, int]:
        """The labels of a model's served versions.

        Raises:
            NotFound: no such model.
        """
        return self._model(name).labels

    def version_of(self, name: str, label: str) -> int:
        """The version that ``label`` names.

        Raises:
            NotFound: no such model, no such label, or its version is not served.
            Unavailable: no version is served yet.
        """
        labels = self._model(name).labels
        if label not in labels:
            self.get(name)
            raise NotFound(f"Unrecognized servable version label: {label}")
        return labels[label]

    def has(self, name: str, number: int) -> bool:
        """Whether the version is in the repository, or on its server, as far as is known."""
        return name in self._models and number in self._models[name].entry.versions

    def folder(self, name: str, number: int) -> Path | None:
        """The folder of a version; None if another server has it.

        Raises:
            NotFound: there is no such model.
        """
        entry = self._model(name).entry
        found = entry.versions.get(number)
        return None if found is None or entry.remote else found.path

    def index(self, ready_only: bool = False) -> list[dict[str, str]]:
        """The rows of the repository index."""
        rows = self._rows(ready_only)
        if not ready_only:
            problem = {"version": "", "state": VersionState.UNAVAILABLE.value}
            rows += [
                {"name": name, **problem, "reason": reason}
                for name, reason in self._beside.items()
                if name not in self._models
            ]
        return sorted(rows, key=lambda row: row["name"])

    def _rows(self, ready_only: bool) -> list[dict[str, str]]:
        return [row for model in self._models.values() for row in model.index(ready_only)]

    def model_states(self) -> Iterator[tuple[str, str]]:
        """Model and state of each row of the index, except versions unloaded on request."""
        for row in self._rows(ready_only=False):
            if "state" in row and row.get("reason") != UNLOADED:
                yield row["name"], row["state"]

    def endpoints(self) -> Iterator[tuple[str, str, str, bool]]:
        """Model, version, ``host:port`` and ejection of every endpoint of a remote model."""
        for name in sorted(self._models):
            for number, served in sorted(self._models[name].served.items()):
                if isinstance(served.backend, RoutedBackend):
                    for endpoint, ejected in served.backend.endpoints():
                        yield name, str(number), endpoint, ejected

    def _model(self, name: str) -> ModelRecord:
        if name not in self._models:
            raise self._unknown(name)
        return self._models[name]

    def _unknown(self, name: str) -> ModelportError:
        if not self._scanned:
            return Unavailable("the server is starting; its models are not known yet")
        return NotFound(f"Request for unknown model: '{name}' is not found")
