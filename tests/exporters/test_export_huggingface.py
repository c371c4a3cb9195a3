"""Vision transformers out of Hugging Face folders, held against transformers itself."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelport.exporters.cli.export import export
from modelport.exporters.loaded_model import Source
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest, huggingface
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from tests.exporters.huggingface_folders import refusal
from tests.pickle_bomb import PickleBomb

VERSION_4 = "vit.encoder.layer.1.attention.attention.query.weight"
VERSION_5 = "vit.layers.1.attention.q_proj.weight"


def classifier(**config: Any) -> nn.Module:
    """A tiny ``ViTForImageClassification``, every weight of it different."""
    with quiet():
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        images = {"image_size": 8, "patch_size": 4, "num_channels": 3, "intermediate_size": 24}
        labels = {"id2label": {0: "cat", 1: "dog", 2: "horse"}}
        model = ViTForImageClassification(ViTConfig(**{**sizes, **images, **labels, **config}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def write(model: nn.Module, folder: Path, **options: Any) -> Path:
    with quiet():
        model.save_pretrained(folder, **options)  # type: ignore[operator]
    return folder


def keys(folder: Path) -> set[str]:
    return {key for file in folder.glob("*.safetensors") for key in load_file(file)}


def difference(model: nn.Module, source: Source) -> float:
    """Between what transformers and we compute, on images far from zero."""
    image = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(1)) * 2
    with torch.no_grad():
        expected = model(image).logits.numpy()
    return float(np.abs(expected - source.reference({"image": image.numpy()})["logits"]).max())


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return classifier()


@pytest.fixture
def folder(model: nn.Module, tmp_path: Path) -> Path:
    return write(model, tmp_path / "classifier")


def edit(folder: Path, name: str = "config.json", **entries: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | entries))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)


def test_the_keys_that_transformers_5_writes_are_those_of_version_4(
    folder: Path, model: nn.Module
) -> None:
    assert VERSION_4 in keys(folder)
    assert VERSION_5 in model.state_dict()


def test_a_folder_computes_what_transformers_computes(folder: Path, model: nn.Module) -> None:
    source = load(SourceRequest(folder))
    assert isinstance(source.model, VisionTransformer)
    assert difference(model, source) < 1e-5
    assert source.labels == ("cat", "dog", "horse")
    assert source.spec.parameters["image.mean"] == "0.5"
    assert source.model_kwargs["layer_norm_eps"] == 1e-12
    assert source.parameter_count == sum(p.numel() for p in model.parameters())


def test_the_key_style_of_version_5_computes_the_same(model: nn.Module, tmp_path: Path) -> None:
    folder = write(model, tmp_path / "five", save_original_format=False)
    assert VERSION_5 in keys(folder)
    assert difference(model, load(SourceRequest(folder, model="vit"))) < 1e-5


@pytest.mark.parametrize("original", [True, False], ids=["version 4", "version 5"])
def test_shards_are_read_as_one(model: nn.Module, tmp_path: Path, original: bool) -> None:
    folder = write(model, tmp_path / "shards", max_shard_size="5KB", save_original_format=original)
    assert len(list(folder.glob("*.safetensors"))) > 2
    source = load(SourceRequest(folder))
    assert difference(model, source) < 1e-5
    before = source.origins
    assert load(SourceRequest(folder)).origins == before
    first = sorted(folder.glob("*.safetensors"))[0]
    save_file({k: v + 1 for k, v in load_file(first).items()}, first)
    assert load(SourceRequest(folder)).origins != before, "one digest stands for every shard"


def test_pickled_weights_are_read_without_running_them(
    folder: Path, model: nn.Module, tmp_path: Path
) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert difference(model, load(SourceRequest(folder))) < 1e-5
    marker = tmp_path / "ran"
    torch.save({"x": PickleBomb(marker)}, folder / "pytorch_model.bin")
    assert exit_code(refusal(folder)) == 5
    assert not marker.exists()


@pytest.mark.parametrize(
    "config",
    [
        {"layer_norm_eps": 0.5},
        {"qkv_bias": False},
        {"image_size": [8, 8], "patch_size": (4, 4)},
        {"num_attention_heads": 4, "intermediate_size": 40, "num_hidden_layers": 3},
    ],
    ids=["epsilon", "no bias", "sides in a list", "other sizes"],
)
def test_the_configuration_is_followed(tmp_path: Path, config: dict[str, Any]) -> None:
    model = classifier(**config)
    assert difference(model, load(SourceRequest(write(model, tmp_path / "m")))) < 1e-5


def test_an_epsilon_that_is_not_the_checkpoints_would_be_seen(tmp_path: Path) -> None:
    model = classifier(layer_norm_eps=0.5)
    folder = write(model, tmp_path / "m")
    naive = load(SourceRequest(folder, model_kwargs={"layer_norm_eps": 1e-6}))
    assert difference(model, naive) > 0.1


def test_weights_in_half_precision_are_computed_with_in_single(
    folder: Path, model: nn.Module
) -> None:
    edit_weights(folder, lambda state: state.update({k: v.half() for k, v in state.items()}))
    assert difference(model, load(SourceRequest(folder))) < 0.05


def test_what_classification_does_not_use_is_left_out(folder: Path, model: nn.Module) -> None:
    unused = {
        "vit.pooler.dense.weight": torch.ones(16, 16),
        "vit.pooler.dense.bias": torch.ones(16),
        "vit.embeddings.mask_token": torch.ones(1, 1, 16),
    }
    edit_weights(folder, lambda state: state.update(unused))
    assert difference(model, load(SourceRequest(folder))) < 1e-5


def test_the_preprocessor_becomes_parameters_of_the_model(folder: Path) -> None:
    name = "preprocessor_config.json"
    edit(folder, name, image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225])
    parameters = load(SourceRequest(folder)).spec.parameters
    assert parameters["image.mean"] == "0.485,0.456,0.406"
    assert parameters["image.std"] == "0.229,0.224,0.225"
    edit(folder, name, rescale_factor=1 / 127.5, image_mean=[1, 1, 1], image_std=[1, 1, 1])
    assert load(SourceRequest(folder)).spec.parameters["image.mean"] == "0.5,0.5,0.5"
    edit(folder, name, do_normalize=False, rescale_factor=1 / 255)
    assert load(SourceRequest(folder)).spec.parameters["image.std"] == "1"
    edit(folder, name, do_normalize=True, image_std=[0, 1, 1])
    assert "image_std is [0, 1, 1]: not positive" in str(refusal(folder))
    edit(folder, name, image_std=[1, 1])
    assert "not 3 numbers" in str(refusal(folder))


def test_placeholder_labels_are_no_labels(folder: Path) -> None:
    edit(folder, id2label={str(i): f"LABEL_{i}" for i in range(3)})
    assert load(SourceRequest(folder)).labels == ()


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"hidden_act": "gelu_new"}, Unsupported, "activation 'gelu_new'"),
        ({"image_size": [8, 12]}, Unsupported, r"image_size of \[8, 12\]"),
        ({"architectures": 5}, Unsupported, "holds a vit; --model vit reads"),
        ({"architectures": ["ViTModel"]}, Unsupported, "holds a ViTModel; --model vit reads"),
        ({"quantization_config": {"bits": 4}}, Unsupported, "is quantized already"),
        ({"num_hidden_layers": 3}, UsageError, "disagree on depth: 3 and 2"),
        ({"hidden_size": 10**9}, UsageError, "disagree on dim"),
        ({"num_attention_heads": 3}, UsageError, "cannot be built"),
        ({"num_attention_heads": "two"}, UsageError, "cannot be built"),
        ({"layer_norm_eps": "small"}, IntegrityError, "layer_norm_eps is 'small'"),
        ({"id2label": {"0": "cat"}}, IntegrityError, "does not name classes 0 to 2"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    folder: Path, entries: dict[str, Any], error: type[ModelportError], message: str
) -> None:
    edit(folder, **entries)
    refused = refusal(folder, model="vit")
    assert type(refused) is error
    assert re.search(message, str(refused)), refused


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s.pop(VERSION_4), UsageError, "missing keys: blocks.1.attn.qkv.weight"),
        (lambda s: s.update(extra=torch.ones(1)), UsageError, "unexpected keys: extra"),
        (
            lambda s: s.update({VERSION_5: s[VERSION_4].clone()}),
            IntegrityError,
            "hold 'blocks.1.attn.qkv.weight' twice",
        ),
        (
            lambda s: s.update({VERSION_4: torch.ones(16, 15)}),
            IntegrityError,
            "do not fit together",
        ),
        (lambda s: s[VERSION_4].fill_(torch.nan), IntegrityError, "contains NaN"),
        (lambda s: s.pop("classifier.weight"), UsageError, "not a ViT's"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path,
    change: Callable[[dict[str, Tensor]], object],
    error: type[ModelportError],
    message: str,
) -> None:
    edit_weights(folder, change)
    refused = refusal(folder)
    assert type(refused) is error
    assert message in str(refused)


def test_a_bias_that_the_configuration_denies_is_unexpected(folder: Path) -> None:
    """transformers leaves it out with a warning; which of the two is right nobody knows."""
    edit(folder, qkv_bias=False)
    assert "6 unexpected keys: vit.encoder.layer.0.attention" in str(refusal(folder))


def test_damaged_folders_are_refused(folder: Path, model: nn.Module, tmp_path: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert exit_code(refusal(folder)) == 5
    (folder / "model.safetensors").unlink()
    assert "holds no weights (model.safetensors or pytorch_model.bin" in str(refusal(folder))
    for text in ("{", "[]", "[" * 100_000):
        (folder / "config.json").write_text(text)
        assert exit_code(refusal(folder)) == 5
    shards = write(model, tmp_path / "shards", max_shard_size="5KB")
    shutil.copytree(shards, tmp_path / "other")
    sorted(shards.glob("*.safetensors"))[1].unlink()
    assert "which is missing; complete the folder" in str(refusal(shards))
    for name in ("../other/model-00001-of-00005.safetensors", "/etc/passwd", "", [7]):
        edit(shards, "model.safetensors.index.json", weight_map={"classifier.bias": name})
        assert "lists no files of its own folder" in str(refusal(shards))


def test_requests_that_do_not_fit_a_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    assert "'fraud' cannot be read from a Hugging Face" in str(refusal(folder, model="fraud"))
    assert "--lora is for --model causal-lm" in str(refusal(folder, lora=tmp_path))
    assert "omit --input" in str(refusal(folder, inputs=("x:FP32[3]",)))
    assert "is not a causal language model" in str(refusal(folder, model="causal-lm"))


def test_the_origin_is_the_folders_name_and_what_was_read(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "classifier"
    shutil.copytree(folder, moved)
    (moved / "README.md").write_text("not read")
    first, second = (huggingface.open_model(path).origin for path in (folder, moved))
    assert first == second
    assert first.name == "classifier"
    (moved / "model.safetensors").rename(moved / "pytorch_model.bin")
    assert huggingface.open_model(moved).origin != first


def test_transformers_is_not_needed_for_a_vision_transformer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith(huggingface.__name__)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert load(SourceRequest(folder)).spec.name == "vit"


def test_a_folder_is_exported_with_its_labels(folder: Path, tmp_path: Path) -> None:
    place = ["--repository", str(tmp_path / "repository"), "--samples", "40"]
    formats = ["--format", "pt2", "--format", "torchscript"]
    done = CliRunner().invoke(export, [str(folder), *formats, *place])
    assert done.exit_code == 0, done.output
    for name in ("vit-pt2", "vit-torchscript"):
        published = tmp_path / "repository" / name
        assert (published / "labels.txt").read_text() == "cat\ndog\nhorse\n"
        certificate = json.loads((published / "1" / "certificate.json").read_text())
        assert certificate["parity"]["passed"]
        assert certificate["checkpoint"]["file"] == "classifier"


def test_own_checkpoints_keep_their_epsilon(vit: nn.Module) -> None:
    assert {m.eps for m in vit.modules() if isinstance(m, nn.LayerNorm)} == {1e-6}
    assert replace(vit.modelport_spec) == VisionTransformer.modelport_spec
