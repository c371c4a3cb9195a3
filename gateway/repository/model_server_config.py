"""TensorFlow Serving's ``--model_config_file``: models by name, each with its base path.

A base path has folders of versions, also zero-padded as ``00000123``, and each of them an artifact:
``saved_model.pb`` with its variables, or a file that a model repository could have there.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import structlog
from google.protobuf import text_format

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import ModelEntry, is_model_name, scan_model
from modelport.gateway.repository.standalone_model import SAVED_MODEL
from modelport.gateway.repository.version_choice import LABEL
from modelport.gateway.wire.proto import model_config_pb2, serving_pb2

log = structlog.get_logger("modelport.models")

_VERSION_NAME = re.compile(r"(?<![0-9])0*+[1-9][0-9]{0,18}\Z")


def read(file: Path) -> list[serving_pb2.ModelConfig]:
    """The models of a ``tensorflow.serving.ModelServerConfig`` in text form.

    Raises:
        InvalidArgument: it cannot be read or parsed, or a model in it cannot be served.
    """
    parsed = serving_pb2.ModelServerConfig()
    try:
        text_format.Parse(untrusted_files.read_text(file, untrusted_files.MAX_CONFIG_BYTES), parsed)
    except OSError as error:
        raise InvalidArgument(f"'{file}' cannot be read: {error.strerror}") from error
    except (ValueError, text_format.ParseError) as error:
        raise InvalidArgument(
            "Error parsing text-format tensorflow.serving.ModelServerConfig: "
            f"'{file}', {str(error).strip()}"
        ) from error
    if not parsed.HasField("model_config_list"):
        raise InvalidArgument(f"'{file}' has no model_config_list")
    models = list(parsed.model_config_list.config)
    names = [model.name for model in models]
    for model in models:
        if not is_model_name(model.name):
            raise InvalidArgument(f"'{file}': '{model.name}' is not a model's name")
        if names.count(model.name) > 1:
            raise InvalidArgument(f"'{file}': model '{model.name}' is listed twice")
        if not Path(model.base_path).is_absolute():
            raise InvalidArgument(
                f"'{file}': the base_path '{model.base_path}' of model '{model.name}' must be an "
                "absolute path"
            )
        if model.model_platform not in ("", "tensorflow"):
            raise InvalidArgument(
                f"'{file}': the model_platform of model '{model.name}' must be 'tensorflow', not "
                f"'{model.model_platform}'"
            )
    return models


class ModelServerConfigFile:
    """The models of the file, which is read again after ``poll_seconds``; 0: never.

    A file that became invalid is logged, and its last models stay.
    """

    def __init__(self, file: Path, poll_seconds: float) -> None:
        self._file, self._poll_seconds = file, poll_seconds
        self._models = read(file)
        self._read_at = time.monotonic()
        self._reason = ""

    def scan(self) -> list[ModelEntry]:
        """Every model as it is now."""
        now = time.monotonic()
        if self._poll_seconds and now - self._read_at >= self._poll_seconds:
            self._read_at = now
            reason = ""
            try:
                self._models = read(self._file)
            except InvalidArgument as error:
                reason = str(error)
                if reason != self._reason:
                    log.error(
                        "the model config file is invalid; its last models stay", reason=reason
                    )
            self._reason = reason
        return [_scan(model) for model in self._models]


def _scan(model: serving_pb2.ModelConfig) -> ModelEntry:
    base = Path(model.base_path).resolve()
    found = scan_model(base.parent, base, _VERSION_NAME)
    config = model_config_pb2.ModelConfig()
    files = {name for version in found.versions.values() for name, *_ in version.fingerprint}
    if SAVED_MODEL in files:
        config.platform, config.default_model_filename = "tensorflow_savedmodel", SAVED_MODEL
    policy = model.model_version_policy
    if policy.HasField("all"):
        config.version_policy.all.SetInParent()
    elif policy.HasField("specific"):
        config.version_policy.specific.versions.extend(policy.specific.versions)
    elif policy.HasField("latest"):
        config.version_policy.latest.num_versions = policy.latest.num_versions
    for label, version in model.version_labels.items():
        config.parameters[LABEL + label].string_value = str(version)
    return found._replace(name=model.name, config_text=configuration.to_text(config))
