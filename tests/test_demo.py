"""The newcomer's first command, in an empty folder, and everything it tells them to do next."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from modelport.exporters import model_spec
from modelport.exporters.demo_models import digits, train
from modelport.exporters.sources import checkpoint
from modelport.gateway.repository import manifest
from tests.conformance.clients import CALLERS, Ask
from tests.server import Gateway, serving

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]  # it trains
MODELPORT = (sys.executable, "-m", "modelport")
#: ``modelport demo`` with less to learn, by smaller models: `make run` does what a newcomer does.
SHORT_DEMO = """
from functools import partial
from modelport.cli import main
from modelport.exporters.demo_models import train
train.FRAUD_KWARGS.update(num_layers=1, d_model=32, nhead=2)
train.VIT_KWARGS.update(depth=1)
train.train_fraud = partial(train.train_fraud, sequences=3000)
train.train_vit = partial(train.train_vit, epochs=7)
main()
"""
TRAINED = Path(__file__).parents[1] / "checkpoints"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder the demo ran in and what it printed; what ``make run`` trained is not again."""
    folder = tmp_path_factory.mktemp("demo")
    if TRAINED.is_dir():
        shutil.copytree(TRAINED, folder / "checkpoints")
    done = run(folder, sys.executable, "-c", SHORT_DEMO, "demo")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_demo_trains_both_models_far_beyond_chance(demo: tuple[Path, str]) -> None:
    """Far below what they reach, because another processor's rounding leads to other weights."""
    auc = re.search(r"AUC ([\d.]+)", demo[1])
    accuracy = re.search(r"accuracy ([\d.]+)", demo[1])
    assert auc is not None
    assert accuracy is not None
    assert float(auc[1]) > 0.75, "chance is 0.5"
    assert float(accuracy[1]) > 0.75, "chance is 0.1"


def test_the_demo_publishes_versions_that_verify_and_carry_certificates(
    demo: tuple[Path, str],
) -> None:
    for name in ("fraud", "vit"):
        version = demo[0] / "model_repository" / name / "1"
        assert manifest.verify(version)
        parity = json.loads((version / "certificate.json").read_text())["parity"]
        assert parity["samples"] >= 1000
        assert parity["decision"]["agreement"] == 1.0
        assert {1, 2, 8} <= set(parity["batch_sizes"])


def test_the_three_protocols_agree_to_the_bit(demo: tuple[Path, str]) -> None:
    assert demo[1].count("the three protocols are bit-identical") == 2


@pytest.fixture(scope="module")
def gateway(demo: tuple[Path, str]) -> Iterator[Gateway]:
    with serving(demo[0] / "model_repository", "--require-manifest") as running:
        yield running


def eager(folder: Path, name: str, *inputs: np.ndarray) -> np.ndarray:
    """The answer of the checkpoint in eager PyTorch."""
    source = checkpoint.read(folder / "checkpoints" / f"{name}.pt")
    module, _, _ = model_spec.build(name, source.shapes, source.model_kwargs)
    checkpoint.load_into(module, source)
    with torch.no_grad():
        answer: np.ndarray = module.eval()(*map(torch.from_numpy, inputs)).numpy()
    return answer


@pytest.mark.parametrize("way", sorted(CALLERS))
def test_every_client_gets_the_checkpoints_answers(
    way: str, demo: tuple[Path, str], gateway: Gateway
) -> None:
    transactions = train.held_out_transactions(8)
    images = digits.load()[1].images[:8]
    with asyncio.Runner() as runner, closing(CALLERS[way](gateway, runner)) as caller:
        lengths = transactions.seq_lens[:, np.newaxis]
        fraud = caller.infer(Ask("fraud", [("tokens", transactions.tokens), ("seq_lens", lengths)]))
        vit = caller.infer(Ask("vit", [("image", images)]))
    expected = eager(demo[0], "fraud", transactions.tokens, transactions.seq_lens)
    np.testing.assert_allclose(fraud.arrays["probability"][:, 0], expected, atol=5e-6, rtol=1e-5)
    expected = eager(demo[0], "vit", images)
    np.testing.assert_allclose(vit.arrays["logits"], expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    ("tokens", "length", "text"),
    [
        ([1, 2, -1], 3, "input 'tokens' for model 'fraud' must lie in [0, 511], got -1"),
        ([1, 2, 512], 3, "input 'tokens' for model 'fraud' must lie in [0, 511], got 512"),
        ([1, 2, 3], 4, "input 'seq_lens' for model 'fraud' must lie in [1, 3], got 4"),
        ([1, 2, 3], 0, "input 'seq_lens' for model 'fraud' must lie in [1, 3], got 0"),
        ([1] * 65, 3, "'sequence' must be >= 1 and <= 64"),
    ],
)
def test_what_the_signature_forbids_never_reaches_the_runtime(
    tokens: list[int], length: int, text: str, gateway: Gateway
) -> None:
    inputs = [("tokens", np.array([tokens])), ("seq_lens", np.array([[length]]))]
    with asyncio.Runner() as runner, closing(CALLERS["http"](gateway, runner)) as caller:
        assert text in caller.refusal(Ask("fraud", inputs)).message()


def test_a_second_run_keeps_what_is_there(demo: tuple[Path, str]) -> None:
    checkpoint = (demo[0] / "checkpoints" / "fraud.pt").read_bytes()
    again = run(demo[0], *MODELPORT, "demo")
    assert again.returncode == 0, again.stderr
    assert (demo[0] / "checkpoints" / "fraud.pt").read_bytes() == checkpoint
    versions = [path.name for path in (demo[0] / "model_repository" / "fraud").iterdir()]
    assert sorted(versions) == ["1", "config.pbtxt", "warmup"]


def test_the_printed_commands_work_as_they_are(demo: tuple[Path, str]) -> None:
    folder, printed = demo
    curl = next(line for line in printed.splitlines() if line.startswith("curl "))
    script = printed.split("<<'END'\n")[1].split("\nEND\n")[0]
    with serving(folder / "model_repository") as gateway:
        answer = subprocess.run(
            curl.replace("127.0.0.1:8000", gateway.http), shell=True, capture_output=True, text=True
        )
        assert 0.0 <= json.loads(answer.stdout)["outputs"][0]["data"][0] <= 1.0
        python = run(folder, sys.executable, "-c", script.replace("127.0.0.1:8001", gateway.grpc))
        assert re.fullmatch(r"predicted (\d) truth \1\n", python.stdout), python.stderr
        infer = next(line for line in printed.splitlines() if line.startswith("modelport infer "))
        sent = run(folder, *MODELPORT, *infer.split()[1:], "--json", "--url", gateway.http)
        assert sent.returncode == 0, sent.stderr
        ((best,),) = json.loads(sent.stdout)["logits"]
        assert best.endswith(f":{digits.load()[1].labels[0]}")
        table = run(folder, *MODELPORT, "models", "--url", gateway.http)
        assert table.stdout.count("READY") == 2, table.stderr
