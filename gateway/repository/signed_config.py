"""The signed part of ``config.pbtxt``, and the fields that may change without a new signature.

A certificate holds the configuration that its version was published with:

    "configuration": {"platform": ..., "input": [...], "parameters": {...}, ...}

Operators may change how a model runs without a new signature: the served versions and their labels,
instances, batching, caching, warm-up and threads. Everything else belongs to the contract with
clients or to the computation, and must be as signed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from modelport.gateway.backend_registry import WRITTEN, platforms
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.signing import CERTIFICATE, VersionCertificate
from modelport.gateway.wire.proto import model_config_pb2 as pb

KEY = "configuration"

#: Fields about how a model runs.
UNSIGNED = frozenset(
    {
        "dynamic_batching",
        "instance_group",
        "metric_tags",
        "model_metrics",
        "model_warmup",
        "response_cache",
        "version_policy",
    }
)
#: Parameters about how a model runs.
_UNSIGNED_PARAMETER = re.compile(
    r"version_label\..+|default_version|aspired_version_policy|admission_control\w*|batch_here"
    r"|overload\w*"
    r"|(intra|inter)_op_thread_count|(INTRA|INTER)_OP_THREAD_COUNT|TF_NUM_(INTRA|INTER)_THREADS"
    r"|INFERENCE_NUM_THREADS|NUM_STREAMS|PERFORMANCE_HINT"
    r"|TF_USE_PER_SESSION_THREADS|tflite_num_threads|enable_mem_(arena|pattern)"
)


def document(config: ModelConfig) -> dict[str, Any]:
    """The part of ``config`` that goes into a version's certificate."""
    from google.protobuf import json_format  # lazy, to keep start-up fast

    found: dict[str, Any] = json_format.MessageToDict(
        _signed_part(config), preserving_proto_field_name=True
    )
    return found


def _signed_part(config: ModelConfig) -> ModelConfig:
    part = copy.deepcopy(config)
    for field in UNSIGNED:
        part.ClearField(field)
    for output in part.output:
        output.ClearField("label_filename")
    for key in [key for key in part.parameters if _UNSIGNED_PARAMETER.fullmatch(key)]:
        del part.parameters[key]
    return part


def check_format(config: ModelConfig, certificate: VersionCertificate, required: bool) -> None:
    """Require that the backend serves the format in the certificate.

    Args:
        required: the certificate must have a format.

    Raises:
        IntegrityError: the backend serves another format.
    """
    artifact = certificate.document.get("artifact")
    name = artifact.get("format") if isinstance(artifact, dict) else None
    row = next((row for row in (*platforms(), *WRITTEN) if row.format == name), None)
    if row is None:
        if required or name is not None:
            raise IntegrityError(
                f"{CERTIFICATE} names no format that can be served; publish the version again"
            )
    elif config.backend != row.backend or config.platform not in ("", row.platform):
        asked = f"backend '{config.backend}'" + (
            f" and platform '{config.platform}'" if config.platform else ""
        )
        raise IntegrityError(
            f"{configuration.FILENAME} asks for {asked}, but {CERTIFICATE} says that the version "
            f"is {row.format}, which '{row.backend}' serves; correct 'backend' and 'platform'"
        )


def apply(config: ModelConfig, certificate: VersionCertificate) -> ModelConfig:
    """``config``, completed from the signed configuration, for a version with a valid signature.

    Raises:
        IntegrityError: it contradicts the signed configuration, or that is incomplete.
    """
    signed = _parse(certificate)
    given = _signed_part(config)
    given.name = signed.name = ""
    for problem in _differences(given, signed):
        raise IntegrityError(
            f"{configuration.FILENAME} changes {problem}, which is signed; undo the change, or "
            "publish the version again with it: 'modelport export --sign-key'"
        )
    merged = copy.deepcopy(signed)
    labels = {output.name: output.label_filename for output in config.output}
    for output in merged.output:
        output.label_filename = labels.get(output.name, "")
    unsigned = copy.deepcopy(config)
    for field in unsigned.DESCRIPTOR.fields:
        if field.name not in UNSIGNED:
            unsigned.ClearField(field.name)
    merged.MergeFrom(unsigned)
    for key, value in config.parameters.items():
        merged.parameters[key].CopyFrom(value)
    merged.name = config.name
    return merged


def _parse(certificate: VersionCertificate) -> ModelConfig:
    content = certificate.document.get(KEY)
    if not isinstance(content, dict):
        raise IntegrityError(
            f"{CERTIFICATE} has no configuration, because modelport 0.1 wrote it; publish the "
            "version again with 'modelport export --sign-key'"
        )
    from google.protobuf import json_format

    try:
        return json_format.ParseDict(content, pb.ModelConfig())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"'{KEY}' in {CERTIFICATE} is not a configuration; publish the version again"
        ) from error


def _differences(given: ModelConfig, signed: ModelConfig) -> Iterator[str]:
    """The fields of ``given`` that differ from ``signed``; omitted fields do not count."""
    for key, value in given.parameters.items():
        there = signed.parameters[key].string_value if key in signed.parameters else None
        if value.string_value != there:
            yield f"parameter '{key}'"
    for field, value in given.ListFields():
        if field.name in ("parameters", "name"):
            continue
        if field.name in ("input", "output"):
            known = {tensor.name: tensor for tensor in getattr(signed, field.name)}
            for tensor in value:
                if tensor != known.pop(tensor.name, None):
                    yield f"{field.name} '{tensor.name}'"
            for name in known:
                yield f"{field.name} '{name}'"
        elif value != getattr(signed, field.name):
            yield f"'{field.name}'"
