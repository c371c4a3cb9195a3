"""Texts embedded per second on one core, beside ONNX Runtime and ``tokenizers`` by hand.

`python -m benchmarks.text`

The model has the sizes of all-MiniLM-L6-v2, with random weights, and is exported as a user would.
By hand, a loop tokenizes a batch, pads it and runs the session. Both ways run on one core, in
rounds that alternate, on the same texts; the client of the gateway has another core. Only ratios
within one run are meaningful.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import onnxruntime
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from benchmarks import script
from benchmarks.peers.servers.modelport import executable
from benchmarks.script import only, pinned
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running

NAME = "minilm"
SIZES = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_TOKENS = 128
#: Texts in a request, and requests in flight.
LOADS = {"32 texts a request": (32, 2), "1 text a request": (1, 4)}
GOAL = 0.95
TIMEOUT_SECONDS = 60.0

Embed = Callable[[Sequence[str]], Any]


class TextRound(NamedTuple):
    """Texts per second of both ways, one after the other."""

    by_hand: float
    gateway: float


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text", description=__doc__)
    parser.add_argument("--rounds", type=script.count, default=7)
    parser.add_argument("--seconds", type=script.positive, default=4.0)
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--core", type=script.core, default=cores[0])
    parser.add_argument("--client-core", type=script.core, default=cores[-1])
    return parser.parse_args(arguments)


def sentences() -> list[str]:
    """Paragraphs of this project's documentation."""
    pages = sorted((environments.ROOT / "docs").rglob("*.md"))
    lines = [line.strip("|-*# ") for page in pages for line in page.read_text().splitlines()]
    return [line[:300] for line in lines if len(line) > 40 and not line.startswith(("```", "|"))]


def export(work: Path, texts: Sequence[str]) -> Path:
    """Write a folder of ``sentence_transformers`` and publish it; return the version."""
    import torch

    library: Any = importlib.import_module("transformers")
    own = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    own.normalizer = normalizers.BertNormalizer(lowercase=True)
    own.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    own.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=30_000, special_tokens=SPECIAL, show_progress=False
    )
    own.train_from_iterator(texts, trainer)
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    folder = work / NAME
    torch.manual_seed(0)
    config = library.BertConfig(vocab_size=own.get_vocab_size(), **SIZES)
    library.BertModel(config).eval().save_pretrained(folder)
    special = zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True)
    names = {f"{key}_token": token for key, token in special}
    library.BertTokenizer(
        tokenizer_object=own, model_max_length=MAX_TOKENS, **names
    ).save_pretrained(folder)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    entries = [{"path": p, "type": f"sentence_transformers.models.{kind}"} for p, kind in kinds]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    command = [*executable(), "export", str(folder), "--format", "onnx", "--name", NAME, "--quiet"]
    command += ["--repository", str(work / "models"), "--max-batch-size", "32", "--samples", "8"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return work / "models" / NAME / "1"


def by_hand(version: Path) -> Embed:
    """The loop that a user would write."""
    tokenizer = Tokenizer.from_file(str(version / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding(pad_id=0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(version / "model.onnx", options)
    names = [each.name for each in session.get_inputs()]

    def embed(texts: Sequence[str]) -> Any:
        found = tokenizer.encode_batch_fast(list(texts))
        inputs = {
            "input_ids": np.array([each.ids for each in found]),
            "attention_mask": np.array([each.attention_mask for each in found]),
            "token_type_ids": np.array([each.type_ids for each in found]),
        }
        return session.run(None, {name: inputs[name] for name in names})[0]

    return embed


@contextlib.contextmanager
def gateway(work: Path, core: int) -> Iterator[str]:
    web, grpc, metrics = free_ports(3)
    command = [*executable(), "serve", "--model-repository", str(work / "models")]
    command += ["--http-port", str(web), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    ready = f"http://{HOST}:{web}/v2/models/{NAME}/ready"
    with running(command, log=work / "gateway.log", ready=ready, cores=only(core)):
        yield f"{HOST}:{web}"


def through(address: str) -> Embed:
    """OpenAI's embeddings over one connection."""
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)

    def embed(texts: Sequence[str]) -> Any:
        asked = {"input": list(texts), "model": NAME, "encoding_format": "base64"}
        connection.request("POST", "/v1/embeddings", json.dumps(asked))
        reply = connection.getresponse()
        content = reply.read()
        if reply.status != 200:
            raise SystemExit(f"the gateway answers {reply.status}: {content[:300]!r}")
        return [row["embedding"] for row in json.loads(content)["data"]]

    return embed


def rate(ways: Sequence[Embed], texts: Sequence[str], size: int, seconds: float) -> float:
    """Texts per second, one request of ``size`` texts in flight each way."""
    until = time.perf_counter() + seconds

    def drive(number: int) -> int:
        done, place = 0, number * 997
        while time.perf_counter() < until:
            start = place % (len(texts) - size)
            ways[number](texts[start : start + size])
            done, place = done + size, place + size
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(len(ways)) as threads:
        return sum(threads.map(drive, range(len(ways)))) / (time.perf_counter() - began)


def measure(
    address: str, hand: Embed, texts: Sequence[str], load: str, options: argparse.Namespace
) -> list[TextRound]:
    size, in_flight = LOADS[load]
    clients = [through(address) for _ in range(in_flight)]
    coded = clients[0](texts[:size])
    theirs = [np.frombuffer(base64.b64decode(each), "<f4") for each in coded]
    if not np.allclose(theirs, hand(texts[:size]), atol=1e-4):
        raise SystemExit("the gateway's vectors are not those of the loop by hand")
    rounds = []
    for number in range(options.rounds):
        found = {}
        for way in ("hand", "gateway")[:: 1 if number % 2 else -1]:
            pinned(options.core if way == "hand" else options.client_core)
            ways = [hand] if way == "hand" else clients
            found[way] = rate(ways, texts, size, options.seconds)
        rounds.append(TextRound(found["hand"], found["gateway"]))
    return rounds


def report(load: str, rounds: Sequence[TextRound]) -> float:
    """Print a line; the median of the ratios."""
    ratios = sorted(each.gateway / each.by_hand for each in rounds)
    middle = statistics.median(ratios)
    hand = statistics.median(each.by_hand for each in rounds)
    through_it = statistics.median(each.gateway for each in rounds)
    print(
        f"{load}: by hand {hand:.0f} texts/s, gateway {through_it:.0f} texts/s, ratio {middle:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}; goal {GOAL})"
    )
    return middle


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    texts = sentences()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        print("exporting", file=sys.stderr)
        hand = by_hand(export(work, texts))
        with gateway(work, options.core) as address:
            ratios = [report(load, measure(address, hand, texts, load, options)) for load in LOADS]
    return int(ratios[0] < GOAL)


if __name__ == "__main__":
    sys.exit(main())
