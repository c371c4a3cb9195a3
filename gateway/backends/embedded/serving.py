"""The load of an embedded model: complete its configuration, warm it, and check its answers."""

from __future__ import annotations

from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded.embedded_backend import EmbeddedBackend, ModelSession
from modelport.gateway.backends.embedded.ragged import RaggedBackend
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import autocomplete, scheduler_tensors
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.types import NUMPY_DTYPES, InferResponse, fits


def serve(
    artifact: Artifact,
    session: ModelSession,
    config: ModelConfig | None = None,
    warmup_repeats: int = 1,
) -> EmbeddedBackend:
    """Make a warm backend of ``session``, and close the session on failure or unload.

    Args:
        config: replaces the artifact's configuration.
        warmup_repeats: as for ``warmup.warm``.

    Raises:
        InvalidArgument: the session contradicts the configuration.
        Unsupported: an answer depends on earlier requests.
    """
    given = artifact.config if config is None else config
    try:
        completed = autocomplete.complete(given, session.inputs, session.outputs)
        ragged = scheduler_tensors.is_ragged(completed)
        backend = (RaggedBackend if ragged else EmbeddedBackend)(artifact, session, completed)
    except BaseException:
        session.close()
        raise
    try:
        first = backend.warm(warmup_repeats)
        if first is not None and not given.output:
            ranks = {tensor.name: tensor.data.ndim for tensor in first.outputs}
            backend.adopt(autocomplete.with_ranks(completed, ranks))
        elif first is not None:
            _check_outputs(first, completed)
        backend.checks_shapes = not ragged  # it checks them itself
        backend.check_independence(str(artifact.config.default_model_filename))
    except BaseException:
        backend.unload()
        raise
    return backend


def _check_outputs(response: InferResponse, config: ModelConfig) -> None:
    """Compare the model's real outputs with the configuration; some runtimes do not declare them.

    Raises:
        InvalidArgument: the datatype, rank or a fixed size differs.
    """
    signature = configuration.signature(scheduler_tensors.declared(config))
    specs = {spec.name: spec for spec in signature.outputs}
    batch = [-1] if signature.max_batch_size else []
    for tensor in response.outputs:
        spec, shape = specs[tensor.name], tensor.data.shape
        wanted = [*batch, *spec.model_dims]
        if not fits(shape, wanted) or tensor.data.dtype != NUMPY_DTYPES[spec.datatype]:
            raise InvalidArgument(
                f"the configuration declares output '{spec.name}' as {spec.datatype} with shape "
                f"{wanted}, but the model returns {tensor.data.dtype} with shape {list(shape)}"
            )
