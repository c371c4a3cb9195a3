"""Folders of models of sound: what a client sends as a WAV file gets transformers' own answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import modelport
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources.huggingface import audio
from modelport.exporters.sources.huggingface.folder import Folder
from modelport.gateway.errors import IntegrityError
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.exporters.huggingface_folders import LABELS
from tests.server import serving
from tests.test_sounds import RATE, samples, wav

_SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, **LABELS}


def write(kind: str, folder: Path) -> tuple[Any, Any]:
    """A tiny model with random weights; return it and its feature extractor."""
    import transformers as t

    torch.manual_seed(0)
    if kind == "ast":
        extractor: Any = t.ASTFeatureExtractor(num_mel_bins=40, max_length=99)
        sizes = {"intermediate_size": 48, "max_length": 99, "num_mel_bins": 40}
        model: Any = t.ASTForAudioClassification(t.ASTConfig(**_SIZES, **sizes))
    elif kind == "whisper":
        extractor = t.WhisperFeatureExtractor(20, chunk_length=2)
        sizes = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4}
        frames = {"encoder_ffn_dim": 48, "num_mel_bins": 20, "max_source_positions": 100}
        rest = {"vocab_size": 60, "decoder_layers": 1, "decoder_attention_heads": 4}
        config = t.WhisperConfig(**sizes, **frames, **rest, **LABELS, pad_token_id=0)
        model = t.WhisperForAudioClassification(config)
    else:
        extractor = t.Wav2Vec2FeatureExtractor()
        sizes = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8)}
        rest = {"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16}
        more = {"num_conv_pos_embedding_groups": 2, "intermediate_size": 48}
        model = t.Wav2Vec2ForSequenceClassification(
            t.Wav2Vec2Config(**_SIZES, **sizes, **rest, **more, classifier_proj_size=16)
        )
    with quiet():
        model.eval().save_pretrained(folder)
        extractor.save_pretrained(folder)
    return model, extractor


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:At least one mel filter")
@pytest.mark.parametrize("kind", ["ast", "whisper", "wav2vec2"])
def test_a_wav_file_gets_the_answer_of_transformers(kind: str, tmp_path: Path) -> None:
    model, extractor = write(kind, tmp_path / kind)
    modelport.export(tmp_path / kind, format=["onnx"], repository=tmp_path / "models")
    sounds = [samples(RATE // 2, seed) for seed in range(3)]
    with (
        serving(tmp_path / "models") as gateway,
        httpx.Client(base_url=f"http://{gateway.http}", timeout=60) as client,
    ):
        [found] = client.post("/v2/repository/index").json()
        for sound in sounds:
            reply = client.post(f"/predictions/{found['name']}", content=wav(sound))
            with torch.no_grad():
                features = extractor(sound, sampling_rate=RATE, return_tensors="pt")
                logits = model(**features).logits[0]
            expected = dict(zip("abc", torch.softmax(logits, 0).tolist(), strict=True))
            assert reply.json() == pytest.approx(expected, abs=1e-4)


def parameters(tmp_path: Path, processor: Any, *dims: int | str) -> dict[str, str]:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    spec = TensorSpec("input_values", Datatype.FP32, dims)
    folder = Folder(tmp_path, {}, (), ())
    return audio.parameters(folder, ModelSignature((spec,), (spec,), 1))


def test_the_extractor_s_settings_become_parameters(tmp_path: Path) -> None:
    ast = {"feature_extractor_type": "ASTFeatureExtractor", "mean": 1, "std": 2.5}
    assert parameters(tmp_path, ast, 99, 40) == {
        **{"audio.rate": "16000", "audio.features": "fbank", "audio.truncate": "true"},
        **{"audio.mean": "1.0", "audio.std": "5.0"},
    }
    wave = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "sampling_rate": 8000}
    assert parameters(tmp_path, wave, "n") == {"audio.rate": "8000", "audio.normalize": "true"}
    whisper = {"feature_extractor_type": "WhisperFeatureExtractor"}
    found = {"audio.rate": "16000", "audio.features": "log-mel", "audio.truncate": "true"}
    assert parameters(tmp_path, whisper, 80, 3000) == found
    for other in ({"hop_length": 100}, {"n_fft": 512}, {"do_normalize": True}):
        assert parameters(tmp_path, {**whisper, **other}, 80, 3000) == {}
    assert parameters(tmp_path, {"feature_extractor_type": "DacFeatureExtractor"}, "n") == {}


@pytest.mark.parametrize(
    "wrong", [{"std": 0}, {"std": "4"}, {"mean": float("nan")}, {"sampling_rate": [1]}]
)
def test_a_setting_that_is_no_number_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match=r"preprocessor_config\.json.*; copy the folder again"):
        parameters(tmp_path, {"feature_extractor_type": "ASTFeatureExtractor", **wrong}, 99, 40)
