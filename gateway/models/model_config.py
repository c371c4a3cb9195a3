"""The configuration of a model as the model manager reads it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from modelport.gateway.backend_registry import WRITTEN, platforms
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import config_schema
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.repository.scan import VERSION_NAME, ModelEntry
from modelport.gateway.repository.version_choice import (
    LABEL,
    chooses_versions,
    chosen_default,
    without_choices,
)
from modelport.gateway.settings import AspiredVersionPolicy
from modelport.gateway.telemetry.statistics import FIRST_RESPONSE_BUCKETS_MS
from modelport.gateway.wire.proto import model_config_pb2 as pb

#: The metric whose buckets ``model_metrics`` may declare, and the most of them.
FIRST_RESPONSE, MAX_BUCKETS = "nv_inference_first_response_histogram_ms", 64
_ASPIRED = "aspired_version_policy"


def version_labels(config: ModelConfig) -> dict[str, int]:
    """The labels that ``config`` declares.

    Raises:
        InvalidArgument: a label has no name, or its value is not a version.
    """
    labels = {}
    for key, parameter in config.parameters.items():
        if key.startswith(LABEL):
            text = parameter.string_value
            if not VERSION_NAME.match(text) or key == LABEL:
                raise InvalidArgument(
                    f"parameter '{key}' must name a label and its version, not '{text}'"
                )
            labels[key.removeprefix(LABEL)] = int(text)
    return labels


def histogram_buckets(config: ModelConfig | None) -> Sequence[float]:
    """The bounds of ``nv_inference_first_response_histogram_ms`` that ``config`` declares.

    Raises:
        InvalidArgument: they are not ascending, or those of another metric.
    """
    bounds: Sequence[float] = FIRST_RESPONSE_BUCKETS_MS
    for control in config.model_metrics.metric_control if config is not None else ():
        family, bounds = control.metric_identifier.family, [*control.histogram_options.buckets]
        if family != FIRST_RESPONSE:
            raise InvalidArgument(
                f"model_metrics has buckets of '{family}'; only '{FIRST_RESPONSE}' has some"
            )
        ascending = all(low < high for low, high in itertools.pairwise(bounds))
        finite = all(map(math.isfinite, bounds))
        if not (0 < len(bounds) <= MAX_BUCKETS and ascending and finite):
            raise InvalidArgument(
                f"the buckets of '{family}' in model_metrics must be 1 to {MAX_BUCKETS} ascending "
                "finite numbers"
            )
    return bounds


def _parsed(entry: ModelEntry, override: str | None) -> ModelConfig:
    if override is not None:
        config = configuration.parse_json(override)
    else:
        config = configuration.parse(entry.config_text or "")
    known = dict(entry.beside)
    for step in config.ensemble_scheduling.step:
        step.model_name = known.get(step.model_name, step.model_name)
    return config


class Computation(NamedTuple):
    """The part of a configuration that versions are loaded with, and their instances."""

    content: bytes
    instances: bytes
    text: str


def computation(entry: ModelEntry, override: str | None) -> Computation:
    """An identifier of the configuration that changes if its versions must be loaded again.

    Settings that choose versions are left out. Any other change of the text counts, comments too.
    """
    text = entry.config_text if override is None else override
    config = _parsed(entry, override)
    instances = pb.ModelConfig(instance_group=config.instance_group)
    return Computation(
        without_instances(config),
        instances.SerializeToString(deterministic=True),
        without_choices(text or ""),
    )


def without_instances(config: ModelConfig) -> bytes:
    """A configuration without its instances, and without the settings that choose versions."""
    rest = pb.ModelConfig()
    rest.CopyFrom(config)
    rest.ClearField("version_policy")
    rest.ClearField("instance_group")
    for key in filter(chooses_versions, list(rest.parameters)):
        del rest.parameters[key]
    content: bytes = rest.SerializeToString(deterministic=True)
    return content


def copy_version_choice(source: ModelConfig, target: ModelConfig) -> None:
    """Copy the settings that choose versions."""
    target.version_policy.CopyFrom(source.version_policy)
    for key in filter(chooses_versions, list(target.parameters)):
        del target.parameters[key]
    for key, parameter in source.parameters.items():
        if chooses_versions(key):
            target.parameters[key].CopyFrom(parameter)


def resource_preserving(config: ModelConfig, default: AspiredVersionPolicy) -> bool:
    """Whether old versions are unloaded before new ones are loaded.

    Raises:
        InvalidArgument: the parameter is not a known policy.
    """
    if _ASPIRED in config.parameters:
        text = config.parameters[_ASPIRED].string_value
        try:
            default = AspiredVersionPolicy(text)
        except ValueError:
            known = " or ".join(f"'{policy}'" for policy in AspiredVersionPolicy)
            raise InvalidArgument(f"parameter '{_ASPIRED}' must be {known}, not '{text}'") from None
    return default is AspiredVersionPolicy.RESOURCE_PRESERVING


def read_config(
    entry: ModelEntry, override: str | None = None, route: ModelRoute | None = None
) -> ModelConfig:
    """Read the configuration of a model, or its ``override`` in JSON, and fill in the defaults.

    A model that only ``route`` names serves every version of its server, unless its configuration
    says otherwise.

    Raises:
        InvalidArgument: it does not parse, or this gateway does not support it.
    """
    if entry.problem:
        raise InvalidArgument(entry.problem)
    config = _parsed(entry, override)
    if config.name == entry.repository_name or entry.source.startswith("/"):
        config.name = entry.name
    if not (config.platform or config.backend or config.default_model_filename):
        if route is not None:
            config.backend = route.backend
        else:
            _derive_backend(entry, config)
    if entry.remote:
        config.name = entry.name  # the route has the name on the other server
        if not config.HasField("version_policy"):
            config.version_policy.all.SetInParent()
    config = configuration.complete(config, entry.name)
    if route is None:  # else the server that runs the model knows
        config_schema.check(config)
    version_labels(config)
    chosen_default(config)
    return config


def _derive_backend(entry: ModelEntry, config: ModelConfig) -> None:
    """Derive the backend from the name of the model file, as Triton does."""
    files = {name for v in entry.versions.values() for name, *_ in v.fingerprint}
    for known in (*platforms(), *WRITTEN):
        if any(f.split("/")[0] == known.default_filename for f in files):
            config.backend, config.platform = known.backend, known.platform
            config.default_model_filename = known.default_filename
            return
    if entry.versions:
        expected = ", ".join(known.default_filename for known in platforms())
        raise InvalidArgument(
            f"must specify 'platform' or 'backend' for '{entry.name}': no version holds one of "
            f"{expected}"
        )
