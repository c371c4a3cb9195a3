"""U-Net against TensorFlow's "SAME", ResNet against transformers', and their exports."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from modelport.exporters import model_spec
from modelport.exporters.cli.export import export
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.model_registry import MODELS
from modelport.exporters.models.resnet import ResNet50
from modelport.exporters.models.unet import SameConvTranspose2d, UNet
from modelport.exporters.proof import parity
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import checkpoint
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Array
from tests.thorough import sampled, thorough

UNET_KWARGS: dict[str, Any] = {
    "in_channels": 2,
    "keypoints": 3,
    "features": [4, 6, 8],
    "upsampling_kernel_size": 3,
    "max_size": 21,
}
RESNET_KWARGS: dict[str, Any] = {
    "num_classes": 5,
    "in_channels": 3,
    "width": 8,
    "layers": [2, 1, 2, 1],
    "image_size": 33,
}


def perturbed(module: nn.Module, scale: float) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return module.eval()


def unet(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return perturbed(UNet(**{**UNET_KWARGS, **kwargs}), 0.2)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    """Statistics of batch normalisation as training leaves them, of images far from zero."""
    torch.manual_seed(0)
    module = perturbed(ResNet50(**RESNET_KWARGS), 0.1).train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # plain averages
    with torch.no_grad():
        for _ in range(3):
            module(torch.randn(8, 3, 33, 33) * 2 + 1)
    return module.eval()


def as_source(module: nn.Module) -> Source:
    declared = module.modelport_spec
    assert isinstance(declared, model_spec.ModelSpec)
    return source(module, declared, declared.signature(module, 8))


def channels_last(tensor: Tensor) -> Array:
    return tensor.detach().permute(0, 2, 3, 1).numpy()


def filters(weight: Tensor) -> Array:
    """``[out, in, h, w]``, or ``[in, out, h, w]`` transposed, as TensorFlow's kernels have it."""
    return weight.detach().permute(2, 3, 1, 0).numpy()


def in_tensorflow(state: Mapping[str, Tensor], image: Tensor, levels: int) -> Array:
    """The U-Net as TensorFlow's own operators compute it from the same weights, channels first."""
    from modelport.exporters.runtime.tensorflow_runtime import tf

    def convolved(hidden: Any, name: str) -> Any:
        hidden = tf.nn.conv2d(hidden, filters(state[f"{name}.weight"]), 1, "SAME")
        return hidden + state[f"{name}.bias"].numpy()

    def convolutions(hidden: Any, name: str) -> Any:
        return tf.nn.relu(convolved(tf.nn.relu(convolved(hidden, f"{name}.0")), f"{name}.2"))

    hidden = channels_last(image)
    skipped = []
    for level in range(levels):
        if level:
            hidden = tf.nn.max_pool2d(hidden, 2, 2, "SAME")
        hidden = convolutions(hidden, f"encoder.{level}")
        skipped.append(hidden)
    skipped.pop()
    for level in range(levels - 1):
        skip = skipped.pop()
        hidden = tf.nn.conv2d_transpose(
            hidden, filters(state[f"upsampling.{level}.weight"]), skip.shape, 2, "SAME"
        )
        hidden = hidden + state[f"upsampling.{level}.bias"].numpy()
        hidden = convolutions(tf.concat([skip, hidden], -1), f"decoder.{level}")
    heatmaps: Array = convolved(hidden, "head").numpy().transpose(0, 3, 1, 2)
    return heatmaps


@pytest.mark.parametrize("kernel", [2, 3, 4, 5])
def test_transposed_convolution_crops_as_tensorflow_does(kernel: int) -> None:
    from modelport.exporters.runtime.tensorflow_runtime import tf

    torch.manual_seed(0)
    layer = SameConvTranspose2d(3, 2, kernel)
    naive = nn.ConvTranspose2d(3, 2, kernel, 2, padding=kernel // 2, output_padding=1)
    naive.load_state_dict(layer.state_dict())
    differs = 0
    for height in range(1, 9):
        for width in (height, 9 - height):
            size = torch.empty(2, 1, height, width)
            image = torch.randn(2, 3, -(-height // 2), -(-width // 2))
            expected = tf.nn.conv2d_transpose(
                channels_last(image), filters(layer.weight), (2, height, width, 2), 2, "SAME"
            ).numpy()
            bias = layer.bias.detach().numpy()
            found = channels_last(layer(image, size)) - bias
            assert np.abs(found - expected).max() < 1e-5, (height, width)
            other = channels_last(naive(image)) - bias
            differs += int(other.shape != expected.shape or np.abs(other - expected).max() > 0.01)
    assert differs, "PyTorch's own padding would do"


def test_pooling_pads_at_the_end_as_tensorflow_does() -> None:
    from modelport.exporters.runtime.tensorflow_runtime import tf

    pool: Any = unet().pool
    for height in range(1, 8):
        image = torch.randn(2, 3, height, 9 - height) - 5  # zeroes would win where they do not pad
        expected = tf.nn.max_pool2d(channels_last(image), 2, 2, "SAME").numpy()
        assert np.array_equal(channels_last(pool(image)), expected)


@pytest.mark.parametrize("kernels", [(3, 2), (3, 3), (5, 4)])
def test_a_unet_computes_what_tensorflow_computes_from_its_weights(
    kernels: tuple[int, int],
) -> None:
    module = unet(kernel_size=kernels[0], upsampling_kernel_size=kernels[1])
    for height, width in ((16, 16), (17, 20), (5, 7), (33, 12), (4, 4)):
        image = torch.rand(2, 2, height, width)
        with torch.no_grad():
            found = module(image).numpy()
        expected = in_tensorflow(module.state_dict(), image, levels=3)
        assert found.shape == (2, 3, height, width)
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_padding_that_is_even_would_be_seen_at_odd_sizes() -> None:
    """The trap: PyTorch's pooling drops the last row and column, its padding centres the rest."""
    image = torch.rand(1, 2, 17, 17)
    module: Any = unet()
    expected = in_tensorflow(module.state_dict(), image, levels=3)
    module.pool = nn.MaxPool2d(2, padding=1)
    with torch.no_grad():
        found = module(image).numpy()
    assert np.abs(found - expected).max() > 0.01 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (2, "torchscript"),
        (3, "onnx"),
        *(thorough(kernel, "pt2") for kernel in (2, 3)),
        thorough(2, "onnx"),
        thorough(3, "torchscript"),
    ],
)
def test_a_unet_is_exported_for_any_size(tmp_path: Path, kind: str, kernel: int) -> None:
    subject = as_source(unet(upsampling_kernel_size=kernel))
    row = find_format(kind)
    path = tmp_path / row.platform.default_filename
    row.export(subject, path, ExportTarget(opset=row.routes[Framework.PYTORCH].default_opset))
    session = row.open_session(path)
    for batch in (1, 2, 8):
        for height, width in ((8, 8), (9, 21), (20, 11), (13, 13)):
            image = {"image": np.random.default_rng(0).random((batch, 2, height, width), "f4")}
            expected = subject.reference(image)["heatmaps"]
            error = np.abs(session(image)["heatmaps"] - expected).max()
            assert error < 2e-6 * np.abs(expected).max()
    report = parity.check(subject, session, samples=40, seed=0, atol=1e-5, rtol=1e-4)
    assert report.axis_sizes["height"] >= {8, 14, 21}
    assert report.agreement is None, "heat maps decide nothing"


@pytest.mark.parametrize("kind", sampled(("onnx", "torchscript"), "torchscript"))
def test_a_resnet_is_exported_with_its_statistics(
    resnet: nn.Module, tmp_path: Path, kind: str
) -> None:
    subject = as_source(resnet)
    row = find_format(kind)
    path = tmp_path / row.platform.default_filename
    row.export(subject, path, ExportTarget(opset=row.routes[Framework.PYTORCH].default_opset))
    report = parity.check(subject, row.open_session(path), samples=40, seed=0, atol=2e-5, rtol=1e-4)
    assert report.agreement == 1
    assert report.batch_sizes == {1, 2, 7, 8}  # seven: edges beside each other


def in_transformers(state: Mapping[str, Tensor]) -> Any:
    """``ResNetForImageClassification`` with the weights of a state dict in torchvision's names."""
    with quiet():
        from transformers import ResNetConfig, ResNetForImageClassification

        widths = [32 * 2**stage for stage in range(4)]
        config = ResNetConfig(
            embedding_size=8, hidden_sizes=widths, depths=RESNET_KWARGS["layers"], num_labels=5
        )
        model = ResNetForImageClassification(config).eval()
    names = (
        (r"^conv1\.", "resnet.embedder.embedder.convolution."),
        (r"^bn1\.", "resnet.embedder.embedder.normalization."),
        (r"^fc\.", "classifier.1."),
        (r"^layer(\d)\.", lambda m: f"resnet.encoder.stages.{int(m[1]) - 1}.layers."),
        (r"downsample\.0\.", "shortcut.convolution."),
        (r"downsample\.1\.", "shortcut.normalization."),
        (r"\.conv(\d)\.", lambda m: f".layer.{int(m[1]) - 1}.convolution."),
        (r"\.bn(\d)\.", lambda m: f".layer.{int(m[1]) - 1}.normalization."),
    )
    renamed = {}
    for key, value in state.items():
        for pattern, replacement in names:
            key = re.sub(pattern, replacement, key)
        renamed[key] = value
    model.load_state_dict(renamed, strict=True)
    return model


def test_a_resnet_computes_what_transformers_computes(resnet: nn.Module) -> None:
    image = torch.randn(4, 3, 33, 33)
    with torch.no_grad():
        expected = in_transformers(resnet.state_dict())(image).logits
        error = float((resnet(image) - expected).abs().max())
    assert error < 1e-5 * float(expected.abs().max())


def test_the_parameters_are_torchvisions() -> None:
    """Names and counts as of torchvision.models.resnet50."""
    with torch.device("meta"):
        module = ResNet50(1000, 3, 64, (3, 4, 6, 3))
    assert sum(p.numel() for p in module.parameters()) == 25_557_032
    state = module.state_dict()
    assert len(state) == 320
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.downsample.0.weight",
        "layer1.0.downsample.1.num_batches_tracked",
        "layer2.0.conv2.weight",
        "layer3.5.bn3.bias",
        "layer4.2.conv3.weight",
        "fc.bias",
    } <= set(state)
    assert isinstance(module.layer2[0].conv2, nn.Conv2d)
    assert module.layer2[0].conv2.stride == (2, 2), "version 1.5"


@pytest.mark.parametrize("name", ["unet", "resnet50"])
def test_hyper_parameters_follow_from_the_checkpoint(
    name: str, resnet: nn.Module, tmp_path: Path
) -> None:
    module, sizes = (unet(), {"max_size": 21}) if name == "unet" else (resnet, {"image_size": 33})
    path = tmp_path / "model.pt"
    torch.save(module.state_dict(), path)
    read = checkpoint.read(path)
    built, declared, kwargs = model_spec.build(name, read.shapes, sizes)
    assert declared is not None
    assert declared.name == name
    expected = UNET_KWARGS | {"kernel_size": 3} if name == "unet" else RESNET_KWARGS
    assert kwargs == expected
    checkpoint.load_into(built, read)
    image = torch.rand(2, 2 if name == "unet" else 3, 33, 33)
    with torch.no_grad():
        assert torch.equal(built.eval()(image), module(image))


@pytest.mark.parametrize(
    ("name", "message"),
    [("unet", "is not a U-Net's"), ("resnet50", "is not a ResNet-50's"), ("vit", "not a ViT's")],
)
def test_another_models_checkpoint_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_spec.build(name, {"embedding.weight": (3, 4), "conv1.weight": (3,)}, {})


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("unet", UNET_KWARGS | {"features": [4]}, "two levels or more"),
        ("unet", UNET_KWARGS | {"upsampling_kernel_size": 1}, "at least 2"),
        ("unet", UNET_KWARGS | {"kernel_size": 4}, "4 odd"),
        ("unet", UNET_KWARGS | {"max_size": 7}, "at least 8"),
        ("resnet50", RESNET_KWARGS | {"layers": [1, 1]}, "must be 4 positive numbers"),
    ],
)
def test_hyper_parameters_that_make_no_model_are_refused(
    name: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        model_spec.build(name, {}, kwargs)


def test_every_registered_name_leads_to_a_declared_model() -> None:
    for name in MODELS:
        declared = model_spec.find_factory(name).modelport_spec  # type: ignore[attr-defined]
        assert declared.name == name


@pytest.mark.thorough
def test_the_command_exports_both_to_torchscript_and_to_tensorflow(
    resnet: nn.Module, tmp_path: Path
) -> None:
    place = ["--repository", str(tmp_path / "repository"), "--samples", "20"]
    for name, module, kwargs in (
        ("unet", unet(), '{"max_size": 12}'),
        ("resnet50", resnet, '{"image_size": 33}'),
    ):
        path = tmp_path / f"{name}.pt"
        torch.save(module.state_dict(), path)
        fixed = [str(path), "--model", name, "--model-kwargs", kwargs, *place]
        done = CliRunner().invoke(export, [*fixed, "--format", "torchscript"])
        assert done.exit_code == 0, done.output
        done = CliRunner().invoke(export, [*fixed, "--format", "tflite", "--format", "savedmodel"])
        assert done.exit_code == 0, done.output
