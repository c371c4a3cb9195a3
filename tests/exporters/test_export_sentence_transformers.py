"""Folders of ``sentence_transformers``, held against its definitions in NumPy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import save_file

from modelport.exporters.cli.export import export
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.huggingface import companions
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.types import Array
from tests.exporters.huggingface_folders import refusal, write

KINDS = "sentence_transformers.models."
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], np.int64)
TEXTS = {
    "input_ids": np.array([[5, 9, 3, 7, 60], [8, 2, 0, 0, 0], [4, 0, 0, 0, 0]], np.int64),
    "attention_mask": MASK,
    "token_type_ids": np.zeros_like(MASK),
}


def module(folder: Path, name: str, kind: str, **config: Any) -> dict[str, str]:
    """Write the configuration of a module; return its entry of ``modules.json``."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "config.json").write_text(json.dumps(config))
    return {"path": name, "type": KINDS + kind}


def listing(folder: Path, *entries: dict[str, str]) -> Path:
    first = {"path": "", "type": f"{KINDS}Transformer"}
    (folder / "modules.json").write_text(json.dumps([first, *entries]))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A transformer with mean pooling."""
    place = write("bert-features", tmp_path)
    flags = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    return listing(place, module(place, "1_Pooling", "Pooling", **flags))


def answers(folder: Path, task: str | None = None) -> dict[str, Array]:
    return load(SourceRequest(folder, task=task)).reference(TEXTS)


def tokens(folder: Path) -> Array:
    return answers(folder, "feature-extraction")["token_embeddings"]


def held(array: Array) -> Array:
    return array[..., None].astype(np.float64)


POOLED: dict[str, Callable[[Array], Array]] = {
    "cls": lambda t: t[:, 0],
    "max": lambda t: np.where(held(MASK) == 1, t, -1e9).max(1),
    "mean": lambda t: (t * held(MASK)).sum(1) / held(MASK).sum(1),
    "mean_sqrt_len_tokens": lambda t: (t * held(MASK)).sum(1) / np.sqrt(held(MASK).sum(1)),
    "weightedmean": lambda t: (
        (t * held(MASK * np.arange(1, 6))).sum(1) / held(MASK * np.arange(1, 6)).sum(1)
    ),
    "lasttoken": lambda t: t[np.arange(3), MASK.sum(1) - 1],
}
FLAGS = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}


@pytest.mark.thorough
def test_every_mode_of_pooling_is_that_of_its_definition(folder: Path) -> None:
    expected = tokens(folder)
    for mode, pooled in POOLED.items():
        for config in ({"pooling_mode": mode}, {FLAGS[mode]: True}):
            listing(folder, module(folder, "1_Pooling", "Pooling", **config))
            found = answers(folder)["sentence_embedding"]
            assert np.abs(found - pooled(expected)).max() < 1e-5, mode
    both = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    listing(folder, module(folder, "1_Pooling", "Pooling", **both))
    found = answers(folder)["sentence_embedding"]
    joined = np.concatenate([POOLED["cls"](expected), POOLED["mean"](expected)], axis=1)
    assert np.abs(found - joined).max() < 1e-5


def test_dense_layers_and_normalisation_are_inside(folder: Path) -> None:
    expected = POOLED["mean"](tokens(folder))
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(8, 32, generator=generator), torch.randn(8, generator=generator)
    sizes = {"in_features": 32, "out_features": 8, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    entries = [
        module(folder, "1_Pooling", "Pooling", pooling_mode="mean"),
        module(folder, "2_Dense", "Dense", **sizes, **activation),
        module(folder, "3_Normalize", "Normalize"),
    ]
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense/model.safetensors")
    found = answers(listing(folder, *entries))["sentence_embedding"]
    dense = np.tanh(expected @ weight.numpy().T + bias.numpy())
    dense /= np.linalg.norm(dense, axis=1, keepdims=True)
    assert np.abs(found - dense).max() < 1e-5
    first = load(SourceRequest(folder)).origins
    save_file(
        {"linear.weight": weight, "linear.bias": bias + 1}, folder / "2_Dense/model.safetensors"
    )
    assert load(SourceRequest(folder)).origins != first, "the digest covers every module"


def test_the_longest_text_is_the_librarys(folder: Path) -> None:
    assert load(SourceRequest(folder)).signature.axes["sequence"].maximum == 24
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 9}))
    assert load(SourceRequest(folder)).signature.axes["sequence"].maximum == 9


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ([{"path": "x", "type": "custom.Model"}], IntegrityError, "names code of its own"),
        ([{"path": "../x", "type": f"{KINDS}Pooling"}], IntegrityError, "is not a folder in it"),
        ([{"path": "1_Pooling", "type": f"{KINDS}LSTM"}], Unsupported, "Transformer, LSTM"),
        ([], Unsupported, "begins with Transformer;"),
        ([{"path": "none", "type": f"{KINDS}Pooling"}], UsageError, "cannot be read"),
    ],
)
def test_modules_that_are_not_known_are_refused(
    folder: Path, entries: list[dict[str, str]], error: type[ModelportError], message: str
) -> None:
    refused = refusal(listing(folder, *entries))
    assert type(refused) is error
    assert message in str(refused)


def test_layers_that_do_not_fit_are_refused(folder: Path) -> None:
    pooling = module(folder, "1_Pooling", "Pooling", pooling_mode="mean")
    dense = {"in_features": 32, "out_features": 8, "bias": False}
    save_file({"linear.weight": torch.ones(8, 31)}, _file(folder))
    listing(folder, pooling, module(folder, "2_Dense", "Dense", **dense))
    assert "do not fit its config.json" in str(refusal(folder))
    save_file({"linear.weight": torch.ones(8, 32)}, _file(folder))
    wrong = {"activation_function": "os.system"}
    listing(folder, pooling, module(folder, "2_Dense", "Dense", **dense, **wrong))
    assert "the activation 'os.system'" in str(refusal(folder))
    listing(folder, module(folder, "1_Pooling", "Pooling", pooling_mode="median"))
    assert "no mode of pooling" in str(refusal(folder))
    (folder / "modules.json").write_text("[1]")
    assert "lists no modules" in str(refusal(folder))
    (folder / "modules.json").unlink()
    assert "needs the pooling of a" in str(refusal(folder, task="sentence-similarity"))


def _file(folder: Path) -> Path:
    (folder / "2_Dense").mkdir(exist_ok=True)
    return folder / "2_Dense" / "model.safetensors"


def test_the_tokenizer_travels_with_the_artifact_and_code_does_not(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "vocab.txt").write_text("[PAD]\nword\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    code = {"auto_map": {"AutoTokenizer": "code.Tokenizer"}, "chat_template": "{{ 1 }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 6, **code}))
    for name in ("code.py", "chat_template.jinja", "README.md"):
        (folder / name).write_text("raise SystemExit")
    place = ["--repository", str(tmp_path / "repository"), "--max-batch-size", "2"]
    done = CliRunner().invoke(
        export, [str(folder), "--format", "torchscript", "--samples", "20", *place]
    )
    assert done.exit_code == 0, done.output
    version = tmp_path / "repository" / "bert-features" / "1"
    config = json.loads((version / "tokenizer_config.json").read_text())
    assert config == {"model_max_length": 6}
    assert (version / "vocab.txt").read_text() == "[PAD]\nword\n"
    assert json.loads((version / "config.json").read_text())["model_type"] == "bert"
    assert not [path for path in version.iterdir() if path.suffix in (".py", ".jinja", ".md")]
    certificate = json.loads((version / "certificate.json").read_text())
    assert {"vocab.txt", "tokenizer.json", "config.json"} <= certificate["artifact"]["files"].keys()


def test_the_tokenizer_travels_from_the_transformers_own_folder(
    folder: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "snapshots" / "0123"
    whole.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "digest").write_text("[PAD]\n")
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").unlink()
    (folder / "1_Pooling").rename(whole / "1_Pooling")
    folder.rename(whole / "0_Transformer")
    (whole / "0_Transformer" / "vocab.txt").symlink_to("../../../blobs/digest")
    listed[0]["path"] = "0_Transformer"
    (whole / "modules.json").write_text(json.dumps(listed))
    found = load(SourceRequest(whole)).companions
    assert found["vocab.txt"] == b"[PAD]\n"
    (whole / "0_Transformer" / "merges.txt").symlink_to(tmp_path / "secret")
    (tmp_path / "secret").write_text("key")
    assert "is a link out of its folder" in str(refusal(whole))


def test_every_file_of_a_tokenizer_travels() -> None:
    models = Path(transformers.__file__).parent / "models"
    named = re.compile(r"^VOCAB_FILES_NAMES = (\{.*?\})", re.MULTILINE | re.DOTALL)
    texts = [path.read_text() for path in models.glob("*/tokenization_*.py")]
    files = {
        name for text in texts for name in re.findall(r'": "([^"]+)"', "".join(named.findall(text)))
    }
    assert "spm.model" in files, "of DeBERTa"
    assert files <= {*companions.JSON, *companions.TEXT, *companions.BINARY}


def test_no_file_outside_the_folder_is_published(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (folder / "vocab.txt").symlink_to(tmp_path / "secret")
    assert "is a link out of its folder" in str(refusal(folder))
    (folder / "vocab.txt").unlink()
    (folder / "merges.txt").write_bytes(b"\xff")
    assert "is not UTF-8 text" in str(refusal(folder))
    (folder / "merges.txt").unlink()
    (folder / "tokenizer.json").write_text("[]")
    assert "is not a JSON object" in str(refusal(folder))


def test_the_cache_of_the_hub_is_a_folder_like_any_other(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--x" / "snapshots" / "0123"
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    (blobs / "digest").write_text("[PAD]\n")
    (snapshot / "vocab.txt").symlink_to("../../blobs/digest")
    assert load(SourceRequest(snapshot)).companions["vocab.txt"] == b"[PAD]\n"
