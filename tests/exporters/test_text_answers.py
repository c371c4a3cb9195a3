"""The answers to texts beside ``transformers``' own pipelines, on the same weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from modelport.exporters.errors import ParityError
from modelport.exporters.publishing import text_answers
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.errors import InvalidArgument, UsageError
from modelport.gateway.inference.text import answers, text_infer
from modelport.gateway.inference.text.text_infer import TextInfer
from modelport.gateway.repository import text_settings
from modelport.gateway.types import (
    NO_DEADLINE,
    Array,
    Datatype,
    InferRequest,
    InferResponse,
    Tensor,
    finished,
)
from tests.exporters import text_folders

LONG = "the quick brown fox jumps over the lazy dog and " * 4
TEXTS = ("hello world", "Berlin is the capital", "x", "it's NOT good, é 東京!", "", " a\tb ")


class TextModel:
    """A folder's model behind the gateway's text interface, and its tokenizer for pipelines."""

    def __init__(self, folder: Path, version: Path) -> None:
        self.source = source = load(SourceRequest(folder))
        self._folder, self._pipelines = folder, dict[str, Any]()
        for name, content in source.companions.items():
            (version / name).write_bytes(content)
        found = text_infer.load(version, source.signature)
        assert found is not None
        self.interface = found
        self.batches: list[tuple[int, ...]] = []
        self._infer = TextInfer(found, self._run, "m", 1)

    def _run(self, request: InferRequest, _: object) -> InferResponse:
        inputs = {tensor.name: tensor.data for tensor in request.inputs}
        self.batches.append(inputs["input_ids"].shape)
        outputs = self.source.reference(inputs)
        kept = [Tensor(n, Datatype.FP32, outputs[n]) for n in request.outputs]
        return InferResponse("m", 1, kept)

    def ask(self, inputs: Mapping[str, Sequence[str]], **options: Any) -> InferResponse:
        tensors = [Tensor(n, Datatype.BYTES, array(*each)) for n, each in inputs.items()]
        request = InferRequest("m", tensors, parameters=options)
        return asyncio.run(finished(self._infer(request, NO_DEADLINE)))

    def items(self, inputs: Mapping[str, Sequence[str]], **options: Any) -> list[Any]:
        return answers.items(self.ask(inputs, **options).outputs)

    def pipeline(self, task: str) -> Callable[..., Any]:
        if task not in self._pipelines:
            with quiet():
                tokenizer = transformers.AutoTokenizer.from_pretrained(self._folder)
                self._pipelines[task] = transformers.pipeline(
                    task, model=self.source.model.model, tokenizer=tokenizer, device="cpu"
                )
        return self._pipelines[task]


def array(*texts: str) -> Array:
    found = np.empty(len(texts), object)
    found[:] = [text.encode() for text in texts]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TextModel]:
    made: dict[str, TextModel] = {}

    def find(name: str) -> TextModel:
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            sentences = name == "sentences"
            folder = (
                text_folders.write_sentences(place)
                if sentences
                else text_folders.write(name, place)
            )
            (place / "version").mkdir()
            made[name] = TextModel(folder, place / "version")
        return made[name]

    return find


def same(ours: Any, theirs: Any) -> None:
    """Require equal items, scores up to rounding."""
    assert type(ours) is type(theirs) or isinstance(theirs, np.floating), (ours, theirs)
    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            same(ours[name], value)
    elif isinstance(theirs, float | np.floating):
        assert ours == pytest.approx(float(theirs), abs=2e-5)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", ["sentiment", "several", "reranker"])
def test_classes_are_those_of_the_pipeline(model: Callable[[str], TextModel], name: str) -> None:
    found, pipe = model(name), model(name).pipeline("text-classification")
    same(found.items({"text": TEXTS}), pipe(list(TEXTS), top_k=None))
    same(found.items({"text": TEXTS}, top_k=1), pipe(list(TEXTS), top_k=1))
    for function in ("none", "sigmoid", "softmax") if name == "sentiment" else ():
        expected = pipe(list(TEXTS), top_k=None, function_to_apply=function)
        same(found.items({"text": TEXTS}, function_to_apply=function), expected)
    pair = {"text": "hello world", "text_pair": "Berlin is bad"}
    same(
        found.items({key: [text] for key, text in pair.items()})[0],
        pipe(pair, top_k=None),
    )
    cut = pipe([LONG], top_k=None, truncation=True)
    same(found.items({"text": [LONG]}, truncate=True), cut)


def test_long_pairs_are_cut_as_transformers_cuts_them(model: Callable[[str], TextModel]) -> None:
    found, pipe = model("sentiment"), model("sentiment").pipeline("text-classification")
    words = LONG.split()
    for one, other in ((1, 60), (60, 1), (15, 14), (40, 40), (13, 40), (40, 13), (14, 15)):
        pair = {"text": " ".join(words[:one]), "text_pair": " ".join(words[:other])}
        expected = pipe(pair, top_k=None, truncation=True)
        asked = {key: [text] for key, text in pair.items()}
        same(found.items(asked, truncate=True)[0], expected)


@pytest.mark.parametrize("options", [{}, {"multi_label": True}, {"hypothesis_template": "{}?"}])
def test_zero_shot_is_that_of_the_pipeline(
    model: Callable[[str], TextModel], options: dict[str, Any]
) -> None:
    found, pipe = model("nli"), model("nli").pipeline("zero-shot-classification")
    for labels in (["sport", "urgent", "not urgent"], ["sport"]):
        for text in ("hello world", LONG):
            ours = found.items({"text": [text], "candidate_labels": labels}, **options)[0]
            theirs = pipe(text, candidate_labels=labels, **options)
            assert [item["label"] for item in ours] == theirs["labels"]
            same([item["score"] for item in ours], theirs["scores"])


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_entities_are_those_of_the_pipeline(
    model: Callable[[str], TextModel], strategy: str
) -> None:
    found, pipe = model("tagger"), model("tagger").pipeline("token-classification")
    texts = [text for text in TEXTS if text.strip()] + [LONG, "unurgently greater worlds"]
    theirs = [pipe(text, aggregation_strategy=strategy) for text in texts]
    same(found.items({"text": texts}, aggregation_strategy=strategy), theirs)


def test_filled_masks_are_those_of_the_pipeline(model: Callable[[str], TextModel]) -> None:
    found, pipe = model("filler"), model("filler").pipeline("fill-mask")
    texts = ["hello [MASK]!", "[MASK]", "Berlin is the [MASK] of Germany"]
    same(found.items({"text": texts}, top_k=7), pipe(texts, top_k=7))
    with pytest.raises(InvalidArgument, match="text 2 has 2 masks"):
        found.items({"text": ["[MASK]", "[MASK] [MASK]"]})


def test_embeddings_are_pooled_over_the_tokens(model: Callable[[str], TextModel]) -> None:
    pipe = model("features").pipeline("feature-extraction")
    theirs = [np.mean(pipe(text)[0], axis=0) for text in TEXTS]
    ours = model("features").ask({"text": TEXTS}).outputs[0].data
    np.testing.assert_allclose(ours, theirs, atol=2e-5)
    vectors = model("sentences").ask({"text": TEXTS}).outputs[0].data
    unit = ours / np.linalg.norm(ours, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, unit, atol=2e-5)
    normalized = model("features").ask({"text": TEXTS}, normalize=True).outputs[0].data
    np.testing.assert_allclose(normalized, unit, atol=2e-5)
    few = model("sentences").ask({"text": TEXTS}, dimensions=4).outputs[0].data
    np.testing.assert_allclose(few, unit[:, :4] / np.linalg.norm(unit[:, :4], axis=1)[:, None],
                               atol=2e-5)  # fmt: skip


@pytest.mark.parametrize("name", ["sentiment", "nli", "tagger", "reader", "filler", "sentences"])
def test_the_proof_finds_the_answers_equal(model: Callable[[str], TextModel], name: str) -> None:
    found = model(name)
    for case in text_answers.cases(found.source, 0):
        inputs = {key: [each.decode() for each in value] for key, value in case.inputs.items()}
        outputs = {t.name: t.data for t in found.ask(inputs).outputs}
        text_answers.check(case, outputs)
        wrong = {
            key: value + 0.01 if value.dtype.kind == "f" else value
            for key, value in outputs.items()
        }
        with pytest.raises(ParityError, match="otherwise than transformers' pipeline"):
            text_answers.check(case, wrong)


def test_a_long_context_is_read_in_windows(model: Callable[[str], TextModel]) -> None:
    found = model("reader")
    asked = {"question": ["what is urgent", "what"], "context": [LONG, "Berlin"]}
    found.batches.clear()
    rows = found.items(asked, top_k=3)
    assert sum(rows for rows, _ in found.batches) > 3
    assert all(item["answer"] == LONG[item["start"] : item["end"]] for item in rows[0])
    assert len(rows[0]) == 3
    scores = [item["score"] for item in rows[0]]
    assert scores == sorted(scores, reverse=True)
    (nothing,) = found.items({"question": ["what"], "context": ["Berlin"]},
                             handle_impossible_answer=True, top_k=9)  # fmt: skip
    assert "" in {item["answer"] for item in nothing}


def test_texts_of_similar_lengths_share_a_batch(model: Callable[[str], TextModel]) -> None:
    found = model("sentiment")
    found.batches.clear()
    found.ask({"text": [("hello " * (1 + i % 20)).strip() for i in range(32)]})
    assert [rows for rows, _ in found.batches] == [8, 8, 8, 8]
    lengths = [length for _, length in found.batches]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_long_texts_are_refused_or_cut_as_declared(tmp_path: Path) -> None:
    folder = text_folders.write("sentiment", tmp_path)
    declared = {
        choice: json.loads(
            load(SourceRequest(folder, long_texts=choice)).companions[text_settings.FILENAME]
        )["long_texts"]
        for choice in (None, "truncate", "refuse")
    }
    assert declared == {None: "refuse", "truncate": "truncate", "refuse": "refuse"}
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="--long-texts is for a Hugging Face folder with a"):
        load(SourceRequest(folder, long_texts="truncate"))
    assert text_settings.FILENAME not in load(SourceRequest(folder)).companions


def test_a_tokenizer_that_its_configuration_changes_is_published_as_it_works(
    tmp_path: Path,
) -> None:
    folder = text_folders.write("sentiment", tmp_path)
    own = (folder / "tokenizer.json").read_bytes()
    assert load(SourceRequest(folder)).companions["tokenizer.json"] == own
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "extra_special_tokens": ["[NEW]"]}))
    changed = load(SourceRequest(folder)).companions["tokenizer.json"]
    assert b"[NEW]" in changed


def test_the_start_of_a_very_long_text_is_enough(model: Callable[[str], TextModel]) -> None:
    found, pipe = model("sentiment"), model("sentiment").pipeline("text-classification")
    words, spaces = "hello world " * 2000, " " * 30_000
    for text in (words, f"{spaces}{words}", f"{'x' * 30_000} {words}", f"hello {spaces} world"):
        theirs = pipe([text], top_k=None, truncation=True)
        same(found.items({"text": [text]}, truncate=True), theirs)
        pair = {"text": text, "text_pair": "Berlin is bad"}
        asked = {key: [each] for key, each in pair.items()}
        same(found.items(asked, truncate=True)[0], pipe(pair, top_k=None, truncation=True))
    with pytest.raises(InvalidArgument, match=r"text 1 has more than .* tokens, at most 32"):
        found.items({"text": [words]})
