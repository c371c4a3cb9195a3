"""WAV files as inputs: what transformers' extractors compute, and nothing that damage can cost."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import warnings
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
from click.testing import CliRunner

from modelport.cli import modelport
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.inference import audio_decoding
from modelport.gateway.inference.audio_decoding import MAX_OPEN_SAMPLES, from_parameters
from modelport.gateway.types import Array, Datatype, TensorSpec
from tests import models
from tests.server import serving

RATE = 16_000
MEL = {"audio.features": "log-mel"}
FBANK = {"audio.features": "fbank", "audio.mean": "-4.25", "audio.std": "9.0"}


def spec(*dims: int | str, datatype: Datatype = Datatype.FP32) -> TensorSpec:
    return TensorSpec("x", datatype, dims)


def samples(count: int, seed: int = 0) -> Array:
    """16-bit samples as fractions: tones and noise."""
    at, noise = np.arange(count) / RATE, np.random.default_rng(seed).standard_normal(count)
    sound = 0.4 * np.sin(2 * np.pi * 440 * at) + 0.2 * np.sin(2 * np.pi * 3000 * at) + 0.05 * noise
    found: Array = (np.clip(sound, -1, 1) * 32767).astype("<i2") / np.float32(32768)
    return found


def wav(sound: Array, rate: int = RATE, channels: int = 1, width: int = 2) -> bytes:
    """Write a file with Python's own ``wave``; 8 bits are unsigned."""
    scaled = np.rint(sound.astype(np.float64) * (1 << (8 * width - 1)))
    whole = (scaled + (128 if width == 1 else 0)).astype("<i8")
    raw = whole[:, np.newaxis].view(np.uint8)[:, :width].tobytes()
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(raw)
    return stream.getvalue()


def decode(data: bytes, wanted: TensorSpec, **parameters: str) -> Array:
    given = {f"audio.{name}": value for name, value in parameters.items()}
    found = from_parameters({"audio.rate": str(RATE), **given}, wanted)
    assert found is not None
    return found(data)


@pytest.mark.parametrize("count", [500, 16_000, 40_123, 16_000 * 11])
def test_features_are_those_of_transformers_extractors(count: int) -> None:
    transformers = pytest.importorskip("transformers")
    sound = samples(count)
    warnings.simplefilter("ignore")  # a filter of the default extractor is empty
    extractors = [
        (transformers.WhisperFeatureExtractor(chunk_length=2), spec(80, 200), MEL),
        (transformers.WhisperFeatureExtractor(128, chunk_length=1), spec(128, 100), MEL),
        (transformers.ASTFeatureExtractor(mean=-4.25, std=4.5), spec(1024, 128), FBANK),
        (
            transformers.ASTFeatureExtractor(num_mel_bins=40, max_length=99, do_normalize=False),
            spec(99, 40),
            {"audio.features": "fbank"},
        ),
        (transformers.Wav2Vec2FeatureExtractor(), spec("n"), {"audio.normalize": "true"}),
        (transformers.Wav2Vec2FeatureExtractor(do_normalize=False), spec("n"), {}),
    ]
    for extractor, wanted, parameters in extractors:
        found = from_parameters(
            {"audio.rate": "16000", "audio.truncate": "true", **parameters}, wanted
        )
        assert found is not None
        [expected] = next(iter(extractor(sound, sampling_rate=RATE, return_tensors="np").values()))
        np.testing.assert_allclose(found(wav(sound)), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_every_width_of_a_sample_is_the_same_sound(width: int) -> None:
    sound = np.array([0, 0.5, -1, 0.25, 127 / 128], np.float32)
    np.testing.assert_array_equal(decode(wav(sound, width=width), spec("n")), sound)


def chunk(name: bytes, content: bytes, size: int | None = None) -> bytes:
    stated = len(content) if size is None else size
    return name + struct.pack("<I", stated) + content + b"\0" * (len(content) % 2)


def riff(*chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", 4 + sum(map(len, chunks))) + b"WAVE" + b"".join(chunks)


def head(code: int, bits: int, channels: int = 1, rate: int = RATE, more: bytes = b"") -> bytes:
    block = channels * bits // 8
    return chunk(b"fmt ", struct.pack("<HHIIHH", code, channels, rate, 0, block, bits) + more)


def test_floats_extended_formats_other_chunks_and_unknown_sizes_are_read() -> None:
    sound = samples(7)
    floats, doubles = sound.tobytes(), sound.astype("<f8").tobytes()
    extended = struct.pack("<HHIH", 22, 32, 0, 3) + bytes(14)
    files = [
        riff(head(3, 32), chunk(b"data", floats)),
        riff(head(3, 64), chunk(b"LIST", b"odd"), chunk(b"data", doubles)),
        riff(chunk(b"JUNK", b""), head(0xFFFE, 32, more=extended), chunk(b"data", floats)),
        riff(head(3, 32), chunk(b"data", floats, size=0xFFFFFFFF)),  # of ffmpeg to a pipe
    ]
    for data in files:
        np.testing.assert_array_equal(decode(data, spec("n")), sound)
    assert decode(files[0], spec(1, "n")).shape == (1, 7)
    assert decode(files[0], spec("n", datatype=Datatype.FP16)).dtype == np.float16


def test_channels_are_averaged_and_what_is_short_is_filled_with_silence() -> None:
    both = np.stack([samples(50), np.zeros(50, np.float32)], 1).reshape(-1)
    found = decode(wav(both, channels=2), spec(60))
    np.testing.assert_array_equal(found[:50], samples(50) / 2)
    assert not found[50:].any()


REFUSED = [
    (b"", "is not a WAV file"),
    (b"RIFF....WAVE", "is damaged"),
    (wav(samples(9))[:40], "is damaged"),
    (riff(chunk(b"data", bytes(8)), head(1, 16)), "is damaged"),
    (riff(head(1, 16, channels=0), chunk(b"data", bytes(8))), "is damaged"),
    (riff(head(1, 16, channels=65), chunk(b"data", bytes(800))), "is damaged"),
    (riff(*[chunk(b"JUNK", b"")] * 70, head(1, 16), chunk(b"data", bytes(8))), "is damaged"),
    (riff(head(2, 4), chunk(b"data", bytes(8))), "format 2 with 4 bits"),
    (riff(head(1, 16), chunk(b"data", b"\0")), "no samples"),
    (riff(head(3, 32), chunk(b"data", b"\0\0\x80\x7f")), "are no numbers"),
    (riff(head(3, 64), chunk(b"data", struct.pack("<d", 1e300))), "are no numbers"),
    (wav(samples(9), rate=44_100), "44100 samples a second, the model takes 16000"),
    (wav(samples(RATE)), "1.00 seconds, the model takes at most 0.50"),
]


@pytest.mark.parametrize(("data", "reason"), REFUSED)
def test_a_file_that_the_model_cannot_take_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^input 'x': .*{reason}.*; .*"):
        decode(data, spec(RATE // 2))


def test_what_is_too_long_is_cut_only_where_that_is_declared() -> None:
    sound = samples(RATE)
    np.testing.assert_array_equal(decode(wav(sound), spec(100), truncate="true"), sound[:100])
    # And costs no more than what is kept: the rest is never read.
    long = riff(head(1, 8), chunk(b"data", b"\x80" * (MAX_OPEN_SAMPLES + 1)))
    with pytest.raises(InvalidArgument, match="seconds"):
        decode(long, spec("n"))


def test_damage_anywhere_is_a_sound_or_a_clear_error() -> None:
    whole, rng = wav(samples(300)), random.Random(0)
    outcomes = set()
    for _ in range(3000):
        data = bytearray(whole[: rng.choice([len(whole), rng.randrange(len(whole))])])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(min(len(data), 60))] = rng.randrange(256)
        try:
            assert np.isfinite(decode(bytes(data), spec(8, 5), features="log-mel")).all()
            outcomes.add("a sound")
        except InvalidArgument as error:
            outcomes.add(str(error).split(";")[0][:30])
    assert len(outcomes) > 4


@pytest.mark.parametrize(
    ("parameters", "wanted", "name"),
    [
        ({"rate": "fast"}, spec("n"), "audio.rate"),
        ({"rate": "1e9"}, spec("n"), "audio.rate"),
        ({"rate": "nan"}, spec("n"), "audio.rate"),
        ({"rate": "50", "features": "log-mel"}, spec(8, 20), "audio.rate"),
        ({"rate": "50", "features": "fbank"}, spec(20, 8), "audio.rate"),
        ({"features": "mfcc"}, spec(80, 100), "audio.features"),
        ({"features": "fbank"}, spec("n", 80), "audio.features"),
        ({"features": "log-mel"}, spec(1 << 20, 9), "audio.features"),
        ({"features": "fbank", "std": "0"}, spec(9, 9), "audio.std"),
        ({"normalize": "maybe"}, spec("n"), "audio.normalize"),
    ],
)
def test_a_wrong_parameter_is_named(
    parameters: dict[str, str], wanted: TensorSpec, name: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"parameter '{name}'"):
        decode(wav(samples(9)), wanted, **parameters)


def test_only_a_float_input_of_the_right_rank_is_a_sound() -> None:
    for wanted in (spec(9, datatype=Datatype.INT16), spec(2, 9), spec(1, 2, 9)):
        assert from_parameters({"audio.rate": "16000"}, wanted) is None
    assert from_parameters({}, spec("n")) is None
    assert not audio_decoding.is_wav(b"RIFF\0\0\0\0AVI ")


def test_a_sound_is_predicted_by_every_way_that_takes_images(tmp_path: Path) -> None:
    """A body, base64 in JSON, and a file of ``modelport infer`` are the same request."""
    models.multiply(tmp_path / "models" / "sound" / "1" / "model.onnx")
    extra = 'parameters { key: "audio.rate" value { string_value: "16000" } }'
    config = models.config("sound", ["x FP32 4"], ["y FP32 4"], extra=extra)
    (tmp_path / "models" / "sound" / "config.pbtxt").write_text(config)
    sound = samples(3)
    body = wav(sound)
    expected = [*(2 * sound).tolist(), 0.0]
    encoded = {"instances": [{"b64": base64.b64encode(body).decode()}]}
    (tmp_path / "sound.wav").write_bytes(body)
    with (
        serving(tmp_path / "models") as gateway,
        httpx.Client(base_url=f"http://{gateway.http}") as client,
    ):
        assert client.post("/predictions/sound", content=body).json() == expected
        for path in ("/predictions/sound", "/v1/models/sound:predict"):
            [row] = client.post(path, json=encoded).json()["predictions"]
            assert row == pytest.approx(expected)
        flags = ["--url", f"http://{gateway.http}", "--json"]
        file = str(tmp_path / "sound.wav")
        printed = CliRunner().invoke(modelport, ["infer", "sound", file, *flags])
        assert json.loads(printed.stdout) == {"y": [expected]}
        wrong = client.post("/predictions/sound", content=wav(sound, rate=8000))
        assert wrong.status_code == 400
        assert "8000 samples a second" in wrong.text
