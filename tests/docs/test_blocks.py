"""Code blocks of the documentation, pasted page by page as they stand.

A block whose title is a file's name is written to that file. ``shell.NOT_RUN`` lists the commands
that cannot run here; their options are still checked.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from google.protobuf import text_format
from PIL import Image

from modelport.cli import modelport
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.models.vit import VisionTransformer
from modelport.gateway.wire.proto import model_config_pb2
from tests.docs import pages, shell
from tests.docs.pages import ROOT, CodeBlock
from tests.exporters import huggingface_folders, text_folders
from tests.exporters.conftest import FRAUD_KWARGS, VIT_KWARGS

pytestmark = pytest.mark.thorough
slow = pytest.mark.skipif(
    not os.environ.get("MODELPORT_SLOW_TESTS"), reason="slow; `make docs-blocks` runs it"
)

LANGUAGES = frozenset({"bash", "json", "python", "text", "toml", "yaml"})
BLOCKS = [block for file in pages.FILES for block in pages.blocks(file)]
#: Pages that make everything they need; the others go on where the quickstart's demo ends.
FROM_NOTHING = frozenset({"README.md"})
#: What a newcomer pastes first.
FIRST = frozenset({"README.md", "docs/quickstart.md"})
MAX_NOT_RUN = 34
#: What ``hf download`` names → a small model of the same kind.
DOWNLOADS = {
    "distilbert/distilbert-base-uncased-finetuned-sst-2-english": "bert",
    "google-bert/bert-base-uncased": "bert-mask",
    "Qwen/Qwen3-0.6B": "qwen3",
}
#: The same, for models that a page sends texts to.
TEXT_DOWNLOADS: dict[str, Callable[[Path], Path]] = {
    "cardiffnlp/twitter-roberta-base-sentiment-latest": partial(text_folders.write, "sentiment"),
    "cross-encoder/ms-marco-MiniLM-L6-v2": partial(text_folders.write, "reranker"),
    "sentence-transformers/all-MiniLM-L6-v2": text_folders.write_sentences,
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as ``modelport demo`` leaves it, with small models and another version of one."""
    folder = tmp_path_factory.mktemp("demo")
    write_checkpoints(folder / "checkpoints")
    for name in ("fraud", "fraud", "vit"):  # two versions: pages roll back to the first
        command = ["export", f"{folder}/checkpoints/{name}.pt", "--model", name]
        command += ["--format", "onnx", "--repository", f"{folder}/model_repository"]
        done = CliRunner().invoke(modelport, command, env=shell.ENVIRONMENT)
        assert done.exit_code == 0, done.output
    return folder


@pytest.mark.timeout(shell.SECONDS)
@pytest.mark.parametrize(
    "file",
    [
        pytest.param(
            file,
            id=(name := str(file.relative_to(ROOT))),
            marks=() if name in FIRST else slow,
        )
        for file in pages.FILES
        if any(pages.blocks(file))
    ],
)
def test_a_pages_blocks_run_in_order(file: Path, tmp_path: Path, demo: Path) -> None:
    run = shell.runnable(pages.blocks(file))
    if str(file.relative_to(ROOT)) not in FROM_NOTHING:
        shutil.copytree(demo, tmp_path, dirs_exist_ok=True)
        shell.checkout(tmp_path)
    write_downloads(pages.blocks(file), tmp_path)
    shell.paste(run, tmp_path, gateway=shell.asks_first(run))


def write_downloads(blocks: Iterable[CodeBlock], folder: Path) -> None:
    """Small models of the architectures that ``hf download`` brings, in the same places."""
    for block in blocks:
        for name, place in re.findall(r"hf download (\S+) .*?--local-dir (\S+)", block.text):
            if name in TEXT_DOWNLOADS:
                written = TEXT_DOWNLOADS[name](folder / "downloads")
            else:
                written = huggingface_folders.write(DOWNLOADS[name], folder / "downloads")
            written.rename(folder / place)


def write_checkpoints(folder: Path) -> None:
    """Small models in the places of the demo's, untrained."""
    folder.mkdir()
    torch.manual_seed(0)
    made = {
        "fraud": (FraudTransformer, FRAUD_KWARGS | {"vocab_size": 512, "num_layers": 1}),
        "vit": (VisionTransformer, VIT_KWARGS | {"dim": 64, "mlp_dim": 128, "depth": 1}),
    }
    for name, (factory, kwargs) in made.items():
        content = {"model_state_dict": factory(**kwargs).state_dict(), "model_kwargs": kwargs}
        torch.save(content, folder / f"{name}.pt")
    numbers = np.random.default_rng(0)
    image = numbers.random((64, 1, 8, 8), np.float32)
    np.savez(folder / "vit-held-out.npz", image=image, labels=numbers.integers(0, 5, 64))
    Image.new("L", (8, 8), 128).save(folder / "digit.png")


def test_every_block_names_its_language() -> None:
    unknown = [f"{b.place}: '{b.language}{b.rest}'" for b in BLOCKS if not _known(b)]
    assert unknown == []


def _known(block: CodeBlock) -> bool:
    return block.language in LANGUAGES and not block.rest


def test_few_blocks_are_not_run_and_each_reason_is_in_one_table() -> None:
    reasons = [shell.reason(block) for block in BLOCKS if block.language == "bash"]
    assert sum(map(bool, reasons)) <= MAX_NOT_RUN
    assert set(reasons) - {""} == set(shell.NOT_RUN.values()), "a reason without a block"


def test_a_server_in_the_foreground_ends_its_block() -> None:
    for block in BLOCKS:
        shell.serves(block)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language != "text"], ids=lambda block: block.place
)
def test_a_block_is_what_its_language_says(block: CodeBlock) -> None:
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "yaml":
        list(yaml.safe_load_all(block.text))
    elif block.language == "python":
        compile(block.text, block.place, "exec")
    else:
        for command in pages.commands(block.text):
            check_command(command)


def test_configurations_in_text_blocks_are_configurations() -> None:
    found = [block for block in BLOCKS if "config.pbtxt" in block.title]
    assert len(found) > 3
    for block in found:
        text_format.Parse(block.text, model_config_pb2.ModelConfig())


def check_command(command: str) -> None:
    """The command's options are ones that ``modelport`` has, its verbs the Makefile's."""
    for words in simple_commands(command):
        while words and re.fullmatch(r"[A-Za-z_]+=\S*", words[0]):
            del words[0]
        if words[:1] == ["modelport"]:
            check_options(modelport, words[1:])
        elif words[:1] == ["make"]:
            makefile = (ROOT / "Makefile").read_text()
            for verb in words[1:]:
                assert "=" in verb or re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


def simple_commands(command: str) -> Iterator[list[str]]:
    """The parts of a list or pipeline, by words."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= set("|&;"):
            yield words
            words = []
        else:
            words.append(word)
    yield words


def check_options(command: click.Command, words: list[str]) -> None:
    """Raises ``click.UsageError``: there is no such verb or option."""
    context: Any = click.Context(command)
    if isinstance(command, click.Group):
        found = command.get_command(context, words[0]) if words else None
        if found is not None:
            check_options(found, words[1:])
            return
        assert words[:1] in (["--help"], ["--version"], ["--config"]), words
        return
    command.make_parser(context).parse_args([word for word in words if word != "..."])
