"""SageMaker's multi-model endpoint: models that it unpacks, loaded and unloaded on request."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.protocols.sagemaker_models import out_of_memory
from tests.gateway.backends.python import python_models
from tests.server import Gateway, serving

VECTORS = "".join(
    f'{side} {{ name: "{name}" data_type: TYPE_FP32 dims: -1 }}'
    for side, name in (("input", "x"), ("output", "y"))
)
TWICE = "def compute(x): return {'y': 2 * x}"
SHORT = "raise MemoryError('CUDA out of memory')"
ENSEMBLE = f"""platform: "ensemble" {VECTORS} ensemble_scheduling {{ step {{ model_name: "step"
  input_map {{ key: "x" value: "x" }} output_map {{ key: "y" value: "y" }} }} }}"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for hashed, code in (
        ("a1", TWICE),
        ("b2", TWICE),
        ("c3", TWICE),
        ("d4", TWICE),
        ("short", SHORT),
    ):
        python_models.computed(root / hashed, "model", code, f'name: "any" {VECTORS}')
    python_models.computed(root / "graph" / "model", "step", TWICE, VECTORS)
    (root / "graph" / "model" / "whole" / "1").mkdir(parents=True)
    (root / "graph" / "model" / "whole" / "config.pbtxt").write_text(ENSEMBLE)
    shutil.copytree(root / "graph", root / "other")
    python_models.computed(root / "hidden" / "model", ".hidden", TWICE, VECTORS)
    for name in ("p", "q"):
        python_models.computed(root / "two" / "model", name, TWICE, VECTORS)
    (root / "secret").mkdir()
    return root


@pytest.fixture(scope="module")
def gateway(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    empty = tmp_path_factory.mktemp("empty")
    variables = {"SAGEMAKER_MULTI_MODEL": "true", "SAGEMAKER_MODELS_FOLDER": str(archives)}
    with (
        mock.patch.dict("os.environ", variables),
        serving(empty, "--allow-python", "--model-control-mode", "explicit") as gateway,
    ):
        yield gateway


def asked(gateway: Gateway, method: str, path: str, document: object = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(gateway.http)
    body = None if document is None else json.dumps(document)
    connection.request(method, path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    found = json.loads(answer.read())
    connection.close()
    return answer.status, found


def load(gateway: Gateway, archives: Path, name: str, hashed: str) -> tuple[int, Any]:
    document = {"model_name": name, "url": f"{archives}/{hashed}/model"}
    return asked(gateway, "POST", "/models", document)


def invoked(gateway: Gateway, name: str) -> tuple[int, Any]:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [2], "data": [1, 2]}]
    return asked(gateway, "POST", f"/models/{name}/invoke", {"inputs": inputs})


def test_models_are_loaded_listed_invoked_and_unloaded(gateway: Gateway, archives: Path) -> None:
    assert asked(gateway, "GET", "/models") == (200, {"models": []})
    assert load(gateway, archives, "one", "a1") == (200, {})
    assert load(gateway, archives, "one", "a1")[0] == 409
    assert load(gateway, archives, "another", "a1")[0] == 409
    assert load(gateway, archives, "two", "b2") == (200, {})
    one, two = (
        {"modelName": name, "modelUrl": f"{archives}/{hashed}"}
        for name, hashed in (("one", "a1"), ("two", "b2"))
    )
    assert asked(gateway, "GET", "/models") == (200, {"models": [one, two]})
    assert asked(gateway, "GET", "/models/two") == (200, two)
    status, answer = invoked(gateway, "one")
    assert (status, answer["outputs"][0]["data"]) == (200, [2, 4])
    assert asked(gateway, "DELETE", "/models/one") == (200, {})
    assert [asked(gateway, method, "/models/one")[0] for method in ("GET", "DELETE")] == [404] * 2
    assert invoked(gateway, "one")[0] == 404
    assert invoked(gateway, "two")[0] == 200
    assert load(gateway, archives, "one", "a1") == (200, {})
    assert invoked(gateway, "one")[0] == 200


def test_an_ensemble_comes_and_goes_with_the_models_of_its_steps(
    gateway: Gateway, archives: Path
) -> None:
    assert load(gateway, archives, "graph", "graph") == (200, {})
    status, answer = invoked(gateway, "graph")
    assert (status, answer["outputs"][0]["data"]) == (200, [2, 4])
    assert asked(gateway, "DELETE", "/models/graph") == (200, {})
    index = asked(gateway, "POST", "/v2/repository/index", {})[1]
    assert not {"graph", "step"} & {row["name"] for row in index}


def test_an_ensemble_never_gets_the_step_of_another_archive(
    gateway: Gateway, archives: Path
) -> None:
    assert load(gateway, archives, "graph", "graph") == (200, {})
    status, answer = load(gateway, archives, "other", "other")
    assert status == 400
    assert "'step' beside it has the name of another model" in answer["error"]
    assert invoked(gateway, "graph")[0] == 200
    assert asked(gateway, "DELETE", "/models/graph") == (200, {})
    assert load(gateway, archives, "other", "other") == (200, {})
    assert asked(gateway, "DELETE", "/models/other") == (200, {})


def test_of_two_loads_of_a_name_at_once_one_is_refused(gateway: Gateway, archives: Path) -> None:
    with ThreadPoolExecutor() as pool:
        loads = [pool.submit(load, gateway, archives, "same", each) for each in ("c3", "d4")]
    assert sorted(each.result()[0] for each in loads) == [200, 409]
    assert asked(gateway, "DELETE", "/models/same") == (200, {})


def test_what_is_not_found_leaves_the_name_and_the_folder(gateway: Gateway, archives: Path) -> None:
    document = {"model_name": "found", "url": f"{archives}/hidden/model/.hidden"}
    assert [asked(gateway, "POST", "/models", document)[0] for _ in range(2)] == [404] * 2
    assert load(gateway, archives, "found", "c3") == (200, {})
    assert asked(gateway, "DELETE", "/models/found") == (200, {})


@pytest.mark.parametrize("name", ["OOM", "bloom", "classroom"])
def test_a_name_is_no_lack_of_memory(gateway: Gateway, name: str) -> None:
    assert asked(gateway, "GET", f"/models/{name}")[0] == 404
    assert invoked(gateway, name)[0] == 404


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("CUDA out of memory", True), ("CUDA_OUT_OF_MEMORY", True), ("MemoryError: x", True),
        ("java.lang.OutOfMemoryError", True), ("OOM when allocating tensor", True),
        ("No space left on device", True), ("unexpected input 'room_type'", False),
        ("no tokens of BLOOM", False),
    ],
)  # fmt: skip
def test_errors_of_memory_are_known_by_whole_words(text: str, expected: bool) -> None:
    assert out_of_memory(InvalidArgument(text)) is expected


def test_short_memory_is_507_and_leaves_nothing(gateway: Gateway, archives: Path) -> None:
    status, answer = load(gateway, archives, "short", "short")
    assert status == 507
    assert "CUDA out of memory" in answer["error"]
    assert asked(gateway, "GET", "/models/short")[0] == 404
    assert load(gateway, archives, "short", "short")[0] == 507  # not 409


@pytest.mark.parametrize(
    ("name", "url", "error"),
    [
        ("x", "/etc", "expected a path of the form"),
        ("x", "FOLDER/secret", "expected a path of the form"),
        ("x", "FOLDER/a1/model/../../../etc/model", "expected a path of the form"),
        ("x", "FOLDER-other/a1/model", "expected a path of the form"),
        ("x", "FOLDER/none/model", "cannot be read: No such file or directory"),
        ("x", "FOLDER/two/model", "has 2 models and 0 ensembles"),
        ("../x", "FOLDER/a1/model", "cannot be a model's name"),
        ("", "FOLDER/a1/model", "must be a JSON object with the text 'model_name'"),
        ("x", "", "must be a JSON object with the text 'url'"),
        ("x", 7, "must be a JSON object with the text 'url'"),
    ],
)
def test_what_cannot_be_loaded_is_refused(
    gateway: Gateway, archives: Path, name: str, url: Any, error: str
) -> None:
    url = url.replace("FOLDER", str(archives)) if isinstance(url, str) else url
    status, answer = asked(gateway, "POST", "/models", {"model_name": name, "url": url})
    assert status == 400
    assert error in answer["error"]


def test_a_folder_outside_is_never_loaded_by_another_protocol(
    gateway: Gateway, archives: Path
) -> None:
    path = f"/v2/repository/models/{archives}/b2/model/load"
    assert asked(gateway, "POST", path, {})[0] == 404
