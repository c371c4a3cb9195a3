"""A migrated model gathers requests as TorchServe did."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor, nn

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
