"""The choice of the reader for a checkpoint: its name, or the files in its folder, decide."""

from __future__ import annotations

import importlib
from pathlib import Path

from modelport.exporters.loaded_model import Source
from modelport.exporters.sources import SourceRequest
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import missing_extra

KERAS_SUFFIXES = frozenset({".keras", ".h5", ".hdf5"})
#: ``--model LIBRARY:NAME``.
VISION_LIBRARIES = frozenset({"timm", "torchvision"})
SAVED_MODEL = "saved_model.pb"
HUGGING_FACE = ("config.json", "modules.json")
#: Files of such a folder: its configuration and its weights.
PARTS = frozenset({HUGGING_FACE[0], "model.safetensors", "pytorch_model.bin"})
#: Of XGBoost and CatBoost (both .json), LightGBM and skops.
TREE_SUFFIXES = frozenset({".ubj", ".json", ".txt", ".skops"})
#: Of CatBoost's default format, which only its library reads.
CATBOOST_SUFFIX = ".cbm"
RECORDED_SUFFIX = ".npz"
PICKLE_SUFFIXES = frozenset({".pkl", ".pickle", ".joblib"})


def load(request: SourceRequest) -> Source:
    """Load the model that ``request`` names, with its weights.

    Raises:
        UsageError: there is no such checkpoint, or it does not fit the model.
        IntegrityError: the checkpoint is damaged or wants to run code.
        Unsupported: a required library is not installed.
    """
    path = request.checkpoint
    if not path.exists():
        raise UsageError(f"checkpoint '{path}' does not exist; give the path of a trained model")
    if request.model is None and path.is_file() and path.name in PARTS:
        others = {part for part in PARTS if (path.parent / part).is_file()}
        if HUGGING_FACE[0] in others and len(others) > 1:
            raise UsageError(
                f"'{path}' is one file of a Hugging Face folder; give the folder, '{path.parent}'"
            )
    reader = "vision_models" if is_vision_model(request.model) else _reader(path)
    if request.lora is not None and reader != "huggingface":
        raise UsageError(f"--lora needs a Hugging Face folder as checkpoint, not '{path}'")
    if request.task is not None and reader != "huggingface" and not (path / SAVED_MODEL).is_file():
        raise UsageError(f"--task needs a Hugging Face folder as checkpoint, not '{path}'")
    if request.long_texts is not None and reader != "huggingface":
        raise UsageError(f"--long-texts needs a Hugging Face folder as checkpoint, not '{path}'")
    if reader in ("tensorflow", "trees") and request.output_names:
        raise UsageError(f"'{path}' declares its own outputs; omit --output-name")
    if reader == "trees" and request.inputs:
        raise UsageError(f"'{path}' declares its own inputs; omit --input")
    try:
        module = importlib.import_module(f"modelport.exporters.sources.{reader}")
    except ImportError as error:
        raise missing_extra(error) from error
    source: Source = module.load(request)
    return source


def is_vision_model(model: str | None) -> bool:
    """Whether ``--model`` names an architecture of timm or torchvision."""
    return (model or "").partition(":")[0] in VISION_LIBRARIES and ":" in (model or "")


def _reader(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix in PICKLE_SUFFIXES:
        raise UsageError(
            f"'{path}' is a pickle, which runs code when it is read; save the model with "
            "skops.io.dump() (scikit-learn) or save_model() (XGBoost .ubj, LightGBM .txt, CatBoost "
            "format='json')"
        )
    if suffix == CATBOOST_SUFFIX:
        raise UsageError(
            f"'{path}' is CatBoost's binary format; save the model with save_model('model.json', "
            "format='json')"
        )
    if suffix == RECORDED_SUFFIX:
        return "recorded"
    if suffix in TREE_SUFFIXES and path.is_file():
        return "trees"
    if suffix in KERAS_SUFFIXES or (path / SAVED_MODEL).is_file():
        return "tensorflow"
    if any((path / name).is_file() for name in HUGGING_FACE):
        return "huggingface"
    if path.is_dir():
        raise UsageError(
            f"checkpoint '{path}' is a folder with neither {HUGGING_FACE[0]} (Hugging Face) nor "
            f"{SAVED_MODEL} (TensorFlow) in it; give the path of a trained model"
        )
    return "pytorch"
