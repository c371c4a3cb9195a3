"""Every registered model in every format: one ``modelport export`` each.

An export has a process of its own, so that its memory is measured alone; the figures come from the
certificates. Small models are trained. Large ones have random weights with every layer distinct,
and show size, cost and numerical error, but not accuracy.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelport.exporters.demo_models import train
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.resnet import ResNet50
from modelport.exporters.models.unet import UNet
from modelport.exporters.models.vit import VisionTransformer

HEAD = "| model | format | max error | agreement | held out | size | export | peak memory |"

LARGE_FRAUD = {
    "vocab_size": 50_000,
    "d_model": 1024,
    "nhead": 16,
    "num_layers": 24,
    "dim_feedforward": 4096,
    "max_positions": 512,
}
VIT_B16 = {
    "image_size": 224,
    "patch_size": 16,
    "in_channels": 3,
    "num_classes": 21_841,
    "dim": 768,
    "depth": 12,
    "num_heads": 12,
    "mlp_dim": 3072,
}

RESNET_50 = {"num_classes": 1000, "in_channels": 3, "width": 64, "layers": (3, 4, 6, 3)}
UNET = {"in_channels": 3, "keypoints": 17, "features": (32, 64, 128, 256), "max_size": 128}

FORMATS = ("onnx", "torchscript", "savedmodel", "tflite", "pt2", "aoti")
TORCH_FORMATS = ("onnx", "torchscript", "pt2", "aoti")
#: (format, flag, precision) of the rows below fp32.
LOWER = (
    ("onnx", "--dtype", "fp16"),
    ("tflite", "--dtype", "fp16"),
    ("torchscript", "--dtype", "fp16"),
    ("savedmodel", "--dtype", "bf16"),
    ("onnx", "--quantize", "int8"),
    ("tflite", "--quantize", "int8"),
)


@dataclass(frozen=True, slots=True)
class TableSubject:
    """A model of the table; ``write`` makes its checkpoint, ``arguments`` go to every export."""

    label: str
    write: Callable[[Path], Path]
    arguments: tuple[str, ...]
    formats: tuple[str, ...] = FORMATS
    lower: tuple[tuple[str, str, str], ...] = ()
    held_out: bool = False


def distinct(module: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter at random; equal layers would hide a swapped pair."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 0.1 * float(parameter.std()) if parameter.numel() > 1 else 0.1
            parameter.add_(torch.randn(parameter.shape, generator=generator) * max(scale, 0.01))
    return module


def _random(factory: Callable[..., nn.Module], kwargs: dict[str, Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.manual_seed(0)
        path = folder / "random.pt"
        module = distinct(factory(**kwargs))
        if isinstance(module, ResNet50):
            _settle(module)
        train.save(path, module, model_kwargs=kwargs, metrics={}, seed=0)
        return path

    return write


def _settle(module: nn.Module) -> None:
    """Give batch normalisation its statistics; an untrained model's activations would explode."""
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None  # the mean over all batches
    module.train()
    with torch.no_grad():
        module(torch.randn(8, 3, 224, 224) + torch.linspace(-3, 3, 8)[:, None, None, None])
    module.eval()


def _trained(trainer: Callable[[Path], object], name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = Path("checkpoints") / f"{name}.pt"
        if not train.held_out_path(path).exists() or not path.exists():
            trainer(path)
        return path

    return write


def _language_model(folder: Path) -> Path:
    """A small random Llama, and adapters of rank 8 for its attention beside it."""
    import transformers
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "llama")
    base = LlamaForCausalLM.from_pretrained(folder / "llama")
    wanted = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(base, wanted).save_pretrained(str(folder / "adapters"))
    return folder / "llama"


SUBJECTS = (
    TableSubject(
        "fraud, demo",
        _trained(train.train_fraud, "fraud"),
        ("--model", "fraud"),
        lower=LOWER,
        held_out=True,
    ),
    TableSubject(
        "ViT, digits",
        _trained(train.train_vit, "vit"),
        ("--model", "vit"),
        lower=LOWER,
        held_out=True,
    ),
    TableSubject(
        "ViT-B/16, 21,841 classes",
        _random(VisionTransformer, VIT_B16),
        # Random weights decide between near-equal values: agreement is shown, but not required.
        ("--model", "vit", "--samples", "16", "--min-agreement", "0"),
        lower=(("onnx", "--quantize", "int8"), ("tflite", "--quantize", "int8")),
    ),
    TableSubject("fraud, 354 M", _random(FraudTransformer, LARGE_FRAUD), ("--model", "fraud")),
    TableSubject(
        "ResNet-50",
        _random(ResNet50, RESNET_50),
        ("--model", "resnet50", "--samples", "32"),
        TORCH_FORMATS,
    ),
    TableSubject(
        "U-Net, 17 keypoints",
        _random(UNet, UNET),
        ("--model", "unet", "--samples", "32"),
        TORCH_FORMATS,
    ),
    TableSubject(
        "Llama with LoRA",
        _language_model,
        ("--model", "causal-lm", "--samples", "32"),
        ("onnx", "torchscript"),
    ),
)


def _jobs(subject: TableSubject) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each row's name and its export arguments."""
    for name in subject.formats:
        yield name, ("--format", name)
    for name, flag, precision in subject.lower:
        yield f"{name} {precision}", ("--format", name, flag, precision)


def _export(subject: TableSubject, checkpoint: Path, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Run one export and return its certificate.

    Raises:
        RuntimeError: the export failed; the message is its own.
    """
    command = [
        sys.executable,
        "-m",
        "modelport",
        "export",
        str(checkpoint),
        *subject.arguments,
        *arguments,
    ]
    if subject.held_out:
        command += ["--data", str(train.held_out_path(checkpoint))]
    adapters = checkpoint.parent / "adapters"
    if adapters.is_dir():
        command += ["--lora", str(adapters)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "-o", folder], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{subject.label} {' '.join(arguments)}: {done.stderr.strip()}")
        certificate: dict[str, Any] = json.loads((Path(folder) / "certificate.json").read_text())
        return certificate


def _row(label: str, name: str, certificate: dict[str, Any]) -> str:
    parity, found = certificate["parity"], certificate["evaluation"]
    error = max(output["max_abs_error"] for output in parity["outputs"].values())
    agreement = parity["decision"] and parity["decision"]["agreement"]
    if found and found["agreement"] is not None:
        agreement = found["agreement"]
    metric = f"{found['metric']} {found['artifact']:.4f}" if found and found["metric"] else "-"
    resources = certificate["resources"]
    cells = (
        label,
        name,
        f"{error:.1e}",
        "-" if agreement is None else f"{agreement:.2%}",
        metric,
        f"{certificate['artifact']['size_bytes'] / 1e6:,.2f} MB",
        f"{resources['export_seconds']:.1f} s",
        f"{resources['peak_memory_bytes'] / 1e9:.1f} GB",
    )
    return f"| {' | '.join(cells)} |"


def rows(work: Path) -> Iterator[str]:
    """Export each model, and yield the lines of the table."""
    yield HEAD
    yield "|" + "---|" * HEAD.count(" | ") + "---|"
    for number, subject in enumerate(SUBJECTS):
        place = work / str(number)
        place.mkdir()
        checkpoint = subject.write(place)
        for name, arguments in _jobs(subject):
            yield _row(subject.label, name, _export(subject, checkpoint, arguments))
