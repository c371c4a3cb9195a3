"""Every field of ``config.pbtxt`` is read, has no effect, or is refused; each is what it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from docs import config_fields
from modelport.gateway.backends.base import Artifact
from modelport.gateway.backends.embedded import onnxruntime_options, placement
from modelport.gateway.backends.embedded.ragged import RaggedLayout
from modelport.gateway.backends.fake import FakeBackend
from modelport.gateway.backends.pipeline.ensemble_check import check as check_ensemble
from modelport.gateway.errors import InvalidArgument, ModelportError
from modelport.gateway.inference import image_decoding, pipeline
from modelport.gateway.inference.batching import Schedulers, dynamic_batching, sequence_batching
from modelport.gateway.inference.batching.sequence_tensors import SequenceTensors
from modelport.gateway.inference.cache import ResponseCache
from modelport.gateway.inference.rate_limiter import RateLimiter
from modelport.gateway.inference.signatures import NamedSignatures
from modelport.gateway.models import model
from modelport.gateway.models.model_config import FIRST_RESPONSE, histogram_buckets, read_config
from modelport.gateway.repository import config, config_schema, scheduler_tensors
from modelport.gateway.repository.routes_file import ModelRoute
from modelport.gateway.repository.scan import ModelEntry
from modelport.gateway.repository.version_policy import VersionPolicy
from modelport.gateway.telemetry import Statistics
from modelport.gateway.types import Datatype, InferRequest, InferResponse, Tensor
from modelport.gateway.wire.proto import model_config_pb2 as pb
from tests.gateway.backends.pipeline import test_ensemble
from tests.gateway.models.managers import World, served

ROOT = Path(__file__).parents[3]
LEAVES = [*config_fields.leaves(pb.ModelConfig.DESCRIPTOR)]
READ, IDLE, REFUSED = config_fields.READ, config_schema.WITHOUT_EFFECT, config_schema.REFUSED


# -- the tables -----------------------------------------------------------------------------------


def misplaced(descriptor: Any, read: Any, *others: Any) -> list[str]:
    """The fields of the schema that are not in exactly one table, and entries that are no field."""
    leaves = [*config_fields.leaves(descriptor)]

    def covers(entry: str, leaf: str) -> bool:
        return leaf == entry or leaf.startswith((f"{entry}.", f"{entry}{{}}"))

    entries = [entry for table in others for entry in table]
    wrong = [
        leaf for leaf in leaves
        if (leaf in read) + sum(covers(entry, leaf) for entry in entries) != 1
    ]  # fmt: skip
    wrong += [entry for entry in entries if not any(covers(entry, leaf) for leaf in leaves)]
    return wrong + sorted(set(read) - set(leaves))


def test_every_field_is_in_exactly_one_table() -> None:
    assert misplaced(pb.ModelConfig.DESCRIPTOR, READ, IDLE, REFUSED) == []
    assert len(LEAVES) > 100


@pytest.mark.parametrize("path", ["model_warmup.count", "input.dims", "metric_tags"])
def test_a_field_in_no_table_or_in_two_is_found(path: str) -> None:
    """The defect that was reported: ``model_warmup`` was listed as read, and so not looked for."""
    without = [{k: v for k, v in table.items() if k != path} for table in (READ, IDLE, REFUSED)]
    assert [leaf.removesuffix("{}") for leaf in misplaced(pb.ModelConfig.DESCRIPTOR, *without)] == [
        path
    ]
    twice = {**REFUSED, path: "twice"}
    assert misplaced(pb.ModelConfig.DESCRIPTOR, READ, IDLE, twice)
    assert misplaced(pb.ModelConfig.DESCRIPTOR, {**READ, "no.such": ""}, IDLE, REFUSED)


def test_a_field_of_a_newer_schema_is_found() -> None:
    file = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    for message in file.message_type:
        if message.name == "ModelWarmup":
            kind = descriptor_pb2.FieldDescriptorProto.TYPE_BOOL
            message.field.add(name="newer", number=99, type=kind, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    newer = pool.FindMessageTypeByName("inference.ModelConfig")
    assert misplaced(newer, READ, IDLE, REFUSED) == ["model_warmup.newer"]
    assert message_factory.GetMessageClass(newer)


# -- refused, and without effect ------------------------------------------------------------------


def holding(path: str) -> Any:
    """A configuration with a value in the field ``path``, and in no other."""
    made = message = pb.ModelConfig(name="m")
    *folders, last = path.split(".")
    for step in folders:
        field = getattr(message, step.removesuffix("{}"))
        descriptor = message.DESCRIPTOR.fields_by_name[step.removesuffix("{}")]
        if step.endswith("{}"):
            message = field[1 if "priority" in step else "k"]
        else:
            message = field.add() if descriptor.is_repeated else field
    name = last.removesuffix("{}")
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    field = getattr(message, name)
    if last.endswith("{}"):
        field["k"] = "v"
    elif descriptor.message_type is not None:
        _ = field.add() if descriptor.is_repeated else field.SetInParent()
    else:
        value: Any = "v" if descriptor.type == descriptor.TYPE_STRING else 1
        if descriptor.enum_type is not None:
            value = min(1, len(descriptor.enum_type.values) - 1)
        if descriptor.type == descriptor.TYPE_BOOL:
            value = True
        _ = field.append(value) if descriptor.is_repeated else setattr(message, name, value)
    return made


@pytest.mark.parametrize("path", LEAVES)
def test_a_field_is_treated_as_its_table_says(path: str) -> None:
    made = holding(path)
    refused = [entry for entry in REFUSED if path.startswith(entry)]
    if refused:
        with pytest.raises(InvalidArgument, match=f"^'{refused[0]}.*' of 'm' is not supported: "):
            config_schema.check(made)
        return
    config_schema.check(made)
    idle = [entry for entry, _ in config_schema.without_effect(made)]
    assert idle == [entry for entry in IDLE if path.startswith(entry)]
    assert bool(idle) != (path in READ)


@pytest.mark.parametrize("path", REFUSED)
def test_a_refused_field_fails_the_load_here_and_not_on_a_route(path: str) -> None:
    leaf = next(leaf for leaf in LEAVES if leaf.startswith(path))
    made = holding(leaf)
    made.backend = "onnxruntime"
    if path.startswith("ensemble"):
        made.backend, made.platform = "", "ensemble"
    entry = ModelEntry("m", Path(), config.to_text(made))
    with pytest.raises(InvalidArgument, match=f"'{path}' of 'm' is not supported"):
        read_config(entry)
    assert read_config(entry, route=ModelRoute(("localhost:1",), "triton"))


@pytest.mark.parametrize("path", ["instance_group.kind", "input.data_type", "batch_input.kind"])
def test_an_unknown_value_of_an_enum_is_refused_by_name(path: str) -> None:
    parent, _, field = path.partition(".")
    with pytest.raises(InvalidArgument, match=f"'{path}' is 77; it must be one of [A-Z_]+, "):
        config_schema.check(config.parse(f"{parent} {{ {field}: 77 }}"))


async def test_a_version_with_idle_fields_and_unknown_parameters_is_served_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = World(tmp_path)
    text = "".join(config.to_text(holding(leaf)) for leaf in LEAVES if leaf.startswith("metric_"))
    text = text.replace('name: "m"\n', "")
    key = 'parameters { key: "rangee.x" value { string_value: "0..1" } }'
    world.publish(1, config=text + key)
    manager = await world.serve()
    assert served(manager)
    await manager.stop()
    out, err = capfd.readouterr()
    told = re.sub(r"\x1b\[\d*m", "", out + err)
    assert re.search(r"fields of config.pbtxt have no effect +fields='?metric_tags: ", told)
    assert re.search(r"unknown parameter.* did_you_mean=range.x.* parameter=rangee.x", told)


# -- read -----------------------------------------------------------------------------------------

Observe = Callable[[str, Path], Any]
X = (
    'input { name: "x" data_type: TYPE_FP32 dims: 2 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 2 }'
)


def tensor(
    kind: str, name: str = "x", datatype: str = "FP32", dims: str = "2", more: str = ""
) -> str:
    return f'{kind} {{ name: "{name}" data_type: TYPE_{datatype} dims: [{dims}] {more} }}'


def signature(text: str, folder: Path) -> Any:
    return config.signature(config.parse(text))


def completed(text: str, folder: Path) -> Any:
    made = config.complete(config.parse(text), "m")
    return made.backend, made.platform, made.default_model_filename


def backend_and_file(text: str, folder: Path) -> Any:
    return completed(text, folder)[::2]


def versions(text: str, folder: Path) -> Any:
    made = config.complete(config.parse(text), "m")
    return VersionPolicy.of(made.version_policy).chosen([1, 2, 3])


def batching(text: str, folder: Path) -> Any:
    return dynamic_batching.read(config.parse(f"max_batch_size: 8 dynamic_batching {{ {text} }}"))


def sequences(text: str, folder: Path) -> Any:
    return sequence_batching.read(config.parse(f"max_batch_size: 8 sequence_batching {{ {text} }}"))


def sequence_tensors(text: str, folder: Path) -> Any:
    (folder / "initial_state").mkdir(parents=True, exist_ok=True)
    (folder / "initial_state/four").write_bytes(bytes(range(4)))
    made = config.parse(f'name: "m" sequence_batching {{ {text} }}')
    first = SequenceTensors(made, folder.joinpath).first
    return str(scheduler_tensors.declared(made)), {name: str(data) for name, data in first.items()}


def ragged_batch(text: str, folder: Path) -> Any:
    made = config.parse(tensor("input", dims="-1") + tensor("output", "y", dims="-1") + text)
    made.max_batch_size, made.input[0].allow_ragged_batch = 8, True
    config_schema.check(made)
    scheduler_tensors.check_batch_tensors(made)
    layout = RaggedLayout(made)
    pair = [
        InferRequest("m", [Tensor("x", Datatype.FP32, np.ones((1, size), "f4"))]) for size in (1, 3)
    ]
    for each in made.input[1:]:
        pair[0].inputs.append(Tensor(each.name, Datatype.FP32, np.ones((1, 2), "f4")))
        pair[1].inputs.append(Tensor(each.name, Datatype.FP32, np.ones((1, 2), "f4")))
    batch = layout.join(pair)
    flat = Tensor("y", Datatype.FP32, np.ones(4, "f4"))
    split = layout.split(InferResponse("m", 1, [flat]), pair) if made.batch_output else []
    return str(batch.inputs), str(split)


def labels(text: str, folder: Path) -> Any:
    (folder / "labels.txt").write_text("cat")
    return model._labels(ModelEntry("m", folder), config.parse(text))


def decoder(text: str, folder: Path) -> Any:
    made = config.parse(text + 'parameters { key: "image.scale" value { string_value: "1" } }')
    return bool(image_decoding.decoder(made, config.signature(made).inputs[0]))


def artifact(text: str) -> Artifact:
    return Artifact("m", 1, Path(), config.parse(text), 1)


def gpu(text: str, folder: Path) -> Any:
    return placement.gpu_of(artifact(f"instance_group {{ {text} }}"), lambda _: "")


def instances(text: str, folder: Path) -> Any:
    return config.instance_count(config.complete(config.parse(text), "m"))


def limited(text: str, folder: Path) -> Any:
    made = config.parse(f"instance_group {{ rate_limiter {{ {text} }} }}")
    model = RateLimiter({}).limit(config.complete(made, "m"))
    return model and [(each.needs, each.priority) for each in model.instances]


def in_flight(text: str, folder: Path) -> Any:
    scheduling = f"ensemble_scheduling {{ {text}"
    described = test_ensemble.text(*test_ensemble.CHAIN).replace(
        "ensemble_scheduling {", scheduling
    )
    return [places._value for places in test_ensemble.ensemble(described)._places.values()]


def graph_level(text: str, folder: Path) -> Any:
    return onnxruntime_options.session_options(artifact(text)).graph_optimization_level


def providers(text: str, folder: Path) -> Any:
    kind = "KIND_GPU" if "gpu_execution" in text else "KIND_CPU"
    accelerators = f"optimization {{ execution_accelerators {{ {text} }} }}"
    return onnxruntime_options.providers(
        artifact(f"instance_group {{ kind: {kind} }} {accelerators}")
    )


def ensemble(text: str, folder: Path) -> Any:
    asked = []

    def config_of(name: str, number: int) -> Any:
        asked.append((name, number))
        return config.parse(X + f'name: "{name}"')

    steps = f"ensemble_scheduling {{ step {{ {text} }} }}"
    try:
        check_ensemble("e", config.parse(f'platform: "ensemble" {X} {steps}'), config_of)
    except ModelportError as error:
        return asked, str(error)
    return asked, ""


def entry_points(text: str, folder: Path) -> Any:
    backend = FakeBackend(artifact(X + text))
    schedulers = Schedulers(backend, Statistics())
    named = NamedSignatures("m", schedulers)
    shared = pipeline.SharedState(ResponseCache(1 << 20))
    built = pipeline.build("m", 1, named, shared, Path, None, schedulers)
    return type(built.infer), getattr(built.infer, "__name__", "")


async def warm_up(text: str, folder: Path) -> Any:
    world = World(folder)
    (folder / "m/warmup").mkdir(parents=True, exist_ok=True)
    (folder / "m/warmup/raw").write_bytes(bytes(range(8)))
    world.publish(1, config=f"model_warmup {{ {text} }}")
    manager = await world.serve()
    ((_, _, reason),) = manager.states("m")
    asked = served(manager).requests if manager.versions("m") else []
    await manager.stop()
    return reason, [each.inputs[0].data.tolist() for each in asked]


STEP = (
    'model_name: "a" model_version: 1 '
    'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" }'
)
IN = 'inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: 2 {} }} }}'
ZERO = IN.format("zero_data: true")
ACCELERATOR = "optimization.execution_accelerators."
DEFAULT = "dynamic_batching.default_queue_policy."
LEVEL = "dynamic_batching.priority_queue_policy{}."
LEVELS = (
    "priority_levels: 2 default_priority_level: 1 priority_queue_policy {{ key: 1 value {{ {} }} }}"
)
POLICY = {
    "timeout_action": "timeout_action: DELAY",
    "default_timeout_microseconds": "default_timeout_microseconds: 1",
    "allow_timeout_override": "allow_timeout_override: true",
    "max_queue_size": "max_queue_size: 1",
}
CONTROL = 'control_input {{ name: "c" control {{ kind: CONTROL_SEQUENCE_{} {} }} }}'
STATE = 'input_name: "s" output_name: "t" data_type: TYPE_INT8 dims: [4] '


def initial(more: str = "", name: str = "i", datatype: str = "INT8", dims: str = "4") -> str:
    first = f'data_type: TYPE_{datatype} dims: [{dims}] name: "{name}" {more}'
    return f"{STATE} initial_state {{ {first} }}"


WIDE = 'input { name: "z" data_type: TYPE_FP32 dims: [2] }'
COUNT = (
    'input {{ name: "z" data_type: TYPE_FP32 dims: [2] }} '
    'batch_input {{ kind: {} target_name: "n" data_type: TYPE_INT32 source_input: "x" }} '
)
SCATTER = 'batch_output {{ target_name: "{}" source_input: "{}" }}'
METRIC = (
    'model_metrics {{ metric_control {{ metric_identifier {{ family: "{}" }} '
    "histogram_options {{ buckets: {} }} }} }}"
)


def buckets(text: str, folder: Path) -> Any:
    return histogram_buckets(config.parse(text))


#: Field → what shows an effect, and two configurations that differ in this field alone.
EFFECTS: dict[str, tuple[Any, str, str]] = {
    "name": (completed, 'name: "m"', 'name: "n"'),
    "platform": (backend_and_file, 'platform: "onnxruntime_onnx"', 'platform: "torch_aoti"'),
    "backend": (completed, 'backend: "onnxruntime"', 'backend: "tensorflow"'),
    "default_model_filename": (
        backend_and_file, 'default_model_filename: "model.pt"',
        'default_model_filename: "../model.pt"',
    ),
    "version_policy.latest.num_versions": (
        versions, "version_policy { latest { num_versions: 1 } }",
        "version_policy { latest { num_versions: 2 } }",
    ),
    "version_policy.all": (versions, "", "version_policy { all {} }"),
    "version_policy.specific.versions": (
        versions, "version_policy { specific { versions: 1 } }",
        "version_policy { specific { versions: 2 } }",
    ),
    "max_batch_size": (signature, "max_batch_size: 1", "max_batch_size: 2"),
    "input.format": (
        decoder, tensor("input", dims="3, 8, 8", more="format: FORMAT_NCHW"),
        tensor("input", dims="3, 8, 8", more="format: FORMAT_NHWC"),
    ),
    "input.optional": (signature, tensor("input"), tensor("input", more="optional: true")),
    **{
        f"{kind}.{field}": (signature, tensor(kind), tensor(kind, **change))
        for kind in ("input", "output")
        for field, change in {
            "name": {"name": "z"}, "data_type": {"datatype": "INT8"}, "dims": {"dims": "3"},
            "reshape.shape": {"more": "reshape { shape: [1, 2] }"},
        }.items()
    },
    "output.label_filename": (
        labels, tensor("output"), tensor("output", more='label_filename: "labels.txt"')
    ),
    "optimization.graph.level": (graph_level, "", "optimization { graph { level: 2 } }"),
    f"{ACCELERATOR}gpu_execution_accelerator.name": (
        providers, 'gpu_execution_accelerator { name: "cuda" }',
        'gpu_execution_accelerator { name: "tensorrt" }',
    ),
    f"{ACCELERATOR}cpu_execution_accelerator.name": (
        providers, 'cpu_execution_accelerator { name: "openvino" }',
        'cpu_execution_accelerator { name: "other" }',
    ),
    f"{ACCELERATOR}gpu_execution_accelerator.parameters{{}}": (
        providers, 'gpu_execution_accelerator { name: "cuda" }',
        'gpu_execution_accelerator { name: "cuda" parameters { key: "use_tf32" value: "1" } }',
    ),
    f"{ACCELERATOR}cpu_execution_accelerator.parameters{{}}": (
        providers, 'cpu_execution_accelerator { name: "openvino" }',
        'cpu_execution_accelerator { name: "openvino" parameters { key: "x" value: "0" } }',
    ),
    "dynamic_batching.preferred_batch_size": (batching, "", "preferred_batch_size: 2"),
    "dynamic_batching.max_queue_delay_microseconds": (
        batching, "", "max_queue_delay_microseconds: 2",
    ),
    "dynamic_batching.preserve_ordering": (batching, "", "preserve_ordering: true"),
    "dynamic_batching.priority_levels": (
        batching, "priority_levels: 2 default_priority_level: 1",
        "priority_levels: 3 default_priority_level: 1",
    ),
    "dynamic_batching.default_priority_level": (
        batching, "priority_levels: 2 default_priority_level: 1",
        "priority_levels: 2 default_priority_level: 2",
    ),
    **{
        DEFAULT + field: (batching, "", f"default_queue_policy {{ {text} }}")
        for field, text in POLICY.items()
    },
    **{
        LEVEL + field: (batching, LEVELS.format(""), LEVELS.format(text))
        for field, text in POLICY.items()
    },
    **{
        f"sequence_batching.{path}": (sequences, first, second)
        for path, first, second in (
            ("max_sequence_idle_microseconds", "", "max_sequence_idle_microseconds: 5"),
            ("iterative_sequence", "", "iterative_sequence: true"),
            (
                "direct.max_queue_delay_microseconds",
                "direct { minimum_slot_utilization: 1 }",
                "direct { minimum_slot_utilization: 1 max_queue_delay_microseconds: 5 }",
            ),
            ("direct.minimum_slot_utilization", "", "direct { minimum_slot_utilization: 1 }"),
            ("oldest.max_candidate_sequences", "", "oldest { max_candidate_sequences: 2 }"),
            ("oldest.preferred_batch_size", "oldest {}", "oldest { preferred_batch_size: 2 }"),
            (
                "oldest.max_queue_delay_microseconds",
                *("oldest {}", "oldest { max_queue_delay_microseconds: 2 }"),
            ),
            ("oldest.preserve_ordering", "oldest {}", "oldest { preserve_ordering: true }"),
        )
    },
    **{
        f"sequence_batching.control_input.{path}": (
            sequence_tensors, CONTROL.format(*first), CONTROL.format(*second)
        )
        for path, first, second in (
            ("control.kind", ("START", ""), ("CORRID", "")),
            ("control.int32_false_true", ("START", ""), ("START", "int32_false_true: [0, 1]")),
            ("control.fp32_false_true", ("START", ""), ("START", "fp32_false_true: [0, 1]")),
            ("control.bool_false_true", ("START", ""), ("START", "bool_false_true: [false, true]")),
            (
                "control.data_type",
                *(("CORRID", "data_type: TYPE_INT32"), ("CORRID", "data_type: TYPE_STRING")),
            ),
        )
    },
    "sequence_batching.control_input.name": (
        sequence_tensors, "control_input {}", 'control_input { name: "c" }'
    ),
    **{
        f"sequence_batching.state.{path}": (
            sequence_tensors, f"state {{ {first} }}", f"state {{ {second} }}"
        )
        for path, first, second in (
            ("input_name", STATE, STATE.replace('"s"', '"u"')),
            ("output_name", STATE, STATE.replace('"t"', '"u"')),
            ("data_type", STATE, STATE.replace("INT8", "BOOL")),
            ("dims", STATE, STATE.replace("[4]", "[2]")),
            ("initial_state.data_type", initial(), initial(datatype="INT16")),
            ("initial_state.dims", initial(), initial(dims="2")),
            ("initial_state.name", initial(name=""), initial()),
            ("initial_state.zero_data", initial(), initial("zero_data: true")),
            (
                "initial_state.data_file",
                *(initial("zero_data: true"), initial('data_file: "four"')),
            ),
        )
    },
    "input.allow_ragged_batch": (
        ragged_batch, WIDE, WIDE.replace('"z"', '"z" allow_ragged_batch: true')
    ),
    "batch_input.kind": (
        ragged_batch, COUNT.format("BATCH_ELEMENT_COUNT"),
        COUNT.format("BATCH_ACCUMULATED_ELEMENT_COUNT"),
    ),
    "batch_input.target_name": (
        ragged_batch, COUNT.format("BATCH_ELEMENT_COUNT"),
        COUNT.replace('"n"', '"m"').format("BATCH_ELEMENT_COUNT"),
    ),
    "batch_input.data_type": (
        ragged_batch, COUNT.format("BATCH_ELEMENT_COUNT"),
        COUNT.replace("INT32", "FP32").format("BATCH_ELEMENT_COUNT"),
    ),
    "batch_input.source_input": (
        ragged_batch, COUNT.format("BATCH_ELEMENT_COUNT"),
        COUNT.replace('source_input: "x"', 'source_input: "z"').format("BATCH_ELEMENT_COUNT"),
    ),
    "batch_output.kind": (
        ragged_batch, SCATTER.format("y", "x"), SCATTER.format("y", "x").replace("{ ", "{ kind: 9 ")
    ),
    "batch_output.target_name": (ragged_batch, SCATTER.format("y", "x"), SCATTER.format("w", "x")),
    "batch_output.source_input": (ragged_batch, SCATTER.format("y", "x"), SCATTER.format("y", "w")),
    "ensemble_scheduling.step.model_name": (ensemble, STEP, STEP.replace('"a"', '"b"')),
    "ensemble_scheduling.step.model_version": (ensemble, STEP, STEP.replace("1", "2")),
    "ensemble_scheduling.step.input_map{}": (
        ensemble, STEP, STEP.replace('value: "x"', 'value: "w"'),
    ),
    "ensemble_scheduling.step.output_map{}": (
        ensemble, STEP, STEP.replace('value: "y"', 'value: "w"'),
    ),
    "ensemble_scheduling.max_inflight_requests": (in_flight, "", "max_inflight_requests: 2"),
    "instance_group.rate_limiter.resources.name": (
        limited, "resources { count: 1 name: 'a' }", "resources { count: 1 name: 'b' }",
    ),
    "instance_group.rate_limiter.resources.count": (
        limited, "resources { count: 1 }", "resources { count: 2 }",
    ),
    "instance_group.rate_limiter.resources.global": (
        limited, "resources { count: 1 }", "resources { count: 1 global: true }",
    ),
    "instance_group.rate_limiter.priority": (limited, "priority: 1", "priority: 2"),
    "instance_group.name": (
        instances, "instance_group { count: -1 }", 'instance_group { count: -1 name: "group" }',
    ),
    "instance_group.kind": (gpu, "kind: KIND_CPU", "kind: KIND_GPU"),
    "instance_group.count": (instances, "", "instance_group { count: 2 }"),
    "instance_group.gpus": (gpu, "kind: KIND_GPU gpus: 0", "kind: KIND_GPU gpus: 1"),
    "parameters{}.string_value": (
        signature, tensor("input") + 'parameters { key: "range.x" value { string_value: "0..1" } }',
        tensor("input") + 'parameters { key: "range.x" value { string_value: "0..2" } }',
    ),
    "model_warmup.name": (
        warm_up, 'name: "a" batch_size: 9 ' + ZERO, 'name: "b" batch_size: 9 ' + ZERO,
    ),
    "model_warmup.batch_size": (warm_up, "batch_size: 1 " + ZERO, "batch_size: 2 " + ZERO),
    "model_warmup.count": (warm_up, "batch_size: 1 " + ZERO, "count: 2 batch_size: 1 " + ZERO),
    "model_warmup.inputs{}.data_type": (
        warm_up, "batch_size: 1 " + ZERO, "batch_size: 1 " + ZERO.replace("FP32", "INT8"),
    ),
    "model_warmup.inputs{}.dims": (
        warm_up, "batch_size: 1 " + ZERO, "batch_size: 1 " + ZERO.replace("dims: 2", "dims: 1"),
    ),
    **{
        f"model_warmup.inputs{{}}.{field.partition(':')[0]}": (
            warm_up, "batch_size: 1 " + IN.format(""), "batch_size: 1 " + IN.format(field),
        )
        for field in ("zero_data: true", "random_data: true", 'input_data_file: "raw"')
    },
    "model_transaction_policy.decoupled": (
        entry_points, "", "model_transaction_policy { decoupled: true }",
    ),
    "response_cache.enable": (entry_points, "", "response_cache { enable: true }"),
    "model_metrics.metric_control.metric_identifier.family": (
        buckets, METRIC.format(FIRST_RESPONSE, 1), METRIC.format("nv_inference_count", 1),
    ),
    "model_metrics.metric_control.histogram_options.buckets": (
        buckets, METRIC.format(FIRST_RESPONSE, 1), METRIC.format(FIRST_RESPONSE, 2),
    ),
}  # fmt: skip


async def observed(observe: Any, text: str, folder: Path) -> Any:
    try:
        found = observe(text, folder)
        return await found if observe is warm_up else found
    except (ModelportError, OSError) as error:
        return str(error)


async def has_effect(observe: Any, first: str, second: str, folder: Path) -> bool:
    assert config.parse(first if observe is signature else "") is not None
    return bool(
        await observed(observe, first, folder / "1")
        != await observed(observe, second, folder / "2")
    )


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    every = [*onnxruntime_options.CPU_ACCELERATORS.values(), onnxruntime_options.CPU]
    every += onnxruntime_options.GPU_ACCELERATORS.values()
    monkeypatch.setattr(onnxruntime_options.ort, "get_available_providers", lambda: every)
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize("path", READ)
async def test_a_field_that_is_read_has_an_effect(path: str, accelerators: Path) -> None:
    assert await has_effect(*EFFECTS[path], accelerators)


def test_every_effect_is_that_of_a_field() -> None:
    assert set(EFFECTS) == set(READ)


@pytest.mark.parametrize(
    ("observe", "text"),
    [
        (signature, 'metric_tags { key: "a" value: "b" }'),
        (graph_level, "optimization { eager_batching: true }"),
        (versions, "model_metrics {}"),
        (entry_points, 'runtime: "x"'),
    ],
)
async def test_a_field_without_effect_is_found(observe: Any, text: str, accelerators: Path) -> None:
    assert not await has_effect(observe, "", text, accelerators)


# -- parameters -----------------------------------------------------------------------------------


def asked_of_parameters() -> tuple[dict[str, str], set[str]]:
    """The parameters that the gateway's code asks for, and the file that does; and all its strings.

    By ``parameters.text()`` and the like, ``….parameters[KEY]``, and ``KEY in ….parameters``. The
    strings are without the tables.
    """
    found, strings = {}, set()
    for file in (ROOT / "gateway").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        constants = {
            target.id: node.value
            for node in nodes
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for key in filter(None, map(_key, nodes)):
            value = constants.get(key.id) if isinstance(key, ast.Name) else key
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[value.value] = file.name
        if file.name not in ("config_schema.py", "signed_config.py"):
            strings |= {
                node.value
                for node in nodes
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
    return found, strings


def _key(node: ast.AST) -> ast.expr | None:
    """The key by which ``node`` asks a configuration for a parameter."""
    match node:
        case ast.Call(
            func=ast.Attribute(
                value=ast.Name(id="parameters"), attr="text" | "integer" | "threads" | "boolean"
            ),
            args=[_, key, *_],
        ):
            return key
        case ast.Subscript(value=ast.Attribute(value=ast.Name(id=holder), attr="parameters")):
            return node.slice if "config" in holder else None
        case ast.Compare(
            left=key, comparators=[ast.Attribute(value=ast.Name(id=holder), attr="parameters")]
        ):
            return key if "config" in holder else None
    return None


def test_every_parameter_that_the_code_asks_for_is_in_a_table_and_the_other_way_round() -> None:
    backends = config_schema.BACKEND_PARAMETERS.values()
    read = {name for table in (config_schema.PARAMETERS, *backends) for name in table.read}
    asked, strings = asked_of_parameters()
    assert len(asked) > 25
    assert {name: file for name, file in asked.items() if name not in read} == {}
    for name in read - set(config_schema.CUDA_OPTIONS):
        prefix, _, word = name.partition(".")
        if prefix == "mask":  # load tests read it
            continue
        alone = (
            {f"{prefix}.", f"{prefix}", f"{prefix}.{{"} if word in ("NAME", "TENSOR") else {name}
        )
        assert alone & strings, f"no code reads '{name}'"


def test_no_parameter_is_in_two_tables() -> None:
    for table in config_schema.BACKEND_PARAMETERS.values():
        names = [name for part in (*table, *config_schema.PARAMETERS) for name in part]
        assert len(names) == len(set(names))


NEAREST = {
    "rangee.x": "range.x", "axs.n": "axis.n", "mask.xx": "mask.x", "image.men": "image.mean",
    "INTRA_OP_THREAD_COUNT": "intra_op_thread_count", "version_labels.a": "version_label.a",
    "owner": "", "": "",
}  # fmt: skip


@pytest.mark.parametrize("key", NEAREST)
def test_an_unknown_parameter_is_found_with_the_nearest_name(key: str) -> None:
    made = config.parse(X + 'name: "m" backend: "onnxruntime"')
    for known in ("range.x", "range.y", "axis.n", "image.mean", "execution_mode", "batch_here"):
        made.parameters[known].string_value = ""
    assert [*config_schema.unknown_parameters(made)] == []
    made.parameters[key].string_value = ""
    assert [*config_schema.unknown_parameters(made)] == [(key, NEAREST[key])]
    elsewhere = [*config_schema.unknown_parameters(made, elsewhere=True)]
    assert elsewhere == ([(key, NEAREST[key])] if NEAREST[key] else [])


def test_a_parameter_of_another_backend_is_unknown_and_one_of_tritons_is_idle() -> None:
    made = config.parse(X + 'name: "m" backend: "pytorch"')
    made.parameters["DISABLE_CUDNN"].string_value = "true"
    made.parameters["tflite_num_threads"].string_value = "1"
    assert [key for key, _ in config_schema.without_effect(made)] == ["DISABLE_CUDNN"]
    assert [key for key, _ in config_schema.unknown_parameters(made)] == ["tflite_num_threads"]


def test_a_parameter_that_names_native_code_is_refused() -> None:
    made = config.parse('backend: "openvino"')
    made.parameters["CPU_EXTENSION_PATH"].string_value = "/tmp/evil.so"
    with pytest.raises(InvalidArgument, match="names native code"):
        config_schema.check(made)
