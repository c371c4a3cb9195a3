"""``config.pbtxt`` in Triton's schema: parse, write and complete it, and convert it to a signature.

The messages are those of ``tritonclient`` (``model_config.proto`` of Triton's repository
``common``). The bounds of values and dynamic axes, for which the schema has no field, are stored in
``parameters``, which Triton keeps and ignores:

    axis.sequence = "1..64"        the size of the dynamic axis ``sequence`` is from 1 to 64
    axes.tokens = "sequence"       names of dynamic dims of ``tokens``, in order, comma-separated
    range.tokens = "0..511"        every value of ``tokens`` is in [0, 511]
    range.seq_lens = "1..sequence" ... no value exceeds the request's size of ``sequence``
    mask.attention_mask = "right"  1 at data and 0 at padding, which is there; for load tests
    padding.sequence = "0"         inputs may be padded along ``sequence`` with 0 for batching
    padding.sequence = "ids=1,mask=0"  ... with a value for each input that has the axis
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor

from modelport.gateway.backend_registry import BACKENDS, PIPELINE, WRITTEN
from modelport.gateway.backend_registry import PLATFORMS as PLATFORMS
from modelport.gateway.backend_registry import Platform as Platform
from modelport.gateway.errors import InvalidArgument
from modelport.gateway.extensions import ExtensionError
from modelport.gateway.repository import padding
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from modelport.gateway.wire.proto import model_config_pb2 as pb

ModelConfig = Any  # pb.ModelConfig; tritonclient ships no type information

FILENAME = "config.pbtxt"
#: The platform of an ensemble, and also its backend here.
ENSEMBLE = "ensemble"
#: The folder of the inputs of warm-up requests.
WARMUP = "warmup"
#: The folder of the initial states of sequences.
INITIAL_STATE = "initial_state"
#: Queued requests of a model version, or of each of its priority levels: ``max_queue_size`` if the
#: configuration leaves it at 0.
DEFAULT_MAX_QUEUE_SIZE = 4096
#: Triton's ``max_sequence_idle_microseconds`` of a configuration that leaves it at 0.
DEFAULT_SEQUENCE_IDLE_MICROSECONDS = 1_000_000

_PREFIX = "TYPE_"
MAX_SIZE_DIGITS = 18


def datatype(number: int, where: str) -> Datatype:
    """The datatype of a field ``data_type``; raises ``InvalidArgument`` if it is not set."""
    known = pb.DataType.DESCRIPTOR.values_by_number.get(number)
    if known is None or not number:
        raise InvalidArgument(f"{where} must specify 'data_type'")
    name = known.name.removeprefix(_PREFIX)
    return Datatype("BYTES" if name == "STRING" else name)


def data_type(datatype: Datatype) -> int:
    name = "STRING" if datatype is Datatype.BYTES else datatype.value
    number: int = pb.DataType.Value(_PREFIX + name)
    return number


def parse(text: str) -> ModelConfig:
    """Parse ``config.pbtxt``.

    Raises:
        InvalidArgument: the text is not a ``ModelConfig``; the message has line and column.
    """
    try:
        return text_format.Parse(text, pb.ModelConfig())
    except (text_format.ParseError, ValueError) as error:  # or a number out of range
        raise _invalid(FILENAME, error) from error


def parse_json(text: str) -> ModelConfig:
    """Parse a JSON model configuration (the ``config`` parameter of a load request).

    Raises:
        InvalidArgument: the text is not JSON, or not a ``ModelConfig``.
    """
    from google.protobuf import json_format  # lazy, to keep start-up fast

    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError("it must be a JSON object")
        _put_in_lists(document, pb.ModelConfig.DESCRIPTOR)
        return json_format.ParseDict(document, pb.ModelConfig())
    except (ValueError, json_format.ParseError, RecursionError) as error:
        raise _invalid("'config'", error) from error


def _put_in_lists(document: dict[str, Any], message: Any) -> None:
    """Make a list of what stands where a list belongs, as Triton's parser does."""
    for field in message.fields:
        inner = field.message_type
        is_map = inner is not None and inner.GetOptions().map_entry
        for name in {field.name, field.json_name} & document.keys():
            if field.is_repeated and not is_map and not isinstance(document[name], list | None):
                document[name] = [document[name]]
            value = document[name]
            if is_map and isinstance(value, dict):
                inner, value = inner.fields_by_name["value"].message_type, list(value.values())
            for each in value if isinstance(value, list) else [value]:
                if inner is not None and isinstance(each, dict):
                    _put_in_lists(each, inner)


def _invalid(what: str, error: Exception) -> InvalidArgument:
    """The error for an invalid configuration; protobuf's message may have several lines."""
    return InvalidArgument(
        f"{what} is not a valid model configuration: {' '.join(str(error).split())}"
    )


def to_text(config: ModelConfig) -> str:
    text: str = text_format.MessageToString(config)
    return text


def to_json(message: Any) -> dict[str, Any]:
    """Convert ``message`` to the JSON of Triton's HTTP API.

    snake_case names, enums by name, 64-bit integers as numbers, unset messages omitted.
    """
    return dict(_json_fields(message))


def _json_fields(message: Any) -> Iterator[tuple[str, Any]]:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            yield field.name, {key: _json_value(inner, value[key]) for key in value}
        elif field.is_repeated:
            yield field.name, [_json_value(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            yield field.name, _json_value(field, value)


def _json_value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        return field.enum_type.values_by_number[value].name
    return value.decode("latin-1") if isinstance(value, bytes) else value


def complete(config: ModelConfig, name: str) -> ModelConfig:
    """Fill in Triton's defaults for everything but inputs and outputs.

    Raises:
        InvalidArgument: the configuration contradicts itself or its folder.
    """
    completed = copy.deepcopy(config)
    if completed.name and completed.name != name:
        raise InvalidArgument(
            f"unexpected directory name '{name}' for model '{completed.name}', directory name must "
            "equal model name"
        )
    completed.name = name
    if completed.max_batch_size < 0:
        raise InvalidArgument(f"'max_batch_size' must be non-negative value for '{name}'")
    if not completed.HasField("version_policy"):
        completed.version_policy.latest.num_versions = 1
    elif completed.version_policy.HasField("latest"):
        latest = completed.version_policy.latest
        latest.num_versions = latest.num_versions or 1
    if completed.HasField("ensemble_scheduling") or completed.platform == ENSEMBLE:
        return _complete_ensemble(completed)
    known = platform_of(completed)
    if known is not None:
        completed.platform = completed.platform or known.platform
        completed.backend = completed.backend or known.backend
        completed.default_model_filename = (
            completed.default_model_filename or known.default_filename
        )
    if completed.backend == PIPELINE.backend:
        _check_pipeline(completed)
    filename = completed.default_model_filename
    if filename and (filename in (".", "..") or "/" in filename or "\\" in filename):
        raise InvalidArgument(
            f"'default_model_filename' must be a plain file name, not '{filename}'"
        )
    if not completed.instance_group and completed.backend != PIPELINE.backend:
        completed.instance_group.add(name=name, kind=pb.ModelInstanceGroup.KIND_CPU, count=1)
    for index, group in enumerate(completed.instance_group):
        group.name = group.name or f"{name}_{index}"
        if group.count < 0:
            raise InvalidArgument(
                f"'count' of instance group '{group.name}' must be positive, not {group.count}"
            )
        group.count = group.count or 1
    if completed.HasField("sequence_batching"):
        sequences = completed.sequence_batching
        sequences.max_sequence_idle_microseconds = (
            sequences.max_sequence_idle_microseconds or DEFAULT_SEQUENCE_IDLE_MICROSECONDS
        )
    return completed


def _complete_ensemble(config: ModelConfig) -> ModelConfig:
    """Check an ensemble, which has no file and no instances of its own."""
    name = config.name
    if config.platform != ENSEMBLE:
        raise InvalidArgument(
            f"ensemble scheduling cannot be set for model '{name}' whose platform is not {ENSEMBLE}"
        )
    if not config.HasField("ensemble_scheduling"):
        raise InvalidArgument(f"must specify 'ensemble_scheduling' for ensemble '{name}'")
    _check_graph(config, ENSEMBLE)
    config.backend = ENSEMBLE
    return config


def _check_graph(config: ModelConfig, kind: str) -> None:
    """Refuse what is the business of the models of the steps."""
    if config.instance_group:
        raise InvalidArgument(f"instance group should not be specified for {kind} '{config.name}'")
    if config.HasField("optimization"):
        raise InvalidArgument(f"optimization should not be specified for {kind} '{config.name}'")
    if config.model_warmup:
        raise InvalidArgument(f"model_warmup can not be specified for {kind} '{config.name}'")


def _check_pipeline(config: ModelConfig) -> None:
    """Refuse what ``pipeline.toml`` declares."""
    _check_graph(config, PIPELINE.format)
    if config.default_model_filename != PIPELINE.default_filename:
        raise InvalidArgument(
            f"'default_model_filename' of pipeline '{config.name}' must be "
            f"'{PIPELINE.default_filename}'"
        )
    declared = {field.name for field, _ in config.ListFields()}
    for field in ("input", "output", "max_batch_size", "model_transaction_policy"):
        if field in declared:
            raise InvalidArgument(
                f"'{field}' should not be specified for {PIPELINE.format} '{config.name}': "
                f"{PIPELINE.default_filename} and the models of its steps declare it"
            )


def platform_of(config: ModelConfig) -> Platform | None:
    """The format that ``config`` names by platform, backend or file name."""
    names = config.platform, config.backend, config.default_model_filename
    for name, field in zip(names, ("platform", "backend", "default_filename"), strict=True):
        for known in (*PLATFORMS, *WRITTEN):
            if name and name == getattr(known, field):
                return known
    return _extension_platform(config)


def _extension_platform(config: ModelConfig) -> Platform | None:
    """The format of an installed backend that ``config`` names."""
    if not config.backend or config.backend in BACKENDS.builtin:
        return None
    try:
        backend = BACKENDS.get(config.backend)
    except ExtensionError:
        return None  # loading the model has the reason
    formats = backend.platforms if backend is not None else ()
    named = (
        known
        for known in formats
        if config.platform in ("", known.platform)
        and config.default_model_filename in ("", known.default_filename)
    )
    return next(named, None)


def companions(config: ModelConfig) -> list[PurePosixPath]:
    """The files beside ``config.pbtxt`` that it refers to: labels, warm-up inputs and states."""
    names = {PurePosixPath(output.label_filename) for output in config.output}
    for warmup in config.model_warmup:
        files = (each.input_data_file for each in warmup.inputs.values())
        names |= {PurePosixPath(WARMUP, file) for file in files if file}
    for state in config.sequence_batching.state:
        initial = (each.data_file for each in state.initial_state)
        names |= {PurePosixPath(INITIAL_STATE, file) for file in initial if file}
    return sorted(names - {PurePosixPath()})


def instance_count(config: ModelConfig) -> int:
    return sum(max(1, group.count) for group in config.instance_group) or 1


def build(name: str, platform: Platform, signature: ModelSignature) -> ModelConfig:
    """The configuration for ``signature``, with its bounds in ``parameters``."""
    config = pb.ModelConfig(
        name=name,
        platform=platform.platform,
        backend=platform.backend,
        default_model_filename=platform.default_filename,
        max_batch_size=signature.max_batch_size,
    )
    config.version_policy.latest.num_versions = 1
    for spec in signature.inputs:
        _describe(config, config.input.add(optional=spec.optional), spec)
    for spec in signature.outputs:
        _describe(config, config.output.add(), spec)
    for axis in signature.axes.values():
        _set(config, f"axis.{axis.name}", _span(axis.minimum, axis.maximum))
        if axis.padding is not None:
            _set(config, f"padding.{axis.name}", padding.to_text(axis.padding))
    return config


def _describe(config: ModelConfig, tensor: Any, spec: TensorSpec) -> None:
    """Declare ``tensor`` of ``config``, with its bounds in the parameters."""
    tensor.name = spec.name
    tensor.data_type = data_type(spec.datatype)
    tensor.dims.extend(spec.wire_dims)
    if spec.reshape is not None:
        tensor.reshape.SetInParent()
        tensor.reshape.shape.extend(spec.reshape)
    axes = [d if isinstance(d, str) else "" for d in spec.dims if isinstance(d, str) or d == -1]
    if any(axes):
        _set(config, f"axes.{spec.name}", ",".join(axes))
    if spec.minimum is not None or spec.maximum is not None:
        _set(config, f"range.{spec.name}", _span(spec.minimum, spec.maximum))


def _span(low: float | None, high: float | str | None) -> str:
    return f"{'' if low is None else low}..{'' if high is None else high}"


def _set(config: ModelConfig, key: str, value: str) -> None:
    config.parameters[key].string_value = value


def _parameter(config: ModelConfig, key: str) -> str | None:
    return config.parameters[key].string_value if key in config.parameters else None


def _number(text: str, key: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise InvalidArgument(f"parameter '{key}': '{text}' is not a number") from None


def _size(text: str, key: str) -> int | None:
    if text and not (text.isdecimal() and len(text) <= MAX_SIZE_DIGITS):
        raise InvalidArgument(f"parameter '{key}': '{text}' is not a size")
    return int(text) if text else None


def _parse_span(config: ModelConfig, key: str) -> tuple[str, str]:
    low, separator, high = (_parameter(config, key) or "..").partition("..")
    if not separator:
        raise InvalidArgument(f"parameter '{key}' must have the form 'low..high'")
    return low.strip(), high.strip()


def signature(config: ModelConfig) -> ModelSignature:
    """The signature that ``config`` declares.

    Raises:
        InvalidArgument: a tensor has no name, type or dims, or a bound does not parse.
    """
    axes: dict[str, Axis] = {}
    for key in config.parameters:
        if key.startswith("axis."):
            low, high = _parse_span(config, key)
            name = key.removeprefix("axis.")
            least, most = _size(low, key) or 0, _size(high, key)
            if most is not None and most < least:
                raise InvalidArgument(f"parameter '{key}': no size lies in '{low}..{high}'")
            axes[name] = Axis(name, least, most)
    inputs = tuple(_spec(config, tensor, "input", axes) for tensor in config.input)
    outputs = tuple(_spec(config, tensor, "output", axes) for tensor in config.output)
    declared = {spec.name for spec in (*inputs, *outputs)}
    for key in config.parameters:
        kind, _, name = key.partition(".")
        if kind in ("axes", "range") and name not in declared:
            raise InvalidArgument(f"parameter '{key}': there is no input or output '{name}'")
        if key.startswith("padding."):
            value = padding.parse(key, _parameter(config, key) or "", name, inputs)
            axes[name] = replace(axes[name], padding=value)
    for kind, specs in (("input", inputs), ("output", outputs)):
        names = [spec.name for spec in specs]
        for name in {n for n in names if names.count(n) > 1}:
            raise InvalidArgument(f"{kind} '{name}' is declared twice")
    return ModelSignature(inputs, outputs, config.max_batch_size, axes)


def _spec(config: ModelConfig, tensor: Any, kind: str, axes: dict[str, Axis]) -> TensorSpec:
    if not tensor.name:
        raise InvalidArgument(f"model {kind} must specify 'name'")
    where = f"model {kind} '{tensor.name}'"
    if not tensor.dims:
        raise InvalidArgument(f"{where} must specify 'dims'")
    if any(d != -1 and d < 1 for d in tensor.dims):
        raise InvalidArgument(f"{where} dimension must be integer >= 1, or -1")
    names = iter((_parameter(config, f"axes.{tensor.name}") or "").split(","))
    dims: list[int | str] = []
    for size in tensor.dims:
        named = next(names, "").strip() if size == -1 else ""
        if named:
            axes.setdefault(named, Axis(named, 0, None))
        dims.append(named or int(size))
    reshape = tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None
    if reshape is not None:
        _check_reshape(where, dims, reshape)
    low, high = _parse_span(config, f"range.{tensor.name}")
    return TensorSpec(
        name=tensor.name,
        datatype=datatype(tensor.data_type, where),
        dims=tuple(dims),
        minimum=_number(low, f"range.{tensor.name}") if low else None,
        maximum=(high if high in axes else _number(high, f"range.{tensor.name}")) if high else None,
        reshape=reshape,
        optional=bool(getattr(tensor, "optional", False)),
    )


def _check_reshape(where: str, dims: list[int | str], reshape: tuple[int, ...]) -> None:
    def fixed(sizes: Sequence[int | str]) -> tuple[int, int]:
        known = [size for size in sizes if isinstance(size, int) and size != -1]
        return math.prod(known), len(sizes) - len(known)

    if fixed(dims) != fixed(reshape):
        raise InvalidArgument(f"{where} has different size for dims and reshape")
