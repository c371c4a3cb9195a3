"""A migrated model gathers requests as TorchServe did, and its handler runs as it did there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from tests import models
from tests.archives import mar, migrate, torchscript
from tests.polling import WAIT_SECONDS, eventually
from tests.server import serving

BATCH_SIZE = 4
#: Longer than the test: what waits for it has waited in vain.
DELAY_MILLISECONDS = 600_000
CONFIG = f"""
load_models=linear.mar
models={{"linear": {{"1.0": {{"marName": "linear.mar", "batchSize": {BATCH_SIZE}, \\
  "maxBatchDelay": {DELAY_MILLISECONDS}}}}}}}
"""


class DoublingModel(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


@pytest.mark.thorough
def test_requests_wait_until_there_is_a_batch_and_run_as_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    archive = mar(tmp_path / "linear.mar", "linear", {"model.pt": torchscript(DoublingModel())})
    settings = tmp_path / "config.properties"
    settings.write_text(CONFIG)
    tensors = ("--input", "x:FP32[1]", "--output-tensor", "y:FP32[1]", "--max-batch-size", "16")
    result = migrate(archive, tmp_path / "models", *tensors, "--config-properties", str(settings))
    assert result.exit_code == 0, result.output
    with (
        serving(tmp_path / "models") as gateway,
        httpx.Client(base_url=f"http://{gateway.http}", timeout=WAIT_SECONDS) as client,
        ThreadPoolExecutor(BATCH_SIZE) as clients,
    ):

        def described() -> dict[str, Any]:
            (row,) = client.get("/models/linear").json()
            found: dict[str, Any] = row
            return found

        def executions() -> dict[int, int]:
            (row,) = client.get("/v2/models/linear/stats").json()["model_stats"]
            return {b["batch_size"]: b["compute_infer"]["count"] for b in row["batch_stats"]}

        def predict(value: float) -> float:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [value]}
            reply = client.post("/predictions/linear", json={"inputs": [tensor]})
            return float(reply.raise_for_status().json()["outputs"][0]["data"][0])

        def waiting(count: int) -> Callable[[], bool]:
            return lambda: described()["jobQueueStatus"]["pendingRequests"] == count

        row = described()
        assert (row["batchSize"], row["maxBatchDelay"]) == (BATCH_SIZE, DELAY_MILLISECONDS)
        asked: list[Future[float]] = []
        for value in range(1, BATCH_SIZE):
            asked.append(clients.submit(predict, value))
            eventually(waiting(value))
        assert executions() == {}
        asked.append(clients.submit(predict, BATCH_SIZE))
        answers = [each.result(WAIT_SECONDS) for each in asked]
        assert answers == [2.0 * value for value in range(1, BATCH_SIZE + 1)]
        assert executions() == {BATCH_SIZE: 1}


HANDLER = """
import json
import numpy as np
from ts.torch_handler.base_handler import BaseHandler

class Ranking(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        with open(context.system_properties["model_dir"] + "/data/words.txt") as file:
            self.words = file.read().split()
        self.bonus = context.model_yaml_config["handler"]["bonus"]

    def preprocess(self, data):
        bodies = [row.get("data") or row.get("body") for row in data]
        values = [body if isinstance(body, list) else json.loads(body) for body in bodies]
        self.counts = [len(each) for each in values]  # kept for postprocess
        return np.array([(each + [0] * 4)[:4] for each in values], np.float32)

    def postprocess(self, outputs):
        if not self.counts[0]:
            self.context.set_response_status(code=422, phrase="no values", idx=0)
            return ["there are no values"]
        words = [self.words[row.argmax()] for row in outputs]
        best = [float(row.max()) + self.bonus for row in outputs]
        return [dict(word=w, count=c, best=b) for w, c, b in zip(words, self.counts, best)]
"""


def test_a_handler_runs_around_its_model_as_in_torchserve(tmp_path: Path) -> None:
    files = {
        "model.onnx": models.multiply(tmp_path / "model.onnx", 3.0).read_bytes(),
        "json.py": HANDLER,  # it imports the other json
        "data/words.txt": "one two three four",
        "model-config.yaml": "batchSize: 4\nmaxBatchDelay: 1\nhandler:\n  bonus: 1\n",
    }
    archive = mar(
        tmp_path / "m.mar", "m", files,
        serializedFile="model.onnx", handler="json.py", configFile="model-config.yaml",
    )  # fmt: skip
    repository = tmp_path / "models"
    result = migrate(archive, repository)
    assert result.exit_code == 0, result.output
    assert "--allow-python" in result.output
    with (
        serving(repository, "--allow-python") as gateway,
        httpx.Client(base_url=f"http://{gateway.http}", timeout=WAIT_SECONDS) as client,
    ):
        expected = {"word": "three", "count": 3, "best": 22.0}
        assert client.post("/predictions/m", content=b"[1, 2, 7]").json() == expected
        assert client.post("/predictions/m", json=[1, 2, 7]).json() == expected
        refused = client.post("/predictions/m", content=b"[]")
        assert refused.status_code == 400
        assert "there are no values" in refused.text
        headers = {"content-type": "application/json"}
        broken = client.post("/predictions/m", content=b"[1", headers=headers)
        assert (broken.status_code, "the body is not JSON" in broken.text) == (400, True)
        broken = client.post("/predictions/m", content=b"[1")
        assert (broken.status_code, "JSONDecodeError" in broken.text) == (500, True)
        with ThreadPoolExecutor(4) as clients:
            bodies = [b"[%d, 0]" % number for number in range(1, 9)]
            asked = [clients.submit(client.post, "/predictions/m", content=b) for b in bodies]
            best = [each.result(WAIT_SECONDS).json()["best"] for each in asked]
        assert best == [3.0 * number + 1 for number in range(1, 9)]
        (row,) = client.get("/v2/models/m-graph/stats").json()["model_stats"]
        assert row["inference_count"] == 11


TORCH_HANDLER = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler

class Doubling(BaseHandler):
    def preprocess(self, data):
        bodies = [json.loads(row.get("data") or row.get("body")) for row in data]
        return torch.tensor(bodies, dtype=torch.float32, device=self.device)

    def inference(self, data, *args, **kwargs):
        self.model.eval()
        with torch.inference_mode():
            return self.model(data.to(self.device), *args, **kwargs)
"""


@pytest.mark.thorough
def test_a_handler_has_pytorchs_tensors_if_it_imports_pytorch(tmp_path: Path) -> None:
    files = {"model.pt": torchscript(DoublingModel()), "doubling.py": TORCH_HANDLER}
    archive = mar(tmp_path / "m.mar", "m", files, handler="doubling.py:Doubling")
    tensors = ("--input", "x:FP32[2]", "--output-tensor", "y:FP32[2]")
    result = migrate(archive, tmp_path / "models", *tensors)
    assert result.exit_code == 0, result.output
    explicit = ("--model-control-mode", "explicit", "--load-model", "m")  # which loads its graph
    with serving(tmp_path / "models", "--allow-python", *explicit) as gateway:
        url = f"http://{gateway.http}/predictions/m"
        answer = httpx.post(url, content=b"[1.5, 4]", timeout=WAIT_SECONDS)
        assert answer.json() == [3.0, 8.0]
