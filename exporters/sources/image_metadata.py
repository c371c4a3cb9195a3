"""Image preprocessing and class names that ``modelport export`` takes from flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import Decision
from modelport.gateway.errors import InvalidArgument, UsageError
from modelport.gateway.inference import image_decoding
from modelport.gateway.repository import untrusted_files
from modelport.gateway.repository.scan import MAX_LABEL_BYTES
from modelport.gateway.types import ModelSignature, TensorSpec


def describe(source: Source, declared: Mapping[str, str], labels: Path | None) -> Source:
    """Add the flags' image parameters and labels to ``source``; they override its own.

    Args:
        declared: values by name: ``mean`` for ``--image-mean``, the parameter ``image.mean``.
        labels: a file of class names, one a line.

    Raises:
        UsageError: no input is an image, a value is wrong, or labels do not fit the outputs.
    """
    spec = source.spec
    if declared:
        own = {key: value for key, value in spec.parameters.items() if key.startswith("image.")}
        given = {f"image.{name}": value for name, value in declared.items()}
        _check(source.signature, {**own, **given}, next(iter(declared)))
        spec = replace(spec, parameters={**spec.parameters, **given})
    if labels is None:
        return replace(source, spec=spec)
    names, output = _names(labels), _labelled(source)
    if isinstance(output.dims[-1], int) and output.dims[-1] not in (-1, len(names)):
        raise UsageError(
            f"--labels '{labels}' names {len(names)} classes, output '{output.name}' has "
            f"{output.dims[-1]}; give one line for each"
        )
    spec = replace(spec, decision=spec.decision or Decision(output.name))
    return replace(source, spec=spec, labels=names)


def _check(signature: ModelSignature, parameters: Mapping[str, str], flag: str) -> None:
    try:
        found = [image_decoding.from_parameters(parameters, spec) for spec in signature.inputs]
    except InvalidArgument as error:
        raise UsageError(f"--image-{flag}: {error}") from error
    if not any(found):
        taken = ", ".join(f"'{s.name}' {s.datatype} {list(s.dims)}" for s in signature.inputs)
        raise UsageError(
            f"--image-{flag}: no input is an image; the model takes {taken}, an image has three "
            "dims, 1 or 3 of them channels"
        )


def _names(path: Path) -> tuple[str, ...]:
    try:
        text = untrusted_files.read_text(path, MAX_LABEL_BYTES)
        names = tuple(line.strip() for line in text.splitlines())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"--labels '{path}' cannot be read: {reason}") from error
    if not names or not all(names):
        raise UsageError(
            f"--labels '{path}' is empty or has an empty line; write one class name on each line"
        )
    return names


def _labelled(source: Source) -> TensorSpec:
    """The output that the labels describe: the decision's, or the only one."""
    outputs = source.signature.outputs
    decision = source.spec.decision
    chosen = [o for o in outputs if decision is None or o.name == decision.output]
    if len(chosen) != 1:
        raise UsageError(
            f"--labels belongs to one output, and the model has {len(chosen)}: "
            f"{', '.join(o.name for o in outputs)}; declare a decision in the ModelSpec"
        )
    return chosen[0]
