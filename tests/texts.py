"""Models with a text interface whose answers are known: a tokenizer, and vectors for its tokens.

A model's ``logits`` are the mean of its tokens' rows in a table, or the rows themselves.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from modelport.gateway.repository import text_settings
from modelport.gateway.repository.text_settings import (
    LongTexts,
    ScoreFunction,
    TextSettings,
    TextTask,
)
from modelport.gateway.types import Array
from tests.models import config, save

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, CLS, SEP, MASK = range(5)
#: What the tokenizer is trained on.
CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "hello world, this model reads text and gives an answer",
    "Berlin is the capital of Germany and Paris is the capital of France",
    "what is urgent, what is sport, and what is not",
    "I like it. I do not like it! is it good or bad?",
)
MAX_TOKENS = 32
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_AXES = "".join(
    f'parameters {{ key: "axes.{name}" value {{ string_value: "sequence" }} }}\n'
    for name in TEXT_INPUTS
)
EXTRA = (
    f'{_AXES}parameters {{ key: "axis.sequence" value {{ string_value: "1..{MAX_TOKENS}" }} }}\n'
)


@functools.cache
def tokenizer() -> Tokenizer:
    """Train a WordPiece tokenizer on ``CORPUS``."""
    found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=True)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=160, special_tokens=list(SPECIAL), show_progress=False
    )
    found.train_from_iterator(CORPUS, trainer)
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return found


def settings(task: TextTask, **changes: Any) -> TextSettings:
    known: dict[str, Any] = {"pad": PAD, "unknown": UNKNOWN, "cls": CLS, "mask": MASK}
    known |= {"task": task, "max_tokens": MAX_TOKENS, "long_texts": LongTexts.REFUSE}
    known |= {"labels": (), "function": ScoreFunction.SOFTMAX}
    return TextSettings(**{**known, **changes})


def table(width: int, seed: int = 0) -> Array:
    """A row for each token."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((tokenizer().get_vocab_size(), width)).astype(np.float32)


def mean_of(rows: Array, *texts: str) -> Array:
    """Compute the answer of a model with these rows to a text, or a pair."""
    found: Array = rows[tokenizer().encode(*texts).ids].mean(axis=0)
    return found


def publish(root: Path, name: str, rows: Array, own: TextSettings, extra: str = "") -> Path:
    """Write a model whose output is the mean of its tokens' ``rows``; return its version."""
    output = own.pooled or "logits"
    version = root / name / "1"
    ids = [helper.make_tensor_value_info(i, TensorProto.INT64, ["b", "s"]) for i in TEXT_INPUTS]
    nodes = [
        helper.make_node("Gather", ["rows", "input_ids"], ["vectors"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["held"]),
        helper.make_node("Mul", ["vectors", "held"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "second"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["held", "second"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], [output]),
    ]
    width = rows.shape[1]
    values = (("rows", rows), ("last", np.array([2])), ("second", np.array([1])))
    graph = helper.make_graph(
        nodes,
        "texts",
        ids,
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["b", width])],
        [numpy_helper.from_array(value, key) for key, value in values],
    )
    save(version / "model.onnx", graph)
    text = config(
        name,
        [f"{i} INT64 -1" for i in TEXT_INPUTS],
        [f"{output} FP32 {width}"],
        extra=EXTRA + extra,
    )
    (root / name / "config.pbtxt").write_text(text)
    (version / text_settings.FILENAME).write_bytes(own.to_json())
    (version / text_settings.TOKENIZER).write_text(tokenizer().to_str())
    return version


def repository(root: Path) -> Path:
    """Write a classifier, a reranker and a model of embeddings."""
    labels = ("bad", "neutral", "good")
    publish(root, "sentiment", table(3), settings(TextTask.CLASSIFICATION, labels=labels))
    one = settings(TextTask.CLASSIFICATION, labels=("LABEL_0",), function=ScoreFunction.SIGMOID)
    publish(root, "reranker", table(1), one)
    publish(root, "sentences", table(8), settings(TextTask.EMBEDDING, pooled="embedding_output"))
    return root
