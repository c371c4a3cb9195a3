"""The effect of each field and parameter of ``config.pbtxt``, and the reason if it has none.

Every field of ``model_config.proto`` that is neither in ``WITHOUT_EFFECT`` nor in ``REFUSED`` is
read; ``docs/config_fields.py`` says what for. A path in a table stands for the fields below it,
too. ``{}`` stands for a key of a map. Parameters have such tables as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from modelport.gateway.backend_registry import PIPELINE, PYTHON
from modelport.gateway.errors import InvalidArgument, closest

_TENSORRT = "only Triton's TensorRT backend reads it"
_CUDA = "copies to and from a GPU are the runtime's own"
#: Path → reason.
WITHOUT_EFFECT: Mapping[str, str] = {
    "runtime": "a backend has one runtime here; Triton completes it with a library's name",
    "input.is_shape_tensor": _TENSORRT,
    "input.is_non_linear_format_io": _TENSORRT,
    "output.is_shape_tensor": _TENSORRT,
    "output.is_non_linear_format_io": _TENSORRT,
    "sequence_batching.state.use_same_buffer_for_input_output": "only a GPU's memory is shared",
    "optimization.priority": _TENSORRT,
    "optimization.cuda": _TENSORRT,
    "optimization.input_pinned_memory": _CUDA,
    "optimization.output_pinned_memory": _CUDA,
    "optimization.gather_kernel_buffer_threshold": _CUDA,
    "optimization.eager_batching": "a batch is gathered while the one before it runs",
    "instance_group.profile": _TENSORRT,
    "instance_group.host_policy": "there is no --host-policy",
    "cc_model_filenames": "`default_model_filename` is loaded on every device",
    "metric_tags": "metrics have the labels `model` and `version` alone",
}

#: Path → remedy.
REFUSED: Mapping[str, str] = {
    "sequence_batching.state.use_growable_memory": "it is memory of a GPU; remove it",
    "ensemble_scheduling.step.model_namespace": "an ensemble calls the models of its own "
    "repository; remove it",
    "instance_group.secondary_devices": "no backend has any; remove it",
    "instance_group.passive": "every instance takes requests; remove it",
    "model_operations": "custom operators are native code; export the model without them",
    "model_repository_agents": (
        "no agent would check or decrypt the model; use manifests and --require-signature"
    ),
}

#: Options of ONNX Runtime's CUDA provider, which older configurations have among the parameters.
CUDA_OPTIONS = (
    "gpu_mem_limit", "arena_extend_strategy", "cudnn_conv_algo_search",
    "do_copy_in_default_stream", "cudnn_conv_use_max_workspace", "enable_cuda_graph",
    "cudnn_conv1d_pad_to_nc1d", "use_ep_level_unified_stream", "use_tf32", "prefer_nhwc",
)  # fmt: skip


#: Tensors, and characters of a name, among which a similar name is looked for.
_MAX_NEAR = 100


class ParameterTable(NamedTuple):
    """The parameters of one backend, or of all: name → effect, reason or remedy.

    A word in capitals after the last dot of a name stands for any: ``TENSOR`` for an input or
    output.
    """

    read: Mapping[str, str] = {}
    without_effect: Mapping[str, str] = {}
    refused: Mapping[str, str] = {}


PARAMETERS = ParameterTable(
    read={
        "axis.NAME": '`"1..64"`: bounds of the dynamic axis `NAME`',
        "axes.TENSOR": (
            '`"sequence"`: names of the tensor\'s dynamic dimensions, in order, separated by commas'
        ),
        "range.TENSOR": (
            '`"0..511"`: range of every value; `"1..sequence"`: up to the request\'s own `sequence`'
        ),
        "mask.TENSOR": (
            '`"right"`, `"left"` or `"any"`: 1 where there is data, with padding there; load tests '
            "and gates draw requests without padding"
        ),
        "padding.NAME": (
            '`"0"`: pad inputs along the axis so that they share a batch; `"ids=1,mask=0"`: a '
            "value for each input"
        ),
        "classification.TENSOR": "`logits` or `probabilities`: the output has a value a class",
        **{
            f"image.{key}": "preprocessing of [images](../protocols/images.md)"
            for key in ("size", "resize", "layout", "interpolation", "scale", "mean", "std")
        },
        **{
            f"audio.{key}": "preprocessing of [sound](../protocols/images.md#sound)"
            for key in ("rate", "features", "normalize", "truncate", "mean", "std")
        },
        "version_label.NAME": "the version that a label names",
        "default_version": (
            "the version for requests without one, if `version_policy` serves it; otherwise the "
            "newest served one"
        ),
        "aspired_version_policy": (
            "`availability_preserving` or `resource_preserving`, for this model"
        ),
        "admission_control": "[overload](../serving/batching.md#overload)",
        "admission_control_min_pending_requests": "[overload](../serving/batching.md#overload)",
        "batch_here": "gather requests for a model on another server, an ensemble or a pipeline",
        "raw_body": (
            "`true`: the paths of TorchServe, SageMaker and Vertex AI pass each body to the only "
            "input as it is, JSON too"
        ),
        "explainer": "the model that answers `:explain` and `/explanations`",
    }
)
_SIGNATURE = {"TF_SIGNATURE_DEF": "signature"}
#: The backend of models that are code.
_CODE = "python"
#: By backend.
BACKEND_PARAMETERS: Mapping[str, ParameterTable] = {
    "onnxruntime": ParameterTable(
        read={
            "string_encoding": "`latin-1` passes any bytes through strings",
            "intra_op_thread_count": "threads of an operator",
            "inter_op_thread_count": "operators at once, with `execution_mode` 1",
            "execution_mode": "1 runs operators in parallel",
            "enable_mem_arena": "whether memory is kept in an arena",
            "enable_mem_pattern": "whether memory is planned by the first run",
            **dict.fromkeys(CUDA_OPTIONS, "option of the CUDA provider"),
        },
    ),
    "pytorch": ParameterTable(
        read={
            "INTRA_OP_THREAD_COUNT": "threads of an operator, in all models",
            "INTER_OP_THREAD_COUNT": "operators at once, in all models",
            "INFERENCE_MODE": "`false` runs in `no_grad` mode",
            "DISABLE_OPTIMIZED_EXECUTION": "`true` does not optimize TorchScript",
        },
        without_effect={
            "DISABLE_CUDNN": "cuDNN is used where PyTorch has it",
            "ENABLE_CACHE_CLEANING": "the GPU's memory is kept for the next request",
            "ENABLE_WEIGHT_SHARING": "instances always share their weights",
            "ENABLE_JIT_EXECUTOR": "TorchScript has PyTorch's default executor",
            "ENABLE_JIT_PROFILING": "TorchScript has PyTorch's default executor",
            "ENABLE_TENSOR_FUSER": "TorchScript has PyTorch's default fuser",
            "NUM_THREADS": "only models of Python code have it",
            "TORCH_COMPILE_OPTIONAL_PARAMETERS": "only models of Python code have it",
        },
    ),
    "tensorflow": ParameterTable(
        read={
            **_SIGNATURE,
            "TF_GRAPH_TAG": "tag of the SavedModel",
            "TF_NUM_INTRA_THREADS": "threads of an operator",
            "TF_NUM_INTER_THREADS": "operators at once",
            "TF_USE_PER_SESSION_THREADS": "whether the model has threads of its own",
        },
        without_effect={
            "TF_INIT_OPS_FILE": "a SavedModel names its own initialization",
            "MAX_SESSION_SHARE_COUNT": "instances always share one session",
        },
    ),
    "tflite": ParameterTable(read={**_SIGNATURE, "tflite_num_threads": "threads of an operator"}),
    "openvino": ParameterTable(
        read={
            "INFERENCE_NUM_THREADS": "threads of the model",
            "NUM_STREAMS": "requests at once; `AUTO`: OpenVINO decides",
            "PERFORMANCE_HINT": "`LATENCY`, `THROUGHPUT` or `CUMULATIVE_THROUGHPUT`",
            "HINT_BF16": "`yes` computes in bf16",
            "TARGET_DEVICE": "must be `CPU`",
        },
        without_effect={
            "COMPILATION_NUM_THREADS": "OpenVINO decides",
            "ENABLE_BATCH_PADDING": "batches of a model of a fixed size are always padded",
            "RESHAPE_IO_LAYERS": "a model is served with its own shapes",
            "SKIP_OV_DYNAMIC_BATCHSIZE": "the batch dimension is the model's own",
        },
        refused={"CPU_EXTENSION_PATH": "it names native code, which is not loaded; remove it"},
    ),
    "executorch": ParameterTable(),
    "python": ParameterTable(
        read={
            "EXECUTION_ENV_PATH": (
                "a virtual environment, or a tar archive of one, whose interpreter runs the model; "
                "`$$TRITON_MODEL_DIRECTORY` is the model's folder"
            ),
            "RLIMIT_DATA": (
                "bytes of data that a worker may have (`setrlimit`); `--python-max-data` counts, "
                "too, if it is smaller"
            ),
        },
        without_effect={"FORCE_CPU_ONLY_INPUT_TENSORS": "tensors are always in the CPU's memory"},
    ),
    "ensemble": ParameterTable(),
    "pipeline": ParameterTable(),
    "fake": ParameterTable(
        read={
            "delay_seconds": "delay of each response",
            "error": "message of the error that each request gets",
            "responses": "responses of a decoupled model",
        }
    ),
    "identity": ParameterTable(
        read={
            "execute_delay_ms": "delay of each execution",
            "creation_delay_sec": "delay of the load",
        }
    ),
}


def check(config: Any) -> None:
    """Check that this gateway itself can serve a model with the fields of ``config``.

    Raises:
        InvalidArgument: a field or parameter is in a table ``refused``, or an enum has an unknown
            value.
    """
    for path in sorted({*_paths(config)} & REFUSED.keys()):
        raise refusal(path, config.name)
    for key, remedy in _table(config).refused.items():
        if key in config.parameters and config.parameters[key].string_value:
            raise InvalidArgument(f"parameter '{key}' is not supported: {remedy}")


def check_complete(config: Any) -> None:
    """Check that nothing of the configuration of a model has to be taken from its artifact.

    Raises:
        InvalidArgument: an input or output may be missing.
    """
    if config.backend == PIPELINE.backend:
        return  # pipeline.toml is its configuration
    takes_none = config.backend == PYTHON.backend  # a Python model may have no inputs
    if not config.output or not (config.input or takes_none):
        missing = "input" if config.output else "output"
        raise InvalidArgument(
            f"model '{config.name}' must specify '{missing}' in its configuration, because "
            "--disable-auto-complete-config is set"
        )


def refusal(path: str, model: str) -> InvalidArgument:
    return InvalidArgument(f"'{path}' of '{model}' is not supported: {REFUSED[path]}")


def without_effect(config: Any) -> list[tuple[str, str]]:
    """The fields and parameters of ``config`` that have no effect here, and the reasons."""
    found = {*_paths(config)}
    fields = [(path, reason) for path, reason in WITHOUT_EFFECT.items() if path in found]
    table = _table(config).without_effect
    return fields + [(key, table[key]) for key in sorted(config.parameters) if key in table]


def unknown_parameters(config: Any, elsewhere: bool = False) -> Iterator[tuple[str, str]]:
    """The parameters of ``config`` that no table has, and the nearest known name of each.

    Args:
        config: completed with the model's inputs and outputs.
        elsewhere: another server runs the model, and may know parameters that are like no other,
            as the code of a Python model may.
    """
    elsewhere |= config.backend not in BACKEND_PARAMETERS or config.backend == _CODE
    tensors = dict.fromkeys(tensor.name for tensor in (*config.input, *config.output))
    tables = (PARAMETERS, _table(config))
    names = [name for table in tables for part in table for name in part]
    split = [name.partition(".") for name in names]
    words = {kind: word for kind, _, word in split if word in ("NAME", "TENSOR")}
    known = {name for name in names if name.partition(".")[0] not in words}
    for key in sorted(config.parameters.keys() - known):
        kind, _, rest = key.partition(".")
        word = words.get(kind, "")
        if (word == "NAME" and rest) or (word == "TENSOR" and rest in tensors):
            continue
        alike = known | {f"{kind}.{rest or word}" for kind, word in words.items() if word == "NAME"}
        ends = [rest] if rest in tensors else [*islice(tensors, _MAX_NEAR)]
        alike |= {
            f"{kind}.{end}" for kind, word in words.items() if word == "TENSOR" for end in ends
        }
        near = closest(key[:_MAX_NEAR], sorted(alike))
        if near or not elsewhere:
            yield key, near


def _table(config: Any) -> ParameterTable:
    """The parameters of the model's backend; of a backend elsewhere, none are known."""
    return BACKEND_PARAMETERS.get(config.backend, ParameterTable())


def step(field: FieldDescriptor) -> str:
    """The name of a field in a path."""
    kind = field.message_type
    return f"{field.name}{{}}" if kind is not None and kind.GetOptions().map_entry else field.name


def value_message(field: FieldDescriptor) -> Any:
    """The type of a field's messages, or of a map's values; None: it has numbers or strings."""
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        return kind.fields_by_name["value"].message_type
    return kind


def _paths(message: Any, prefix: str = "") -> Iterator[str]:
    """The path of every field that is set, messages included.

    Raises:
        InvalidArgument: an enum has an unknown value.
    """
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.enum_type is not None:
            _check_enum(path, field, value)
        if value_message(field) is None:
            yield path
            continue
        yield path
        path = prefix + step(field)
        for each in _each(field, value):
            yield from _paths(each, f"{path}.")


def _each(field: FieldDescriptor, value: Any) -> Iterable[Any]:
    if step(field) != field.name:
        return [value[key] for key in value]
    return value if field.is_repeated else [value]


def _check_enum(path: str, field: FieldDescriptor, value: Any) -> None:
    known = field.enum_type.values_by_number
    for number in value if field.is_repeated else [value]:
        if number not in known:
            names = ", ".join(each.name for each in known.values())
            raise InvalidArgument(f"'{path}' is {number}; it must be one of {names}")
