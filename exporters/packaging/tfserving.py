"""The folder of SavedModels and the list of models that TensorFlow Serving reads.

    <model>/<version>/saved_model.pb  variables/  assets.extra/   what lies in model.savedmodel here
    <model>/<version>/certificate.json                            not read by TensorFlow Serving
    models.config                                                 for --model_config_file

The list is a ``ModelServerConfig`` (``tensorflow_serving/config/model_server_config.proto``); each
model's ``version_policy`` becomes its ``model_version_policy``, which has the same three forms.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from google.protobuf import text_encoding

from modelport.exporters.packaging.selection import SelectedModel
from modelport.gateway.errors import IntegrityError
from modelport.gateway.repository.config import ModelConfig

MODELS_CONFIG = "models.config"


def check(model: SelectedModel) -> None:
    """Raise ``IntegrityError`` if a version is not a SavedModel."""
    for number in model.versions:
        if not (model.artifact(number) / "saved_model.pb").is_file():
            raise IntegrityError(f"version {number} of '{model.name}' has no saved_model.pb")


def write(models: Sequence[SelectedModel], target: Path, base_path: str) -> None:
    """Write the package to the folder ``target``, which the server will find at ``base_path``."""
    entries = []
    for model in models:
        for number in model.versions:
            folder = target / model.name / str(number)
            shutil.copytree(model.artifact(number), folder, copy_function=shutil.copyfile)
            for file in model.certificates(number):
                shutil.copyfile(file, folder / file.name)
        entries.append(_entry(model, f"{base_path.rstrip('/')}/{model.name}"))
    text = "model_config_list {\n" + "".join(entries) + "}\n"
    (target / MODELS_CONFIG).write_text(text, encoding="utf-8")


def _entry(model: SelectedModel, base_path: str) -> str:
    return f"""\
  config {{
    name: {_quote(model.name)}
    base_path: {_quote(base_path)}
    model_platform: "tensorflow"
    model_version_policy {{ {_policy(model.config)} }}
  }}
"""


def _policy(config: ModelConfig) -> str:
    policy = config.version_policy
    if policy.HasField("all"):
        return "all { }"
    if policy.HasField("specific"):
        versions = " ".join(f"versions: {number}" for number in policy.specific.versions)
        return f"specific {{ {versions} }}"
    return f"latest {{ num_versions: {policy.latest.num_versions} }}"


def _quote(text: str) -> str:
    return f'"{text_encoding.CEscape(text.encode(), as_utf8=True)}"'
