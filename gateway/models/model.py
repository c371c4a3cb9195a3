"""A model and its versions as they are served: states, handles, and what the folder declares."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from modelport.gateway.backends.base import Backend, LabelledBackend
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference import admission, batching, cache, streaming
from modelport.gateway.inference.signatures import NamedSignatures
from modelport.gateway.inference.validation import Validator
from modelport.gateway.models.version_policy import VersionPolicy, VersionSnapshot, wanted
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes import ModelRoute
from modelport.gateway.repository.scan import VERSION_NAME, ModelEntry
from modelport.gateway.settings import AspiredVersionPolicy
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, InferStream, ModelSignature

#: The reason Triton gives for a version that was unloaded on purpose.
UNLOADED = "unloaded"
#: Config parameter ``version_label.stable = "3"``: requests may ask for ``stable`` instead of 3.
_LABEL = "version_label."
#: A timer may fire so much early.
TIMER_SECONDS = 0.01
_ASPIRED = "aspired_version_policy"


class VersionState(StrEnum):
    """The states of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


def _never() -> bool:
    return False


class ServedVersion:
    """A loaded version and its counted handles. Nothing of it changes but the counts."""

    __slots__ = (
        "__weakref__", "_drained", "backend", "config", "decoupled", "in_flight", "infer", "labels",
        "name", "number", "refuses", "signature", "signatures", "statistics", "stream", "validator",
    )  # fmt: skip

    def __init__(
        self,
        entry: ModelEntry,
        number: int,
        backend: Backend,
        statistics: Statistics,
        store: cache.ResponseCache | None = None,
    ) -> None:
        self.name = entry.name
        self.number = number
        self.backend = backend
        self.config = backend.config
        self.signature: ModelSignature = configuration.signature(backend.config)
        self.validator = Validator(entry.name, self.signature)
        #: Those that the artifact itself names, beside the configuration's.
        self.signatures = NamedSignatures(entry.name, backend, statistics)
        #: By output, those that the configuration names; ``labels_of`` has the others.
        self.labels = _labels(entry, backend.config)
        self.statistics = statistics
        self.decoupled = streaming.is_decoupled(self.config)
        batching.check(self.config)
        cache.check(entry.name, self.config)
        #: The chain: cache, admission, batcher, backend; of these, what the configuration asks for.
        self.infer: Infer = streaming.refuse
        #: Whether a request is refused, whatever it holds: then it need not be read.
        self.refuses: Callable[[], bool] = _never
        self.stream: InferStream = streaming.of(backend)
        if not self.decoupled:
            infer = batching.wrap(backend, self.config, self.signature, statistics)
            self.infer = self.signatures.before(infer)
            guard = admission.wrap(self.infer, self.config, backend.execution)
            self.infer = cache.wrap(guard, entry.name, number, self.config, statistics, store)
            if isinstance(guard, admission.OverloadGuard) and self.infer is guard:
                self.refuses = guard.refuses  # what is cached is answered under any load
        self.in_flight = 0
        self._drained: asyncio.Event | None = None

    def labels_of(self, output: str) -> tuple[str, ...]:
        """The class labels of ``output``: the configuration's, else the backend's own.

        Raises:
            Unavailable: the model of an ensemble's step, which has them, is not there.
        """
        labels = self.labels.get(output)
        if labels is None and isinstance(self.backend, LabelledBackend):
            return self.backend.labels_of(output)
        return labels or ()

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


class VersionSettings(NamedTuple):
    """What a reload asks of one model; None: what the model's configuration says.

    Attributes:
        policy: which versions to serve.
        labels: names of versions, each of a version that is served or about to be.
    """

    policy: VersionPolicy | None = None
    labels: Mapping[str, int] | None = None


@dataclass(slots=True)
class LoadFailure:
    """What did not load, or could not be asked, and when it is tried again by itself.

    Attributes:
        content: what identifies the content that failed.
        reason: public.
        transient: something it needs is not there yet: it is tried until it is.
        tries: how often in a row the same content has failed.
        retry_at: on ``time.monotonic()``'s clock; None: only with another content, or on request.
        due: it is to be tried again now.
    """

    content: Hashable
    reason: str
    transient: bool
    tries: int
    retry_at: float | None
    due: bool = False


@dataclass(slots=True)
class ModelRecord:
    """One model's state. Changed by the manager alone, under ``lock`` across awaits."""

    entry: ModelEntry
    #: What it was brought up to date with.
    reconciled: ModelEntry | None = None
    config: ModelConfig | None = None
    override: str | None = None
    wanted: VersionSettings = field(default_factory=VersionSettings)
    #: Asked for by its own name, not only as a step of an ensemble, and not unloaded since.
    asked: bool = False
    problem: str = ""
    #: A version was wanted and could not be served; true until one is, or none is wanted.
    troubled: bool = False
    served: dict[int, ServedVersion] = field(default_factory=dict)
    serving: dict[int, Hashable] = field(default_factory=dict)
    failed: dict[int, LoadFailure] = field(default_factory=dict)
    #: The server that runs a model which only a route names could not tell its versions.
    unreachable: LoadFailure | None = None
    states: dict[int, tuple[VersionState, str]] = field(default_factory=dict)
    #: Unloaded one by one, on request: not loaded again before the model is.
    withheld: set[int] = field(default_factory=set)
    #: Unloaded to make room for others; loaded again where those do not load.
    displaced: set[int] = field(default_factory=set)
    #: The version that a request without a version gets: ``pinned``, else the newest that is READY.
    default: ServedVersion | None = None
    pinned: int = 0
    #: The version that each label names, or named last while what it names now does not serve yet.
    labelled: dict[str, int] = field(default_factory=dict)
    #: Counts the loads, of a version or of the configuration, that failed.
    load_failures: int = 0
    #: Counts the loads on request: a server elsewhere is asked anew at each.
    requests: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None
    #: Set while no load is tried again but those that wait for something.
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def broken(self) -> bool:
        """Asked for, and what a request without a version gets does not serve."""
        if self.default is None:
            return self.troubled
        return bool(self.default.backend.problem)

    @property
    def is_ensemble(self) -> bool:
        """Whether it loads only where the models of its steps are READY."""
        return self.config is not None and bool(self.config.HasField("ensemble_scheduling"))

    @property
    def labels(self) -> dict[str, int]:
        """The labels of versions that are served."""
        return {label: number for label, number in self.labelled.items() if number in self.served}

    @property
    def policy(self) -> VersionPolicy:
        assert self.config is not None
        return self.wanted.policy or VersionPolicy.of(self.config)

    def ask(self, wanted: VersionSettings, override: str | None = None) -> None:
        """Everything that is wanted is to be tried anew."""
        self.wanted, self.override, self.asked = wanted, override, True
        self.requests += 1
        self.withheld.clear()
        self.forget_failures()

    def look(self, entry: ModelEntry) -> None:
        """What the repository has now; another server is asked for its versions later."""
        if entry.remote and self.entry.remote:
            entry = entry._replace(versions=self.entry.versions)
        self.entry = entry

    def check_labels(
        self, asked: VersionSettings, available: Collection[int], route: ModelRoute | None
    ) -> None:
        """TensorFlow Serving's rule, but that a version may also be one that is about to serve.

        Raises:
            InvalidArgument: a label names another version, or the configuration is no good.
        """
        policy = asked.policy or VersionPolicy.of(read_config(self, route))
        served = dict.fromkeys(self.served)
        coming = wanted(VersionSnapshot(policy, dict.fromkeys(available), served)) or served
        for number in (asked.labels or {}).values():
            if number not in coming:
                raise InvalidArgument(
                    f"Request to assign label to version {number} of model {self.entry.name}, "
                    "which is not currently available for inference"
                )

    def step_names(self, route: ModelRoute | None) -> list[str]:
        """The models that an ensemble needs; none for any other model."""
        try:
            scheduling = read_config(self, route).ensemble_scheduling
        except InvalidArgument:  # told when it is loaded
            return []
        return [step.model_name for step in scheduling.step]

    def failures(self) -> Iterator[LoadFailure]:
        yield from self.failed.values()
        if self.unreachable is not None:
            yield self.unreachable

    def forget_failures(self) -> None:
        self.failed.clear()
        self.unreachable = None

    def mark_due(self, waiting: bool = False) -> bool:
        """Mark what is to be tried again by now, or all that waits; whether there is anything."""
        now = time.monotonic()
        for failure in self.failures():
            if failure.retry_at is not None and (
                failure.retry_at <= now + TIMER_SECONDS or (waiting and failure.transient)
            ):
                failure.due, failure.retry_at = True, None
        return any(failure.due for failure in self.failures())

    def rows(self) -> Iterator[tuple[int, VersionState, str]]:
        """Version, state and reason, ascending. A version whose backend is down is not READY."""
        for number, (state, reason) in sorted(self.states.items()):
            served = self.served.get(number)
            if state is VersionState.READY and served is not None and served.backend.problem:
                yield number, VersionState.UNAVAILABLE, served.backend.problem
            else:
                yield number, state, reason or self.problem

    def index(self, ready_only: bool) -> Iterator[dict[str, str]]:
        """Its rows of the repository index."""
        name = self.entry.name
        for number, state, reason in self.rows():
            if not ready_only or state is VersionState.READY:
                row = {"name": name, "version": str(number), "state": state.value}
                yield {**row, "reason": reason}
        if not self.states and not ready_only:
            problem = {"version": "", "state": "UNAVAILABLE", "reason": self.problem}
            yield {"name": name, **(problem if self.problem else {})}

    def select(self) -> None:
        """What requests get that name no version, or a label. A label moves to a version that
        serves: until it does, and where it never does, the label stays where it was."""
        if self.pinned not in self.served:
            self.pinned = 0
        number = self.pinned or max(self.served, default=0)
        self.default = self.served[number] if number else None
        declared = self.wanted.labels
        if declared is None:
            declared = version_labels(self.config) if self.config is not None else {}
        self.labelled = {
            label: number if number in self.served else self.labelled.get(label, number)
            for label, number in declared.items()
        }


def version_labels(config: ModelConfig) -> dict[str, int]:
    """The labels that ``config`` declares.

    Raises:
        InvalidArgument: a label without a name, or for what is no version.
    """
    labels = {}
    for key, parameter in config.parameters.items():
        if key.startswith(_LABEL):
            text = parameter.string_value
            if not VERSION_NAME.match(text) or key == _LABEL:
                raise InvalidArgument(
                    f"parameter '{key}' must name a label and its version, not '{text}'"
                )
            labels[key.removeprefix(_LABEL)] = int(text)
    return labels


def resource_preserving(config: ModelConfig, default: AspiredVersionPolicy) -> bool:
    """Whether old versions go before new ones come.

    Raises:
        InvalidArgument: the parameter names no such policy.
    """
    if _ASPIRED in config.parameters:
        text = config.parameters[_ASPIRED].string_value
        try:
            default = AspiredVersionPolicy(text)
        except ValueError:
            known = " or ".join(f"'{policy}'" for policy in AspiredVersionPolicy)
            raise InvalidArgument(f"parameter '{_ASPIRED}' must be {known}, not '{text}'") from None
    return default is AspiredVersionPolicy.RESOURCE_PRESERVING


def read_config(model: ModelRecord, route: ModelRoute | None = None) -> ModelConfig:
    """The configuration of ``model``'s folder, or its override, with the defaults filled in.

    A model that only ``route`` names serves every version that the server has, unless its
    configuration says otherwise.

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
        if route is not None:
            config.backend = route.backend
        else:
            _derive_backend(entry, config)
    if entry.remote:
        config.name = entry.name  # what the other server calls it is the route's matter
        if not config.HasField("version_policy"):
            config.version_policy.all.SetInParent()
    config = configuration.complete(config, entry.name)
    version_labels(config)
    return config


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
