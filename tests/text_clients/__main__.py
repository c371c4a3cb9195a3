"""Unmodified clients of text models against a real gateway: OpenAI's, LangChain's, LlamaIndex's and
Cohere's.

    python -m tests.text_clients

They have an environment of their own, made once in ``.peers/``; ``calls.py`` runs in it. Exits with
1 if an answer is not the model's.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from modelport.loadtests.system import environments
from tests import texts, verb
from tests.server import serving
from tests.texts import mean_of, table

PACKAGES = (
    "openai==3.57.0",
    "langchain-openai==1.7.4",
    "llama-index-embeddings-text-embeddings-inference==0.6.0",
    "llama-index-postprocessor-tei-rerank==0.6.0",
    "cohere==7.3.1",
)
RUN_SECONDS = 300
TEXTS, QUERY = ["hello world", "Berlin is the capital"], "what"


def expected() -> dict[str, Any]:
    """Compute the answer of each call."""
    vectors = np.array([mean_of(table(8), text) for text in TEXTS])
    scores = [1 / (1 + np.exp(-mean_of(table(1), QUERY, text)[0])) for text in TEXTS]
    order = sorted(zip(TEXTS, scores, strict=True), key=lambda each: -each[1])
    plain = ("with_openai", "with_openai_async", "with_langchain_openai")
    return {
        **dict.fromkeys(plain, vectors),
        # Text Embeddings Inference makes vectors of length one.
        "with_llama_index": vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
        **dict.fromkeys(("with_llama_index_rerank", "with_cohere"), order),
    }


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, np.ndarray):
        return bool(np.allclose(found, wanted, atol=1e-5))
    names = [name for name, _ in found] == [name for name, _ in wanted]
    return names and np.allclose([s for _, s in found], [s for _, s in wanted], atol=1e-5)


def report(found: Mapping[str, Any]) -> int:
    """Print a line for each call; the number of wrong or missing ones."""
    wrong = 0
    for name, wanted in expected().items():
        right = name in found and same(found[name], wanted)
        wrong += not right
        print(f"{'ok   ' if right else 'WRONG'} {name.removeprefix('with_')}")
    return wrong


def main() -> int:
    python = environments.venv("text_clients", *PACKAGES) / "python"
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(texts.repository(Path(folder))) as gateway,
    ):
        calls = Path(__file__).with_name("calls.py")
        command = [str(python), str(calls), f"http://{gateway.http}"]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=RUN_SECONDS, check=False
        )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return min(1, report({line["call"]: line["found"] for line in lines}) + done.returncode)


if __name__ == "__main__":
    verb.run(main)
