"""The backend of embedded runtimes, made from a ``ModelSession``.

A runtime's module opens the artifact. Names, threads, warm-up, timing and errors are handled here
for all runtimes.
"""

from __future__ import annotations

import contextlib
import queue
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from modelport.gateway.backends.base import Artifact, Execution
from modelport.gateway.backends.capabilities import BackgroundWork
from modelport.gateway.backends.embedded import independence, warmup
from modelport.gateway.backends.embedded.instances import (
    INLINE_SECONDS,
    ONE_CORE_INLINE_SECONDS,
    Instances,
)
from modelport.gateway.errors import (
    Internal,
    InvalidArgument,
    ModelportError,
    Unsupported,
    reason_of,
)
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import scheduler_tensors
from modelport.gateway.repository.artifact_checks import trial_load
from modelport.gateway.repository.autocomplete import ArtifactTensor
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.runtime.background_thread import BackgroundThread
from modelport.gateway.types import (
    Answer,
    Array,
    Deadline,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    TensorSpec,
)

log = structlog.get_logger("modelport.backends")

#: "[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : " before the runtime's message.
_PREFIX = re.compile(r"^\[\w+\] : \d+ : \w+ : ")
_QUOTED_FOLDERS = re.compile(r'"[^"]*/([^"/]*)"')
_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s\"':]*/)*")
_MAX_REASON = 500

Compute = Callable[[Sequence[str], dict[str, Array]], Sequence[Array]]


class ModelSession(Protocol):
    """An artifact opened by its runtime.

    A run depends on its inputs only: a session that keeps state resets it at the start of each run.
    Arrays are those of ``gateway.types``: BF16 as its bits, BYTES as ``bytes`` objects. Outputs
    belong to the caller, so the next run must not write to them.
    """

    @property
    def inputs(self) -> Sequence[ArtifactTensor]: ...

    @property
    def outputs(self) -> Sequence[ArtifactTensor]: ...

    @property
    def bounded(self) -> bool:
        """Whether the input sizes bound a run's time: no loop depends on a value.

        Called while the artifact is still in its place.
        """

    @property
    def state(self) -> str:
        """The state that runs would share, by names or in a word; empty: none is known."""

    @property
    def random(self) -> bool:
        """Whether a run draws random numbers.

        Called while the artifact is still in its place.
        """

    @property
    def run(self) -> Compute:
        """Compute the named outputs, in the order of the names. Called from several threads.

        It must not write to inputs, which may be read-only, unaligned or strided.
        """

    def close(self) -> None:
        """Free all resources; called when no run is active."""


class EmbeddedBackend:
    """An ``Infer`` over one session. Tensors have the model's own shapes."""

    problem = ""

    def __init__(self, artifact: Artifact, session: ModelSession, config: ModelConfig) -> None:
        self._name, self._version = artifact.model_name, artifact.version
        self._cores = artifact.threads
        self._made_here = trial_load.made_here(artifact.path)
        #: Set once the configuration is known to match the model; then outputs must match it too.
        self.checks_shapes = False
        self.signatures: Mapping[str, ModelSignature] = {}
        self.signature_defs = b""
        self._named: dict[str, tuple[dict[str, _OutputShape], Compute]] = {}
        self.adopt(config)
        self._session: ModelSession | None = session
        self._compute = session.run
        self._infer = Instances(
            self._run,
            f"{self._name}-{self._version}",
            configuration.instance_count(config),
        )
        self._background = BackgroundThread(f"{self._name}-{self._version}_background")
        # A run cannot be interrupted, and does not see the parameters. State is reset before each
        # run, so that requests in one batch would meet in it.
        self.execution = Execution(
            batches=False, interruptible=False, parameters=False, inline=self._infer.inline,
            queues=True, joins=not session.state, ahead=1,
        )  # fmt: skip

    def adopt(self, config: ModelConfig) -> None:
        """Use ``config`` as the model's configuration."""
        self.config = config
        self._signature = configuration.signature(scheduler_tensors.declared(config))
        self._batched = self._signature.max_batch_size > 0
        self._outputs = {spec.name: _OutputShape(spec) for spec in self._signature.outputs}
        self._output_names = list(self._outputs)

    def serve_signatures(
        self, signatures: Mapping[str, ModelSignature], runs: Mapping[str, Compute], defs: bytes
    ) -> None:
        """Serve requests that name one of ``signatures``; its run checks their shapes."""
        self.signatures, self.signature_defs = signatures, defs
        self._named = {
            name: ({spec.name: _OutputShape(spec) for spec in signature.outputs}, runs[name])
            for name, signature in signatures.items()
        }

    def __call__(self, request: InferRequest, deadline: Deadline) -> Answer:
        return self._infer(request, deadline)

    def in_background(self, work: BackgroundWork) -> None:
        self._background.do(partial(work, self._run))

    def warm(self, repeats: int = 1) -> InferResponse | None:
        """Warm the model as ``warmup.warm`` does; the response to the largest batch, if any."""
        warmup.check_size(self._signature)
        gathers = self.config.HasField("dynamic_batching")
        limit = INLINE_SECONDS if gathers or self._cores > 1 else ONE_CORE_INLINE_SECONDS
        once = self._made_here
        warmth = warmup.warm(self._run, self._name, self._signature, repeats, limit, once)
        if warmth.inline_elements and self._session is not None and self._session.bounded:
            self._infer.allow_inline(warmth.inline_elements)
        return warmth.first

    def check_independence(self, file: str) -> None:
        """Raise ``Unsupported`` if answers depend on earlier requests, unless they are random."""
        assert self._session is not None
        if self._session.state and self.config.HasField("sequence_batching"):
            raise Unsupported(
                f"'{file}' keeps state itself, which is reset before each request, so a sequence "
                "would not find it again; export the model with its state as an input and an "
                "output, and declare both as 'state' of 'sequence_batching'"
            )
        if self._session.state:
            log.warning(
                "the model keeps state, which is reset before each request",
                model=self._name, version=self._version, state=self._session.state,
            )  # fmt: skip
        output = independence.differing_output(self._run, self._name, self._signature)
        if output and self._session.random:
            log.warning(
                "the model draws random numbers: equal requests get different answers",
                model=self._name, version=self._version,
            )  # fmt: skip
        elif output:
            raise Unsupported(
                f"'{file}' keeps state between requests: output '{output}' depends on earlier "
                "requests, which may be another client's; export the model with its state as an "
                "input and an output"
            )

    def unload(self) -> None:
        self._infer.close()
        self._background.close()
        if self._session is not None:
            self._session.close()
        # References to this backend must not keep the model alive.
        self._session, self._compute = None, _unloaded
        self._named.clear()

    def _run(self, request: InferRequest) -> InferResponse:
        specs, every, compute = self._outputs, self._output_names, self._compute
        checks = self.checks_shapes
        if request.signature:
            specs, compute = self._named.get(request.signature, ({}, _unloaded))
            every, checks = list(specs), False
        feed = {}
        for tensor in request.inputs:
            data = tensor.data  # runtimes may use aligned instructions
            feed[tensor.name] = data if data.flags.aligned else data.copy()
        names = request.outputs or every
        started = time.perf_counter_ns()
        try:
            arrays = compute(names, feed)
        except ModelportError:
            raise
        except Exception as error:  # every runtime has its own exception classes
            raise Internal(f"inference failed: {public_reason(error)}") from error
        request.timing.compute_infer_ns = time.perf_counter_ns() - started
        batch = request.inputs[0].data.shape[:1] if self._batched and feed else ()
        outputs = []
        for name, array in zip(names, arrays, strict=True):
            output = specs[name]
            # Most outputs have no dynamic dimension.
            same = not checks or array.shape == batch + output.dims
            if not same and not output.fits(array.shape, batch):
                raise Internal(
                    f"output '{name}' must have shape {[*batch, *output.dims]}, but the model "
                    f"returns {list(array.shape)}"
                )
            outputs.append(Tensor(name, output.datatype, array))
        return InferResponse(self._name, self._version, outputs)


class _OutputShape:
    """The expected shape of an output. ``dims`` are the model's, without the batch dimension."""

    def __init__(self, spec: TensorSpec) -> None:
        self.datatype, self.dims = spec.datatype, spec.model_dims
        self._rank = len(self.dims)
        self._fixed = [(-self._rank + i, d) for i, d in enumerate(self.dims) if d != -1]

    def fits(self, shape: tuple[int, ...], batch: tuple[int, ...]) -> bool:
        if len(shape) != self._rank + len(batch) or shape[: len(batch)] != batch:
            return False
        return all(shape[i] == d for i, d in self._fixed)


def _unloaded(names: Sequence[str], inputs: dict[str, Array]) -> Sequence[Array]:
    raise Internal("the model is unloaded")


class SessionPool:
    """One session per instance, for a runtime whose sessions take one run at a time.

    Each run waits for a free session.
    """

    def __init__(self, sessions: Sequence[ModelSession]) -> None:
        self._sessions = sessions
        self._free: queue.SimpleQueue[ModelSession] = queue.SimpleQueue()
        for session in sessions:
            self._free.put(session)
        self.inputs, self.outputs = sessions[0].inputs, sessions[0].outputs
        self.bounded, self.random = sessions[0].bounded, sessions[0].random
        self.state = sessions[0].state

    def run(self, names: Sequence[str], inputs: dict[str, Array]) -> Sequence[Array]:
        session = self._free.get()
        try:
            return session.run(names, inputs)
        finally:
            self._free.put(session)

    def close(self) -> None:
        for session in self._sessions:
            session.close()
        self._sessions = ()
        self._free = queue.SimpleQueue()


def artifact_file(artifact: Artifact) -> Path:
    """The artifact's file or folder.

    Raises:
        InvalidArgument: it does not exist.
    """
    path = artifact.path / str(artifact.config.default_model_filename)
    if not path.exists():
        raise InvalidArgument(f"'{path.name}' is missing from version {artifact.version}")
    return path


@contextlib.contextmanager
def opening(artifact: Artifact, text_of: Callable[[Exception], str] = str) -> Iterator[None]:
    """Translate the exceptions of a runtime that opens ``artifact``.

    Args:
        text_of: the part of a runtime's exception that may be public.

    Raises:
        InvalidArgument: the artifact does not load.
    """
    try:
        yield
    except ModelportError:
        raise
    except Exception as error:  # damage raises any of a dozen classes
        text = text_of(error)
        for folder in (artifact.path, artifact.path.parent.parent):
            text = text.replace(f"{folder}/", "")
        name = artifact.config.default_model_filename
        reason = public_reason(Exception(text))
        raise InvalidArgument(f"'{name}' does not load: {reason}") from error


def public_reason(error: Exception) -> str:
    """The informative line of a runtime's message, without class names and folders."""
    text = _PREFIX.sub("", reason_of(error) or "no reason given")
    line = _FOLDERS.sub("", _QUOTED_FOLDERS.sub(r'"\1"', text))
    return line if len(line) <= _MAX_REASON else line[:_MAX_REASON] + "..."
