"""``modelport inspect``: the inputs, outputs, weights and operators of an artifact.

This module imports none of the libraries that read artifacts, which keeps ``--help`` fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.paths import ExistingRepository
from modelport.gateway.cli.tables import print_table, printable
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.runtime.progress import progress_bar

if TYPE_CHECKING:
    from modelport.exporters.inspection import Inspection, TensorInfo


@click.command(cls=InterruptibleCommand)
@click.argument("artifact", type=ExistingRepository())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(artifact: Path | Location, as_json: bool) -> None:
    """Show what ARTIFACT holds, without running it.

    ARTIFACT is an .onnx, .pt, .pt2 or .tflite file, a SavedModel, or the folder of a model (its
    newest version) or of a version in a repository, also as s3://, gs:// or
    az://BUCKET/PREFIX/MODEL[/VERSION].

    The JSON object has, in this order: format, inputs and outputs (name, datatype, shape),
    size_bytes, opset, format_version, producer, dynamic_axes (name, minimum, maximum), weights
    (values by datatype), operators (counts by name), external_data (file, size_bytes), notes,
    certificate, parameters, quantized_share. A value that the format does not store is null.

    Weights are the constant tensors that are floating-point or at most 8 bits wide; parameters is
    the number of their values, quantized_share the fraction of those stored in at most 8 bits.

    Exit codes: 0 done, 2 usage, 4 a library is not installed, 5 integrity.
    """
    with progress_bar() as progress:
        progress("reading", 0, 0)
        from modelport.exporters import inspection
        from modelport.exporters.publishing import download

        with download.local(artifact) as path:
            found = inspection.inspect(path)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
    else:
        for label, value in _summary(found).items():
            click.echo(f"{label:<12} {printable(value)}")
        tensors = [("input", t) for t in found.inputs] + [("output", t) for t in found.outputs]
        print_table(("", "name", "datatype", "shape"), [(kind, *_cells(t)) for kind, t in tensors])
        if found.operators is not None:
            counts = [(printable(name), f"{count:,}") for name, count in found.operators.items()]
            print_table(("operator", "count"), counts)


def _summary(found: Inspection) -> dict[str, str]:
    versions = {"opset": found.opset, "version": found.format_version, "by": found.producer}
    known = ", ".join(f"{key} {value}" for key, value in versions.items() if value is not None)
    rows = {"format": f"{found.format} ({known})" if known else found.format}
    rows["size"] = _megabytes(found.size_bytes)
    if found.external_data:
        files = (f"{e.file} ({_megabytes(e.size_bytes)})" for e in found.external_data)
        rows["external"] = ", ".join(files)
    if found.weights is not None:
        kinds = ", ".join(f"{name} {count:,}" for name, count in found.weights.items())
        rows["parameters"] = f"{found.parameters:,}" + (f" ({kinds})" if kinds else "")
        rows["quantized"] = f"{found.quantized_share or 0:.1%} of parameters in 8 bits or less"
    if found.dynamic_axes:
        axes = (f"{a.name} {_span(a.minimum, a.maximum)}".strip() for a in found.dynamic_axes)
        rows["dynamic"] = ", ".join(axes)
    for index, note in enumerate(found.notes):
        rows["note" if not index else f"note {index + 1}"] = note
    return {**rows, **_certificate(found.certificate)}


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.2f} MB"


def _span(low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return ""
    return f"{'' if low is None else low}..{'' if high is None else high}"


def _certificate(content: Any) -> dict[str, str]:
    """The certificate's figures, one line each; one of another version may lack some."""
    if content is None:
        return {}

    def at(*keys: str) -> Any:
        value = content
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    outputs = at("parity", "outputs")
    errors = {
        name: output.get("max_abs_error")
        for name, output in (outputs.items() if isinstance(outputs, dict) else ())
        if isinstance(output, dict)
    }
    agreement = at("parity", "decision", "agreement")
    rows = {
        "certificate": at("created"),
        "checkpoint": at("checkpoint", "file"),
        "max error": ", ".join(f"{name} {value}" for name, value in errors.items()),
        "agreement": None if agreement is None else f"{agreement}",
    }
    return {label: str(value) for label, value in rows.items() if value}


def _cells(tensor: TensorInfo) -> tuple[str, str, str]:
    shape = "?" if tensor.shape is None else f"[{', '.join(map(str, tensor.shape))}]"
    return printable(tensor.name), tensor.datatype or "?", shape
