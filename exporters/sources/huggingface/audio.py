"""``preprocessor_config.json`` of a model of sound, as parameters of ``config.pbtxt``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from modelport.exporters.sources.huggingface.folder import PREPROCESSOR, Folder
from modelport.gateway.errors import IntegrityError, InvalidArgument
from modelport.gateway.inference import audio_decoding
from modelport.gateway.types import ModelSignature


def parameters(folder: Folder, signature: ModelSignature) -> dict[str, str]:
    """The parameters ``audio.*`` of the folder's feature extractor; none if it has no known one.

    Raises:
        IntegrityError: A value of the file is not a number, or contradicts the model.
    """
    try:
        found = _parameters(folder.preprocessor())
        if found:
            audio_decoding.from_parameters(found, signature.inputs[0])
    except InvalidArgument as error:
        raise IntegrityError(
            f"'{folder.path / PREPROCESSOR}': {error}; copy the folder again"
        ) from error
    return found


def _parameters(processor: Mapping[str, Any]) -> dict[str, str]:
    """The parameters, with the defaults of transformers' feature extractors."""
    kind = processor.get("feature_extractor_type")
    normalize = processor.get("do_normalize", kind != "WhisperFeatureExtractor") is True
    if kind == "Wav2Vec2FeatureExtractor":
        found = {"audio.normalize": str(normalize).lower()}
    elif kind == "WhisperFeatureExtractor" and not normalize and _is_usual(processor):
        found = {"audio.features": "log-mel", "audio.truncate": "true"}
    elif kind == "ASTFeatureExtractor":
        found = {"audio.features": "fbank", "audio.truncate": "true"}
        if normalize:
            found["audio.mean"] = str(_number(processor, "mean", -4.2677393))
            # The extractor divides by twice the deviation.
            found["audio.std"] = str(2 * _number(processor, "std", 4.5689974))
    else:
        return {}
    return {"audio.rate": f"{_number(processor, 'sampling_rate', 16_000):g}", **found}


def _is_usual(processor: Mapping[str, Any]) -> bool:
    """Whether frames have 25 ms and are 10 ms apart, as those of ``audio_decoding``."""
    rate = _number(processor, "sampling_rate", 16_000)
    hop, length = _number(processor, "hop_length", 160), _number(processor, "n_fft", 400)
    return rate == 100 * hop == 40 * length


def _number(processor: Mapping[str, Any], key: str, usual: float) -> float:
    value = processor.get(key, usual)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise InvalidArgument(f"{key} is {str(value)[:64]!r}, not a number")
    return float(value)
