"""The optional part of ``make gpu-check``: ONNX Runtime for GPUs, from a wheel in pieces.

The wheel has some 300 MB. ``make gpu-wheels`` cuts it into pieces that a machine can be given one
after the other; here they are put together. The models were exported where the pieces were made.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelport.gateway.repository import config as configuration
from modelport.gateway.wire.proto import model_config_pb2 as pb
from tests.gpu_check import load, subjects
from tests.gpu_check.subjects import KINDS, MAX_BATCH
from tests.server import serving

if TYPE_CHECKING:
    from tests.gpu_check.checks import CheckRunner, Found

#: Beside the pieces: the wheel's name, its SHA-256 and the number of pieces.
DESCRIPTION = "onnxruntime-gpu.json"


def joined(pieces: Path, folder: Path) -> Path:
    """The wheel, put together in ``folder``.

    Raises:
        FileNotFoundError: not all pieces have come.
        ValueError: they are not those of the wheel.
    """
    descriptions = sorted(pieces.rglob(DESCRIPTION))
    if not descriptions:
        raise FileNotFoundError(f"there are no pieces of onnxruntime-gpu in '{pieces}'")
    about: dict[str, Any] = json.loads(descriptions[0].read_text())
    found = {file.name: file for file in pieces.rglob("piece-*")}
    names = [f"piece-{number}" for number in range(about["pieces"])]
    missing = [name for name in names if name not in found]
    if missing:
        raise FileNotFoundError(f"{', '.join(missing)} of onnxruntime-gpu did not come")
    wheel, digest = folder / str(about["wheel"]), hashlib.sha256()
    with wheel.open("wb") as file:
        for name in names:
            content = found[name].read_bytes()
            digest.update(content)
            file.write(content)
    if digest.hexdigest() != about["sha256"]:
        raise ValueError("the pieces of onnxruntime-gpu are damaged")
    return wheel


def run(checks: CheckRunner, folder: Path, device: str, pieces: Path) -> None:
    """Serve the ONNX models on the GPU with that wheel, if its pieces are there."""
    try:
        wheel = joined(pieces, folder)
    except FileNotFoundError as error:
        checks.leave_out("ONNX Runtime for GPUs", str(error))
        return
    from tests.gpu_check.__main__ import installed

    site = folder / "onnxruntime-site"
    wheel_folder = folder / "onnxruntime-wheel"
    wheel_folder.mkdir()
    installed(Path(wheel.rename(wheel_folder / wheel.name)).parent, site)
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), before)))
    try:
        for name in ("fraud", "vit"):
            checks.check(f"{name}-onnx", _served, folder / f"onnx-{name}", name, pieces, device)
    finally:
        os.environ["PYTHONPATH"] = before


def publish(repository: Path, model: Path, name: str) -> None:
    """The ONNX file on the GPU, and on the processor as its reference."""
    for place, kind in KINDS.items():
        folder = repository / f"{name}-{place}" / "1"
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(model.read_bytes())
        config = pb.ModelConfig(name=f"{name}-{place}", platform="onnxruntime_onnx")
        config.max_batch_size = MAX_BATCH
        config.instance_group.add(kind=kind, count=1)
        (folder.parent / "config.pbtxt").write_text(configuration.to_text(config))


def _served(repository: Path, name: str, pieces: Path, device: str) -> Found:
    (model,) = pieces.rglob(f"{name}.onnx")
    publish(repository, model, name)
    requests = load.Requests(subjects.subject(name), {1: 8, MAX_BATCH: 2})
    with serving(repository, may_fork=False) as gateway:
        url = f"http://{gateway.http}"
        asyncio.run(requests.expect(url, f"{name}-cpu"))
        asyncio.run(load.each(url, f"{name}-{device}", requests))
        found = asyncio.run(load.many(url, f"{name}-{device}", requests, 2.0))
    text = f"within {requests.worst:.0%} of the tolerance, {found['rows_per_second']:.0f}/s"
    return text, found | {"worst": requests.worst}


if __name__ == "__main__":
    from modelport.exporters.formats import onnx
    from modelport.exporters.formats.base import ExportTarget

    for model_name in sys.argv[2:]:
        target = ExportTarget(opset=20)
        source = subjects.subject(model_name).source
        onnx.export(source, Path(sys.argv[1]) / f"{model_name}.onnx", target)
