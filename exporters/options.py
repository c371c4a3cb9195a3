"""Options of ``modelport export``, ``verify`` and ``convert``, and of the functions of these names.

Importing it imports neither torch nor a runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import click

from modelport.exporters.model_registry import MODELS
from modelport.gateway.cli.declared_options import option
from modelport.gateway.cli.paths import EXISTING, WrittenPath, WrittenRepository
from modelport.gateway.repository.storage.location import Location

#: Called with the stage's name, the work done and the whole work; 0 of 0 is unknown.
Progress = Callable[[str, int, int], None]
AnyPath = Path | str
FORMAT_NAMES = "onnx|torchscript|savedmodel|tflite|openvino|pt2|aoti|executorch|all"

#: ``--image-NAME`` sets the parameter ``image.NAME`` of ``config.pbtxt``; its help text.
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


SEED = option(help="Seed of the inputs.", type=click.IntRange(0), default=0)
MODEL_VERSION = option(
    help="Version to publish; auto: the next free one.",
    was="version",
    type=str,
    default="auto",
    metavar="N|auto",
)
PUBLIC_KEY = option(
    help="Require a signature by this Ed25519 key. Repeatable: any one of the keys.",
    was="public_keys",
    type=EXISTING,
    metavar="PUBKEY",
)

SIGN_KEY = option(
    help="Sign the certificate with this Ed25519 key ('modelport keygen' makes one).",
    type=EXISTING,
    metavar="FILE",
)


class ExportOptions(TypedDict, total=False):
    """Options of ``export`` and ``certify``.

    Attributes:
        image: values of ``--image-mean`` and the like, by their last word.
        progress: is called as the work advances.
    """

    model: Annotated[
        str | None,
        f"A registered model ({', '.join(MODELS)}, or a plug-in's), or any factory of an "
        "nn.Module; timm:NAME or torchvision:NAME. Hugging Face folders, Keras files and "
        "SavedModels need none.",
        option(metavar="NAME|package.module:factory"),
    ]
    custom_objects: Annotated[
        str | None,
        "The module that registers a .keras file's own classes with "
        "keras.saving.register_keras_serializable().",
        option(metavar="MODULE"),
    ]
    signature: Annotated[
        str | None,
        "The signature of a SavedModel to export.  [default: serving_default, or its only one]",
        option(metavar="NAME"),
    ]
    task: Annotated[
        str | None,
        "The task to export a Hugging Face folder for: text-classification, "
        "feature-extraction, text-generation-with-past, ...  [default: its architecture's]",
        option(metavar="TASK"),
    ]
    model_kwargs: Annotated[
        Mapping[str, Any] | None,
        "Hyper-parameters; they override the checkpoint's.",
        option(metavar="JSON"),
    ]
    lora: Annotated[
        AnyPath | None,
        "PEFT adapters to merge into a Hugging Face checkpoint.",
        EXISTING,
        option(metavar="DIR"),
    ]
    input: Annotated[
        Sequence[str],
        "Declare an input of a model that declares no signature, or sizes that a Keras model "
        "or SavedModel leaves open: 'image:FP32[3,224,224]', "
        "'tokens:INT64[sequence=1..64]=0..511'; the bounds of a dimension of -1 are found by "
        "running the model. Repeatable.",
        option(was="inputs", metavar="NAME:DATATYPE[DIMS]"),
    ]
    output_name: Annotated[
        Sequence[str],
        "Name the model's outputs, in order, or choose some of its own names.  [default: its "
        "own, such as logits; output, or output_0, ...]",
        option(was="output_names"),
    ]
    mask: Annotated[
        Sequence[str],
        "An input that is 1 where there is data and 0 at padding, or the number of positions "
        "with data ('lengths:INT64[]=1..sequence'). The proof's inputs have at least one such "
        "position, padded on the right, on the left or anywhere. The outputs are undefined at "
        "padding and not compared there. Repeatable.  [default: INT or BOOL inputs named "
        "mask, attention_mask, ..._attention_mask, padded on the right; every output is "
        "compared]",
        option(was="masks", metavar="NAME[:right|left|any][=OUTPUT,...]"),
    ]
    max_batch_size: Annotated[
        int,
        "0: no input or output has a batch dimension (graphs, detectors).",
        click.IntRange(0, 2**31 - 1),
        option(default=8),
    ]
    format: Annotated[
        str | Sequence[str],
        "The artifact's format; 'all' is onnx, torchscript, savedmodel and tflite. Repeatable.",
        option(was="formats", required=True, metavar=FORMAT_NAMES),
    ]
    name: Annotated[str | None, "The model's name in the repository.  [default: the model's own]"]
    name_template: Annotated[
        str | None,
        "Template of {name}, {format} and {precision}.  [default: {name}, and {name}-{format} "
        "for more than one format]",
        option(metavar="TEMPLATE"),
    ]
    repository: Annotated[
        AnyPath | Location,
        "The model repository to publish into: a folder, or s3://, gs:// or az://BUCKET/PREFIX.",
        WrittenRepository(),
        option(default=Path("model_repository")),
    ]
    model_version: Annotated[int | str, MODEL_VERSION]
    dtype: Annotated[
        str,
        "Precision inside the artifact; inputs and outputs keep their datatypes.",
        option(default="fp32", metavar="fp32|fp16|bf16"),
    ]
    quantize: Annotated[
        str | None,
        "int8: weights and activations (ONNX: dynamic, or static with --calibrate; TFLite: "
        "dynamic range). int8-weight-only, int4: weights alone, in blocks, for language "
        "models in ONNX.",
        option(metavar="int8|int8-weight-only|int4"),
    ]
    calibrate: Annotated[
        Sequence[AnyPath],
        "Quantise activations of --quantize int8 statically, by their ranges on these inputs: "
        "an .npz of rows by input name, requests as .json or .jsonl, a file of 'modelport "
        "sample', or a folder of 'serve --record'. Repeatable.",
        EXISTING,
        option(metavar="FILE.npz|.jsonl"),
    ]
    calibration_method: Annotated[
        str | None,
        "Method to choose ranges with --calibrate.  [default: minmax]",
        option(metavar="minmax|entropy|percentile"),
    ]
    per_channel: Annotated[
        bool | None,
        "One scale for each output channel of int8 weights, or for each tensor.  [default: "
        "per channel]",
        option("--per-channel/--no-per-channel", default=None),
    ]
    block_size: Annotated[
        int | None,
        "Weights that share a scale, for int4 and int8-weight-only.  [default: 32]",
        option(metavar="16|32|64|128|256"),
    ]
    optimize: Annotated[
        str | None,
        "Optimise the ONNX graph as optimum-cli does. O1: constant folding and redundant "
        "nodes, ONNX's own operators only. O2: fusions of ONNX Runtime and of transformers, "
        "too. O3: GELU is approximated, too, held to the bounds of fp16.",
        option(metavar="O1|O2|O3"),
    ]
    opset: Annotated[
        int | None,
        "ONNX operator set, up to the newest that ONNX Runtime runs.  [default: 20; from "
        "TensorFlow 18]",
    ]
    atol: Annotated[
        float | None,
        "Absolute tolerance.  [default: the model's own]",
        click.FloatRange(0),
    ]
    rtol: Annotated[
        float | None,
        "Relative tolerance.  [default: the model's own]",
        click.FloatRange(0),
    ]
    samples: Annotated[
        int | None,
        "Random inputs to compare on.  [default: 1000, fewer above 5 million parameters]",
        click.IntRange(1),
    ]
    seed: Annotated[int, SEED]
    data: Annotated[
        AnyPath | None,
        "Held-out inputs by name, and 'labels', or a folder of 'serve --record'; below fp32 these "
        "replace the random inputs.",
        EXISTING,
        option(metavar="FILE.npz"),
    ]
    max_drop: Annotated[
        float,
        "Accepted loss of accuracy (or AUC) on --data.",
        click.FloatRange(0),
        option(default=0.01),
    ]
    min_agreement: Annotated[
        float | None,
        "Below fp32, the fraction of decisions that must agree.  [default: fp16 0.995, bf16 "
        "0.98, int8 0.97, int8-weight-only 0.98, int4 0.9]",
        click.FloatRange(0, 1),
    ]
    max_relative_error: Annotated[
        float | None,
        "Below fp32, the limit for a model without a decision.  [default: fp16 0.01, bf16 "
        "0.05, int8 0.1, int8-weight-only 0.05, int4 0.2]",
        click.FloatRange(0),
    ]
    image: Annotated[Mapping[str, str] | None, _image_flags]
    labels: Annotated[
        AnyPath | None,
        "Class names, one per line.  [default: a Hugging Face folder's]",
        EXISTING,
        option(metavar="FILE"),
    ]
    long_texts: Annotated[
        str | None,
        "Texts of more tokens than the model takes, for a Hugging Face folder with a tokenizer.  "
        "[default: as the task's pipeline: truncate for embeddings and token-classification]",
        option(metavar="truncate|refuse"),
    ]
    sign_key: Annotated[AnyPath | None, SIGN_KEY]
    output: Annotated[
        AnyPath | None,
        "Write the artifact and its certificate here instead of publishing.",
        WrittenPath(),
        option("-o", "--output"),
    ]
    progress: Progress | None


class VerifyOptions(TypedDict, total=False):
    """Options of ``verify``; ``progress`` is called as the work advances."""

    integrity: Annotated[
        bool, "Check the files only, without running the model.", option(is_flag=True)
    ]
    public_key: Annotated[Sequence[AnyPath], PUBLIC_KEY]
    checkpoint: Annotated[
        AnyPath | None,
        "The checkpoint that was exported.  [default: the certificate's, here or in checkpoints/]",
        EXISTING,
    ]
    lora: Annotated[
        AnyPath | None,
        "The adapters that the export merged.",
        EXISTING,
        option(metavar="DIR"),
    ]
    data: Annotated[
        AnyPath | None,
        "The held-out inputs of its evaluation.",
        EXISTING,
        option(metavar="FILE.npz"),
    ]
    model: Annotated[
        str | None,
        "Run this factory, which an unsigned certificate names.",
        option(metavar="package.module:factory"),
    ]
    trust: Annotated[
        bool,
        "Run the version's artifact and its certificate's factory although no --public-key "
        "signed them: native code (aoti), operators that access files, factories.",
        option(is_flag=True),
    ]
    progress: Progress | None


class ConvertOptions(TypedDict, total=False):
    """Options of ``convert``; ``progress`` is called as the work advances."""

    model_kwargs: Annotated[
        Mapping[str, Any] | None,
        "Hyper-parameters; they override the files'.",
        option(metavar="JSON"),
    ]
    samples: Annotated[
        int,
        "Number of random inputs to compare both models on.",
        click.IntRange(1),
        option(default=1000),
    ]
    seed: Annotated[int, SEED]
    check: Annotated[
        bool, "Compare SOURCE with an existing TARGET; write no model.", option(is_flag=True)
    ]
    progress: Progress | None
