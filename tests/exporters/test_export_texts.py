"""Exports with a text interface: published only if the gateway answers as the pipeline does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelport.exporters import api
from modelport.exporters.errors import ParityError
from modelport.gateway.inference.text import tokenizing
from modelport.gateway.repository import manifest, text_settings
from tests.exporters import text_folders

FORMATS = ("torchscript", "openvino", "savedmodel", "tflite", "pt2")


def write(name: str, place: Path) -> Path:
    if name == "sentences":
        return text_folders.write_sentences(place)
    return text_folders.write(name, place)


def publish(name: str, place: Path, format: str = "onnx") -> Path:
    (done,) = api.export(
        write(name, place), name="m", format=format, repository=place / "repository", samples=10
    )
    return Path(str(done.path))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "format"),
    [
        *((name, "onnx") for name in (*text_folders.MODELS, "sentences")),
        *(("sentiment", format) for format in FORMATS),
        ("tagger", "torchscript"),
    ],
)
def test_every_task_and_format_is_published_with_its_text_interface(
    name: str, format: str, tmp_path: Path
) -> None:
    version = publish(name, tmp_path, format)
    settings = text_settings.parse((version / text_settings.FILENAME).read_bytes())
    assert settings.max_tokens == text_folders.MAX_TOKENS
    certified = json.loads((version / manifest.CERTIFICATE).read_text())["artifact"]["files"]
    listed = manifest.parse((version / manifest.FILENAME).read_bytes())
    for file in (text_settings.FILENAME, text_settings.TOKENIZER):
        assert file in certified
        assert file in listed


@pytest.mark.thorough
def test_a_gateway_that_tokenizes_otherwise_publishes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The known-bad variant: the second text of a pair has the type of the first."""
    padded = tokenizing.padded

    def wrong(*given: object) -> object:
        inputs = padded(*given)  # type: ignore[arg-type]
        return {**inputs, "token_type_ids": inputs["token_type_ids"] * 0}

    monkeypatch.setattr(tokenizing, "padded", wrong)
    with pytest.raises(ParityError, match="otherwise than transformers' pipeline"):
        publish("sentiment", tmp_path)
    assert not (tmp_path / "repository").exists()
