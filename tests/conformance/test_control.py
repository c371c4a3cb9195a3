"""Health, metadata, configuration, statistics and index, by all four clients."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import pytest

from modelport import __version__
from tests.conformance.clients import Ask, ControlCaller, InferCaller, integers
from tests.conformance.conftest import Callers
from tests.conformance.repository import IDENTITY

ROW = np.array([[1, 2, 3, 4]], np.float32)


@pytest.fixture
def http(callers: Callers) -> InferCaller:
    return callers["http"]


def test_the_client_is_the_one_that_the_contract_names() -> None:
    assert importlib.metadata.version("tritonclient") == "2.73.0"


def test_the_server_is_live_and_ready(control: ControlCaller) -> None:
    assert control("is_server_live") is True
    assert control("is_server_ready") is True


@pytest.mark.parametrize(
    ("model", "version", "ready"),
    [
        ("x2", "", True),
        ("x2", "1", True),
        ("x2", "2", False),
        ("two_versions", "1", True),
        ("two_versions", "2", True),
        ("two_versions", "3", False),
        ("nobody", "", False),
        ("nobody", "1", False),
    ],
)
def test_a_model_is_ready_if_its_version_is(
    control: ControlCaller, model: str, version: str, ready: bool
) -> None:
    assert control("is_model_ready", model, version) is ready


def test_the_server_names_what_works_and_nothing_else(control: ControlCaller) -> None:
    assert control("get_server_metadata") == {
        "name": "modelport",
        "version": __version__,
        "extensions": [
            "classification",
            "sequence",
            "model_repository",
            "model_repository(unload_dependents)",
            "schedule_policy",
            "model_configuration",
            "binary_tensor_data",
            "parameters",
            "statistics",
            "trace",
            "logging",
            "generate",
        ],
    }


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            "x2",
            {
                "versions": ["1"],
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
            },
        ),
        (
            "add_and_subtract",
            {
                "versions": ["1"],
                "inputs": [
                    {"name": "a", "datatype": "FP32", "shape": [-1, -1]},
                    {"name": "b", "datatype": "FP32", "shape": [-1, -1]},
                ],
                "outputs": [
                    {"name": "total", "datatype": "FP32", "shape": [-1, -1]},
                    {"name": "difference", "datatype": "FP32", "shape": [-1, -1]},
                ],
            },
        ),
        (
            "fixed",
            {
                "versions": ["1"],
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 3]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 3]}],
            },
        ),
        (
            "auto",
            {
                "versions": ["1"],
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
            },
        ),
        (
            "scalar",
            {
                "versions": ["1"],
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 1]}],
            },
        ),
        (
            "two_versions",
            {
                "versions": ["1", "2"],
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
            },
        ),
    ],
)
def test_metadata_tells_versions_names_datatypes_and_shapes(
    control: ControlCaller, model: str, expected: dict[str, Any]
) -> None:
    document = control("get_model_metadata", model)
    versions = document.pop("versions")
    assert versions == expected["versions"]
    assert all(isinstance(version, str) for version in versions)
    rest = {k: v for k, v in expected.items() if k != "versions"}
    assert integers(document) == {"name": model, "platform": "onnxruntime_onnx", **rest}


@pytest.mark.parametrize("datatype", sorted(IDENTITY))
def test_metadata_names_every_datatype_in_the_protocols_words(
    control: ControlCaller, datatype: str
) -> None:
    document = control("get_model_metadata", IDENTITY[datatype], "1")
    assert [t["datatype"] for t in document["inputs"] + document["outputs"]] == [datatype] * 2


def _config(control: ControlCaller, model: str, version: str = "") -> dict[str, Any]:
    document = control("get_model_config", model, version)
    if control.transport == "grpc":
        document = document["config"]
    answer: dict[str, Any] = integers(document)
    return answer


def test_the_configuration_is_the_one_of_the_repository(control: ControlCaller) -> None:
    document = _config(control, "x2")
    assert document["name"] == "x2"
    assert document["backend"] == "onnxruntime"
    assert document["max_batch_size"] == 8
    tensor = document["input"][0]
    assert (tensor["name"], tensor["data_type"], tensor["dims"]) == ("x", "TYPE_FP32", [4])
    tensor = document["output"][0]
    assert (tensor["name"], tensor["data_type"], tensor["dims"]) == ("y", "TYPE_FP32", [4])
    assert document["version_policy"] == {"latest": {"num_versions": 1}}


def test_the_configuration_of_a_model_without_one_is_derived_from_it(
    control: ControlCaller,
) -> None:
    document = _config(control, "auto", "1")
    assert document["platform"] == "onnxruntime_onnx"
    assert document["backend"] == "onnxruntime"
    assert document["default_model_filename"] == "model.onnx"
    assert document["max_batch_size"] == 4
    for kind, name in (("input", "x"), ("output", "y")):
        (tensor,) = document[kind]
        assert (tensor["name"], tensor["data_type"], tensor["dims"]) == (name, "TYPE_FP32", [4])


def test_a_string_tensor_is_called_string_in_the_configuration(control: ControlCaller) -> None:
    assert _config(control, IDENTITY["BYTES"])["input"][0]["data_type"] == "TYPE_STRING"


@pytest.mark.parametrize("model", ["x2", "auto", "fixed", "slow", "two_versions"])
@pytest.mark.parametrize(
    "scheduler", ["dynamic_batching", "sequence_batching", "ensemble_scheduling"]
)
def test_a_scheduler_that_does_not_run_is_not_in_the_configuration(
    control: ControlCaller, model: str, scheduler: str
) -> None:
    assert scheduler not in _config(control, model)


def test_the_reshape_of_a_scalar_is_in_the_configuration(control: ControlCaller) -> None:
    (tensor,) = _config(control, "scalar")["input"]
    assert tensor["dims"] == [1]
    assert tensor["reshape"].get("shape", []) == []


def test_every_input_of_the_configuration_is_in_the_metadata(control: ControlCaller) -> None:
    index = control("get_model_repository_index")
    rows = index["models"] if control.transport == "grpc" else index
    for row in rows:
        declared = {tensor["name"] for tensor in _config(control, row["name"])["input"]}
        known = control("get_model_metadata", row["name"])["inputs"]
        assert declared == {tensor["name"] for tensor in known}


def test_the_index_lists_every_version_with_its_state(control: ControlCaller) -> None:
    index = control("get_model_repository_index")
    rows = index["models"] if control.transport == "grpc" else index
    found = {(row["name"], row["version"]): row["state"] for row in rows}
    assert len(found) == len(rows)
    assert set(found.values()) == {"READY"}
    assert {("x2", "1"), ("two_versions", "1"), ("two_versions", "2"), ("auto", "1")} <= set(found)


def _statistics(control: ControlCaller, model: str, version: str = "") -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = integers(
        control("get_inference_statistics", model, version)["model_stats"]
    )
    return rows


def test_statistics_count_batch_elements_and_executions(
    control: ControlCaller, http: InferCaller
) -> None:
    def numbers() -> dict[str, int]:
        (row,) = _statistics(control, "x2")
        stats = row["inference_stats"]
        return {
            "inferences": row.get("inference_count", 0),
            "executions": row.get("execution_count", 0),
            "success": stats["success"].get("count", 0),
            "ns": stats["success"].get("ns", 0),
            "fail": stats.get("fail", {}).get("count", 0),
        }

    http.infer(Ask("x2", [("x", ROW)]))  # protobuf's JSON leaves out what is still 0
    before = numbers()
    http.infer(Ask("x2", [("x", np.zeros((5, 4), np.float32))]))
    http.infer(Ask("x2", [("x", ROW)]))
    http.refusal(Ask("x2", [("x", ROW[:, :1])]))
    after = numbers()
    assert after["inferences"] - before["inferences"] == 6
    assert after["executions"] - before["executions"] == 2
    assert after["success"] - before["success"] == 2
    assert after["ns"] > before["ns"]
    assert after["fail"] - before["fail"] == 1


def test_statistics_of_one_version_move_alone(control: ControlCaller, http: InferCaller) -> None:
    def counts() -> list[int]:
        rows = _statistics(control, "two_versions")
        assert [row["version"] for row in rows] == [1, 2]
        return [row.get("inference_count", 0) for row in rows]

    before = counts()
    http.infer(Ask("two_versions", [("x", ROW)], version="1"))
    after = counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0]
    (row,) = _statistics(control, "two_versions", "1")
    assert (row["name"], row["version"]) == ("two_versions", 1)
    assert row["inference_count"] == after[0]


def test_statistics_of_all_models_are_given_without_a_name(control: ControlCaller) -> None:
    names = {row["name"] for row in _statistics(control, "")}
    assert {"x2", "auto", "slow", *IDENTITY.values()} <= names


def test_statistics_tell_the_batch_sizes_that_ran(
    control: ControlCaller, http: InferCaller
) -> None:
    http.infer(Ask("x2", [("x", np.zeros((3, 4), np.float32))]))
    (row,) = _statistics(control, "x2")
    sizes = [entry["batch_size"] for entry in row["batch_stats"]]
    assert 3 in sizes
    assert sizes == sorted(set(sizes))
    entry = next(entry for entry in row["batch_stats"] if entry["batch_size"] == 3)
    assert entry["compute_infer"]["count"] >= 1
    assert entry["compute_infer"]["ns"] > 0
