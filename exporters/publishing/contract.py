"""The contract of a published model: its name, its signature, its version numbers.

All versions of a model keep the same contract, in any storage.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.gateway.errors import AlreadyExists, InvalidArgument, UsageError
from modelport.gateway.repository import config
from modelport.gateway.repository.config import ModelConfig
from modelport.gateway.repository.scan import MAX_VERSION, VERSION_NAME, is_model_name
from modelport.gateway.repository.storage.location import MAX_SEGMENT_BYTES, Location
from modelport.gateway.types import TensorSpec

#: Twelve hexadecimal digits are enough to tell two files apart.
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")
NAMED = 5  # how many differences a message lists before it only counts


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """The place of a published version."""

    name: str
    version: int
    path: Path | Location


def check_name(name: str) -> None:
    """Raise ``UsageError`` unless ``name`` is a valid model name."""
    if not is_model_name(name):
        raise UsageError(
            f"--name '{name}' is not a model name; use a folder's name of at most "
            f"{MAX_SEGMENT_BYTES} bytes that does not begin with a dot"
        )


def parse_version(text: str) -> int | None:
    """Parse ``--model-version``: a positive number, or None for ``auto``.

    Raises:
        UsageError: it is neither.
    """
    if text == "auto":
        return None
    if VERSION_NAME.match(text) and int(text) <= MAX_VERSION:
        return int(text)
    raise UsageError(
        f"--model-version '{text}' is not a version; use 'auto' or a positive number without "
        "leading zeros"
    )


def next_version(existing: Collection[int], wanted: ModelConfig, version: int | None) -> int:
    """``version``, or the number after ``existing``; errors as in ``publish``."""
    number = version or max(existing, default=0) + 1
    if number in existing:
        raise AlreadyExists(
            f"version {number} of '{wanted.name}' is published and never overwritten; "
            "use --model-version auto or another number"
        )
    if number > MAX_VERSION:
        raise UsageError(f"'{wanted.name}' has no version number left; use another --name")
    return number


def check_contract(content: bytes | None, wanted: ModelConfig) -> None:
    """Raise ``UsageError`` unless a model with this configuration may get a version of ``wanted``.

    ``content`` is None if the model has no configuration.
    """
    if content is None:
        raise UsageError(
            f"'{wanted.name}' is in the repository without a {config.FILENAME}; add one, or use "
            "another --name"
        )
    try:
        there = config.complete(config.parse(content.decode()), wanted.name)
        here = config.complete(wanted, wanted.name)
        found = differences(contract_of(there), contract_of(here))
    except (InvalidArgument, UnicodeDecodeError) as error:
        raise UsageError(
            f"the {config.FILENAME} of '{wanted.name}' does not parse: {error}; correct it, or use "
            "another --name"
        ) from error
    declared = input_parameters(here)
    known = input_parameters(there)
    of_inputs = differences({key: known.get(key) for key in declared}, declared)
    if found or of_inputs:
        raise UsageError(
            f"the {config.FILENAME} of '{wanted.name}' contradicts this export: "
            f"{', '.join(filter(None, (found, of_inputs)))}; use another --name, or the same "
            "--max-batch-size, --model-kwargs and --image flags"
        )


def contract_of(found: ModelConfig) -> dict[str, Any]:
    """The part of a configuration that clients rely on and that the gateway loads by."""
    signature = config.signature(found)
    tensors = [("input", spec) for spec in signature.inputs]
    tensors += [("output", spec) for spec in signature.outputs]
    axes = {
        f"axis '{axis.name}'": f"{axis.minimum}..{'' if axis.maximum is None else axis.maximum}"
        for axis in signature.axes.values()
    }
    return {
        "platform": found.platform,
        "file": found.default_model_filename,
        "max_batch_size": signature.max_batch_size,
        **{f"{kind} '{spec.name}'": _tensor(spec) for kind, spec in tensors},
        "inputs in order": [spec.name for spec in signature.inputs],
        "outputs in order": [spec.name for spec in signature.outputs],
        **axes,
        "padding": {axis.name: axis.padding for axis in signature.axes.values()},
    }


def _tensor(spec: TensorSpec) -> str:
    dims = ",".join(map(str, spec.dims))
    text = f"{spec.datatype}[{dims}]"
    if spec.minimum is not None or spec.maximum is not None:
        low, high = ("" if bound is None else bound for bound in (spec.minimum, spec.maximum))
        text += f"={low}..{high}"
    if spec.reshape is not None:
        text += f" reshape {list(spec.reshape)}"
    return f"{text} optional" if spec.optional else text


def input_parameters(found: ModelConfig) -> dict[str, str]:
    """The parameters of a configuration by which images and sounds become inputs."""
    parameters = found.parameters.items()
    return {
        key: value.string_value for key, value in parameters if key.startswith(("image.", "audio."))
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The differences between two documents, field by field; empty if there are none."""
    found = list(_differences(there, here, ""))
    rest = len(found) - NAMED
    listed = ", ".join(found[:NAMED])
    return f"{listed} and {rest} more" if rest > 0 else listed


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key in dict.fromkeys((*there, *here)):
        old, new = there.get(key), here.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif _plain(old) != _plain(new):
            yield f"{prefix}{key} is {_plain(old)} there and {_plain(new)} here"


def _plain(value: Any) -> str:
    if value is None:
        return "absent"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(map(_plain, value))}]"
    return _DIGEST.sub(r"\1…", str(value))
