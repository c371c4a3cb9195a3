"""``config.pbtxt``: read, written, completed, turned into a signature."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config
from modelport.gateway.types import Axis, Datatype, ModelSignature, TensorSpec
from modelport.gateway.wire.proto import model_config_pb2 as pb

X2 = """
name: "x2"
backend: "onnxruntime"
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 4 }
output { name: "y" data_type: TYPE_FP32 dims: 4 }
"""
SEQUENCE = """
max_batch_size: 4
input { name: "tokens" data_type: TYPE_INT64 dims: [ -1, 3, -1 ] }
input { name: "seq_lens" data_type: TYPE_INT32 dims: 1 reshape { } }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
parameters { key: "axis.sequence" value { string_value: "1..64" } }
parameters { key: "axes.tokens" value { string_value: "sequence,other" } }
parameters { key: "range.tokens" value { string_value: "0..511" } }
parameters { key: "range.seq_lens" value { string_value: "1..sequence" } }
"""


def refused(text: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        config.signature(config.parse(text))
    return str(caught.value)


# -- reading and writing --------------------------------------------------------------------------


def test_a_configuration_that_is_written_reads_back_the_same() -> None:
    parsed = config.parse(SEQUENCE)
    assert config.parse(config.to_text(parsed)) == parsed


def test_an_empty_configuration_is_a_configuration() -> None:
    assert config.parse("") == pb.ModelConfig()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('name: "x"\nnonsense: 1\n', 2),
        ('name: "x"\n\ninput { name: "a"\n  data_type: TYPE_FP33 }', 4),
        ("max_batch_size: many", 1),
        ('name: "x"\ninput {', 2),
    ],
)
def test_a_text_that_does_not_parse_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"config\.pbtxt is not a valid.*\b{line}:\d+ : "):
        config.parse(text)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"nonsense": 1}', "[" * 100_000, '{"name": 1}'])
def test_a_json_configuration_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="'config' is not a valid model config") as caught:
        config.parse_json(text)
    assert "\n" not in str(caught.value)


def test_a_json_configuration_is_the_same_message_as_its_text() -> None:
    text = '{"name":"x2","backend":"onnxruntime","max_batch_size":8}'
    assert config.parse_json(text) == config.parse(
        'name: "x2" backend: "onnxruntime" max_batch_size: 8'
    )


@pytest.mark.parametrize(
    ("one", "several"),
    [
        ('{"instance_group": {"kind": "KIND_CPU"}}', '{"instance_group": [{"kind": "KIND_CPU"}]}'),
        ('{"input": {"name": "x", "dims": 4}}', '{"input": [{"name": "x", "dims": [4]}]}'),
        (
            '{"ensembleScheduling": {"step": {"inputMap": {"a": "b"}}}}',
            '{"ensemble_scheduling": {"step": [{"input_map": {"a": "b"}}]}}',
        ),
        (
            '{"dynamic_batching": {"priorityQueuePolicy": {"1": {}}}}',
            '{"dynamic_batching": {"priority_queue_policy": {"1": {}}}}',
        ),
    ],
)
def test_one_value_in_place_of_a_list_is_a_list_of_one_as_in_triton(one: str, several: str) -> None:
    assert config.parse_json(one) == config.parse_json(several)


def test_json_has_snake_case_names_words_for_enums_and_numbers_for_64_bit_integers() -> None:
    document = config.to_json(config.parse(X2))
    assert document["max_batch_size"] == 8
    (x,) = document["input"]
    assert x["data_type"] == "TYPE_FP32"
    assert x["dims"] == [4]
    assert type(x["dims"][0]) is int


def test_json_leaves_out_the_schedulers_that_are_not_configured() -> None:
    document = config.to_json(config.parse(X2))
    for scheduler in ("dynamic_batching", "sequence_batching", "ensemble_scheduling"):
        assert scheduler not in document
    batching = config.to_json(config.parse(X2 + "dynamic_batching { }"))
    assert "dynamic_batching" in batching


def test_json_holds_maps_repeated_messages_and_survives_a_json_library() -> None:
    document = config.to_json(config.complete(config.parse(SEQUENCE), "s"))
    assert document["parameters"]["axis.sequence"] == {"string_value": "1..64"}
    assert document["version_policy"] == {"latest": {"num_versions": 1}}
    assert document["instance_group"][0]["kind"] == "KIND_CPU"
    assert json.loads(json.dumps(document)) == document


def test_a_sequence_is_idle_after_tritons_second_unless_the_configuration_says_otherwise() -> None:
    for text, idle in (("", 1_000_000), ("max_sequence_idle_microseconds: 5", 5)):
        made = config.complete(config.parse(X2 + f"sequence_batching {{ {text} }}"), "x2")
        assert made.sequence_batching.max_sequence_idle_microseconds == idle


def test_the_files_of_initial_states_are_companions_of_the_configuration() -> None:
    state = 'state { initial_state { data_file: "zeros" } }'
    made = config.parse(X2 + f"sequence_batching {{ {state} }}")
    assert [str(path) for path in config.companions(made)] == ["initial_state/zeros"]


ENSEMBLE = 'ensemble_scheduling { step { model_name: "a" } } '


def test_an_ensemble_needs_no_file_and_no_instances() -> None:
    done = config.complete(config.parse('platform: "ensemble" ' + ENSEMBLE), "e")
    assert (done.backend, done.default_model_filename) == ("ensemble", "")
    assert not done.instance_group
    assert config.complete(done, "e") == done


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (X2 + ENSEMBLE, "cannot be set for model 'x2' whose platform is not ensemble"),
        ('platform: "ensemble"', "must specify 'ensemble_scheduling' for ensemble 'x2'"),
        (f'platform: "ensemble" {ENSEMBLE} instance_group {{ }}', "instance group should not be"),
        (f'platform: "ensemble" {ENSEMBLE} optimization {{ }}', "optimization should not be"),
        (f'platform: "ensemble" {ENSEMBLE} model_warmup {{ }}', "model_warmup can not be"),
    ],
)
def test_an_ensemble_that_is_configured_as_another_model_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        config.complete(config.parse(text), "x2")


# -- completing -----------------------------------------------------------------------------------


def test_completion_fills_in_tritons_defaults() -> None:
    done = config.complete(config.parse('backend: "onnxruntime"'), "m")
    assert done.name == "m"
    assert done.platform == "onnxruntime_onnx"
    assert done.default_model_filename == "model.onnx"
    assert done.version_policy.latest.num_versions == 1
    assert [(g.name, g.count) for g in done.instance_group] == [("m", 1)]


def test_completion_leaves_its_argument_and_what_is_configured_alone() -> None:
    given_config = config.parse(
        'backend: "onnxruntime" default_model_filename: "other.onnx" '
        "version_policy { specific { versions: [3, 5] } } instance_group { count: 3 }"
    )
    before = config.to_text(given_config)
    done = config.complete(given_config, "m")
    assert config.to_text(given_config) == before
    assert done.default_model_filename == "other.onnx"
    assert list(done.version_policy.specific.versions) == [3, 5]
    assert config.instance_count(done) == 3


def test_completing_twice_changes_nothing() -> None:
    once = config.complete(config.parse(X2), "x2")
    assert config.complete(once, "x2") == once


def test_a_latest_policy_without_a_number_keeps_one_version() -> None:
    done = config.complete(config.parse("version_policy { latest { } }"), "m")
    assert done.version_policy.latest.num_versions == 1


@pytest.mark.parametrize(
    ("written", "format_"),
    [
        ('platform: "onnxruntime_onnx"', "onnx"),
        ('platform: "pytorch_libtorch"', "torchscript"),
        ('platform: "torch_aoti"', "aoti"),
        ('platform: "tensorflow_savedmodel"', "savedmodel"),
        ('backend: "tflite"', "tflite"),
        ('backend: "pytorch"', "torchscript"),
        ('default_model_filename: "model.onnx"', "onnx"),
    ],
)
def test_a_platform_is_known_by_name_backend_or_file(written: str, format_: str) -> None:
    known = config.platform_of(config.parse(written))
    assert known is not None
    assert known.format == format_


def test_an_unknown_backend_is_kept_as_it_is() -> None:
    done = config.complete(config.parse('backend: "fake"'), "m")
    assert (done.backend, done.platform, done.default_model_filename) == ("fake", "", "")


def test_a_configuration_that_names_another_model_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="unexpected directory name 'm' for model 'x2'"):
        config.complete(config.parse(X2), "m")


def test_a_negative_batch_size_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'max_batch_size' must be non-negative"):
        config.complete(config.parse("max_batch_size: -1"), "m")


@pytest.mark.parametrize(
    "filename", ["../model.onnx", "..", ".", "/etc/passwd", "a/b.onnx", "a\\\\b.onnx", "x/../y"]
)
def test_a_default_file_name_that_is_a_path_is_refused(filename: str) -> None:
    text = f'backend: "onnxruntime" default_model_filename: "{filename}"'
    with pytest.raises(InvalidArgument, match="must be a plain file name"):
        config.complete(config.parse(text), "m")


# -- signatures -----------------------------------------------------------------------------------


def test_bounds_in_parameters_become_axes_and_ranges() -> None:
    signature = config.signature(config.parse(SEQUENCE))
    tokens, lengths = signature.inputs
    assert signature.max_batch_size == 4
    assert signature.axes["sequence"] == Axis("sequence", 1, 64)
    assert tokens.dims == ("sequence", 3, "other")
    assert (tokens.minimum, tokens.maximum) == (0, 511)
    assert (lengths.minimum, lengths.maximum) == (1, "sequence")
    assert lengths.reshape == ()
    assert signature.outputs[0].dims == (-1,)


def test_an_axis_that_only_axes_names_is_unbounded() -> None:
    assert config.signature(config.parse(SEQUENCE)).axes["other"] == Axis("other", 0, None)


@pytest.mark.parametrize("key", ["axis", "padding", "paddings.x"])
def test_another_parameter_than_a_bound_is_the_models_own(key: str) -> None:
    text = X2 + f'parameters {{ key: "{key}" value {{ string_value: "same" }} }}'
    assert config.signature(config.parse(text)) == config.signature(config.parse(X2))


def test_a_bound_may_be_open_on_either_side() -> None:
    text = X2 + 'parameters { key: "range.x" value { string_value: "%s" } }'
    low = config.signature(config.parse(text % "-1.5..")).inputs[0]
    high = config.signature(config.parse(text % "..2")).inputs[0]
    assert (low.minimum, low.maximum) == (-1.5, None)
    assert (high.minimum, high.maximum) == (None, 2)


@pytest.mark.parametrize("value", ["5", "5-6", "a..b", "1..nowhere", "..x"])
def test_a_bound_that_does_not_parse_is_refused_by_name(value: str) -> None:
    text = X2 + f'parameters {{ key: "range.x" value {{ string_value: "{value}" }} }}'
    assert "parameter 'range.x'" in refused(text)


def test_instances_are_not_counted_below_zero() -> None:
    with pytest.raises(InvalidArgument, match="'count' of instance group 'x2_0' must be positive"):
        config.complete(config.parse(X2 + "instance_group { count: -1 }"), "x2")


def test_an_axis_that_does_not_parse_is_refused_by_name() -> None:
    text = X2 + 'parameters { key: "axis.n" value { string_value: "1..many" } }'
    assert "parameter 'axis.n'" in refused(text)


@pytest.mark.parametrize("value", ["1..inf", "-1..4", "1.5..4", "1e3..", "nan..2", "5..2"])
def test_an_axis_whose_bound_is_no_size_is_refused_by_name(value: str) -> None:
    text = X2 + f'parameters {{ key: "axis.n" value {{ string_value: "{value}" }} }}'
    assert "parameter 'axis.n'" in refused(text)


@pytest.mark.parametrize(("key", "value"), [("range.nosuch", "0..1"), ("axes.nosuch", "n")])
def test_a_parameter_of_a_tensor_that_is_not_declared_is_refused_by_name(
    key: str, value: str
) -> None:
    text = X2 + f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
    assert refused(text) == f"parameter '{key}': there is no input or output 'nosuch'"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("input { data_type: TYPE_FP32 dims: 1 }", "must specify 'name'"),
        ('input { name: "x" dims: 1 }', "must specify 'data_type'"),
        ('input { name: "x" data_type: TYPE_FP32 }', "must specify 'dims'"),
        ('input { name: "x" data_type: TYPE_FP32 dims: 0 }', "dimension must be integer >= 1"),
        ('output { name: "x" data_type: TYPE_FP32 dims: -2 }', "dimension must be integer >= 1"),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: 4 reshape { shape: [ 3 ] } }',
            "different size for dims and reshape",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: -1 reshape { shape: [ 1 ] } }',
            "different size for dims and reshape",
        ),
    ],
)
def test_a_tensor_that_is_not_fully_declared_is_refused(text: str, reason: str) -> None:
    assert reason in refused(text)


def test_a_tensor_that_is_declared_twice_is_refused() -> None:
    one = 'input { name: "x" data_type: TYPE_FP32 dims: 1 }'
    assert "input 'x' is declared twice" in refused(one + one)
    assert refused("output" + one[5:] + "output" + one[5:]) == "output 'x' is declared twice"


@pytest.mark.parametrize("datatype", list(Datatype))
def test_every_datatype_is_written_and_read_back(datatype: Datatype) -> None:
    spec = TensorSpec("x", datatype, (-1,))
    built = config.build("m", config.PLATFORMS[0], ModelSignature((spec,), (spec,)))
    assert config.signature(config.parse(config.to_text(built))).inputs == (spec,)


_dims = st.lists(st.one_of(st.integers(1, 9), st.sampled_from(["n", "m"])), min_size=1, max_size=4)


@given(
    dims=_dims,
    batch=st.integers(0, 8),
    low=st.one_of(st.none(), st.integers(-9, 9), st.floats(-9, 9, allow_nan=False)),
    high=st.one_of(st.none(), st.integers(-9, 99), st.just("n")),
    axis=st.tuples(st.integers(0, 5), st.one_of(st.none(), st.integers(5, 99))),
)
def test_a_signature_that_is_published_is_the_signature_that_is_served(
    dims: list[int | str],
    batch: int,
    low: float | None,
    high: int | str | None,
    axis: tuple[int, int | None],
) -> None:
    axes = {name: Axis(name, *axis) for name in ("n", "m")}
    specs = (TensorSpec("x", Datatype.FP32, tuple(dims), low, high),)
    outputs = (TensorSpec("y", Datatype.FP32, (-1, 2), reshape=(2, -1)),)
    published = ModelSignature(specs, outputs, batch, axes)
    text = config.to_text(config.build("m", config.PLATFORMS[0], published))
    assert config.signature(config.complete(config.parse(text), "m")) == published
