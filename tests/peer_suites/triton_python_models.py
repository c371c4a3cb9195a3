"""Model repositories that the ``test.sh`` of Triton's tests of its Python backend make."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.peer_suites import triton_models
from tests.peer_suites.sources import PinnedSource
from tests.peer_suites.suite import Bench
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_repositories import Build, own

PYTHON_BACKEND = PinnedSource(
    "triton-inference-server/python_backend", "f9088ff60944cc5a2e97ff16baba55f1666852bc"
)
_TESTS = "L0_backend_python"
_READY = f"{_TESTS}/model_readiness/test_models"
_DECOUPLED = "model_transaction_policy { decoupled: True }\n"
_DELAYED = "dynamic_batching { max_queue_delay_microseconds: 500000 }\n"
#: Of ``bls``.
_GPU_TESTS = ("bls_sequence", "bls_tensor_lifecycle", "gpu_bls", "preferred_memory")
_EIGHT = ("^max_batch_size:.*", "max_batch_size: 8")


def _copy(bench: Bench, root: Path, *names: str) -> None:
    triton_models.copy(bench.source(SERVER) / "qa" / "python_models", root, *names)


def python(*names: str) -> Build:
    """Models of ``qa/python_models``."""

    def build(bench: Bench, root: Path) -> None:
        _copy(bench, root, *names)

    return build


def example(**models: str) -> Build:
    """Models of the Python backend's own examples: name, and beginning of the files."""

    def build(bench: Bench, root: Path) -> None:
        for name, files in models.items():
            source = bench.source(PYTHON_BACKEND) / "examples" / files
            (root / name / "1").mkdir(parents=True)
            prefix = "" if source.is_dir() else f"{source.name}_"
            folder = source if source.is_dir() else source.parent
            shutil.copy(folder / f"{prefix}model.py", root / name / "1" / "model.py")
            config = folder / f"{prefix}config.pbtxt"
            if config.is_file():
                shutil.copy(config, root / name / "config.pbtxt")

    return build


def _batching(microseconds: int) -> str:
    return (
        "dynamic_batching { preferred_batch_size: [8], "
        f"max_queue_delay_microseconds: {microseconds} }}\n"
    )


def main(bench: Bench, root: Path) -> None:
    """The models of ``python_test.py``."""
    names = ("pytorch_fp32_fp32", "delayed_model", "init_args", "optional", "non_contiguous")
    _copy(bench, root, "identity_fp32", "identity_bf16", *names)
    _copy(bench, root, "string", "string_fixed", "dlpack_identity")
    for new, datatype, *more in (
        ("identity_uint8", "UINT8", _EIGHT),
        ("identity_uint8_nobatch", "UINT8", ("^max_batch_size:.*", "")),
        ("identity_uint32", "UINT32"),
        ("identity_bool", "BOOL"),
    ):
        changes = (("TYPE_FP32", f"TYPE_{datatype}"), *more)
        append = _batching(12_000_000) if new == "identity_uint8" else ""
        triton_models.renamed(root, "identity_fp32", new, *changes, append=append)
    file = 'default_model_filename: "mymodel.py"\n'
    triton_models.renamed(root, "identity_fp32", "default_model_name", append=file)
    triton_models.edit(root, "pytorch_fp32_fp32", ("^name:.*", 'name: "pytorch_fp32_fp32"'))
    version = root / "default_model_name" / "1"
    (version / "model.py").rename(version / "mymodel.py")


def multi_file(bench: Bench, root: Path) -> None:
    _copy(bench, root, "identity_fp32", "multi_file")
    config = (root / "identity_fp32" / "config.pbtxt").read_text()
    (root / "multi_file" / "config.pbtxt").write_text(config.replace("identity_fp32", "multi_file"))
    shutil.rmtree(root / "identity_fp32")


def without_code(bench: Bench, root: Path) -> None:
    _copy(bench, root, "identity_fp32")
    triton_models.renamed(root, "identity_fp32", "non_existent_model")
    (root / "non_existent_model" / "1" / "model.py").unlink()
    shutil.rmtree(root / "identity_fp32")


def python_based(bench: Bench, root: Path) -> None:
    """The models of ``python_based_backends_test.py``, and their backend beside them."""
    qa = bench.source(SERVER) / "qa"
    backend = root.parent / "backends" / "add_sub"
    backend.mkdir(parents=True, exist_ok=True)
    source = qa / "python_models" / "python_based_backends" / "add_sub_backend" / "model.py"
    shutil.copy(source, backend)
    for name, versions in (("add", "12"), ("sub", "1")):
        for version in versions:
            (root / name / version).mkdir(parents=True)
            content = f'{{ "operation": "{name}" }}\n'
            (root / name / version / "model.json").write_text(content)
        (root / name / "config.pbtxt").write_text('backend: "add_sub"\n')
    _copy(bench, root, "add_sub")
    shutil.copytree(root / "add_sub" / "1", root / "add_sub" / "2")
    generator = qa / "common" / "gen_qa_pytorch_model.py"
    subprocess.run([sys.executable, generator, "-m", root], check=True)


def ensemble(bench: Bench, root: Path) -> None:
    """The models of ``ensemble_test.py``; those of a GPU do not load."""
    _copy(bench, root, "ensemble", "ensemble_gpu", "add_sub")
    for new in ("add_sub_1", "add_sub_2"):
        triton_models.renamed(root, "add_sub", new)
    shutil.rmtree(root / "add_sub")
    name = "libtorch_float32_float32_float32"
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--libtorch"), root, name)
    edits = (("^max_batch_size:.*", "max_batch_size: 0"), ("^version_policy:.*", ""))
    kind = "instance_group [ { kind: KIND_GPU }]\n"
    triton_models.edit(root, name, *edits, append=kind)
    for version in "23":
        shutil.rmtree(root / name / version)


def bls(bench: Bench, root: Path) -> None:
    """``libtorch_gpu`` is left out, and tests inside of ``bls`` that need a GPU."""
    names = ("bls", "bls_async", "bls_memory", "bls_memory_async", "add_sub", "execute_error")
    _copy(bench, root, *names, "dlpack_add_sub", "identity_fp32", "dlpack_identity")
    _copy(bench, root, "dlpack_square", "identity_fp32_timeout")
    example(square_int32="decoupled/square")(bench, root)
    implicit = triton_models.generated(bench, "gen_qa_implicit_models", "--onnx")
    triton_models.copy(implicit, root, "onnx_nobatch_sequence_int32")
    name = "libtorch_nobatch_float32_float32_float32"
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--libtorch"), root, name)
    kind = "instance_group [ { kind: KIND_CPU} ]\n"
    triton_models.renamed(root, name, "libtorch_cpu", append=kind)
    shutil.rmtree(root / name)
    for model, pattern, replacement in (
        ("bls", f"def test_({'|'.join(_GPU_TESTS)})", r"def \1"),
        ("bls_async", "gpu=True", "gpu=False"),
    ):
        code = root / model / "1" / "model.py"
        code.write_text(re.sub(pattern, replacement, code.read_text()))


def bls_loading(bench: Bench, root: Path) -> None:
    _copy(bench, root, "bls_model_loading")
    name = "onnx_int32_int32_int32"
    triton_models.copy(triton_models.generated(bench, "gen_qa_models", "--onnx"), root, name)
    shutil.rmtree(root / name / "1")


def bls_warmup(bench: Bench, root: Path) -> None:
    bls_loading(bench, root)
    value = "value: { data_type: TYPE_FP32 dims: 4 zero_data: false }"
    inputs = "".join(f'inputs {{ key: "{name}" {value} }}\n' for name in ("INPUT0", "INPUT1"))
    warmup = f'model_warmup [{{ name : "regular sample" batch_size: 1 {inputs} }}]\n'
    triton_models.edit(root, "bls_model_loading", append=warmup)


def decoupled(bench: Bench, root: Path) -> None:
    own(f"{_TESTS}/decoupled/models")(bench, root)
    names = ("identity_fp32", "execute_cancel", "response_sender_until_cancelled")
    _copy(bench, root, *names, "dlpack_add_sub")
    triton_models.edit(root, "execute_cancel", append=_DECOUPLED)
    example(square_int32="decoupled/square")(bench, root)


def io(kind: str) -> Build:
    """An ensemble of three models of ``kind``."""

    def build(bench: Bench, root: Path) -> None:
        _copy(bench, root, "ensemble_io", kind)
        for number in (1, 2, 3):
            named = ("^name:.*", f'name: "dlpack_io_identity_{number}"')
            triton_models.renamed(root, kind, f"dlpack_io_identity_{number}", named)
        shutil.rmtree(root / kind)

    return build


def requested_output(bench: Bench, root: Path) -> None:
    folder = bench.source(SERVER) / "qa" / _TESTS / "io"
    triton_models.copy(folder, root, "requested_output_model")
    (root / "requested_output_model").rename(root / "llm")


def lifecycle(bench: Bench, root: Path) -> None:
    names = ("error_code", "execute_cancel", "execute_error", "execute_grpc_error")
    _copy(bench, root, *names, "decoupled_grpc_error", "execute_return_error", "wrong_model")
    triton_models.edit(root, "execute_error", _EIGHT, append=_batching(12_000_000))
    triton_models.edit(root, "execute_grpc_error", _EIGHT, append=_batching(1_200_000))
    named = ("^name:.*", 'name: "wrong_model"')
    triton_models.edit(root, "wrong_model", named, ("TYPE_FP32", "TYPE_UINT32"))


def auto_complete_error(bench: Bench, root: Path) -> None:
    """``test.sh`` copies the code alone."""
    _copy(bench, root, "auto_complete_error")
    (root / "auto_complete_error" / "config.pbtxt").unlink(missing_ok=True)


def readiness(bench: Bench, root: Path) -> None:
    """A model for each answer of ``is_ready``."""
    _copy(bench, root, "identity_fp32")
    tests = bench.source(SERVER) / "qa" / _READY
    parameter = 'parameters: {{ key: "READINESS_FN_{}" value: {{ string_value: "{}" }} }}\n'
    for answer, value, seconds in (
        ("returns_true", "true", "0.1"),
        ("returns_false", "false", "0.1"),
        ("raises_error", "exception", "0.1"),
        ("returns_non_boolean", "non_boolean", "0.1"),
        ("timeout", "true", "8"),
        ("coroutine_returns_true", "coroutine", "0.1"),
    ):
        name = f"is_ready_fn_{answer}"
        told = parameter.format("RETURN_VALUE", value) + parameter.format("DELAY_SECS", seconds)
        triton_models.renamed(root, "identity_fp32", name, append=told)
        file = "readiness_coroutine_model.py" if value == "coroutine" else "readiness_model.py"
        shutil.copy(tests / file, root / name / "1" / "model.py")
    triton_models.copy(tests, root, "is_ready_fn_returns_true_decoupled")


def response_sender(bench: Bench, root: Path) -> None:
    name = "response_sender"
    _copy(bench, root, name)
    for mode, policy in (("", ""), ("_decoupled", _DECOUPLED)):
        for kind in ("", "_async"):
            for batching, queue in (("", ""), ("_batching", _DELAYED)):
                new = f"{name}{mode}{kind}{batching}"
                if new != name:
                    triton_models.renamed(root, name, new, append=policy + queue)
                if kind:
                    version = root / new / "1"
                    (version / "model_async.py").rename(version / "model.py")


def model_control(bench: Bench, root: Path) -> None:
    _copy(bench, root, "identity_fp32", "simple_identity_fp32")
