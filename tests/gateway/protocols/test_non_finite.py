"""NaN and the infinities in JSON answers of every dialect: Triton's tokens, or null."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests import models
from tests.server import Gateway

VALUES = [float("nan"), float("inf"), float("-inf"), 1.5]
X = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": VALUES}
LONG = 20_000
#: Routes with bodies → the values in the answer.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "open inference": ("/v2/models/x/infer", {"inputs": [X]}),
    "open inference, large": (
        "/v2/models/x/infer",
        {"inputs": [X | {"shape": [LONG, 4], "data": VALUES * LONG}]},
    ),
    "rows": ("/v1/models/x:predict", {"instances": [VALUES]}),
    "columns": ("/v1/models/x:predict", {"inputs": [VALUES]}),
    "rows, large": ("/v1/models/x:predict", {"instances": [VALUES] * LONG}),
    "torchserve": ("/predictions/x", {"instances": [VALUES]}),
    "sagemaker": ("/invocations", {"inputs": [X]}),
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    models.identity(root / "x" / "1" / "model.onnx", "FP32")
    (root / "x" / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 100000')
    return root


@pytest.fixture(scope="module", params=[True, False], ids=["null", "tokens"])
def server(request: pytest.FixtureRequest, repository: Path) -> Iterator[tuple[Gateway, bool]]:
    flags = ["--json-nan-as-null"] if request.param else []
    gateway = Gateway(repository, *flags)
    yield gateway, request.param
    gateway.close()


def refuse(token: str) -> None:
    raise ValueError(token)


@pytest.mark.parametrize("name", REQUESTS)
def test_what_is_not_finite_is_written_as_the_flag_says(
    name: str, server: tuple[Gateway, bool]
) -> None:
    gateway, null = server
    path, body = REQUESTS[name]
    answer = httpx.post(
        f"http://{gateway.http}{path}",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
        timeout=30,
    )
    assert answer.status_code == 200, answer.text[:300]
    values = np.array(flat(json.loads(answer.text)), dtype=object)[:4].tolist()
    if null:
        json.loads(answer.text, parse_constant=refuse)
        assert values == [None, None, None, 1.5]
    else:
        assert str(values) == "[nan, inf, -inf, 1.5]"
        with pytest.raises(ValueError, match="NaN"):
            json.loads(answer.text, parse_constant=refuse)


def flat(document: Any) -> list[Any]:
    """The floats and nulls of ``document``, in order."""
    if isinstance(document, dict | list):
        items = document.values() if isinstance(document, dict) else document
        return [value for item in items for value in flat(item)]
    return [document] if document is None or isinstance(document, float) else []
