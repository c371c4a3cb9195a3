"""Conversion between Keras and PyTorch checkpoints, for models that have a Keras port.

A conversion, by modelport or another tool, is accepted only if every tensor is in its place, with
its shape and its values, and if both models give the same outputs for random inputs. Values count
more than outputs: swapping two of twelve layers may move a score by less than any bound on it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import h5py
import safetensors.torch
import torch

from modelport.exporters import model_spec
from modelport.exporters.errors import ParityError
from modelport.exporters.keras_conversion import output_comparison, report, weight_comparison
from modelport.exporters.keras_conversion.convert_request import ConvertRequest, framework_of
from modelport.exporters.keras_conversion.keras_weights import MODEL_KWARGS_KEY, STATED
from modelport.exporters.keras_conversion.model_files import Pair, Side, open_side
from modelport.exporters.keras_conversion.report import ConversionReport
from modelport.exporters.keras_ports import KerasPort, find_port
from modelport.exporters.keras_ports.weights import extract, port
from modelport.exporters.loaded_model import Framework
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.runtime.file_errors import writing_to
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.temporary_folder import temporary_folder
from modelport.exporters.sources import SAFETENSORS, checkpoint
from modelport.gateway.errors import AlreadyExists, Unsupported

#: Called with the stage's name, the amount done and the total; 0 of 0 means unknown.
Progress = Callable[[str, int, int], None]


def convert(
    request: ConvertRequest, progress: Progress = lambda stage, done, total: None
) -> ConversionReport:
    """Write ``request.target``, proven equal to ``request.source``, or check an existing one.

    The report is written beside the target, even if the target is refused.

    Raises:
        UsageError: a file is invalid, or does not fit the model.
        AlreadyExists: the target exists.
        ParityError: the two are not the same model; the message names the layer.
        Unsupported: the model has no Keras port.
        IntegrityError: a file is damaged or wants to run code.
    """
    request.check_arguments()
    declared, keras_port = _find_port(request.model)
    progress("reading", 0, 0)
    source = open_side(request.source, request.model)
    target = open_side(request.target, request.model) if request.check else None
    pair = _build(request, declared, keras_port, source, target)
    source.load(pair)
    with writing_to(request.target.parent, "choose another TARGET"):
        if target is None:
            return _write_proven(request, pair, source, progress)
        result = _prove(request, pair, source, target, progress)
        _conclude(result, request)
    return result


def _write_proven(
    request: ConvertRequest, pair: Pair, source: Side, progress: Progress
) -> ConversionReport:
    """Write the target, read it again, and prove what was read."""
    with temporary_folder(request.target.parent) as folder:
        written = folder / request.target.name
        progress("writing", 0, 0)
        _write(pair, written)
        result = _prove(request, pair, source, open_side(written, request.model), progress)
        if not result.reason:
            _publish(written, request.target)
        _conclude(result, request)
    return result


def _find_port(model: str) -> tuple[ModelSpec, KerasPort]:
    declared = getattr(model_spec.find_factory(model), model_spec.ATTRIBUTE, None)
    if not isinstance(declared, ModelSpec) or declared.keras_port is None:
        raise Unsupported(
            f"--model '{model}' has no Keras port, so its weights have no place in Keras; use a "
            "model that has one, such as fraud or vit"
        )
    return declared, find_port(declared.keras_port)


def _build(
    request: ConvertRequest,
    declared: ModelSpec,
    keras_port: KerasPort,
    source: Side,
    target: Side | None,
) -> Pair:
    """Build both models; some hyper-parameters leave no trace in a shape and only the target has
    them."""
    invisible = STATED.get(request.model, {})
    hints = target.model_kwargs if target is not None else {}
    known = {
        **{name: value for name, value in hints.items() if name in invisible},
        **source.model_kwargs,
        **request.model_kwargs,
    }
    module, _, kwargs = model_spec.build(request.model, source.torch_shapes(keras_port), known)
    with quiet():
        model = keras_port.build(kwargs, "float32")
    links, probes = keras_port.links(kwargs), keras_port.probes(kwargs)
    return Pair(declared, module.eval(), model, links, probes, kwargs)


def _write(pair: Pair, path: Path) -> None:
    kwargs = dict(pair.model_kwargs)
    with quiet():
        if framework_of(path) is Framework.TENSORFLOW:
            port(pair.module.state_dict(), pair.keras_model, pair.links)
            if path.suffix == ".keras":
                pair.keras_model.save(path)
                return
            pair.keras_model.save_weights(path)
            with h5py.File(path, "a") as file:
                file.attrs[MODEL_KWARGS_KEY] = json.dumps(kwargs)
            return
    arrays = extract(pair.keras_model, pair.links)
    state = {key: torch.from_numpy(value) for key, value in arrays.items()}
    if path.suffix in SAFETENSORS:
        metadata = {"format": "pt", checkpoint.MODEL_KWARGS_KEY: json.dumps(kwargs)}
        safetensors.torch.save_file(state, path, metadata)
    else:
        state_key = checkpoint.STATE_DICT_KEYS[0]
        torch.save({state_key: state, checkpoint.MODEL_KWARGS_KEY: kwargs}, path)


def _prove(
    request: ConvertRequest, pair: Pair, source: Side, target: Side, progress: Progress
) -> ConversionReport:
    progress("comparing", 0, 0)
    tensors = weight_comparison.compare(pair.links, source.parts(pair), target.parts(pair))
    result = ConversionReport(
        model=request.model,
        model_kwargs=pair.model_kwargs,
        source=source.end,
        target=target.end,
        samples=request.samples,
        seed=request.seed,
        tensors=tensors,
        reason=target.misfit(pair),
    )
    unlike = bool(result.reason) or any(row.max_abs_error is None for row in tensors)
    result.reason = result.reason or weight_comparison.account(tensors)
    if unlike:  # one of them cannot be loaded
        return result
    target.load(pair)
    result.outputs = output_comparison.compare_outputs(
        pair.module,
        pair.keras_model,
        pair.spec,
        samples=request.samples,
        seed=request.seed,
        progress=lambda done: progress("proving", done, request.samples),
    )
    result.probes = output_comparison.compare_activations(
        pair.module, pair.keras_model, pair.spec, pair.probes, seed=request.seed
    )
    for row in result.outputs:
        error = (
            f"output '{row.name}' differs by {row.mean_abs_error:.3g} on average over "
            f"{request.samples} inputs"
        )
        if not row.mean_abs_error <= output_comparison.BOUND:
            place = result.first_divergence
            where = f"; activations first differ at layer '{place}'" if place else ""
            result.reason = result.reason or f"{error}, bound {output_comparison.BOUND}{where}"
        elif row.mean_abs_error > output_comparison.EXPECTED:
            result.warnings.append(f"{error}; {output_comparison.EXPECTED} is expected")
    return result


def _conclude(result: ConversionReport, request: ConvertRequest) -> None:
    """Store the report; raise ``ParityError`` if it refuses the conversion."""
    path = report.path_of(request.target)
    report.write(result, path)
    if result.reason:
        outcome = "convert it again" if request.check else "nothing was written"
        raise ParityError(
            f"'{request.target.name}' is not the model in '{request.source.name}': "
            f"{result.reason}; {outcome}; the report is '{path}'"
        )


def _publish(written: Path, target: Path) -> None:
    """Link the file to its target: unlike a rename, a link never replaces a newer file."""
    with written.open("rb") as file:
        os.fsync(file.fileno())
    try:
        os.link(written, target)
    except FileExistsError as error:
        raise AlreadyExists(
            f"TARGET '{target}' was created by another process; it was not changed"
        ) from error
