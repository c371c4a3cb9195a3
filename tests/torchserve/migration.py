"""``modelport migrate torchserve`` beside the real TorchServe 0.12.0 that it moves away from.

    python -m tests.torchserve.migration

A store of two archives that ``modelport package`` made, one with TorchServe's own unmodified
``image_classifier`` (torchvision) and one with a handler of its own is served, migrated, and both
servers are asked the same recorded requests. Needs Java 17; exits with 1 if anything is not as it
must be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from modelport.exporters.packaging.package import package
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST
from tests import verb
from tests.archives import mar, torchscript
from tests.torchserve.clients import document
from tests.torchserve.comparison import inputs_of, wire
from tests.torchserve.server import REQUIREMENTS, publish, sources, torchserve

#: ``image_classifier`` imports them; torchvision is the one that goes with that torch.
VISION = (*REQUIREMENTS, "torchvision==0.28.0", "captum==0.9.0")
#: torchvision's wheel is built for CUDA: beside torch for the CPU its operators do not load. Its
#: transforms need none of them, only that these are known by name.
OPERATORS = """
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
CLASSES = 8
#: Requests for the model with a handler of its own.
DESCRIBED = 4
#: Height and width: landscape, portrait, square, small, and with an odd margin to crop.
PICTURES = ((300, 400), (411, 280), (256, 256), (60, 90), (333, 335))


class PictureClassifier(nn.Module):
    """Small, and its answer depends on where in the picture things are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 8, 7, stride=4)
        self.second = nn.Conv2d(8, 8, 5, stride=4)
        self.last = nn.Linear(8 * 13 * 13, CLASSES)

    def forward(self, picture: Tensor) -> Tensor:
        features = self.second(torch.relu(self.first(picture)))
        return self.last(torch.relu(features).flatten(1))


def pictures(path: Path, seed: int) -> Path:
    """The archive of a classifier, as ``torch-model-archiver --handler image_classifier`` does."""
    labels = json.dumps({str(index): f"class {index}" for index in range(CLASSES)})
    files = {"model.pt": torchscript(PictureClassifier(seed)), "index_to_name.json": labels}
    return mar(path, path.stem, files, handler="image_classifier", modelVersion="1")


#: Its postprocess needs what its preprocess has kept.
HANDLER = """
import json
import torch
from ts.torch_handler.base_handler import BaseHandler

class Described(BaseHandler):
    def initialize(self, context):
        super().initialize(context)
        with open(context.system_properties["model_dir"] + "/words.txt") as file:
            self.words = file.read().split()

    def preprocess(self, data):
        bodies = [row.get("data") or row.get("body") for row in data]
        images = [body if isinstance(body, list) else json.loads(body) for body in bodies]
        made = torch.tensor(images, dtype=torch.float32, device=self.device)
        self.sums = made.flatten(1).sum(1).tolist()
        return made

    def postprocess(self, outputs):
        if isinstance(outputs, dict):
            (outputs,) = outputs.values()
        return [
            {"word": self.words[int(row.argmax())], "score": float(row.max()), "sum": total}
            for row, total in zip(outputs, self.sums)
        ]
"""


def described(path: Path, version: Path) -> Path:
    """The archive of a published model with a handler of its own."""
    words = " ".join(f"word{number}" for number in range(1000))
    model = (version / "model.pt").read_bytes()
    files = {"model.pt": model, "described.py": HANDLER, "words.txt": words}
    return mar(path, path.stem, files, handler="described.py")


def record(folder: Path) -> None:
    """Requests for each model, in a folder of its name."""
    for name, source in sources().items():
        if name == "unchecked":
            continue
        (folder / name).mkdir(parents=True)
        for batch in (1, 3):
            inputs = inputs_of(source, batch, 17 if source.signature.axes else 0, seed=batch)
            body = json.dumps(document(wire(source.signature.inputs, inputs)))
            (folder / name / f"batch_{batch}.json").write_text(body)
        (folder / name / "wrong.json").write_text('{"inputs": []}')
    (folder / "pictures").mkdir()
    (folder / "described").mkdir()
    rng = np.random.default_rng(0)
    sides = sources()["vit"].signature.inputs[0].wire_dims
    for number in range(DESCRIBED):
        image = json.dumps(rng.normal(size=sides).round(3).tolist())
        (folder / "described" / f"{number}.json").write_text(image)
    for number, (height, width) in enumerate(PICTURES):
        coarse = rng.integers(0, 256, (height // 20, width // 20, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        picture.save(folder / "pictures" / f"{number}.{'png' if number % 2 else 'jpg'}")
    picture.convert("L").convert("RGB").save(folder / "pictures" / "grey.jpg")


def migrate(path: Path, work: Path, to: str, url: str, *more: str) -> tuple[int, Any]:
    """Exit status and report of the command, in a process of its own."""
    report = work / f"{to}.json"
    command = [sys.executable, "-m", "modelport", "migrate", "torchserve", str(path)]
    command += [
        "--model-repository",
        str(work / to),
        "--config-properties",
        str(work / "config.properties"),
    ]
    command += ["--compare", url, "--requests", str(work / "requests")]
    command += ["--report", str(report), *more]
    status = subprocess.run(command, check=False).returncode
    return status, json.loads(report.read_text())


def run(work: Path) -> list[str]:
    """Migrate in the empty folder ``work`` and list the faults."""
    store = work / "store"
    store.mkdir()
    for name in ("fraud", "vit"):
        package(
            publish(work / "published", name, sources()[name]), "torchserve", store / f"{name}.mar"
        )
    pictures(store / "pictures.mar", seed=1)
    described(store / "described.mar", work / "published" / "vit" / "1")
    record(work / "requests")
    other = pictures(work / "pictures.mar", seed=2)
    programs = environments.venv("torchserve-vision", *VISION)
    (packages,) = programs.parent.glob("lib/python*/site-packages")
    (packages / "sitecustomize.py").write_text(OPERATORS)
    with torchserve(work, sorted(store.iterdir()), programs) as ports:
        url = f"http://{HOST}:{ports.inference}"
        status, report = migrate(store, work, "repository", url, "--allow-python")
        spoilt, _ = migrate(other, work, "other", url)
    wrong = [] if status == 0 else [f"the store was migrated with exit status {status}, not 0"]
    asked = [c for archive in report["archives"] for c in archive["comparisons"]]
    if len(asked) != 2 * 3 + len(PICTURES) + 1 + DESCRIBED:
        wrong.append(f"{len(asked)} requests were compared")
    wrong += [f"{c['request']}: {c['problem']}" for c in asked if c["problem"]]
    if spoilt != 3:
        wrong.append(f"a model with other weights ended with {spoilt}, not 3")
    for name in ("fraud", "vit"):
        for file in ("model.pt", "manifest.json"):
            there, back = (work / r / name / "1" / file for r in ("published", "repository"))
            if there.read_bytes() != back.read_bytes():
                wrong.append(f"{file} of '{name}' did not come back as it was packaged")
    largest = max((c["max_difference"] or 0.0 for c in asked), default=0.0)
    print(f"{len(asked)} requests, largest difference {largest:.1e}")
    return wrong


def main() -> int:
    with tempfile.TemporaryDirectory() as work:
        wrong = run(Path(work))
    print("\n".join(wrong) or "as it must be")
    return int(bool(wrong))


if __name__ == "__main__":
    verb.run(main)
