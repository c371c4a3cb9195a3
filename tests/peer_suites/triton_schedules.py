"""Model repositories of Triton's tests of queues, cancellation, ensembles and metrics."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.peer_suites import triton_models
from tests.peer_suites.suite import Bench
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_repositories import Build

_CUSTOM = "custom_zero_1_float32"


def _echo(root: Path, name: str, datatype: str, batch: int, delay_ms: int, more: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(
        f'backend: "identity" max_batch_size: {batch}\n'
        f'input {{ name: "INPUT0" data_type: TYPE_{datatype} dims: -1 }}\n'
        f'output {{ name: "OUTPUT0" data_type: TYPE_{datatype} dims: -1 }}\n'
        "instance_group { count: 1 kind: KIND_CPU }\n"
        f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}\n{more}\n'
    )


def queue(batching: str, delayed: bool = False) -> Build:
    """An echo that batches, and an ensemble of it."""

    def build(bench: Bench, root: Path) -> None:
        qa = bench.source(SERVER) / "qa"
        triton_models.copy(qa / "L0_model_queue", root, "ensemble_zero_1_float32")
        triton_models.copy(qa / "custom_models", root, _CUSTOM)
        delay = 'parameters { key: "execute_delay_ms" value { string_value: "5000" } }\n'
        triton_models.edit(
            *(root, _CUSTOM, (r"dims:.*\[.*\]", "dims: [ -1 ]")),
            ("max_batch_size:.*", "max_batch_size: 32"),
            append="instance_group [ { kind: KIND_CPU count: 1 }]\n"
            f"dynamic_batching {{ {batching} }}\n" + delay * delayed,
        )

    return build


def slow_integers(bench: Bench, root: Path) -> None:
    _echo(root, "custom_identity_int32", "INT32", 1024, 10_000)


def slow_floats(bench: Bench, root: Path) -> None:
    triton_models.copy(bench.source(SERVER) / "qa" / "custom_models", root, _CUSTOM)
    delay = 'parameters [ { key: "execute_delay_ms"; value: { string_value: "1000" }} ]\n'
    triton_models.edit(root, _CUSTOM, append=delay)


def slow_batches(bench: Bench, root: Path) -> None:
    batching = "dynamic_batching { max_queue_delay_microseconds: 600000 }"
    _echo(root, "dynamic_batch", "FP32", 2, 6000, batching)
    for name, strategy in (("direct", ""), ("oldest", "max_candidate_sequences: 1")):
        sequences = f"{name} {{ {strategy} }} max_sequence_idle_microseconds: 6000000"
        more = f"sequence_batching {{ {sequences} }}"
        _echo(root, f"sequence_{name}", "FP32", 1, 6000, more)
    (root / "ensemble_model" / "1").mkdir(parents=True)
    step = (
        'step {{ model_name: "dynamic_batch" model_version: -1\n'
        ' input_map {{ key: "INPUT0" value: "{}" }}\n'
        ' output_map {{ key: "OUTPUT0" value: "{}" }} }}\n'
    )
    (root / "ensemble_model" / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 1\n'
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 }\n'
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }\n'
        "ensemble_scheduling {\n"
        + step.format("INPUT0", "between")
        + step.format("between", "OUTPUT0")
        + "}\n"
    )


def ensembles(bench: Bench, root: Path) -> None:
    """``simple`` has two versions, of one file."""
    source = bench.source(SERVER)
    models = source / "qa" / "L0_simple_ensemble" / "models"
    triton_models.copy(models, root, "simple", "ensemble_add_sub_int32_int32_int32")
    triton_models.copy(models, root, "*partial_add_sub")
    file = source / triton_models.EXAMPLES / "simple" / "1" / "model.onnx"
    for version in ("1", "2"):
        (root / "simple" / version).mkdir(exist_ok=True)
        shutil.copy(file, root / "simple" / version)


def slow_simple(bench: Bench, root: Path) -> None:
    """``simple`` takes fifteen seconds."""
    name = "execute_delayed_model"
    triton_models.copy(bench.source(SERVER) / "qa" / "python_models", root, name)
    (root / name).rename(root / "simple")


def _pairs(bench: Bench, root: Path, wanted: Callable[[str], bool]) -> None:
    for platform in ("onnx", "libtorch"):
        made = triton_models.generated(bench, "gen_qa_models", f"--{platform}")
        triton_models.copy(made, root, *(m.name for m in made.iterdir() if wanted(m.name)))


def _loads(name: str) -> bool:
    """Whether it is a batching model that loads without a GPU, which BF16 needs."""
    return name.count("_") == 3 and "bf16" not in name


def status(bench: Bench, root: Path) -> None:
    """``plan`` models are those of ONNX under another name."""
    _pairs(bench, root, _loads)
    triton_models.renamed(root, "onnx_float32_float32_float32", "plan_float32_float32_float32")


def status_changed(bench: Bench, root: Path) -> None:
    """The same after the versions that ``test.sh`` removes have gone."""
    _pairs(bench, root, _loads)
    for platform in ("onnx", "libtorch"):
        for version in ("2", "3"):
            shutil.rmtree(root / f"{platform}_int32_int32_int32" / version)
    name = "plan_float16_float32_float32"
    triton_models.renamed(root, name.replace("plan", "onnx"), name)
    shutil.copytree(root / name / "1", root / name / "7")


def counted(bench: Bench, root: Path) -> None:
    models = bench.source(SERVER) / "qa" / "L0_metrics" / "unit_test_models"
    triton_models.copy(models, root, "*")


def pending(bench: Bench, root: Path) -> None:
    """Echoes of two seconds with and without a batcher, and an ensemble of them."""
    metrics = bench.source(SERVER) / "qa" / "L0_metrics"
    triton_models.copy(metrics, root, "ensemble_delay", "identity_delay")
    (root / "ensemble_delay").rename(root / "ensemble")
    batching = "dynamic_batching {{ max_queue_delay_microseconds: 100000 {} }}\n"
    sequences = "sequence_batching {{ {} {{ max_queue_delay_microseconds: 100000 {} }} }}\n"
    for new, more in (
        ("sequence_direct", sequences.format("direct", "minimum_slot_utilization: 1.0")),
        ("sequence_oldest", sequences.format("oldest", "max_candidate_sequences: 4")),
        ("default", ""),
        ("dynamic", batching.format("")),
        ("max_queue_size", batching.format("default_queue_policy { max_queue_size: 4 }")),
        ("default_composing", ""),
        ("dynamic_composing", batching.format("")),
    ):
        triton_models.renamed(root, "identity_delay", new, append=more)
    shutil.rmtree(root / "identity_delay")


_ENSEMBLES = "L0_simple_ensemble/test.sh"


def decoupled_steps(made: str, first: int, last: int) -> Build:
    """The models that these lines of ``test.sh`` make."""

    def build(bench: Bench, root: Path) -> None:
        triton_models.scripted(bench, root, _ENSEMBLES, (34, 35), (first, last), made=made)

    return build


#: Lines of ``test.sh``: two models; a second instance in place of the second one.
_TWO_MODELS, _TWO_INSTANCES = (60, 89), (287, 292)


def rate_limited(instances: bool = False, conflict: bool = False) -> Build:
    """The models of ``L0_rate_limiter/test.sh`` whose backend is no native code, on a CPU."""

    def build(bench: Bench, root: Path) -> None:
        lines = (_TWO_MODELS, _TWO_INSTANCES) if instances else (_TWO_MODELS,)
        test_sh = "L0_rate_limiter/test.sh"
        triton_models.scripted(bench, root, test_sh, *lines, made="custom_models")
        shutil.rmtree(root / "custom_sequence_int32")
        if conflict:
            name = f"{_CUSTOM}_v2"
            edit = ("global: True", "global: False")
            triton_models.renamed(root, name, f"{_CUSTOM}_v3", edit)
        for model in root.iterdir():
            triton_models.edit(root, model.name, ("KIND_GPU", "KIND_CPU"))

    return build


def one_model(bench: Bench, root: Path) -> None:
    repositories = bench.source(SERVER) / "qa/L0_metrics/model_namespacing_repos"
    triton_models.copy(repositories / "addsub_repo", root, "*")


def torch_floats(bench: Bench, root: Path) -> None:
    """Without the labels; ``test.sh`` adds instances of KIND_GPU."""
    name = "libtorch_float32_float32_float32"
    made = triton_models.generated(bench, "gen_qa_models", "--libtorch")
    triton_models.copy(made, root, name)
    for version in ("2", "3"):
        shutil.rmtree(root / name / version)
    triton_models.edit(root, name, ("label_filename:.*", ""))


def decoupled_ensemble(bench: Bench, root: Path) -> None:
    models = bench.source(SERVER) / "qa" / "L0_metrics" / "ensemble_decoupled"
    triton_models.copy(models, root, "*")
    shutil.rmtree(root / "async_execute", ignore_errors=True)
    shutil.copytree(root / "async_execute_decouple", root / "async_execute")
    decoupled = ("model_transaction_policy { decoupled: True }", "")
    triton_models.edit(root, "async_execute", decoupled)


def with_buckets(bench: Bench, root: Path) -> None:
    name = "async_execute_decouple"
    triton_models.copy(bench.source(SERVER) / "qa" / "python_models", root, name)
    triton_models.edit(
        *(root, name),
        append="model_metrics { metric_control: [ { metric_identifier: { "
        'family: "nv_inference_first_response_histogram_ms" } '
        "histogram_options: { buckets: [ -1, 0.0, 1, 2.5 ] } } ] }\n",
    )
