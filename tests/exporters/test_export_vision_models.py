"""Architectures of timm and torchvision by name; both are extras, `modelport[timm]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from modelport.exporters.cli.export import export
from modelport.exporters.runtime import torchvision_operators
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.errors import ModelportError

torchvision_operators.declare()
with quiet():
    timm: Any = pytest.importorskip("timm", reason="needs modelport[timm]")
    torchvision: Any = pytest.importorskip("torchvision", reason="needs modelport[timm]")

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def saved(module: nn.Module, path: Path) -> Path:
    torch.save(module.eval().state_dict(), path)
    return path


def same(source: Any, module: nn.Module, output: str = "logits") -> bool:
    with torch.no_grad():
        expected = module(IMAGES)
    expected = expected["out"] if isinstance(expected, dict) else expected
    found = source.reference({"pixel_values": IMAGES.numpy()})[output]
    return bool(np.abs(found - expected.numpy()).max() < 1e-5)


def test_a_checkpoint_of_timm_needs_the_name_alone(tmp_path: Path) -> None:
    """Classes are the weights', preprocessing is the architecture's."""
    module = timm.create_model("resnet10t", num_classes=5)
    path = saved(module, tmp_path / "model.pth")
    source = load(SourceRequest(path, model="timm:resnet10t", model_kwargs={"image_size": 64}))
    assert source.signature.inputs[0].dims == (3, 64, 64)
    assert source.signature.outputs[0].dims == (5,)
    assert source.spec.parameters["image.mean"] == "0.485,0.456,0.406"
    assert same(source, module)
    headless = saved(timm.create_model("resnet10t", num_classes=0), tmp_path / "headless.pth")
    source = load(SourceRequest(headless, model="timm:resnet10t"))
    assert source.signature.outputs[0].dims == (512,)


def test_a_folder_of_timm_needs_no_name(tmp_path: Path) -> None:
    from timm.models import save_for_hf

    module = timm.create_model("resnet10t", num_classes=2).eval()
    with quiet():
        save_for_hf(
            module,
            tmp_path,
            model_config={"num_classes": 2, "label_names": ["cat", "dog"]},
            safe_serialization=True,
        )
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"]["input_size"] = [3, 64, 64]
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = load(SourceRequest(tmp_path))
    assert source.labels == ("cat", "dog")
    assert same(source, module)


def test_a_classifier_and_a_segmentation_model_of_torchvision(tmp_path: Path) -> None:
    kwargs = {"image_size": 64}
    module = torchvision.models.get_model("mobilenet_v3_small", weights=None, num_classes=4)
    path = saved(module, tmp_path / "small.pth")
    name = "torchvision:mobilenet_v3_small"
    source = load(SourceRequest(path, model=name, model_kwargs=kwargs))
    assert "image.resize" not in source.spec.parameters
    assert load(SourceRequest(path, model=name)).spec.parameters["image.resize"] == "256"
    assert same(source, module)
    lraspp = torchvision.models.get_model(
        "lraspp_mobilenet_v3_large", weights=None, weights_backbone=None, num_classes=21
    )
    path = saved(lraspp, tmp_path / "lraspp.pth")
    name = "torchvision:lraspp_mobilenet_v3_large"
    source = load(SourceRequest(path, model=name, model_kwargs=kwargs))
    assert [(o.name, o.dims) for o in source.signature.outputs] == [("out", (21, 64, 64))]
    assert same(source, lraspp, "out")


def test_the_command_exports_and_proves(tmp_path: Path) -> None:
    module = torchvision.models.get_model("mobilenet_v3_small", weights=None, num_classes=4)
    path = saved(module, tmp_path / "small.pth")
    flags = ["--model", "torchvision:mobilenet_v3_small", "--model-kwargs", '{"image_size": 64}']
    place = ["--repository", str(tmp_path / "repository"), "--format", "onnx", "--samples", "20"]
    done = CliRunner().invoke(export, [str(path), *flags, *place])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "repository" / "torchvision-mobilenet_v3_small" / "1").is_dir()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("timm:resnet10", "did you mean 'resnet10t'?"),
        ("timm:hf-hub:someone/model", "is not known to the library"),
        ("torchvision:fasterrcnn_resnet50_fpn", "is not known to the library"),
        ("torchvision:resnet18", "keys"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, model: str, message: str) -> None:
    path = saved(timm.create_model("resnet10t", num_classes=5), tmp_path / "model.pth")
    with pytest.raises(ModelportError) as caught:
        load(SourceRequest(path, model=model))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
