"""Model repositories that the ``test.sh`` beside Triton's own tests make."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.peer_suites import triton_examples, triton_models
from tests.peer_suites.suite import Bench
from tests.peer_suites.triton_models import SERVER

Build = Callable[[Bench, Path], None]


def examples(bench: Bench, root: Path) -> None:
    shutil.copytree(triton_examples.repository(bench), root, dirs_exist_ok=True)


def grpc_examples(bench: Bench, root: Path) -> None:
    examples(bench, root)
    triton_models.renamed(root, "simple_dyna_sequence", "simple_string_dyna_sequence")


def _python(bench: Bench, root: Path, *names: str) -> None:
    triton_models.copy(bench.source(SERVER) / "qa" / "python_models", root, *names)


def own(folder: str, *names: str) -> Build:
    """The repository beside the test."""

    def build(bench: Bench, root: Path) -> None:
        triton_models.copy(bench.source(SERVER) / "qa" / folder, root, *(names or ("*",)))

    return build


def _identity(bench: Bench) -> Path:
    return triton_models.generated(bench, "gen_qa_identity_models", "--onnx")


def http(bench: Bench, root: Path) -> None:
    one, many = "onnx_zero_1_float32", "onnx_zero_1_object"
    names = (one, many, "onnx_zero_1_float16", "onnx_zero_3_float32")
    triton_models.copy(_identity(bench), root, *names)
    triton_models.renamed(root, many, f"{many}_1_element", ("-1", "1"))
    triton_models.renamed(
        *(root, one, f"{one}_queue"),
        append="dynamic_batching { max_queue_delay_microseconds: 1000000 "
        "preferred_batch_size: [ 8 ] default_queue_policy { max_queue_size: 1 } }",
    )
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple_identity")
    string = ("TYPE_STRING", "TYPE_INT64")
    triton_models.renamed(root, "simple_identity", "simple_identity_int64", string)


def sizes(bench: Bench, root: Path) -> None:
    triton_models.copy(_identity(bench), root, "onnx_zero_1_float32")
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple_identity")


def grpc(bench: Bench, root: Path) -> None:
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple")
    _python(bench, root, "string_identity")
    triton_models.edit(root, "string_identity", (r"dims: \[ 1 \]", "dims: [ -1 ]"))


def _torch(bench: Bench, root: Path, generator: str, *flags: str) -> None:
    """The generator's TorchScript models, beside the ONNX ones that are there already."""
    made = triton_models.generated(bench, generator, "--libtorch", *flags)
    triton_models.copy(made, root, "libtorch_*")


_CPU = "\ninstance_group [ { kind: KIND_CPU }]\n"


def _kinds(root: Path) -> None:
    for platform in ("onnx", "libtorch", "openvino"):
        for config in root.glob(f"{platform}*/config.pbtxt"):
            config.write_text(config.read_text() + _CPU)


def infer(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--onnx"), root, "onnx_*")
    ensembles = triton_models.generated(bench, "gen_qa_models", "--ensemble")
    triton_models.copy(ensembles, root, "*_onnx_*", "nop_*")
    triton_models.copy(
        *(bench.source(SERVER) / "qa" / "ensemble_models", root),
        *("wrong_label_*", "label_override_*", "mix_type_*", "batch_to_*", "nobatch_to_*"),
        "mix_nobatch_*",
    )
    custom = bench.source(SERVER) / "qa" / "custom_models"
    triton_models.copy(custom, root, "custom_zero_1_float32")
    triton_models.edit(root, "custom_zero_1_float32", append=_CPU)
    dims = r"dims: \[ 1 \]"
    triton_models.renamed(
        *(root, "custom_zero_1_float32", "custom_nobatch_zero_1_float32"),
        *(("max_batch_size: 1", "max_batch_size: 0"), (dims, "dims: [ -1, -1 ]")),
    )
    triton_models.edit(
        *(root, "custom_zero_1_float32"),
        *(("max_batch_size: 1", "max_batch_size: 8"), (dims, "dims: [ -1 ]")),
    )
    _kinds(root)


def reshape(bench: Bench, root: Path) -> None:
    onnx = triton_models.generated(bench, "gen_qa_reshape_models", "--onnx", "--variable")
    ensembles = triton_models.generated(bench, "gen_qa_reshape_models", "--ensemble")
    triton_models.copy(onnx, root, "*")
    _torch(bench, root, "gen_qa_reshape_models", "--variable")
    triton_models.copy(ensembles, root, "*")
    for folder in sorted(root.glob("onnx_*")):
        new = folder.name.replace("onnx_", "custom_")
        platform = (r"^platform:.*", 'backend: "identity"')
        triton_models.renamed(root, folder.name, new, platform, append=_CPU)
        for file in (root / new / "1").iterdir():
            file.unlink()


def _as_plans(root: Path, datatype: str) -> None:
    """Models and ensembles of TensorRT's name, which are those of ONNX."""
    for folder in sorted(root.glob(f"*onnx_*{datatype}")):
        new = folder.name.replace("onnx_", "plan_")
        names = (('"onnx_', '"plan_'), ("_onnx_", "_plan_"))
        triton_models.renamed(root, folder.name, new, *names)


def variable(bench: Bench, root: Path) -> None:
    onnx = triton_models.generated(bench, "gen_qa_models", "--onnx", "--variable")
    ensembles = triton_models.generated(bench, "gen_qa_models", "--ensemble", "--variable")
    triton_models.copy(onnx, root, "onnx_*")
    _torch(bench, root, "gen_qa_models", "--variable")
    triton_models.copy(ensembles, root, "*_onnx_*", "*_libtorch_*", "nop_*")
    _as_plans(root, "float32")
    _as_plans(root, "int32")
    _kinds(root)


def zero(bench: Bench, root: Path) -> None:
    triton_models.copy(_identity(bench), root, "*")
    _torch(bench, root, "gen_qa_identity_models")
    ensembles = triton_models.generated(bench, "gen_qa_identity_models", "--ensemble")
    triton_models.copy(ensembles, root, "*")


def class_counts(bench: Bench, root: Path) -> None:
    _python(bench, root, "identity_fp32")
    floats = ("TYPE_FP32", "TYPE_STRING")
    triton_models.renamed(root, "identity_fp32", "identity_bytes", floats)


def shapes(bench: Bench, root: Path) -> None:
    onnx = triton_models.generated(bench, "gen_qa_models", "--onnx")
    triton_models.copy(onnx, root, "onnx_object_int32_int32")
    own("L0_input_validation/models")(bench, root)
    model = root / "pt_identity"
    (model / "1").mkdir(parents=True)
    script = "import torch; torch.jit.save(torch.jit.script(torch.nn.Identity()), 'model.pt')"
    subprocess.run([sys.executable, "-c", script], cwd=model / "1", check=True)
    (model / "config.pbtxt").write_text(
        'name: "pt_identity" backend: "pytorch" max_batch_size: 8\n'
        'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [8] } ]\n'
        'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [8] } ]\n'
        "dynamic_batching { max_queue_delay_microseconds: 1000000 }\n"
    )


def nothing(bench: Bench, root: Path) -> None:
    """Models are loaded by the tests, or none is there."""


def strings(bench: Bench, root: Path) -> None:
    triton_models.copy(_identity(bench), root, "onnx_zero_1_object")
    _python(bench, root, "string_identity")
    triton_models.edit(root, "string_identity", (r"\[ 1 \]", "[ 8 ]"))


def scalars(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_ort_scalar_models"), root, "*")


def output_names(bench: Bench, root: Path) -> None:
    """The model of TensorRT's name is that of ONNX."""
    onnx = "onnx_nobatch_zero_1_float32"
    triton_models.copy(_identity(bench), root, onnx)
    libtorch = triton_models.generated(bench, "gen_qa_identity_models", "--libtorch")
    triton_models.copy(libtorch, root, onnx.replace("onnx", "libtorch"))
    triton_models.renamed(root, onnx, onnx.replace("onnx", "plan"))


def io_names(bench: Bench, root: Path) -> None:
    made = triton_models.generated(bench, "gen_qa_models", "--libtorch")
    name = "libtorch_float32_float32_float32"
    triton_models.copy(made, root, name)
    for new, *renamed in (
        ("output_index",),
        ("io_index", ("INPUT0", "INPUT__0"), ("INPUT1", "INPUT__1")),
        ("no_output_index", ("OUTPUT__0", "OUTPUT0"), ("OUTPUT__1", "OUTPUT1")),
        (
            *("no_arguments_output_index", ("INPUT0", "INPUTA"), ("INPUT1", "INPUTB")),
            *(("OUTPUT__0", "OUTPUTA"), ("OUTPUT__1", "OUTPUTB")),
        ),
        ("mix_index", ("INPUT0", "INPUTA"), ("INPUT1", "INPUT__1"), ("OUTPUT__0", "OUTPUTA")),
        ("mix_arguments", ("INPUT1", "INPUTB"), ("OUTPUT__0", "OUTPUTA")),
        ("mix_arguments_index", ("INPUT1", "INPUT__1"), ("OUTPUT__0", "OUTPUT0")),
        (
            *("unordered_index", ("INPUT0", "INPUT_TMP1"), ("INPUT1", "INPUT0")),
            *(("INPUT_TMP1", "INPUT1"), ("OUTPUT__0", "OUT__1"), ("OUTPUT__1", "OUT__0")),
        ),
    ):
        triton_models.renamed(root, name, f"libtorch_{new}", *renamed)
    shutil.rmtree(root / name)


def shared_weights(bench: Bench, root: Path) -> None:
    made = triton_models.generated(bench, "gen_qa_identity_models", "--libtorch")
    name = "libtorch_nobatch_zero_1_float32"
    triton_models.copy(made, root, name)
    sharing = 'parameters: { key: "ENABLE_WEIGHT_SHARING" value: { string_value: "true" } }'
    group = "instance_group [ { count: 16 kind: KIND_CPU}]"
    triton_models.edit(root, name, append=f"{group}\n{sharing}\n")


def status(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--onnx"), root, "*")


def integers(bench: Bench, root: Path) -> None:
    """The first version of a model of each backend."""
    for platform in ("onnx", "libtorch", "openvino"):
        name = f"{platform}_int32_int32_int32"
        triton_models.copy(
            triton_models.generated(bench, "gen_qa_models", f"--{platform}"), root, name
        )
        for version in ("2", "3"):
            shutil.rmtree(root / name / version)
    padding = 'parameters { key: "ENABLE_BATCH_PADDING" value { string_value: "YES" } }\n'
    triton_models.edit(root, "openvino_int32_int32_int32", append=padding)


def simple(bench: Bench, root: Path) -> None:
    triton_models.copy(bench.source(SERVER) / triton_models.EXAMPLES, root, "simple")


def add_and_subtract(**versions: str) -> Build:
    """Models, each with one version."""

    def build(bench: Bench, root: Path) -> None:
        name = "onnx_int32_int32_int32"
        onnx = triton_models.generated(bench, "gen_qa_models", "--onnx")
        for new, version in versions.items():
            triton_models.copy(onnx, root, name)
            for other in {"1", "2", "3"} - {version}:
                shutil.rmtree(root / name / other)
            triton_models.renamed(root, name, new)
            shutil.rmtree(root / name)

    return build


def sagemaker(bench: Bench, root: Path) -> None:
    add_and_subtract(sm_model="1")(bench, root)
    generating(bench, root)


def unpacked_archives(bench: Bench, root: Path) -> None:
    """Archives where SageMaker unpacks them; the repository is empty."""
    archives = root.parent / "archives"
    archives.mkdir()
    link = Path("/opt/ml/models")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(archives)
    bench.endings.callback(link.unlink, missing_ok=True)
    qa = bench.source(SERVER) / "qa"
    for hashed, generator, model, name in (
        ("123456789abcdefghi", "gen_qa_models", "onnx_int32_int32_int32", "sm_mme_model_1"),
        ("987654321ihgfedcba", "gen_qa_identity_models", "onnx_zero_1_float32", "sm_mme_model_2"),
    ):
        folder = archives / hashed
        triton_models.copy(triton_models.generated(bench, generator, "--onnx"), folder, model)
        (folder / model).rename(folder / "model")
        for version in ("2", "3"):
            shutil.rmtree(folder / "model" / version, ignore_errors=True)
        triton_models.edit(folder, "model", (model, name))
    folder, name = archives / "123456789ensemble" / "model", "python_float32_float32_float32"
    triton_models.copy(qa / "python_models", folder, "add_sub", "fan_add_sub")
    (folder / "fan_add_sub").rename(folder / f"fan_{name}")
    (folder / "add_sub").rename(folder / name)
    (folder / f"fan_{name}" / "1").mkdir(exist_ok=True)
    whole = "max_batch_size: 64\n"
    triton_models.edit(folder, name, ("label_filename:.*", ""), append=whole)
    triton_models.edit(
        *(folder, f"fan_{name}", ("label_filename:.*", ""), ("ENSEMBLE_MODEL_NAME", name)),
        append=whole,
    )
    text = (folder / f"fan_{name}" / "config.pbtxt").read_text()
    named = re.sub("name:.*", f'name: "fan_{name}"', text, count=1)
    (folder / f"fan_{name}" / "config.pbtxt").write_text(named)
    nops = triton_models.generated(bench, "gen_qa_models", "--ensemble")
    triton_models.copy(nops, folder, "nop_TYPE_FP32_-1")
    (folder / "nop_TYPE_FP32_-1" / "1").mkdir(exist_ok=True)


def repeating(bench: Bench, root: Path) -> None:
    """``repeat_int32`` is code of Triton's; here it has its signature, and is decoupled."""
    (root / "repeat_int32" / "1").mkdir(parents=True)
    (root / "repeat_int32" / "config.pbtxt").write_text(
        'backend: "fake" model_transaction_policy { decoupled: true }\n'
        'input { name: "IN" data_type: TYPE_INT32 dims: -1 }\n'
        'input { name: "DELAY" data_type: TYPE_UINT32 dims: -1 }\n'
        'input { name: "WAIT" data_type: TYPE_UINT32 dims: 1 }\n'
        'output { name: "OUT" data_type: TYPE_INT32 dims: 1 }\n'
        'output { name: "IDX" data_type: TYPE_UINT32 dims: 1 }\n'
    )


FLOATS = "onnx_float32_float32_float32"


def floats(bench: Bench, root: Path) -> None:
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--onnx"), root, FLOATS)


def simple_ensemble(bench: Bench, root: Path) -> None:
    floats(bench, root)
    ensembles = triton_models.generated(bench, "gen_qa_models", "--ensemble")
    triton_models.copy(ensembles, root, f"simple_{FLOATS}")


def beside(bench: Bench, root: Path, link: str) -> Path:
    """Link ``root`` where the tests of ``qa/`` change it; the folder of the test."""
    path = bench.work / SERVER.name / "qa" / link
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(root)
    return path.parent


def namespaced(test: str) -> Build:
    """The two repositories of a test of ``L0_model_namespacing``."""

    def build(bench: Bench, root: Path) -> None:
        source = bench.source(SERVER) / "qa" / "L0_model_namespacing" / test
        shutil.copytree(source / "addsub_repo", root, dirs_exist_ok=True)
        folder = beside(bench, root, "L0_model_namespacing/test_dir/addsub_repo")
        shutil.rmtree(folder / "subadd_repo", ignore_errors=True)
        shutil.copytree(source / "subadd_repo", folder / "subadd_repo")
        for model in (*root.iterdir(), *(folder / "subadd_repo").iterdir()):
            (model / "1").mkdir(exist_ok=True)

    return build


def cached(bench: Bench, root: Path) -> None:
    simple_ensemble(bench, root)
    beside(bench, root, "L0_response_cache/models/ensemble_models")


def slow_queue(bench: Bench, root: Path) -> None:
    (root / "dynamic_batch" / "1").mkdir(parents=True)
    (root / "dynamic_batch" / "config.pbtxt").write_text(
        'backend: "identity" max_batch_size: 1\n'
        'input { name: "INPUT0" data_type: TYPE_FP32 dims: -1 }\n'
        'output { name: "OUTPUT0" data_type: TYPE_FP32 dims: -1 }\n'
        "instance_group { count: 1 kind: KIND_CPU }\n"
        "dynamic_batching { preferred_batch_size: 1 default_queue_policy {\n"
        "  timeout_action: REJECT default_timeout_microseconds: 1000000 max_queue_size: 8 } }\n"
        'parameters { key: "execute_delay_ms" value { string_value: "8000" } }\n'
    )


_BATCHES = (
    "dynamic_batching { preferred_batch_size: [ 2, 6 ], max_queue_delay_microseconds: 10000000 }"
)


def batching(bench: Bench, root: Path) -> None:
    floats(bench, root)
    _batch(root)


def batching_shapes(bench: Bench, root: Path) -> None:
    variable = triton_models.generated(bench, "gen_qa_models", "--onnx", "--variable")
    triton_models.copy(variable, root, FLOATS)
    _batch(root)
    triton_models.edit(root, FLOATS, ("16", "-1"))
    ragged = "onnx_nobatch_zero_1_float32"
    triton_models.copy(_identity(bench), root, ragged)
    triton_models.renamed(
        *(root, ragged, ragged.replace("nobatch_", "")),
        ("^max_batch_size:.*", "max_batch_size: 8"),
        ('name: "INPUT0"', 'name: "INPUT0"\nallow_ragged_batch: true'),
        append='batch_output [{target_name: "OUTPUT0" kind: BATCH_SCATTER_WITH_INPUT_SHAPE '
        f'source_input: "INPUT0" }}] {_BATCHES}',
    )
    shutil.rmtree(root / ragged)


def _batch(root: Path) -> None:
    triton_models.edit(
        *(root, FLOATS),
        *(("^max_batch_size:.*", "max_batch_size: 8"),),
        ("^version_policy:.*", "version_policy: { specific { versions: [1] }}"),
        append=_BATCHES,
    )


def special_floats(bench: Bench, root: Path) -> None:
    """``np.NINF`` of the model went with NumPy 2."""
    own("L0_nan_inf/models")(bench, root)
    code = root / "nan_inf_output" / "1" / "model.py"
    code.write_text(code.read_text().replace("np.NINF", "-np.inf"))


def generating(bench: Bench, root: Path) -> None:
    models = bench.source(SERVER) / "qa/python_models/generate_models"
    triton_models.copy(models, root, "mock_llm")
