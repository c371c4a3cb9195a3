"""What a certificate says about ``config.pbtxt``, and what may change without a new signature.

A certificate holds the configuration that its version was published with:

    "configuration": {"platform": ..., "input": [...], "parameters": {...}, ...}

Operators may change how a model is run without signing it again: which versions are served and
under which labels, instances, batching, caching, warm-up and threads. Everything else is the
contract with clients and what the model computes; of a signed version it is as it was signed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config import PLATFORMS, ModelConfig
from modelport.gateway.repository.signing import CERTIFICATE, VersionCertificate
from modelport.gateway.wire.triton_messages import model_config_pb2 as pb

KEY = "configuration"

#: Fields that say how a model is run.
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
#: Entries of ``parameters`` that do.
_UNSIGNED_PARAMETER = re.compile(
    r"version_label\..+|aspired_version_policy|admission_control\w*|batch_here|overload\w*"
    r"|(intra|inter)_op_thread_count|(INTRA|INTER)_OP_THREAD_COUNT|TF_NUM_(INTRA|INTER)_THREADS"
    r"|TF_USE_PER_SESSION_THREADS|tflite_num_threads|enable_mem_(arena|pattern)"
)


def document(config: ModelConfig) -> dict[str, Any]:
    """What a certificate says of ``config``, which is published with the version."""
    from google.protobuf import json_format  # no start has to wait for it

    found: dict[str, Any] = json_format.MessageToDict(
        _signed_part(config), preserving_proto_field_name=True
    )
    return found


def _signed_part(config: ModelConfig) -> ModelConfig:
    part = pb.ModelConfig()
    part.CopyFrom(config)
    for field in UNSIGNED:
        part.ClearField(field)
    for output in part.output:
        output.ClearField("label_filename")
    for key in [key for key in part.parameters if _UNSIGNED_PARAMETER.fullmatch(key)]:
        del part.parameters[key]
    return part


def check_format(config: ModelConfig, certificate: VersionCertificate, required: bool) -> None:
    """The backend must be the one for the format that the certificate names.

    Args:
        required: it must name one.

    Raises:
        IntegrityError: it is another.
    """
    artifact = certificate.document.get("artifact")
    name = artifact.get("format") if isinstance(artifact, dict) else None
    row = next((row for row in PLATFORMS if row.format == name), None)
    if row is None:
        if required or name is not None:
            raise IntegrityError(
                f"{CERTIFICATE} names no format that is served here; publish the version again"
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
    """``config`` of a version whose signature was verified, what it leaves out as it was signed.

    Raises:
        IntegrityError: it says something else than what was signed, or too little was.
    """
    signed = _parse(certificate)
    given = _signed_part(config)
    given.name = signed.name = ""
    for problem in _differences(given, signed):
        raise IntegrityError(
            f"{configuration.FILENAME} changes {problem}, which is signed; take the change back, "
            "or publish the version again with it: 'modelport export --sign-key'"
        )
    merged = pb.ModelConfig()
    merged.CopyFrom(signed)
    labels = {output.name: output.label_filename for output in config.output}
    for output in merged.output:
        output.label_filename = labels.get(output.name, "")
    for field in UNSIGNED:
        _copy(config, merged, field)
    for key, value in config.parameters.items():
        merged.parameters[key].CopyFrom(value)
    merged.name = config.name
    return merged


def _copy(source: ModelConfig, target: ModelConfig, name: str) -> None:
    part = pb.ModelConfig()
    part.CopyFrom(source)
    for field in part.DESCRIPTOR.fields:
        if field.name != name:
            part.ClearField(field.name)
    target.MergeFrom(part)


def _parse(certificate: VersionCertificate) -> ModelConfig:
    content = certificate.document.get(KEY)
    if not isinstance(content, dict):
        raise IntegrityError(
            f"{CERTIFICATE} holds no configuration, as those that modelport 0.1 wrote; "
            "publish the version again with 'modelport export --sign-key'"
        )
    from google.protobuf import json_format

    try:
        return json_format.ParseDict(content, pb.ModelConfig())
    except (json_format.ParseError, ValueError, RecursionError) as error:
        raise IntegrityError(
            f"'{KEY}' in {CERTIFICATE} is no configuration; publish the version again"
        ) from error


def _differences(given: ModelConfig, signed: ModelConfig) -> Iterator[str]:
    """What ``given`` says that ``signed`` does not; what it leaves out is no difference."""
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
