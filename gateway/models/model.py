"""A model and its versions: configuration, state, and the handles of requests in flight."""

from __future__ import annotations

import asyncio
import copy
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import count
from typing import NamedTuple

from modelport.gateway.backend_registry import PIPELINE
from modelport.gateway.backends.backend_host import Loads
from modelport.gateway.backends.base import Backend
from modelport.gateway.backends.capabilities import (
    BackgroundBackend,
    BackgroundWork,
    ComposedBackend,
    LabelledBackend,
    ScalableBackend,
)
from modelport.gateway.backends.pipeline.pipeline_file import step_models
from modelport.gateway.errors import InvalidArgument, Unavailable
from modelport.gateway.inference import pipeline
from modelport.gateway.inference.admission.fair_queue import FairQueue
from modelport.gateway.inference.batching import Schedulers
from modelport.gateway.inference.signatures import NamedSignatures
from modelport.gateway.inference.text.text_infer import (
    TEXT_SIGNATURE,
    TextInfer,
    TextInterface,
)
from modelport.gateway.inference.validation import Validator
from modelport.gateway.models.model_config import read_config, version_labels, without_instances
from modelport.gateway.models.next_action import NO_HOLD, VersionHold
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.repository.version_choice import chosen_default
from modelport.gateway.repository.version_policy import VersionPolicy
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Infer, InferRequest, ModelSignature

#: The reason Triton gives for a version that was unloaded on purpose.
UNLOADED = "unloaded"
#: A timer may fire this much too early.
TIMER_SECONDS = 0.01
#: The longest wait for the requests of instances that are removed.
RETIRE_SECONDS = 30.0
_loads = count()


class VersionState(StrEnum):
    """The states of the repository index."""

    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class ServedVersion:
    """A loaded version of a model and the number of requests in flight."""

    def __init__(
        self,
        entry: ModelEntry,
        number: int,
        backend: Backend,
        statistics: Statistics,
        shared: pipeline.SharedState,
        text: TextInterface | None = None,
    ) -> None:
        self.name = entry.name
        #: The model of the repository that is registered under this name; empty: its own name.
        self.source = entry.source
        self.number = number
        version = entry.versions.get(number)
        #: The folder of the version, and the model's name there; None on another server.
        self.folder = None if version is None or entry.remote else version.path
        self.repository_name = entry.repository_name
        self.backend = backend
        self.config = backend.config
        self.signature: ModelSignature = configuration.signature(backend.config)
        self.validator = Validator(entry.name, self.signature)
        #: The interface for texts, which is the signature ``text``; None if there is none.
        self.text = text
        #: The text interface on the backend alone, for copies of requests.
        self.texts: Infer | None = None
        if text is not None:
            self.texts = TextInfer(text, backend, self.name, number)
            self.validator.max_bytes = None  # texts may be longer than the largest tensors
        self._shared = shared
        schedulers = Schedulers(backend, statistics, shared.limit(backend.config))
        #: Named signatures of the artifact itself, besides the one that the configuration declares.
        self.signatures = NamedSignatures(entry.name, schedulers)
        #: Class labels of the configuration by output; ``labels_of`` has the backend's too.
        self.labels = _labels(entry, backend.config)
        self.statistics = statistics
        self.decoupled = bool(self.config.model_transaction_policy.decoupled)
        self._build = partial(
            pipeline.build, self.name, number, self.signatures, shared, entry.companion, text
        )
        #: The turns of callers; requests of the gateway itself take none.
        self.turns = FairQueue()
        self._compose(self._build(schedulers))
        #: The backend's, if it has one.
        self.in_background: Callable[[BackgroundWork], None] | None = None
        if isinstance(backend, BackgroundBackend):
            self.in_background = backend.in_background
        self.in_flight = 0
        self._drained: asyncio.Event | None = None
        self._load = next(_loads)

    def _compose(self, built: pipeline.Pipeline) -> None:
        self.infer, self.stream, self.refuses, self.overloaded, self._sequences = built
        instances = configuration.instance_count(self.config)
        self.turns.resize(self.signature.max_batch_size, instances)
        if self.config.HasField("sequence_batching"):
            # A request of a running sequence must pass those that wait for its slot.
            self.turns.free = sys.maxsize

    def differs_in_instances(self, config: ModelConfig, said_so: bool) -> bool:
        """Whether the backend can serve ``config`` by instances that come and go.

        Args:
            said_so: the configurations differ in nothing else, before what the artifact completes.
        """
        if not isinstance(self.backend, ScalableBackend):
            return False
        return said_so or without_instances(self.config) == without_instances(config)

    async def scale(self, config: ModelConfig) -> None:
        """Start and remove instances; requests in flight and sequences stay where they are.

        Raises:
            ModelportError: an instance does not start; nothing has changed.
        """
        assert isinstance(self.backend, ScalableBackend)
        wanted = copy.deepcopy(self.config)
        del wanted.instance_group[:]
        wanted.instance_group.extend(config.instance_group)
        schedulers = Schedulers(self.backend, self.statistics, self._shared.limit(wanted))
        removed = await self.backend.scale(wanted)
        self.config = wanted
        self._compose(self._build(schedulers, self._sequences, removed))
        if removed and self._sequences is None:
            ends = [bound.retire() for bound in removed if bound.retire]
            await asyncio.wait(ends, timeout=RETIRE_SECONDS)

    def takes_texts(self, request: InferRequest) -> bool:
        """Whether a request is for the text interface."""
        if request.signature or self.text is None:
            return request.signature == TEXT_SIGNATURE
        return self.text.takes(request.inputs)

    def validator_of(self, request: InferRequest) -> Validator:
        """The validator of a request; texts are given their signature.

        Raises:
            InvalidArgument: the model has no such signature.
        """
        if self.text is not None and self.takes_texts(request):
            request.signature = TEXT_SIGNATURE
        if request.signature:
            return self.signatures.validator(request.signature)
        return self.validator

    def labels_of(self, output: str) -> tuple[str, ...]:
        """The class labels of ``output``: from the configuration, else from the backend.

        Raises:
            Unavailable: the model of an ensemble's step that has the labels is not available.
        """
        labels = self.labels.get(output)
        if labels is None and isinstance(self.backend, LabelledBackend):
            return self.backend.labels_of(output)
        return labels or ()

    def loads(self) -> Loads | None:
        """The loads of the versions that compute its responses; None: they vary by request."""
        steps = self.backend.step_loads() if isinstance(self.backend, ComposedBackend) else ()
        return None if steps is None else (self._load, *steps)

    def release(self) -> None:
        self.in_flight -= 1
        if self._drained is not None and not self.in_flight:
            self._drained.set()

    async def retire(self) -> None:
        """Unload the backend after the last request in flight. No new handle can be acquired."""
        if self.in_flight:
            self._drained = asyncio.Event()
            await self._drained.wait()
        await asyncio.to_thread(self.backend.unload)


class VersionSettings(NamedTuple):
    """Settings of a reload request for one model; None means as the model's configuration says.

    Attributes:
        policy: the versions to serve.
        labels: version labels; each names a version that is served or about to be.
    """

    policy: VersionPolicy | None = None
    labels: Mapping[str, int] | None = None


@dataclass(slots=True)
class LoadFailure:
    """A failed load, or a failed query of a remote server, and the time of its next retry.

    Attributes:
        content: identifies the content that failed.
        reason: public.
        transient: a dependency is missing; the load is retried until it succeeds.
        tries: consecutive failures of the same content.
        retry_at: on ``time.monotonic()``'s clock; None: retried only with other content or on
            request.
        due: to be retried now.
    """

    content: Hashable
    reason: str
    transient: bool
    tries: int
    retry_at: float | None
    due: bool = False

    @property
    def is_retried(self) -> bool:
        """Whether the load is going to be retried."""
        return self.due or self.retry_at is not None


@dataclass(slots=True)
class ModelRecord:
    """The state of one model. Only the manager changes it, under ``lock`` across awaits."""

    entry: ModelEntry
    route: ModelRoute | None = None
    #: The entry of the last reconciliation.
    reconciled: ModelEntry | None = None
    config: ModelConfig | None = None
    #: The JSON configuration of a load request, and the folder's content for which it was given.
    override: str | None = None
    overridden: str = ""
    wanted: VersionSettings = field(default_factory=VersionSettings)
    #: Requested by its own name, not only as a step of an ensemble, and not unloaded since.
    asked: bool = False
    problem: str = ""
    #: A wanted version could not be served; false again once one is, or none is wanted.
    troubled: bool = False
    served: dict[int, ServedVersion] = field(default_factory=dict)
    serving: dict[int, Hashable] = field(default_factory=dict)
    failed: dict[int, LoadFailure] = field(default_factory=dict)
    #: Set if the server of a model that only a route names could not list its versions, or may
    #: list more soon.
    unlisted: LoadFailure | None = None
    states: dict[int, tuple[VersionState, str]] = field(default_factory=dict)
    #: Versions that have been served and are not: not ready, and not unknown.
    left: set[int] = field(default_factory=set)
    #: Versions unloaded one by one on request; not loaded again until the model is.
    withheld: set[int] = field(default_factory=set)
    #: Versions unloaded to make room for others; loaded again if those fail.
    displaced: set[int] = field(default_factory=set)
    #: The versions of a rollout that is running.
    hold: VersionHold = NO_HOLD
    #: The version for requests without a version: the hold's, else ``pinned``, else that of the
    #: configuration, else the newest that is READY.
    default: ServedVersion | None = None
    pinned: int = 0
    #: The version of each label; if its new version is not served yet, the previous one.
    labelled: dict[str, int] = field(default_factory=dict)
    #: Failed loads, of a version or of the configuration.
    load_failures: int = 0
    #: Loads on request; each one queries a remote server again.
    requests: int = 0
    #: Reconciliations that run or wait for others.
    reconciliations: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None
    #: Set while no retry is pending, except retries that wait for a dependency.
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def broken(self) -> bool:
        """Whether the model was requested but its default version cannot serve."""
        if self.default is None:
            return self.troubled
        return bool(self.default.backend.problem)

    @property
    def is_ensemble(self) -> bool:
        """Whether the model is an ensemble or a pipeline: its steps' models have to be READY."""
        config = self.config
        return config is not None and (
            config.HasField("ensemble_scheduling") or config.backend == PIPELINE.backend
        )

    @property
    def is_loading(self) -> bool:
        """Whether a version is being loaded."""
        return any(state is VersionState.LOADING for state, _ in self.states.values())

    @property
    def labels(self) -> dict[str, int]:
        """The labels of served versions."""
        return {label: number for label, number in self.labelled.items() if number in self.served}

    @property
    def policy(self) -> VersionPolicy:
        assert self.config is not None
        return self.wanted.policy or VersionPolicy.of(self.config.version_policy)

    def ask(self, wanted: VersionSettings, override: str | None = None) -> None:
        """Apply the settings of a load request and forget earlier failures.

        Without an ``override``, an earlier one stays if the folder has not changed, as in Triton.
        """
        content = self.entry.content
        if override is not None:
            self.override, self.overridden = override, content
        elif self.overridden != content:
            self.override, self.overridden = None, ""
        self.wanted, self.asked = wanted, True
        self.requests += 1
        self.withheld.clear()
        self.forget_failures()

    def look(self, entry: ModelEntry) -> None:
        """Take the repository's current entry; a remote model keeps its versions until queried."""
        if entry.remote and self.entry.remote:
            entry = entry._replace(versions=self.entry.versions)
        self.entry = entry

    def read_config(self) -> ModelConfig:
        """Read the current configuration; raises as ``model_config.read_config``."""
        return read_config(self.entry, self.override, self.route)

    def check_labels(self, asked: VersionSettings, available: Collection[int]) -> None:
        """Apply TensorFlow Serving's rule for labels, but accept versions that are about to be
        served.

        Raises:
            InvalidArgument: a label names another version, or the configuration is invalid.
        """
        policy = asked.policy or VersionPolicy.of(self.read_config().version_policy)
        coming = policy.chosen(available) or self.served
        for number in (asked.labels or {}).values():
            if number not in coming:
                raise InvalidArgument(
                    f"Request to assign label to version {number} of model {self.entry.name}, "
                    "which is not currently available for inference"
                )

    def step_names(self) -> list[str]:
        """The models of the steps of an ensemble or a pipeline; empty for any other model."""
        try:
            config = self.read_config()
        except InvalidArgument:  # reported when the model loads
            return []
        if config.backend != PIPELINE.backend or self.route is not None:
            return [step.model_name for step in config.ensemble_scheduling.step]
        versions = self.entry.versions
        policy = self.wanted.policy or VersionPolicy.of(config.version_policy)
        wanted = {*policy.chosen(versions), *self.served} & versions.keys()
        names = (name for each in sorted(wanted) for name in step_models(versions[each].pipeline))
        return list(dict.fromkeys(names))

    def failures(self) -> Iterator[LoadFailure]:
        yield from self.failed.values()
        if self.unlisted is not None:
            yield self.unlisted

    def raise_failure(self) -> None:
        """Raise the error of a load, if any.

        Raises:
            Unavailable: a dependency is missing.
            InvalidArgument: anything else failed.
        """
        name = self.entry.name
        if self.entry.problem:
            raise InvalidArgument(
                f"failed to load '{name}', failed to poll from model repository: "
                f"{self.entry.problem}"
            )
        reasons = [
            f"version {number} is at {state} state: {reason}"
            for number, (state, reason) in sorted(self.states.items())
            if number in self.failed
        ]
        if self.problem:
            reasons.insert(0, self.problem)
        if not reasons:
            return
        message = f"load failed for model '{name}': {'; '.join(reasons)}"
        if any(failure.transient for failure in self.failures()):
            raise Unavailable(message)
        raise InvalidArgument(message)

    def is_coming(self, number: int) -> bool:
        """Whether a version that is not served is loading or going to load; 0: any version."""
        if self.unlisted is not None and self.unlisted.is_retried:
            return True  # its server may have any version
        if not number:
            return bool(self.reconciliations) or any(f.is_retried for f in self.failed.values())
        if number in self.failed:
            return self.failed[number].is_retried
        usable = number in self.entry.versions and number not in self.withheld
        return bool(self.reconciliations) and usable

    def forget_failures(self) -> None:
        self.failed.clear()
        self.unlisted = None

    def mark_due(self, waiting: bool = False) -> bool:
        """Mark failures whose retry is due, or all that wait; whether any failure is due."""
        now = time.monotonic()
        for failure in self.failures():
            if failure.retry_at is not None and (
                failure.retry_at <= now + TIMER_SECONDS or (waiting and failure.transient)
            ):
                failure.due, failure.retry_at = True, None
        return any(failure.due for failure in self.failures())

    def rows(self) -> Iterator[tuple[int, VersionState, str]]:
        """Version, state and reason, ascending. A version whose backend is down is UNAVAILABLE."""
        for number, (state, reason) in sorted(self.states.items()):
            served = self.served.get(number)
            if state is VersionState.READY and served is not None and served.backend.problem:
                yield number, VersionState.UNAVAILABLE, served.backend.problem
            else:
                yield number, state, reason or self.problem

    def index(self, ready_only: bool) -> Iterator[dict[str, str]]:
        """The model's rows of the repository index."""
        name = self.entry.name
        for number, state, reason in self.rows():
            if not ready_only or state is VersionState.READY:
                version = str(number)
                yield {"name": name, "version": version, "state": state.value, "reason": reason}
        if not self.states and not ready_only:
            problem = {"version": "", "state": "UNAVAILABLE", "reason": self.problem}
            yield {"name": name, **(problem if self.problem else {})}

    def select(self) -> None:
        """Choose the default version and the version of each label.

        A label moves to a new version once that version is served; until then it keeps the old one.
        """
        if self.pinned not in self.served:
            self.pinned = 0
        chosen = self.hold.default or self.pinned or self._configured
        number = max(self.served, default=0)
        if chosen in self.served:
            number = chosen
        elif chosen and not self._fails(chosen):  # it loads, and no other takes its place
            number = self.default.number if self.default is not None else 0
        self.default = self.served.get(number)
        declared = self.wanted.labels
        if declared is None:
            declared = version_labels(self.config) if self.config is not None else {}
        self.labelled = {
            label: number if number in self.served else self.labelled.get(label, number)
            for label, number in declared.items()
        }

    @property
    def unpinned(self) -> int:
        """The default version of the configuration, else the newest served one; 0: none."""
        return self._configured or max(self.served, default=0)

    @property
    def _configured(self) -> int:
        """The default version that the configuration names, if its policy serves that version."""
        number = chosen_default(self.config) if self.config is not None else 0
        chosen = number and number not in self.withheld
        return number if chosen and number in self.policy.chosen(self.entry.versions) else 0

    def _fails(self, number: int) -> bool:
        """Whether the version is not served, and not about to be."""
        gone = number in self.failed or number not in self.entry.versions
        return gone and number not in self.served


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
