"""Models that give any number of responses, on a real gateway."""

from __future__ import annotations

from pathlib import Path

from tests import models

POLICY = "\nmodel_transaction_policy { decoupled: true }\n"
BROKEN = "the model failed on purpose"


def fake(root: Path, name: str, datatype: str, dims: str, **parameters: str) -> None:
    folder = models.fake(root, name, datatype, dims, **parameters)
    with (folder / "config.pbtxt").open("a") as config:
        config.write(POLICY)


def build(root: Path) -> Path:
    """``once`` and ``slow`` answer once, the others as their configuration says."""
    fake(root, "repeat", "FP32", "4", responses="3")
    fake(root, "endless", "FP32", "4", responses="1000000000", delay_seconds="0.001")
    fake(root, "trickle", "FP32", "4", responses="1000000000", delay_seconds="0.05")
    fake(root, "wide", "FP32", "-1", responses="1000")
    fake(root, "silent", "FP32", "4", responses="0")
    fake(root, "breaking", "FP32", "4", responses="2", error=BROKEN)
    fake(root, "broken", "FP32", "4", responses="0", error=BROKEN)
    fake(root, "late", "FP32", "4", delay_seconds="30")
    fake(root, "talker", "BYTES", "1", responses="3")
    fake(root, "babbler", "BYTES", "1", responses="1000000000", delay_seconds="0.001")
    fake(root, "gossip", "BYTES", "1", responses="2", error=BROKEN)
    models.fake(root, "once", "FP32", "4")
    models.fake(root, "slow", "FP32", "4", delay_seconds="0.3")
    ensemble(root, "staged", "repeat", "y")
    ensemble(root, "nested", "staged", "out")
    models.pipeline(root, "piped", PIPED)
    return root


#: Every response of ``nested`` goes through another step.
PIPED = """
inputs = ["x"]
outputs = { out = "last.y" }
max_batch_size = 1
[steps.first]
model = "nested"
inputs = { x = "x" }
[steps.last]
model = "once"
inputs = { x = "first.out" }
"""


def ensemble(root: Path, name: str, first: str, output: str) -> None:
    """Write an ensemble of ``first``, which is decoupled, and ``once``."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 1 '
        'input { name: "x" data_type: TYPE_FP32 dims: 4 } '
        'output { name: "out" data_type: TYPE_FP32 dims: 4 } ensemble_scheduling { step '
        f'{{ model_name: "{first}" model_version: -1 input_map {{ key: "x" value: "x" }} '
        f'output_map {{ key: "{output}" value: "y" }} }} step {{ model_name: "once" '
        'model_version: -1 input_map { key: "x" value: "y" } '
        'output_map { key: "y" value: "out" } } }'
    )
