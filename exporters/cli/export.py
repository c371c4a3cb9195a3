"""``modelport export``: export a checkpoint as a proven, published version.

This module imports neither torch nor a runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters import api
from modelport.exporters.cli.options import model_version_option, seed_option
from modelport.exporters.models.registry import MODELS
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.exporters.runtime.progress import progress_bar
from modelport.gateway.cli.errors import UsageError
from modelport.gateway.cli.paths import EXISTING, WrittenPath, WrittenRepository

if TYPE_CHECKING:
    from modelport.exporters.export_pipeline import ExportResult
    from modelport.exporters.optimization.result import GraphOptimization
    from modelport.exporters.proof.evaluation import Evaluation

FORMAT_NAMES = "onnx|torchscript|savedmodel|tflite|openvino|pt2|aoti|executorch|all"


#: ``--image-NAME`` sets the parameter ``image.NAME`` of ``config.pbtxt``; its help text.
NAMED = 3  # how many limits are listed
IMAGE_FLAGS: Mapping[str, str] = {
    "mean": "Mean, subtracted from pixels as fractions of full scale: a number, or one for "
    "each channel: 0.485,0.456,0.406.  [default: preprocessor_config.json's or the model's own]",
    "std": "Standard deviation, by which pixels are then divided: 0.229,0.224,0.225.",
    "scale": "Factor applied to pixels, 0 to 255, first.  [default: 1/255, for UINT8 1]",
    "size": "Side, or HEIGHT,WIDTH, of the model's image if its input leaves them open.",
    "resize": "Resize the shorter side to this, then crop the centre to --image-size.",
    "interpolation": "Interpolation: nearest, bilinear, bicubic, lanczos, box or hamming.",
    "layout": "Layout of images, CHW or HWC.  [default: from the input's shape]",
}


def _image_flags(command: Callable[..., None]) -> Callable[..., None]:
    for name, text in reversed(list(IMAGE_FLAGS.items())):
        command = click.option(f"--image-{name}", metavar=name.upper(), help=text)(command)
    return command


@click.command(cls=InterruptibleCommand)
@click.argument("checkpoint", type=EXISTING)
@click.option(
    "--model",
    metavar="NAME|package.module:factory",
    help=f"A registered model ({', '.join(MODELS)}, or a plug-in's), or any factory of an "
    "nn.Module; timm:NAME or torchvision:NAME. Hugging Face folders, Keras files and SavedModels "
    "need none.",
)
@click.option(
    "--task",
    metavar="TASK",
    help="The task to export a Hugging Face folder for: text-classification, feature-extraction, "
    "text-generation-with-past, ...  [default: its architecture's]",
)
@click.option(
    "--model-kwargs", metavar="JSON", help="Hyper-parameters; they override the checkpoint's."
)
@click.option(
    "--lora",
    type=EXISTING,
    metavar="DIR",
    help="PEFT adapters to merge into a Hugging Face checkpoint.",
)
@click.option(
    "--input",
    multiple=True,
    metavar="NAME:DATATYPE[DIMS]",
    help="Declare an input of a model that declares no signature, or sizes that a Keras model or "
    "SavedModel leaves open: 'image:FP32[3,224,224]', 'tokens:INT64[sequence=1..64]=0..511'. "
    "Repeatable.",
)
@click.option(
    "--output-name",
    multiple=True,
    help="Name the model's outputs, in order, or choose some of its own names.  [default: its own, "
    "such as logits; output, or output_0, ...]",
)
@click.option(
    "--mask",
    multiple=True,
    metavar="NAME[:right|left|any][=OUTPUT,...]",
    help="An input that is 1 where there is data and 0 at padding, or the number of positions with "
    "data ('lengths:INT64[]=1..sequence'). The proof's inputs have at least one such position, "
    "padded on the right, on the left or anywhere. The outputs are undefined at padding and not "
    "compared there. Repeatable.  [default: INT or BOOL inputs named mask, attention_mask, "
    "..._attention_mask, padded on the right; every output is compared]",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(0, 2**31 - 1),
    default=8,
    show_default=True,
    help="0: no input or output has a batch dimension (graphs, detectors).",
)
@click.option(
    "--format",
    required=True,
    multiple=True,
    metavar=FORMAT_NAMES,
    help="The artifact's format; 'all' is onnx, torchscript, savedmodel and tflite. Repeatable.",
)
@click.option("--name", help="The model's name in the repository.  [default: the model's own]")
@click.option(
    "--name-template",
    metavar="TEMPLATE",
    help="Template of {name}, {format} and {precision}.  [default: {name}, and {name}-{format} for "
    "more than one format]",
)
@click.option(
    "--repository",
    type=WrittenRepository(),
    default=Path("model_repository"),
    show_default=True,
    help="The model repository to publish into: a folder, or s3://, gs:// or az://BUCKET/PREFIX.",
)
@model_version_option
@click.option(
    "--dtype",
    default="fp32",
    show_default=True,
    metavar="fp32|fp16|bf16",
    help="Precision inside the artifact; inputs and outputs keep their datatypes.",
)
@click.option(
    "--quantize",
    metavar="int8|int8-weight-only|int4",
    help="int8: weights and activations (ONNX: dynamic, or static with --calibrate; TFLite: "
    "dynamic range). int8-weight-only, int4: weights alone, in blocks, for language models in "
    "ONNX.",
)
@click.option(
    "--calibrate",
    multiple=True,
    type=EXISTING,
    metavar="FILE.npz|.jsonl",
    help="Quantise activations of --quantize int8 statically, by their ranges on these inputs: an "
    ".npz of rows by input name, requests as .json or .jsonl, or a file of 'modelport sample'. "
    "Repeatable.",
)
@click.option(
    "--calibration-method",
    metavar="minmax|entropy|percentile",
    help="Method to choose ranges with --calibrate.  [default: minmax]",
)
@click.option(
    "--per-channel/--no-per-channel",
    default=None,
    help="One scale for each output channel of int8 weights, or for each tensor.  [default: per "
    "channel]",
)
@click.option(
    "--block-size",
    type=int,
    metavar="16|32|64|128|256",
    help="Weights that share a scale, for int4 and int8-weight-only.  [default: 32]",
)
@click.option(
    "--optimize",
    metavar="O1|O2|O3",
    help="Optimise the ONNX graph as optimum-cli does. O1: constant folding and redundant nodes, "
    "ONNX's own operators only. O2: fusions of ONNX Runtime and of transformers, too. O3: GELU is "
    "approximated, too, held to the bounds of fp16.",
)
@click.option(
    "--opset",
    type=int,
    help="ONNX operator set, up to the newest that ONNX Runtime runs.  [default: 20; from "
    "TensorFlow 18]",
)
@click.option(
    "--atol", type=click.FloatRange(0), help="Absolute tolerance.  [default: the model's own]"
)
@click.option(
    "--rtol", type=click.FloatRange(0), help="Relative tolerance.  [default: the model's own]"
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    help="Random inputs to compare on.  [default: 1000, fewer above 5 million parameters]",
)
@seed_option
@click.option(
    "--data",
    type=EXISTING,
    metavar="FILE.npz",
    help="Held-out inputs by name, and 'labels'; below fp32 these replace the random inputs.",
)
@click.option(
    "--max-drop",
    type=click.FloatRange(0),
    default=0.01,
    show_default=True,
    help="Accepted loss of accuracy (or AUC) on --data.",
)
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    help="Below fp32, the fraction of decisions that must agree.  [default: fp16 0.995, bf16 0.98, "
    "int8 0.97, int8-weight-only 0.98, int4 0.9]",
)
@click.option(
    "--max-relative-error",
    type=click.FloatRange(0),
    help="Below fp32, the limit for a model without a decision.  [default: fp16 0.01, bf16 0.05, "
    "int8 0.1, int8-weight-only 0.05, int4 0.2]",
)
@_image_flags
@click.option(
    "--labels",
    type=EXISTING,
    metavar="FILE",
    help="Class names, one per line.  [default: a Hugging Face folder's]",
)
@click.option(
    "--sign-key",
    type=EXISTING,
    metavar="FILE",
    help="Sign the certificate with this Ed25519 key ('modelport keygen' makes one).",
)
@click.option(
    "-o",
    "--output",
    type=WrittenPath(),
    help="Write the artifact and its certificate here instead of publishing.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
def export(**options: Any) -> None:
    """Export CHECKPOINT, prove each artifact equal to it, and publish it.

    CHECKPOINT is a .pt, .pth or .safetensors file, a Hugging Face folder, a .keras file, a
    SavedModel, or a model of XGBoost (.ubj, .json), LightGBM (.txt) or scikit-learn (.skops).
    All formats are proven before any is published.

    Exit codes: 0 done, 2 usage, 3 parity, 4 unsupported, 5 integrity.
    """
    given, as_json, quiet = arguments(options)
    with progress_bar(quiet) as progress:
        # torch and the runtime come with this call.
        progress("starting", 0, 0)
        results = api.export(**given, progress=progress)
    show(results, as_json)


def arguments(options: dict[str, Any]) -> tuple[dict[str, Any], bool, bool]:
    """The arguments of ``api.export`` for these options, and ``--json`` and ``--quiet``."""
    given = dict(options)
    given["model_kwargs"] = parse_kwargs(given["model_kwargs"])
    as_json, quiet = given.pop("as_json"), given.pop("quiet")
    images = {name: given.pop(f"image_{name}") for name in IMAGE_FLAGS}
    given["image"] = {name: value for name, value in images.items() if value is not None}
    return given, as_json, quiet


def show(results: Sequence[ExportResult], as_json: bool) -> None:
    """Print what was exported."""
    if as_json:
        click.echo(json.dumps([_document(result) for result in results], indent=2))
    else:
        _print(results)


def parse_kwargs(text: str | None) -> dict[str, Any]:
    """Parse ``--model-kwargs``; raise ``UsageError`` unless it is a JSON object."""
    try:
        kwargs = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--model-kwargs is not JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise UsageError("--model-kwargs must be a JSON object, such as '{\"nhead\": 4}'")
    return kwargs


def _document(result: ExportResult) -> dict[str, Any]:
    report, found, usage = result.proof.report, result.proof.evaluation, result.proof.usage
    return {
        "model": result.name,
        "format": result.format,
        "precision": result.precision,
        "version": result.version,
        "path": str(result.path),
        "size_bytes": result.size_bytes,
        "samples": report.samples + report.edge_samples,
        "max_abs_error": report.max_abs_error,
        "tolerance": {"atol": report.atol, "rtol": report.rtol},
        "conditioning": {
            name: dataclasses.asdict(one) for name, one in report.conditioning.items()
        },
        "ranges": report.ranges,
        "limits": [dataclasses.asdict(limit) for limit in report.limits],
        "agreement": report.agreement,
        "evaluation": None if found is None else dataclasses.asdict(found),
        "optimization": None
        if result.proof.optimization is None
        else dataclasses.asdict(result.proof.optimization),
        "seconds": round(result.seconds, 3),
        "peak_memory_bytes": usage.peak_memory_bytes,
        "notices": list(result.notices),
    }


def _print(results: Sequence[ExportResult]) -> None:
    for number, result in enumerate(results):
        if number:
            click.echo()
        report, found = result.proof.report, result.proof.evaluation
        held_to = f"tolerance {report.atol:g} + {report.rtol:g} * |reference|"
        if report.bounds is not None:
            relative = max(output.relative_error for output in report.outputs.values())
            held_to = f"{relative:.2%} of the values' norm"
        agreement = "none declared" if report.agreement is None else f"{report.agreement:.2%}"
        rows = {
            "model": f"{result.name} ({result.format} {result.precision})",
            "version": "not published" if result.version is None else str(result.version),
            "path": str(result.path),
            "size": f"{result.size_bytes / 1e6:.2f} MB",
            "max error": f"{report.max_abs_error:.2e} ({held_to}, "
            f"{report.samples + report.edge_samples} samples)",
            "agreement": agreement,
        }
        sensitive = [
            f"output '{name}': rounding alone moves it by {one.worst:.3g} times the tolerance; "
            f"up to {one.tolerance:.3g} times are accepted"
            for name, one in report.conditioning.items()
        ]
        if sensitive:
            rows["sensitive"] = "; ".join(sensitive)
        if report.ranges:
            served = (f"{name} {low}..{high}" for name, (low, high) in report.ranges.items())
            rows["ranges"] = f"{', '.join(served)} (found by trial; others are not served)"
        if report.limits:
            rest = len(report.limits) - NAMED
            rows["limits"] = "; ".join(map(str, report.limits[:NAMED])) + (
                f"; and {rest} more in the certificate" if rest > 0 else ""
            )
        if found is not None:
            rows["held out"] = _evaluated(found)
        if result.proof.optimization is not None:
            rows |= optimization_rows(result.proof.optimization)
        usage = result.proof.usage
        rows["seconds"] = (
            f"{result.seconds:.1f} (conversion {usage.seconds:.1f}, peak memory "
            f"{usage.peak_memory_bytes / 1e9:.1f} GB)"
        )
        if result.notices:
            rows["note"] = "; ".join(result.notices)
        for label, value in rows.items():
            click.echo(f"{label:<10} {value}")


def optimization_rows(found: GraphOptimization) -> dict[str, str]:
    """The rows that say how a graph was changed, and how much faster it is."""
    rows = {
        "optimised": f"{found.operators_before} operators before, {found.operators_after} now; "
        f"{found.size_bytes_before / 1e6:.2f} MB before, {found.size_bytes_after / 1e6:.2f} MB now",
    }
    if found.fused:
        rows["operators"] = ", ".join(f"{count} {name}" for name, count in found.fused.items())
    for one in found.speedup:
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in one.shapes.items())
        rows[f"speed-up {one.batch or ''}"] = (
            f"{one.ratio:.2f}x (middle half {one.low:.2f} to {one.high:.2f}) on {shapes}"
        )
    return rows


def _evaluated(found: Evaluation) -> str:
    parts = []
    if found.metric is not None:
        parts.append(f"{found.metric} {found.artifact:.4f} (checkpoint {found.reference:.4f})")
    if found.agreement is not None:
        parts.append(f"agreement {found.agreement:.2%}")
    else:
        parts.append(f"{found.relative_error:.2%} of the values' norm")
    return f"{', '.join(parts)}, {found.rows} rows"
