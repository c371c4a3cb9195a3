"""``modelport package --for tfserving``: the view of SavedModels and the list of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from modelport.gateway.repository import manifest
from tests.packages import packaged, put, refused, run


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "repository"


#: model_server_config.proto and file_system_storage_path_source.proto of TensorFlow Serving: the
#: members of each message as (name, number, type); an upper-case type is a message.
MESSAGES = {
    "Latest": [("num_versions", 1, "uint32")],
    "All": [],
    "Specific": [("versions", 1, "int64*")],
    "Policy": [("latest", 100, "Latest"), ("all", 101, "All"), ("specific", 102, "Specific")],
    "Model": [
        ("name", 1, "string"),
        ("base_path", 2, "string"),
        ("model_platform", 4, "string"),
        ("model_version_policy", 7, "Policy"),
    ],
    "ModelList": [("config", 1, "Model*")],
    "Server": [("model_config_list", 1, "ModelList")],
}


def model_server_config(text: str) -> Any:
    """``text`` as a ``ModelServerConfig``."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="s.proto", package="s", syntax="proto3")
    for name, members in MESSAGES.items():
        message = file.message_type.add(name=name)
        for label, number, kind in members:
            field = message.field.add(name=label, number=number, label=3 if "*" in kind else 1)
            kind = kind.rstrip("*")
            field.type = kinds.Type.Value(f"TYPE_{'MESSAGE' if kind in MESSAGES else kind.upper()}")
            if kind in MESSAGES:
                field.type_name = f".s.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    server = message_factory.GetMessageClass(pool.FindMessageTypeByName("s.Server"))
    return text_format.Parse(text, server())


def test_tensorflow_serving_gets_its_view_and_its_list_of_models(
    repository: Path, tmp_path: Path
) -> None:
    put(repository, "fraud", "savedmodel")
    put(repository, "fraud", "savedmodel", version=2)
    put(repository, "vit.b16", "savedmodel", version=7)
    put(repository, "other", "onnx")
    result = run(repository, "tfserving", tmp_path / "out", "--base-path", "/models/")
    assert result.exit_code == 0, result.output
    assert "left out   'other' is onnx" in result.output
    files = sorted(
        p.relative_to(tmp_path / "out").as_posix()
        for p in (tmp_path / "out").rglob("*")
        if p.is_file()
    )
    inside = ("certificate.json", "certificate.json.sig", "saved_model.pb")
    assert files == sorted(
        [
            "models.config",
            *(f"{v}/{name}" for v in ("fraud/2", "vit.b16/7") for name in inside),
            "fraud/2/variables/variables.index",
            "vit.b16/7/variables/variables.index",
        ]
    )
    assert (tmp_path / "out" / "fraud/2/saved_model.pb").read_bytes() == b"graph of 2"
    listed = model_server_config((tmp_path / "out" / "models.config").read_text())
    entries = {entry.name: entry for entry in listed.model_config_list.config}
    assert {name: entry.base_path for name, entry in entries.items()} == {
        "fraud": "/models/fraud",
        "vit.b16": "/models/vit.b16",
    }
    assert {entry.model_platform for entry in entries.values()} == {"tensorflow"}
    assert entries["fraud"].model_version_policy.latest.num_versions == 1


@pytest.mark.parametrize(
    ("policy", "versions", "expected"),
    [
        ("latest { num_versions: 2 }", [2, 3], "latest { num_versions: 2 }"),
        ("all { }", [1, 2, 3], "all { }"),
        ("specific { versions: [1, 3, 9] }", [1, 3], "specific { versions: [1, 3] }"),
    ],
)
def test_a_version_policy_is_carried_over(
    policy: str, versions: list[int], expected: str, repository: Path, tmp_path: Path
) -> None:
    def change(wanted: Any) -> None:
        wanted.ClearField("version_policy")
        text_format.Parse(policy, wanted.version_policy)

    for version in (1, 2, 3):
        put(repository, "m", "savedmodel", version=version, change=change)
    out = packaged(repository / "m", "tfserving", tmp_path / "out")
    listed = model_server_config((out / "models.config").read_text()).model_config_list.config[0]
    assert listed.base_path == str(out / "m")
    assert sorted(int(p.name) for p in (out / "m").iterdir()) == versions
    wanted = f"model_config_list {{ config {{ model_version_policy {{ {expected} }} }} }}"
    (entry,) = model_server_config(wanted).model_config_list.config
    assert str(listed.model_version_policy) == str(entry.model_version_policy)


def test_a_base_path_with_quotes_and_spaces_is_written_as_it_is(
    repository: Path, tmp_path: Path
) -> None:
    put(repository, "m", "savedmodel")
    path = '/a "b" \\ ä'
    out = packaged(repository, "tfserving", tmp_path / "out", "--base-path", path)
    listed = model_server_config((out / "models.config").read_text(encoding="utf-8"))
    assert listed.model_config_list.config[0].base_path == path + "/m"
    result = run(repository, "tfserving", tmp_path / "new", "--base-path", "models")
    refused(result, 2, "must be absolute")


def test_a_folder_that_is_no_saved_model_is_refused(repository: Path, tmp_path: Path) -> None:
    folder = put(repository, "m", "savedmodel")
    (folder / "model.savedmodel" / "saved_model.pb").unlink()
    manifest.write(folder)
    refused(run(folder, "tfserving", tmp_path / "out"), 5, "no saved_model.pb")
