"""Reading trained weights without running code, and loading them strictly.

Pickles are read by PyTorch's restricted unpickler (``weights_only``), which builds tensors, plain
containers, and stand-ins for objects of every other class; ``.safetensors`` cannot hold code.
"""

from __future__ import annotations

import json
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from modelport.exporters.arguments import check_plain
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import PICKLED, SAFETENSORS, safetensors_header, stand_ins
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError, first_line
from modelport.gateway.repository.artifact_checks import zip_guard
from modelport.gateway.repository.artifact_checks.load_guard import no_code
from modelport.gateway.repository.manifest import sha256_of

#: The keys under which training scripts save the state dict; the first one present is used. There
#: may be a dict of the same kind under it, as in ``{"model": {"state_dict": ...}}``.
STATE_DICT_KEYS = (
    *("model_state_dict", "state_dict", "model_state", "model", "module", "network", "net"),
    *("weights", "params"),
)
#: Dicts within dicts that are looked into.
MOST_NESTED = 4
MODEL_KWARGS_KEY = "model_kwargs"

#: Prefixes that DataParallel and torch.compile add to every key.
WRAPPER_PREFIXES = ("module.", "_orig_mod.")

#: A counter that inference does not read; checkpoints older than PyTorch 0.4.1 lack it.
UNUSED_SUFFIX = ".num_batches_tracked"

#: Values of a tensor beyond those that the file holds, as one expanded from a number has.
MOST_REPEATED = 1 << 22

KEYS_NAMED = 3  # how many offending keys a message lists before it only counts


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Trained weights and the hyper-parameters saved with them.

    Attributes:
        versions: that of each submodule's layout, by its prefix with its
            dot, where the file has them. A module
            whose layout has changed reads older ones by it.
    """

    filename: str
    sha256: str
    state: Mapping[str, Tensor]
    model_kwargs: Mapping[str, Any]
    versions: Mapping[str, int] = field(default_factory=dict)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self.state.items()}


def read(path: Path) -> Checkpoint:
    """Read the checkpoint at ``path``.

    Raises:
        UsageError: there is no such file, its extension names no known format, or its arguments
            are not plain values.
        IntegrityError: the file is damaged, holds no state dict, or wants to run code.
    """
    if not path.is_file():
        raise UsageError(f"checkpoint '{path}' is not a file; give the path of a trained model")
    check_suffix(path)
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise UsageError(f"checkpoint '{path}' cannot be read: {error.strerror}") from error
    state, kwargs = _read_pickled(path) if path.suffix in PICKLED else _read_safetensors(path)
    for key, value in state.items():
        _check_held(key, value, path)
    versions = _unwrap(dict(_versions(state)), state)
    return Checkpoint(path.name, digest, _unwrap(state, state), kwargs, versions)


def check_suffix(path: Path) -> None:
    """Raise ``UsageError`` unless the extension is one of a PyTorch checkpoint."""
    if path.suffix not in PICKLED | SAFETENSORS:
        raise UsageError(
            f"checkpoint '{path}' has an unknown extension '{path.suffix}'; give a model of one of "
            "the frameworks in docs/exporting.md, or a PyTorch checkpoint named "
            f"{', '.join(sorted(PICKLED | SAFETENSORS))}"
        )


def _check_held(key: str, value: Tensor, path: Path) -> None:
    """Refuse a tensor without values, or with far more of them than the file holds."""
    if value.is_meta:
        raise IntegrityError(
            f"checkpoint '{path}': '{key}' has a shape and no values; save it from a model that is "
            "not on the device 'meta'"
        )
    if value.is_nested:
        raise IntegrityError(f"checkpoint '{path}': '{key}' is a nested tensor; save dense ones")
    if value.layout is not torch.strided:
        return
    held = value.untyped_storage().nbytes() // value.element_size()
    if value.numel() > held + MOST_REPEATED:
        raise IntegrityError(
            f"checkpoint '{path}': '{key}' claims {value.numel()} values, and the file holds "
            f"{held}; save it again"
        )


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    safetensors_header.check(path)
    try:
        state = safetensors.torch.load_file(path)
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except safetensors.SafetensorError as error:
        raise _damaged(path, error) from error
    if not state:
        raise IntegrityError(f"checkpoint '{path}' holds no tensors; save model.state_dict()")
    try:
        kwargs = json.loads(metadata.get(MODEL_KWARGS_KEY, "{}"))
    except ValueError as error:
        raise IntegrityError(
            f"checkpoint '{path}': metadata '{MODEL_KWARGS_KEY}' is not JSON; write an object"
        ) from error
    return state, _kwargs_of({MODEL_KWARGS_KEY: kwargs}, path)


def _read_pickled(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    with path.open("rb") as file:
        if (start := file.read(1)) and start not in (b"P", b"\x80"):  # neither zip nor pickle
            raise IntegrityError(
                f"checkpoint '{path}' is not a PyTorch checkpoint; give a file that "
                "torch.save(model.state_dict(), ...) wrote"
            )
    try:
        if zip_guard.is_zip(path):
            zip_guard.check(path, one_root=True)
            _check_kind(path)
        # the unpickler warns about pickles written by other tools
        with quiet(), no_code(path.name), stand_ins.instead_of_classes(path):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except IntegrityError:
        raise
    except pickle.UnpicklingError as error:
        raise _refused(path, error) from error
    # damage can raise almost anything: zip, struct, seek, recursion errors
    except Exception as error:
        raise _damaged(path, error) from error
    content = _with_weights(content)
    if not isinstance(content, Mapping):
        raise IntegrityError(
            f"checkpoint '{path}' holds a {type(content).__name__}, not a state dict; "
            "save model.state_dict()"
        )
    keys = _keys_to_state(content, path)
    state, holder = content, content
    for key in keys:
        state, holder = state[key], state
    if not _is_dict(state) or not (state or _is_state(state)):
        under = " under " + ", ".join(map(repr, keys)) if keys else ""
        raise IntegrityError(
            f"checkpoint '{path}' holds no state dict{under}; save model.state_dict()"
        )
    wrong = [key for key, value in state.items() if not isinstance(value, Tensor)]
    if wrong:
        raise IntegrityError(
            f"checkpoint '{path}' holds no state dict: not tensors: {_some(wrong)}; save "
            f"model.state_dict() by itself or under '{STATE_DICT_KEYS[0]}'"
        )
    outer = holder if MODEL_KWARGS_KEY in holder else content
    return state, _kwargs_of(outer, path) if keys else {}


def _check_kind(path: Path) -> None:
    """Refuse archives of torch that hold a program instead of a pickle."""
    with zipfile.ZipFile(path) as archive:
        names = {name.partition("/")[2] for name in archive.namelist()}
    if ".data/extern_modules" in names:
        raise IntegrityError(
            f"checkpoint '{path}' is an archive of torch.package, whose code runs when it is "
            "loaded; load it where you trust it, and save model.state_dict()"
        )
    if "constants.pkl" in names:
        raise UsageError(
            f"checkpoint '{path}' is a TorchScript program; serve it as it is, or load it with "
            "torch.jit.load() and save its state_dict()"
        )


def _with_weights(content: object) -> object:
    """``content`` with the state dict of each module that was pickled whole."""
    if isinstance(content, stand_ins.StandIn) and stand_ins.is_module(content):
        return stand_ins.state_dict(content)
    if _is_dict(content) and any(isinstance(v, stand_ins.StandIn) for v in content.values()):
        return {key: _with_weights(value) for key, value in content.items()}
    return content


def _keys_to_state(content: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    """The keys that lead to the state dict: names of scripts, else the only one that there is."""
    found = list(_paths(content, MOST_NESTED))
    if len(found) > 1:
        raise IntegrityError(
            f"checkpoint '{path}' holds several state dicts: "
            f"{_some(['.'.join(keys) for keys in found])}; save the model's under "
            f"'{STATE_DICT_KEYS[0]}'"
        )
    named = (key for key in STATE_DICT_KEYS if key in content)
    return found[0] if found else tuple(named)[:1]


def _paths(content: object, depth: int) -> Iterator[tuple[str, ...]]:
    """The keys of every state dict in ``content``; below a key of a script, no others count."""
    if _is_state(content):
        yield ()
    elif depth and _is_dict(content):
        inner = {key: value for key, value in content.items() if isinstance(value, Mapping)}
        names = [key for key in STATE_DICT_KEYS if key in inner][:1] or list(inner)
        for key in names:
            yield from ((key, *keys) for keys in _paths(inner[key], depth - 1))


def _is_state(value: object) -> bool:
    return (
        isinstance(value, Mapping)
        and (bool(value) or hasattr(value, "_metadata"))  # a module may have no weights
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items())
    )


def _is_dict(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _kwargs_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    kwargs = content.get(MODEL_KWARGS_KEY) or {}
    if not _is_dict(kwargs):
        raise IntegrityError(
            f"checkpoint '{path}': '{MODEL_KWARGS_KEY}' is not a dict of the model's arguments"
        )
    check_plain(kwargs, f"checkpoint '{path}': '{MODEL_KWARGS_KEY}'")
    return dict(kwargs)


def _damaged(path: Path, error: Exception) -> IntegrityError:
    reason = first_line(error)
    return IntegrityError(
        f"checkpoint '{path}' is truncated or damaged ({reason}); save or copy it again"
    )


def _refused(path: Path, error: pickle.UnpicklingError) -> IntegrityError:
    wanted = re.search(r"(?:\bGLOBAL|Unsupported class) ([\w.]+)", str(error))
    if wanted is None:
        return _damaged(path, pickle.UnpicklingError("not the pickle of a checkpoint"))
    return IntegrityError(
        f"checkpoint '{path}' wants to run '{wanted[1]}' while loading: refused and not run; "
        "save model.state_dict() alone, or use .safetensors"
    )


def _versions(state: Mapping[str, Tensor]) -> Iterator[tuple[str, int]]:
    """Each prefix with its dot, and the version that ``nn.Module.state_dict`` keeps of it."""
    metadata = getattr(state, "_metadata", None)
    for prefix, entry in metadata.items() if isinstance(metadata, Mapping) else ():
        version = entry.get("version") if isinstance(entry, Mapping) else None
        if isinstance(prefix, str) and type(version) is int:
            yield prefix and f"{prefix}.", version


def _unwrap(state: Mapping[str, T], wrapped: Iterable[str]) -> dict[str, T]:
    """``state`` without what wrappers have put before all names that are ``wrapped``."""
    stripped = [key.replace("._orig_mod.", ".") for key in wrapped]
    prefix = ""
    while stripped:
        found = next((p for p in WRAPPER_PREFIXES if all(k.startswith(p) for k in stripped)), None)
        if found is None:
            break
        prefix += found
        stripped = [key.removeprefix(found) for key in stripped]
    plain = {key.replace("._orig_mod.", "."): value for key, value in state.items()}
    return {k.removeprefix(prefix): value for k, value in plain.items() if k.startswith(prefix)}


def load_into(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Copy ``checkpoint`` into ``module``; keys and shapes must match exactly.

    Raises:
        UsageError: model and checkpoint do not fit together.
        IntegrityError: a weight is NaN.
    """
    where = f"checkpoint '{checkpoint.filename}' does not fit the model"
    expected = module.state_dict()
    missing = [
        key for key in expected if key not in checkpoint.state and not key.endswith(UNUSED_SUFFIX)
    ]
    unexpected = [key for key in checkpoint.state if key not in expected]
    if missing or unexpected:
        parts = [("missing", missing), ("unexpected", unexpected)]
        listed = "; ".join(f"{len(k)} {kind} keys: {_some(k)}" for kind, k in parts if k)
        raise UsageError(
            f"{where}: {listed}; check --model and --model-kwargs, or save the state_dict() of the "
            "model that your own code loads"
        )
    for key, value in checkpoint.state.items():
        if value.layout is not torch.strided and value.layout is not expected[key].layout:
            raise UsageError(f"{where}: {key} is {value.layout}, the model's is dense; save it so")
    if lazy := [key for key, value in expected.items() if is_lazy(value)]:
        raise UsageError(
            f"the model has weights without a shape: {_some(lazy)}; run its lazy modules once in "
            "the factory"
        )
    wrong = [
        f"{key} is {list(value.shape)}, but the model expects {list(expected[key].shape)}"
        for key, value in checkpoint.state.items()
        if value.shape != expected[key].shape
    ]
    if wrong:
        raise UsageError(
            f"{where}: {len(wrong)} wrong shapes: {_some(wrong)}; check --model-kwargs"
        )
    learned = {key for key, _ in module.named_parameters(remove_duplicate=False)}
    for key, value in checkpoint.state.items():
        if key in learned and expected[key].is_floating_point():
            check_real(key, value, f"checkpoint '{checkpoint.filename}'")
        if has_nan(value):
            raise IntegrityError(
                f"checkpoint '{checkpoint.filename}': '{key}' contains NaN; use an earlier one"
            )
    state = OrderedDict(checkpoint.state)
    versions = expected._metadata  # type: ignore[attr-defined]
    for prefix, version in checkpoint.versions.items():
        versions.setdefault(prefix.removesuffix("."), {})["version"] = version
    state._metadata = versions  # type: ignore[attr-defined]
    try:
        module.load_state_dict(state, strict=True)
    except Exception as error:  # modules have hooks of their own
        raise UsageError(f"{where} ({first_line(error)}); check --model") from error


def check_real(key: str, value: Tensor, subject: str) -> None:
    """Raise ``Unsupported`` unless the weight is of real numbers.

    PyTorch would take the integers of a quantised weight for its values, and so numbers of eight
    bits, which have their scale elsewhere.
    """
    if _is_real(value):
        return
    weight = f"{subject}: the weight '{key}' is {str(value.dtype).removeprefix('torch.')}"
    if value.is_complex():
        raise Unsupported(f"{weight}, and the model's is real; use a checkpoint of this model")
    raise Unsupported(
        f"{weight}, as in a quantised model; export the model before its quantisation, and use "
        "--quantize"
    )


def has_nan(value: Tensor) -> bool:
    """Whether any value of a weight is NaN. Weights of fewer than 16 bits are not looked at."""
    dense = value.layout is torch.strided
    return dense and _is_real(value) and bool(torch.isnan(value).any())


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() and value.element_size() > 1


def _some(items: list[Any]) -> str:
    rest = len(items) - KEYS_NAMED
    listed = ", ".join(str(item) for item in items[:KEYS_NAMED])
    return f"{listed} and {rest} more" if rest > 0 else listed
