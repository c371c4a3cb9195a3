"""Tiny BERT-like folders of ``transformers`` with a tokenizer, one for each task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from modelport.exporters.runtime.output_capture import quiet
from tests.texts import MAX_TOKENS, SPECIAL, tokenizer

_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": MAX_TOKENS,
    "pad_token_id": 0,
}
_TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


def labelled(*labels: str) -> dict[str, Any]:
    """Class names of a configuration."""
    return {"id2label": dict(enumerate(labels)), "label2id": {n: i for i, n in enumerate(labels)}}


#: Architecture and configuration by what the model does.
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "sentiment": ("BertForSequenceClassification", labelled("bad", "neutral", "good")),
    "several": (
        "BertForSequenceClassification",
        {**labelled("a", "b"), "problem_type": "multi_label_classification"},
    ),
    "nli": (
        "BertForSequenceClassification",
        labelled("contradiction", "neutral", "entailment"),
    ),
    "reranker": ("BertForSequenceClassification", labelled("LABEL_0")),
    "tagger": ("BertForTokenClassification", labelled(*_TAGS)),
    "reader": ("BertForQuestionAnswering", {}),
    "filler": ("BertForMaskedLM", {}),
    "features": ("BertModel", {}),
}


def write(name: str, place: Path) -> Path:
    """Write the folder of a model of ``MODELS`` with random weights, and return it."""
    architecture, config = MODELS[name]
    folder, own = place / name, tokenizer()
    with quiet():
        torch.manual_seed(0)
        factory = getattr(transformers, architecture)
        kwargs = {**_SIZES, "vocab_size": own.get_vocab_size(), **config}
        model = factory(transformers.BertConfig(**kwargs)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.2)
        model.save_pretrained(folder)
        special = zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True)
        fast = transformers.BertTokenizer(
            tokenizer_object=own,
            model_max_length=MAX_TOKENS,
            **{f"{key}_token": token for key, token in special},
        )
        fast.save_pretrained(folder)
    return folder


def write_sentences(place: Path, **pooling: Any) -> Path:
    """Write a folder of ``sentence_transformers`` with mean pooling and normalisation."""
    folder = write("features", place)
    kinds = ("Transformer", "Pooling", "Normalize")
    paths = ("", "1_Pooling", "2_Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, config in (("1_Pooling", pooling or {"pooling_mode": "mean"}), ("2_Normalize", {})):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    return folder
