"""Where ``instance_group`` puts a model: on the CPU, or on a GPU that is really there."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import config as configuration
from modelport.gateway.wire.triton_messages import model_config_pb2 as pb

log = structlog.get_logger("modelport.backends")

_GROUP = pb.ModelInstanceGroup


def gpu_of(artifact: Artifact, why_not: Callable[[int], str]) -> int | None:
    """The index of the GPU that the model is to run on; None: the CPU.

    ``KIND_GPU`` must have one. ``KIND_AUTO`` takes one if it can be used, and otherwise the CPU,
    with a line in the log that says why.

    Args:
        why_not: why the GPU of that index cannot be used, as a public reason; empty if it can.

    Raises:
        InvalidArgument: the groups ask for more instances than the machine can run.
        Unsupported: the GPU that is asked for cannot be used, or the groups ask for something that
            this gateway does not do.
    """
    groups = artifact.config.instance_group
    count, most = configuration.instance_count(artifact.config), parameters.max_threads()
    if count > most:
        raise InvalidArgument(
            f"instance_group of '{artifact.model_name}' asks for {count} instances, this machine "
            f"runs at most {most}, {parameters.THREADS_PER_CORE} for each core; lower 'count'"
        )
    kinds = {group.kind for group in groups} or {_GROUP.KIND_CPU}
    if kinds == {_GROUP.KIND_CPU}:
        return None
    gpus = {index for group in groups for index in group.gpus} or {0}
    if len(kinds) > 1 or _GROUP.KIND_MODEL in kinds or len(gpus) > 1:
        raise Unsupported(
            f"instance_group of '{artifact.model_name}' must put every instance on the CPU "
            "(KIND_CPU), or on one and the same GPU (KIND_GPU); set one kind and at most one of "
            "'gpus'"
        )
    (index,) = gpus
    reason = why_not(index)
    if not reason:
        return int(index)
    if kinds == {_GROUP.KIND_GPU}:
        raise Unsupported(
            f"instance_group of '{artifact.model_name}' asks for KIND_GPU, but {reason}; set "
            "KIND_CPU, or KIND_AUTO"
        )
    log.info(
        "served on the CPU", model=artifact.model_name, version=artifact.version, reason=reason
    )
    return None


def as_placed(config: pb.ModelConfig, gpu: int | None) -> pb.ModelConfig:
    """``config`` whose groups say where the instances really are, as Triton's do."""
    placed = pb.ModelConfig()
    placed.CopyFrom(config)
    for group in placed.instance_group:
        group.kind = _GROUP.KIND_CPU if gpu is None else _GROUP.KIND_GPU
        group.gpus[:] = [] if gpu is None else [gpu]
    return placed
