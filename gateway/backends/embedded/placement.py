"""Placement of a model by its ``instance_group``: on the CPU, or on a GPU of this machine."""

from __future__ import annotations

import copy
from collections.abc import Callable

import structlog

from modelport.gateway.backends import parameters
from modelport.gateway.backends.base import Artifact
from modelport.gateway.errors import InvalidArgument, Unsupported
from modelport.gateway.repository import config as configuration
from modelport.gateway.wire.proto import model_config_pb2 as pb

log = structlog.get_logger("modelport.backends")

_GROUP = pb.ModelInstanceGroup


def gpu_of(artifact: Artifact, why_not: Callable[[int], str]) -> int | None:
    """The index of the GPU to run the model on; None: the CPU.

    ``KIND_GPU`` requires a GPU. ``KIND_AUTO`` uses one if possible, else the CPU, and logs the
    reason.

    Args:
        why_not: returns the public reason why a GPU cannot be used; empty if it can.

    Raises:
        InvalidArgument: the groups ask for more instances than the machine can run.
        Unsupported: the GPU cannot be used, or the groups need an unsupported placement.
    """
    groups = artifact.config.instance_group
    count, most = configuration.instance_count(artifact.config), parameters.max_threads()
    if count > most:
        raise InvalidArgument(
            f"instance_group of '{artifact.model_name}' asks for {count} instances, but this "
            f"machine runs at most {most}, {parameters.THREADS_PER_CORE} per core; lower 'count'"
        )
    kinds = {group.kind for group in groups} or {_GROUP.KIND_CPU}
    if kinds == {_GROUP.KIND_CPU}:
        return None
    gpus = {index for group in groups for index in group.gpus} or {0}
    if len(kinds) > 1 or _GROUP.KIND_MODEL in kinds or len(gpus) > 1:
        raise Unsupported(
            f"instance_group of '{artifact.model_name}' must put every instance on the CPU "
            "(KIND_CPU), or on the same GPU (KIND_GPU); set one kind and at most one of 'gpus'"
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


def on_cpu(artifact: Artifact, models: str) -> pb.ModelConfig:
    """The configuration as placed by a runtime without GPUs; raises as ``gpu_of``."""
    gpu = gpu_of(artifact, lambda _: f"{models} run on the CPU only")
    return as_placed(artifact.config, gpu)


def as_placed(config: pb.ModelConfig, gpu: int | None) -> pb.ModelConfig:
    """A copy of ``config`` whose groups have the real placement, as in Triton."""
    placed = copy.deepcopy(config)
    for group in placed.instance_group:
        group.kind = _GROUP.KIND_CPU if gpu is None else _GROUP.KIND_GPU
        group.gpus[:] = [] if gpu is None else [gpu]
    return placed
