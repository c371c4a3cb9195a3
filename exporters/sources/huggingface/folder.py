"""Hugging Face folders as written by ``save_pretrained()``: configuration, weights, shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from modelport.exporters.loaded_model import Origin, digest_of
from modelport.exporters.sources import checkpoint
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError
from modelport.gateway.repository import untrusted_files

CONFIG = "config.json"
PREPROCESSOR = "preprocessor_config.json"
ADAPTER_CONFIG = "adapter_config.json"

#: File names in the order of ``transformers`` and ``peft``.
MODEL_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
INDEX_SUFFIX = ".index.json"

#: Bounds of files besides the weights. Libraries walk configurations by recursion.
MOST_BYTES = 1 << 26
MOST_LEVELS = 64

_NESTS = (dict, list)
_Hook = Callable[[dict[str, Any]], Any]
#: How transformers writes floats that JSON lacks: ``{"__float__": "Infinity"}``.
_FLOAT = "__float__"
_FLOATS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of a model or of its adapters.

    Attributes:
        config: the content of its configuration file.
        weights: the files with the weights, shards in order of name.
        files: all files that determine the model's outputs.
    """

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    files: tuple[Path, ...]

    def preprocessor(self) -> Mapping[str, Any]:
        """The content of ``preprocessor_config.json``; empty where there is none."""
        path = self.path / PREPROCESSOR
        return read_json(path) if path.is_file() else {}

    @property
    def origin(self) -> Origin:
        """The folder's name, and one digest over the names and contents of ``files``."""
        return Origin(self.path.resolve().name, digest_of(self.path, self.files))

    def state(self) -> dict[str, Tensor]:
        """All weights by key.

        Raises:
            IntegrityError: a file is damaged, or wants to run code.
        """
        state: dict[str, Tensor] = {}
        for file in self.weights:
            state.update(checkpoint.read(file).state)
        return state


def open_model(path: Path) -> Folder:
    """Open the model folder at ``path``; errors as in ``huggingface.load``."""
    if (path / ADAPTER_CONFIG).exists():
        raise UsageError(
            f"'{path}' holds adapters; give the model they belong to as checkpoint, and "
            f"--lora '{path}'"
        )
    config = json_object(path / CONFIG, read_bytes(path / CONFIG), _float)
    if config.get("quantization_config") is not None:
        raise Unsupported(
            f"'{path}' is quantized already; export the model it was made from, and use --quantize"
        )
    weights, indexes = weight_files(path, MODEL_WEIGHTS)
    extra = [file for file in (path / PREPROCESSOR,) if file.is_file()]
    return Folder(path, config, weights, (path / CONFIG, *indexes, *weights, *extra))


def open_adapters(path: Path) -> Folder:
    """Open the adapter folder at ``path``, in PEFT's layout; errors as in ``huggingface.load``."""
    if not (path / ADAPTER_CONFIG).is_file():
        raise UsageError(
            f"--lora '{path}' holds no {ADAPTER_CONFIG}; give a folder that PEFT's "
            "save_pretrained() wrote"
        )
    weights, indexes = weight_files(path, ADAPTER_WEIGHTS)
    config = read_json(path / ADAPTER_CONFIG)
    return Folder(path, config, weights, (path / ADAPTER_CONFIG, *indexes, *weights))


def read_bytes(path: Path) -> bytes:
    """Read a file that is not one of weights.

    Raises:
        IntegrityError: the file is larger than any of its kind.
        UsageError: the file cannot be read, or is a pipe or a device.
    """
    try:
        return untrusted_files.read(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read: {error.strerror}") from error
    except IntegrityError as error:
        raise IntegrityError(
            f"'{path}' has more than {MOST_BYTES >> 20} MiB, too many for such a file; copy the "
            "folder again"
        ) from error


def parse_json(path: Path, content: bytes, hook: _Hook | None = None) -> Any:
    """Parse ``content``, which was read from ``path``.

    Args:
        hook: is applied to every JSON object.

    Raises:
        IntegrityError: it is not JSON, or is nested too deeply.
    """
    try:
        parsed = json.loads(content, object_hook=hook)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"'{path}' is not JSON ({error}); copy the folder again") from error
    level = [parsed]
    for _ in range(MOST_LEVELS):
        values = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, _NESTS))
        level = [inner for outer in values for inner in outer if isinstance(inner, _NESTS)]
        if not level:
            return parsed
    raise IntegrityError(
        f"'{path}' is nested more than {MOST_LEVELS} levels deep; copy the folder again"
    )


def _float(found: dict[str, Any]) -> Any:
    known = found.keys() == {_FLOAT} and isinstance(found[_FLOAT], str)
    return _FLOATS.get(found[_FLOAT], found) if known else found


def json_object(path: Path, content: bytes, hook: _Hook | None = None) -> dict[str, Any]:
    """Parse ``content`` as ``parse_json`` does; refuse anything but an object."""
    parsed = parse_json(path, content, hook)
    if not isinstance(parsed, dict):
        raise IntegrityError(f"'{path}' is not a JSON object; copy the folder again")
    return parsed


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in ``path``; errors as in ``read_bytes`` and ``json_object``."""
    return json_object(path, read_bytes(path))


def weight_files(
    folder: Path, names: tuple[str, ...] = MODEL_WEIGHTS
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """The weight files of the first name that exists, and the index that lists them."""
    for name in names:
        index = folder / f"{name}{INDEX_SUFFIX}"
        if (folder / name).is_file():
            return (folder / name,), ()
        if index.is_file():
            return _shards(index, Path(name).suffix), (index,)
    raise UsageError(
        f"'{folder}' holds no weights ({' or '.join(names)}, whole or in shards); "
        "complete the folder"
    )


def _shards(index: Path, suffix: str) -> tuple[Path, ...]:
    listed = read_json(index).get("weight_map")
    names = list(listed.values()) if isinstance(listed, dict) else []
    if not names or not all(isinstance(n, str) and n and Path(n).name == n for n in names):
        raise IntegrityError(f"'{index}' lists no files of its own folder; copy the folder again")
    shards = tuple(index.with_name(name) for name in sorted(set(names)))
    for shard in shards:
        if shard.suffix != suffix or not shard.is_file():
            raise UsageError(
                f"'{index}' lists '{shard.name}', which is missing; complete the folder"
            )
    return shards
