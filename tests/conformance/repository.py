"""The repository that the conformance and attack suites are served from."""

from __future__ import annotations

from pathlib import Path

from tests import models

#: datatype → the identity model of that type, ``[batch, n]`` with at most 8 in a batch.
IDENTITY = {datatype: f"identity_{datatype.lower()}" for datatype in models.ONNX_TYPES}
LABELS = ("cat", "dog", "owl")
#: Seconds that the model ``slow`` takes.
SLOW_SECONDS = 0.3
SECRET = "/srv/secret"
#: Requests of one row that ``gathered`` answers together; fewer wait for longer than any test.
GATHERED = 30
#: What ``two_versions`` multiplies by, by version.
FACTORS = {1: 2.0, 2: 3.0}


def add(root: Path, name: str, text: str) -> Path:
    """The place of version 1 of a model with this configuration."""
    (root / name).mkdir(parents=True, exist_ok=True)
    (root / name / "config.pbtxt").write_text(text)
    return root / name / "1" / "model.onnx"


def build(root: Path) -> Path:
    """Every model that the suites call."""
    models.repository(root)
    models.add_and_subtract(
        add(
            root,
            "add_and_subtract",
            models.config(
                "add_and_subtract",
                ["a FP32 -1", "b FP32 -1"],
                ["total FP32 -1", "difference FP32 -1"],
            ),
        )
    )
    for datatype, name in IDENTITY.items():
        text = models.config(name, [f"x {datatype} -1"], [f"y {datatype} -1"])
        models.identity(add(root, name, text), datatype, ("batch", "n"))
    text = models.config(
        "scores", ["x FP32 3"], ['y FP32 3 label_filename: "labels.txt"'], max_batch_size=4
    )
    models.identity(add(root, "scores", text), "FP32", ("batch", 3))
    (root / "scores" / "labels.txt").write_text("\n".join(LABELS))
    text = models.config("fixed", ["x FP32 2,3"], ["y FP32 2,3"], max_batch_size=0)
    models.identity(add(root, "fixed", text), "FP32", (2, 3))
    models.multiply(root / "auto" / "1" / "model.onnx")
    reshape = "reshape { shape: [] }"
    text = models.config("scalar", [f"x FP32 1 {reshape}"], [f"y FP32 1 {reshape}"])
    models.identity(add(root, "scalar", text), "FP32", ("batch",))
    text = models.config("pair", ["x BYTES 1"], ["y BYTES 1"])
    models.identity(add(root, "pair", text), "BYTES", ("batch", 1))
    for version, factor in FACTORS.items():
        models.multiply(root / "two_versions" / str(version) / "model.onnx", factor)
    add(
        root,
        "two_versions",
        models.config(
            "two_versions", ["x FP32 4"], ["y FP32 4"], extra="version_policy { all {} }"
        ),
    )
    models.multiply(add(root, "x3", models.config("x3", ["x FP32 4"], ["y FP32 4"])), factor=3.0)
    text = models.config(
        "heavy",
        ["x FP32 1"],
        ["y FP32 1"],
        max_batch_size=0,
        extra="dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
    )
    models.heavy(add(root, "heavy", text))
    batching = f"preferred_batch_size: {GATHERED} max_queue_delay_microseconds: 600000000"
    text = models.config(
        "gathered",
        ["x INT64 -1"],
        ["y INT64 -1"],
        max_batch_size=GATHERED,
        extra=f"dynamic_batching {{ {batching} }}",
    )
    models.identity(add(root, "gathered", text), "INT64", ("batch", "n"))
    models.fake(root, "slow", "INT64", "1", delay_seconds=str(SLOW_SECONDS))
    models.fake(root, "echo_bytes", "BYTES", "-1")
    models.fake(root, "failing", "FP32", "4", error="the model failed on purpose")
    return root
