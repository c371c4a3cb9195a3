"""A model and its versions as they are served: states, handles, and what the folder declares."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.backends.base import Backend
from gateway.errors import InvalidArgument
from gateway.repository import config as configuration
from gateway.repository.config import ModelConfig
from gateway.repository.scan import ModelEntry
from gateway.telemetry import Statistics
from gateway.types import ModelSignature
from gateway.validation import Validator

#: The reason Triton gives for a version that was unloaded on purpose.
UNLOADED = "unloaded"


class State(StrEnum):
    """The states of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class ServedVersion:
    """A loaded version and its counted handles. Nothing of it changes but the counts."""

    __slots__ = (
        "_drained", "backend", "config", "in_flight", "labels", "name", "number", "signature",
        "statistics", "validator",
    )  # fmt: skip

    def __init__(
        self, entry: ModelEntry, number: int, backend: Backend, statistics: Statistics
    ) -> None:
        self.name = entry.name
        self.number = number
        self.backend = backend
        self.config = backend.config
        self.signature: ModelSignature = configuration.signature(backend.config)
        self.validator = Validator(entry.name, self.signature)
        self.labels = _labels(entry, backend.config)
        self.statistics = statistics
        self.in_flight = 0
        self._drained: asyncio.Event | None = None

    def release(self) -> None:
        self.in_flight -= 1
        if self._drained is not None and not self.in_flight:
            self._drained.set()

    async def retire(self) -> None:
        """Wait until the last handle is released, then unload; nobody can acquire one any more."""
        if self.in_flight:
            self._drained = asyncio.Event()
            await self._drained.wait()
        await asyncio.to_thread(self.backend.unload)


@dataclass(slots=True)
class Model:
    """One model's state. Changed by the lifecycle alone, under ``lock`` across awaits."""

    entry: ModelEntry
    config: ModelConfig | None = None
    override: str | None = None
    problem: str = ""
    #: A version was wanted and could not be served; true until one is, or none is wanted.
    troubled: bool = False
    served: dict[int, ServedVersion] = field(default_factory=dict)
    serving: dict[int, Hashable] = field(default_factory=dict)
    failed: dict[int, Hashable] = field(default_factory=dict)
    states: dict[int, tuple[State, str]] = field(default_factory=dict)
    #: The version that a request without a version gets: the newest that is READY.
    default: ServedVersion | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def broken(self) -> bool:
        """Asked for, and no version of it serves, not even while one is tried again."""
        return not self.served and self.troubled

    def select_default(self) -> None:
        self.default = self.served[max(self.served)] if self.served else None


def read_config(model: Model) -> ModelConfig:
    """The configuration of ``model``'s folder, or its override, with the defaults filled in.

    Raises:
        InvalidArgument: it does not parse, or asks for what this gateway cannot do.
    """
    entry = model.entry
    if entry.problem:
        raise InvalidArgument(entry.problem)
    if model.override is not None:
        config = configuration.parse_json(model.override)
    else:
        config = configuration.parse(entry.config_text or "")
    if not (config.platform or config.backend or config.default_model_filename):
        _derive_backend(entry, config)
    return configuration.complete(config, entry.name)


def _derive_backend(entry: ModelEntry, config: ModelConfig) -> None:
    """Without a configuration the default file names the backend, as Triton has it."""
    files = {name for v in entry.versions.values() for name, *_ in v.fingerprint}
    for known in configuration.PLATFORMS:
        if any(f.split("/")[0] == known.default_filename for f in files):
            config.backend, config.platform = known.backend, known.platform
            config.default_model_filename = known.default_filename
            return
    if entry.versions:
        expected = ", ".join(known.default_filename for known in configuration.PLATFORMS)
        raise InvalidArgument(
            f"must specify 'platform' or 'backend' for '{entry.name}': no version holds one of "
            f"{expected}"
        )


def _labels(entry: ModelEntry, config: ModelConfig) -> dict[str, tuple[str, ...]]:
    labels = {}
    for output in config.output:
        if output.label_filename:
            try:
                labels[output.name] = entry.labels(output.label_filename)
            except (OSError, ValueError) as error:
                raise InvalidArgument(
                    f"label file '{output.label_filename}' of output '{output.name}' cannot be read"
                ) from error
    return labels
