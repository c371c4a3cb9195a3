"""Code blocks of the documentation, run page by page as a reader would.

A block whose title begins with "Needs" or "Takes" is not run; its commands are still parsed. A
block whose title is a file's name is written to that file.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing
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
from tests import keras_models, models
from tests.docs import pages
from tests.docs.pages import ROOT, CodeBlock
from tests.exporters.conftest import FRAUD_KWARGS, VIT_KWARGS
from tests.server import Gateway

pytestmark = pytest.mark.thorough

#: What a page may leave out of a run: fewer inputs to compare, and models that are hardly trained.
ENVIRONMENT = {
    "MODELPORT_EXPORT_SAMPLES": "20",
    "MODELPORT_EXPORT_MIN_AGREEMENT": "0",
    "MODELPORT_EXPORT_MAX_DROP": "0.5",
    "MODELPORT_CONVERT_SAMPLES": "20",
    "MODELPORT_SERVE_HTTP_PORT": "0",
    "MODELPORT_SERVE_GRPC_PORT": "0",
    "MODELPORT_SERVE_METRICS_PORT": "0",
    "MODELPORT_SERVE_LOG_FORMAT": "json",
}
#: Commands in blocks that are run: they are other programs', and harmless.
PROGRAMS = frozenset({"curl", "echo", "mkdir", "modelport", "python"})
LANGUAGES = frozenset({"bash", "json", "python", "text", "toml", "yaml"})
BLOCKS = [block for file in pages.FILES for block in pages.blocks(file)]


class Reader:
    """Somebody who follows the pages in one folder, beside one running gateway."""

    def __init__(self, folder: Path, gateway: Gateway) -> None:
        self._gateway = gateway
        self._folder = folder
        self._before = self._entries()
        self._loaded = {"fraud", "vit"}
        self._ports = {
            "localhost:8000": gateway.http,
            "localhost:8001": gateway.grpc,
            "localhost:8002": f"127.0.0.1:{gateway.metrics_port}",
        }
        addresses = {f"MODELPORT_{v}_URL": gateway.http for v in ("MODELS", "INFER", "LOAD")}
        self._environment = {**ENVIRONMENT, **addresses, "CURL_HOME": str(folder)}
        (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 60\n")

    def follow(self, block: CodeBlock) -> None:
        if block.target:
            path = self._folder / block.target
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "python":
            self._execute(self._here(block.text), block)
        elif block.language == "bash":
            for command in pages.commands(block.text):
                self._command(command, block)

    def _command(self, command: str, block: CodeBlock) -> None:
        command = self._here(command)
        words = shlex.split(command, comments=True)
        assert words[0] in PROGRAMS, f"{block.place}: {words[0]}: title the block 'Needs ...'"
        if {"curl", "infer", "loadtest", "models"} & set(words):
            self._load(words)
        if words[:2] == ["modelport", "serve"]:
            self._serve(words[2:], block)
        elif words[0] == "modelport":
            done = CliRunner().invoke(modelport, words[1:], env=self._environment)
            assert done.exit_code == 0, f"{block.place}: {command}\n{done.output}"
        elif words[:2] == ["python", "-c"]:
            self._execute(words[2], block)
        else:
            self._run(["bash", "-euo", "pipefail", "-c", command], block)

    def _serve(self, arguments: list[str], block: CodeBlock) -> None:
        """Start a gateway of its own, and end it when it is ready."""
        if "--http-port" in arguments:
            arguments[arguments.index("--http-port") + 1] = "0"
        command = [Path(sys.executable).with_name("modelport"), "serve", *arguments]
        environment = {**os.environ, **self._environment}
        with subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if '"started"' in line:
                    break
            process.send_signal(signal.SIGTERM)
            said += process.stderr
        assert process.returncode == 0, f"{block.place}: {arguments}\n{''.join(said)}"

    def _execute(self, code: str, block: CodeBlock) -> None:
        """Run Python in this process, which has imported the frameworks already."""
        sys.path.insert(0, str(self._folder))
        try:
            exec(compile(code, block.place, "exec"), {"__name__": "__main__"})
        finally:
            sys.path.remove(str(self._folder))

    def _run(self, command: list[str], block: CodeBlock) -> None:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, **self._environment, "PATH": path}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout}\n{done.stderr}"

    def _here(self, text: str) -> str:
        for address, there in self._ports.items():
            text = text.replace(address, there)
        return text

    def _load(self, words: list[str]) -> None:
        """Load the new models that a command names, as polling does for those with more time."""
        named = set(re.findall(r"[\w-]+", " ".join(words)))
        there = {path.parent.name for path in self._folder.glob("model_repository/*/[0-9]*")}
        for name in sorted((there & named) - self._loaded):
            connection = http.client.HTTPConnection(self._gateway.http, timeout=60)
            connection.request("POST", f"/v2/repository/models/{name}/load")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            connection.close()
            self._loaded.add(name)

    def _entries(self) -> set[Path]:
        return {*self._folder.iterdir(), *self._folder.glob("model_repository/*")}

    def leave(self) -> None:
        """Remove what a page has made."""
        for path in self._entries() - self._before:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            self._loaded.discard(path.name)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """A folder as ``modelport demo`` leaves it, with another version, a Keras and an ONNX file."""
    folder = tmp_path_factory.mktemp("reader")
    write_checkpoints(folder / "checkpoints")
    keras_models.saved(keras_models.scorer, folder / "model.keras")
    models.multiply(folder / "net.onnx")
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    try:
        for name in ("fraud", "fraud", "vit"):  # two versions: pages roll back to the first
            command = ["export", f"checkpoints/{name}.pt", "--model", name, "--format", "onnx"]
            done = CliRunner().invoke(modelport, command, env=ENVIRONMENT)
            assert done.exit_code == 0, done.output
        control = ("--model-control-mode", "explicit", "--load-model", "*")
        with closing(Gateway(folder / "model_repository", *control)) as gateway:
            yield Reader(folder, gateway)
    finally:
        os.chdir(before)
        sys.path[:] = path


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


@pytest.fixture
def _gone_afterwards(reader: Reader) -> Iterator[None]:
    """Pages are read one by one, and may write files of the same name."""
    before = set(sys.modules)
    yield
    reader.leave()
    here = os.getcwd()
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(here):
            del sys.modules[name]


@pytest.mark.usefixtures("_gone_afterwards")
@pytest.mark.parametrize(
    "file",
    [file for file in pages.FILES if any(pages.blocks(file))],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_a_pages_blocks_run_in_order(file: Path, reader: Reader) -> None:
    for block in pages.blocks(file):
        if not block.reason:
            reader.follow(block)


def test_every_block_names_its_language() -> None:
    unknown = [f"{b.place}: '{b.language}{b.rest}'" for b in BLOCKS if not _known(b)]
    assert unknown == []


def _known(block: CodeBlock) -> bool:
    return block.language in LANGUAGES and not block.rest


def test_few_blocks_are_not_run_and_each_says_why() -> None:
    left_out = [block for block in BLOCKS if block.language in ("bash", "python") and block.reason]
    run = [block for block in BLOCKS if block.language in ("bash", "python") and not block.reason]
    assert len(run) > len(left_out)
    assert all(len(block.reason) > len("Needs a") for block in left_out)


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
