"""The files of a text interface, damaged in every entry, and texts of hostile clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.inference.text import text_infer
from modelport.gateway.inference.text.text_infer import TextInfer, TextInterface
from modelport.gateway.inference.text.text_request import MAX_BYTES, MAX_TEXTS
from modelport.gateway.inference.text.tokenizing import MAX_TEXT_BYTES
from modelport.gateway.models.inference_service import InferenceService
from modelport.gateway.models.manager import ModelManager
from modelport.gateway.repository import config, text_settings
from modelport.gateway.repository.text_settings import TextTask
from modelport.gateway.rollout.traffic.shadow import infer_copy
from modelport.gateway.settings import Settings
from modelport.gateway.types import (
    NO_DEADLINE,
    Datatype,
    InferRequest,
    InferResponse,
    ModelSignature,
    Tensor,
    finished,
)
from tests import texts

LABELS = ("contradiction", "entailment")
SETTINGS = texts.settings(TextTask.CLASSIFICATION, labels=LABELS)


@pytest.fixture
def version(tmp_path: Path) -> Path:
    return texts.publish(tmp_path, "m", texts.table(2), SETTINGS)


def signature(version: Path) -> ModelSignature:
    parsed = config.parse((version.parent / config.FILENAME).read_text())
    return config.signature(config.complete(parsed, "m"))


def load(version: Path) -> TextInterface:
    found = text_infer.load(version, signature(version))
    assert found is not None
    return found


def refused(version: Path) -> bool:
    try:
        load(version)
    except IntegrityError:
        return True
    return False


def ask(version: Path, inputs: dict[str, Sequence[bytes]], **options: Any) -> InferResponse:
    def answer(request: InferRequest, _: object) -> InferResponse:
        rows = request.inputs[0].data.shape[0]
        return InferResponse("m", 1, [Tensor("logits", Datatype.FP32, np.zeros((rows, 2)))])

    tensors = []
    for name, items in inputs.items():
        array = np.empty(len(items), object)
        array[:] = items
        tensors.append(Tensor(name, Datatype.BYTES, array))
    infer = TextInfer(load(version), answer, "m", 1)
    request = InferRequest("m", tensors, parameters=options)
    return asyncio.run(finished(infer(request, NO_DEADLINE)))


WRONG = (None, True, 1.5, -1, "x", [], {}, 2**40)


@pytest.mark.parametrize("entry", list(json.loads(SETTINGS.to_json())))
def test_settings_of_another_type_are_refused(version: Path, entry: str) -> None:
    path = version / text_settings.FILENAME
    document = json.loads(path.read_text())
    accepted = []
    for wrong in WRONG:
        path.write_text(json.dumps({**document, entry: wrong}))
        if not refused(version):
            accepted.append(wrong)
    same_kind = [wrong for wrong in WRONG if type(wrong) is type(document[entry])]
    optional = [None] if entry in ("pad", "unknown", "mask", "cls") else []
    assert all(wrong in same_kind + optional for wrong in accepted)
    rest = {name: value for name, value in document.items() if name != entry}
    if entry in ("format", "task", "max_tokens", "long_texts", "labels", "function"):
        path.write_text(json.dumps(rest))
        with pytest.raises(IntegrityError):
            load(version)


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "1.0"}', "{" * 10_000, "\xff"])
def test_what_is_no_tokenizer_is_refused(version: Path, content: str) -> None:
    (version / text_settings.TOKENIZER).write_bytes(content.encode("latin-1"))
    with pytest.raises(IntegrityError, match="tokenizer") as refused:
        load(version)
    assert len(str(refused.value)) < 400


def test_a_text_interface_has_to_fit_its_model(version: Path) -> None:
    for changes, message in (
        ({"labels": ("a",)}, "1 classes, as its labels"),
        ({"max_tokens": 33}, "sequences of 33 tokens"),
        ({"task": "fill-mask", "mask": 4}, ""),
        ({"task": "question-answering"}, "an output 'end_logits'"),
        ({"task": "feature-extraction"}, "an output 'last_hidden_state' of a fixed size"),
    ):
        document = {**json.loads(SETTINGS.to_json()), **changes}
        (version / text_settings.FILENAME).write_text(json.dumps(document))
        if message:
            with pytest.raises(IntegrityError, match=message):
                load(version)


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ({"text": [b"\xff"]}, {}, "text 1 of input 'text' is not valid UTF-8"),
        ({"text": [b"x", b"x" * (MAX_TEXT_BYTES + 1)]}, {}, "text 2 .* bytes, at most"),
        ({"text": [b"x"] * (MAX_TEXTS + 1)}, {}, "2049 texts, 1 to 2048 are taken"),
        ({"text": [b"x" * MAX_TEXT_BYTES] * 33}, {}, f"at most {MAX_BYTES} are taken"),
        ({"text": []}, {}, "0 texts, 1 to 2048"),
        ({"text": [b"x"], "text_pair": [b"x"] * 2}, {}, "they belong together"),
        ({"text": [b"x"] * 99, "candidate_labels": [b"y"] * 99}, {}, "more than 8192 sequences"),
        ({"text": [b"x"], "candidate_labels": [b"y"], "text_pair": [b"z"]}, {}, "exclude each"),
        ({"text": [b"x"], "candidate_labels": [b"y"]}, {"hypothesis_template": "{0}"}, "contain"),
        ({"text": [b"x"], "candidate_labels": [b"the fox " * 30]}, {}, "leave no room"),
        ({"text": [b"the fox " * 30]}, {}, "tokens, at most 32 are taken"),
        ({"text": [b"x"]}, {"truncate": 1}, "'truncate' must be true or false"),
        ({"text": [b"x"]}, {"function_to_apply": "exec"}, "must be softmax, sigmoid, none"),
        ({"text": [b"x"]}, {"top_k": 10**9}, "an integer from 1 to 1024"),
        ({"text": [b"x"]}, {"unknown": 1}, "there is no parameter 'unknown'"),
    ],
)
def test_hostile_texts_are_refused(
    version: Path, inputs: dict[str, list[bytes]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ask(version, inputs, **options)


def test_a_template_is_text_and_no_format(version: Path) -> None:
    template = "{} {0.__class__} %s"
    found = ask(version, {"text": [b"x"], "candidate_labels": [b"{}", b"y"]},
                hypothesis_template=template)  # fmt: skip
    assert sorted(found.outputs[0].data[0].tolist()) == [b"y", b"{}"]


async def test_a_copy_of_a_request_of_texts_is_answered_as_the_request(tmp_path: Path) -> None:
    manager = ModelManager(Settings((texts.repository(tmp_path),)))
    await manager.start()
    service = InferenceService(manager)

    def request() -> InferRequest:
        array = np.empty(2, object)
        array[:] = [b"hello world", b"Berlin"]
        return InferRequest("sentiment", [Tensor("text", Datatype.BYTES, array)])

    try:
        answered = await finished(service.infer(request(), NO_DEADLINE))
        copied = await infer_copy(service, request(), NO_DEADLINE)
        for one, other in zip(answered.outputs, copied.outputs, strict=True):
            assert one.data.tolist() == other.data.tolist()
        assert manager.get("sentiment").takes_texts(request())
    finally:
        await manager.stop()
