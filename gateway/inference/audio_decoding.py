"""WAV files as model input, preprocessed as the model's configuration declares.

A float input may be a sound if the ``parameters`` of ``config.pbtxt`` have ``audio.rate``. Others
are optional:

    audio.rate       samples a second; a file of another rate is refused
    audio.features   waveform (the default), log-mel (of Whisper) or fbank (of Kaldi)
    audio.normalize  true: a waveform has mean 0 and variance 1
    audio.truncate   true: what is longer than the input is cut; otherwise it is refused
    audio.mean       subtracted from the features of fbank
    audio.std        divisor of the result

The dims of the input are ``[samples]`` for a waveform, ``[bins, frames]`` for log-mel, which are
100 a second, and ``[frames, bins]`` for fbank. What is shorter is filled with silence. Results are
those of Hugging Face's feature extractors of Wav2Vec2, Whisper and the Audio Spectrogram
Transformer. The channels of a file are averaged.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.runtime import offload
from modelport.gateway.types import NUMPY_DTYPES, Array, Datatype, TensorSpec

#: The first bytes of a WAV file, and those from the eighth on.
RIFF, WAVE = b"RIFF", b"WAVE"
#: Samples of a waveform whose length the model leaves open: four minutes at 16 kHz.
MAX_OPEN_SAMPLES: Final = 1 << 22
MAX_RATE: Final = 768_000
#: Of features, whose frames are 100 a second.
LEAST_RATE: Final = 100
#: Of a file, and its chunks before the samples.
MAX_CHANNELS, MAX_CHUNKS = 64, 64
MAX_BINS: Final = 1024
#: Frames that are transformed, and samples that are converted at a time: some milliseconds.
_BLOCK, _PIECE = 256, 1 << 16
_DATATYPES = (Datatype.FP16, Datatype.FP32, Datatype.FP64)
#: Formats of samples by code and bits: their datatype, and the value of full scale.
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_SAMPLES: dict[tuple[int, int], tuple[str, float]] = {
    (_PCM, 8): ("u1", 128.0),
    (_PCM, 16): ("<i2", 32768.0),
    (_PCM, 24): ("<i4", 2147483648.0),
    (_PCM, 32): ("<i4", 2147483648.0),
    (_FLOAT, 32): ("<f4", 1.0),
    (_FLOAT, 64): ("<f8", 1.0),
}
#: Samples by the number of the model's: from those to the features.
Features = Callable[[Array], Array]


def is_wav(data: bytes) -> bool:
    """Whether ``data`` begins as a WAV file does."""
    return data[:4] == RIFF and data[8:12] == WAVE


def from_parameters(
    parameters: Mapping[str, str], spec: TensorSpec
) -> Callable[[bytes], Array] | None:
    """A function from the bytes of a WAV file to the input ``spec``; None: it is no sound.

    The array has the dims of ``spec``, as that of ``image_decoding.decoder``. Decoding takes
    milliseconds, so call it in a thread.

    Raises:
        InvalidArgument: Here, naming the invalid parameter; from the decoder, naming the input
            whose bytes are not a valid WAV file, of another rate, or too long.
    """
    if "audio.rate" not in parameters or spec.datatype not in _DATATYPES:
        return None
    rate = _number(parameters, "audio.rate")
    if not 0 < rate <= MAX_RATE or rate != int(rate):
        raise InvalidArgument(f"parameter 'audio.rate' must be a number from 1 to {MAX_RATE}")
    kind = parameters.get("audio.features", "waveform")
    dims = spec.wire_dims
    leading = len(dims) - (1 if kind == "waveform" else 2)
    if leading not in (0, 1) or any(dim > 1 for dim in dims[:leading]):
        return None
    make, samples = _features(kind, parameters, dims[leading:], int(rate))
    prepare = _SoundDecoder(
        spec.name, NUMPY_DTYPES[spec.datatype], int(rate), samples, make,
        _flag(parameters, "audio.truncate"),
    )  # fmt: skip
    if not leading:
        return prepare
    return lambda data: prepare(data)[np.newaxis]


def _features(
    kind: str, parameters: Mapping[str, str], dims: tuple[int, ...], rate: int
) -> tuple[Features, int]:
    """The function that makes the features, and the number of samples that it takes; 0: any."""
    if kind == "waveform":
        wanted = max(dims[0], 0)
        normal = _flag(parameters, "audio.normalize")
        return lambda samples: _waveform(samples, wanted, normal), wanted
    if kind not in ("log-mel", "fbank"):
        raise InvalidArgument(
            f"parameter 'audio.features' must be waveform, log-mel or fbank, not '{kind[:64]}'"
        )
    bins, frames = dims if kind == "log-mel" else dims[::-1]
    if not (0 < bins <= MAX_BINS and frames > 0):
        raise InvalidArgument(
            f"parameter 'audio.features' is {kind}, which needs an input of fixed dims; it has "
            f"{list(dims)}"
        )
    if rate < LEAST_RATE:
        raise InvalidArgument(f"parameter 'audio.rate' must be at least {LEAST_RATE} for {kind}")
    if kind == "log-mel":
        return LogMel(bins, frames, rate), frames * (rate // 100)
    mean, std = _number(parameters, "audio.mean", 0.0), _number(parameters, "audio.std", 1.0)
    if std <= 0:
        raise InvalidArgument("parameter 'audio.std' must be greater than 0")
    fbank = Fbank(bins, frames, rate, mean, std)
    return fbank, (frames - 1) * fbank.hop + fbank.length


@dataclass(frozen=True, slots=True)
class _SoundDecoder:
    """Bytes → the input.

    Attributes:
        samples: The most that the model takes; 0: any number.
    """

    name: str
    dtype: np.dtype[np.generic]
    rate: int
    samples: int
    make: Features
    truncate: bool

    def __call__(self, data: bytes) -> Array:
        try:
            sound = _read(data, self.rate, self.samples or MAX_OPEN_SAMPLES, self.truncate)
        except _NotUsable as error:
            raise InvalidArgument(f"input '{self.name}': {error}") from error
        return np.asarray(self.make(sound), self.dtype)


# -- the file --------------------------------------------------------------------------------------


class _NotUsable(Exception):
    """The message says what is wrong with the file, and what to send."""


def _read(data: bytes, rate: int, most: int, truncate: bool) -> Array:
    """The samples of a WAV file as float32 ``[samples]``, -1 to 1.

    Source: Microsoft's Multimedia Programming Interface and Data Specifications 1.0.

    Raises:
        _NotUsable: It is damaged, of another rate, or too long.
    """
    code, channels, own_rate, bits, samples = _chunks(data)
    known = _SAMPLES.get((code, bits))
    if known is None:
        raise _NotUsable(
            f"samples of format {code} with {bits} bits are not known; send PCM of 8, 16, 24 or 32 "
            "bits, or floats: ffmpeg -i FILE -c:a pcm_s16le sound.wav"
        )
    if own_rate != rate:
        raise _NotUsable(
            f"the sound has {own_rate} samples a second, the model takes {rate}; resample it: "
            f"ffmpeg -i FILE -ar {rate} sound.wav"
        )
    block = channels * bits // 8
    count = len(samples) // block
    if not count:
        raise _NotUsable("the sound has no samples; send one that has")
    if count > most and not truncate:
        raise _NotUsable(
            f"the sound has {count / rate:.2f} seconds, the model takes at most "
            f"{most / rate:.2f}; send a part of it"
        )
    count = min(count, most)
    mono = np.empty(count, np.float32)
    for at in range(0, count, _PIECE):
        piece = _numbers(samples[at * block : min(at + _PIECE, count) * block], *known, bits)
        mono[at : at + _PIECE] = piece.reshape(-1, channels).mean(1)
        offload.checkpoint()
    if not np.isfinite(mono).all():
        raise _NotUsable("the sound has samples that are no numbers; send finite ones")
    return mono


def _chunks(data: bytes) -> tuple[int, int, int, int, memoryview]:
    """The format's code, channels, rate and bits, and the bytes of the samples."""
    view, offset, found = memoryview(data), 12, None
    if not is_wav(data):
        raise _NotUsable("the data is not a WAV file; send one: ffmpeg -i FILE sound.wav")
    for _ in range(MAX_CHUNKS):
        name, size = bytes(view[offset : offset + 4]), view[offset + 4 : offset + 8]
        if len(size) < 4:
            break
        # A writer that does not know the size, such as ffmpeg to a pipe, states the largest one.
        chunk = view[offset + 8 : offset + 8 + int.from_bytes(size, "little")]
        if name == b"fmt " and len(chunk) >= 16:
            code, channels, rate, _, block, bits = struct.unpack_from("<HHIIHH", chunk)
            if code == _EXTENSIBLE and len(chunk) >= 26:
                (code,) = struct.unpack_from("<H", chunk, 24)
            if not 0 < channels <= MAX_CHANNELS or block != channels * bits // 8:
                break
            found = code, channels, rate, bits
        elif name == b"data":
            if found is None:
                break
            return (*found, chunk)
        offset += 8 + len(chunk) + len(chunk) % 2
    raise _NotUsable("the WAV file is damaged; send a whole one")


def _numbers(samples: memoryview, dtype: str, scale: float, bits: int) -> Array:
    if bits == 24:
        # As the upper bytes of 32 bits.
        wide = np.zeros((len(samples) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(samples, np.uint8).reshape(-1, 3)
        values = wide.reshape(-1).view(dtype)
    else:
        values = np.frombuffer(samples, dtype)
    if dtype == "u1":
        return (values.astype(np.float32) - 128) / np.float32(scale)
    with np.errstate(over="ignore"):  # ``_read`` refuses infinity
        return values.astype(np.float32) / np.float32(scale)


# -- features --------------------------------------------------------------------------------------


def _waveform(samples: Array, wanted: int, normal: bool) -> Array:
    if normal:
        samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    return _filled(samples, wanted or len(samples))


def _filled(samples: Array, wanted: int) -> Array:
    return np.pad(samples, (0, wanted - len(samples))) if len(samples) < wanted else samples


class LogMel:
    """Whisper's features, ``[bins, frames]``: frames of 25 ms, 10 ms apart, on Slaney's mel scale.

    Source: Radford et al., Robust Speech Recognition via Large-Scale Weak Supervision, 2022.
    """

    def __init__(self, bins: int, frames: int, rate: int) -> None:
        self.length, self.hop = rate // 40, rate // 100
        self._samples = frames * self.hop
        self._window = _hann(self.length, self.length)
        edges = _from_slaney(np.linspace(0.0, _slaney(min(8000.0, rate / 2)), bins + 2))
        heights = 2.0 / (edges[2:] - edges[:-2])
        frequencies = np.linspace(0.0, rate // 2, 1 + self.length // 2)
        self._filters = _triangles(frequencies, edges) * heights

    def __call__(self, samples: Array) -> Array:
        half = self.length // 2
        padded = np.pad(_filled(samples, self._samples), half, mode="reflect")
        frames = _frames(padded, self.length, self.hop)[:-1]
        powers = _powers(frames, lambda block: block * self._window, self.length)
        logs = np.log10(np.maximum(powers @ self._filters, 1e-10)).T
        found: Array = (np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0
        return found


class Fbank:
    """Kaldi's features, ``[frames, bins]``: frames of 25 ms, 10 ms apart, from 20 Hz on.

    Source: Kaldi's ``compute-fbank-feats`` with ``--window-type=hanning``, without dither.
    """

    def __init__(self, bins: int, frames: int, rate: int, mean: float, std: float) -> None:
        self.length, self.hop = rate // 40, rate // 100
        self._frames, self._mean, self._std = frames, mean, std
        self._fft = 1 << (self.length - 1).bit_length()
        self._window = _hann(self.length, self.length - 1)
        edges = np.linspace(_kaldi(20.0), _kaldi(rate // 2), bins + 2)
        frequencies = rate / self._fft * np.arange(1 + self._fft // 2)
        self._filters = _triangles(_kaldi(frequencies), edges)

    def __call__(self, samples: Array) -> Array:
        frames = _frames(samples, self.length, self.hop)[: self._frames]
        powers = _powers(frames, self._emphasized, self._fft)
        found = np.zeros((self._frames, self._filters.shape[1]))
        found[: len(powers)] = np.log(np.maximum(powers @ self._filters, np.finfo(np.float32).eps))
        return (found - self._mean) / self._std

    def _emphasized(self, frames: Array) -> Array:
        """Remove the offset, raise the high frequencies, and apply the window."""
        frames = frames - frames.mean(1, keepdims=True)
        before = np.concatenate([frames[:, :1], frames[:, :-1]], 1)
        return (frames - 0.97 * before) * self._window


def _frames(samples: Array, length: int, hop: int) -> Array:
    """``[frames, length]``, whole frames only."""
    if len(samples) < length:
        return np.empty((0, length))
    return np.lib.stride_tricks.sliding_window_view(samples, length)[::hop]


def _powers(frames: Array, shape: Callable[[Array], Array], size: int) -> Array:
    """The power spectrum of each shaped frame, ``[frames, 1 + size // 2]``."""
    found = np.empty((len(frames), 1 + size // 2))
    for at in range(0, len(frames), _BLOCK):
        block = shape(frames[at : at + _BLOCK].astype(np.float64))
        found[at : at + _BLOCK] = np.abs(np.fft.rfft(block, size)) ** 2
        offload.checkpoint()
    return found


def _triangles(frequencies: Array, edges: Array) -> Array:
    """Filters ``[frequencies, bins]``, each from one edge over the next to the one after it."""
    rise = (frequencies[:, np.newaxis] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    fall = (edges[2:] - frequencies[:, np.newaxis]) / (edges[2:] - edges[1:-1])
    found: Array = np.maximum(0.0, np.minimum(rise, fall))
    return found


def _hann(length: int, period: int) -> Array:
    found: Array = 0.5 - 0.5 * np.cos(2 * math.pi * np.arange(length) / period)
    return found


#: Slaney's scale is linear up to here, in steps of 200/3 Hz, and logarithmic from there on.
_BEND_HZ, _BEND_MEL, _STEP = 1000.0, 15.0, math.log(6.4) / 27


def _slaney(hertz: float) -> float:
    if hertz < _BEND_HZ:
        return 3 * hertz / 200
    return _BEND_MEL + math.log(hertz / _BEND_HZ) / _STEP


def _from_slaney(mel: Array) -> Array:
    above = _BEND_HZ * np.exp(_STEP * (mel - _BEND_MEL))
    return np.where(mel < _BEND_MEL, 200 * mel / 3, above)


def _kaldi(hertz: Any) -> Any:
    return 1127.0 * np.log(1.0 + np.asarray(hertz) / 700.0)


# -- parameters ------------------------------------------------------------------------------------


def _number(parameters: Mapping[str, str], key: str, otherwise: float = math.nan) -> float:
    text = parameters.get(key)
    try:
        found = otherwise if text is None else float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise InvalidArgument(f"parameter '{key}' must be a number, not '{(text or '')[:64]}'")
    return found


def _flag(parameters: Mapping[str, str], key: str) -> bool:
    text = parameters.get(key, "false")
    if text not in ("true", "false"):
        raise InvalidArgument(f"parameter '{key}' must be true or false, not '{text[:64]}'")
    return text == "true"
