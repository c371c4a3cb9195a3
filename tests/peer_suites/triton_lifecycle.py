"""Model repositories of ``qa/L0_lifecycle``, which its tests change while the gateway runs.

``plan`` models are those of ONNX under another name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.peer_suites import triton_models
from tests.peer_suites.suite import Bench
from tests.peer_suites.triton_models import SERVER
from tests.peer_suites.triton_repositories import FLOATS, Build, beside, simple_ensemble

_LINK = "L0_lifecycle/models"
_IDENTITY = "identity_zero_1_int32"


def _model(platform: str, datatype: str = "float32") -> str:
    return f"{platform}_{'_'.join([datatype] * 3)}"


def _copy(bench: Bench, root: Path, *platforms: str) -> None:
    """Models of ``platforms`` that add and subtract floats."""
    for platform in platforms:
        if platform != "plan":
            made = triton_models.generated(bench, "gen_qa_models", f"--{platform}")
            triton_models.copy(made, root, _model(platform))
        else:
            made = triton_models.generated(bench, "gen_qa_models", "--onnx")
            shutil.copytree(made / FLOATS, root / _model(platform))
            triton_models.edit(root, _model(platform), (FLOATS, _model(platform)))


def _second(folder: Path) -> Path:
    """An empty second repository beside the first one."""
    second = folder / "models_0"
    shutil.rmtree(second, ignore_errors=True)
    second.mkdir()
    return second


def _fresh(folder: Path, *names: str) -> None:
    for name in names:
        shutil.rmtree(folder / name, ignore_errors=True)


def version_named(name: str) -> Build:
    """The last version in a folder that is no version's."""

    def build(bench: Bench, root: Path) -> None:
        _copy(bench, root, "libtorch")
        (root / _model("libtorch") / "3").rename(root / _model("libtorch") / name)

    return build


def changing(bench: Bench, root: Path) -> None:
    _copy(bench, root, "openvino", "onnx", "plan")
    folder = beside(bench, root, _LINK)
    _fresh(folder, _model("libtorch"))
    _copy(bench, folder, "libtorch")


def changing_versions(bench: Bench, root: Path) -> None:
    libtorch = triton_models.generated(bench, "gen_qa_models", "--libtorch")
    triton_models.copy(libtorch, root, "libtorch_int32_int32_int32")
    beside(bench, root, _LINK)


def controlled(bench: Bench, root: Path) -> None:
    simple_ensemble(bench, root)
    for name in (FLOATS, f"simple_{FLOATS}"):
        triton_models.edit(root, name, ("^max_batch_size:.*", "max_batch_size: 1"))
    beside(bench, root, _LINK)


def files_gone(bench: Bench, root: Path) -> None:
    _copy(bench, root, "onnx")
    for file in (root / FLOATS).glob("[0-9]/*"):
        file.unlink()
    triton_models.edit(root, FLOATS, ("^max_batch_size:.*", "max_batch_size: 1"))
    beside(bench, root, _LINK)


def two_of_them_broken(bench: Bench, root: Path) -> None:
    """Version 3 of ``libtorch`` lacks its file."""
    second = _second(beside(bench, root, _LINK))
    _copy(bench, root, "openvino", "libtorch")
    _copy(bench, second, "onnx", "plan")
    for file in (root / _model("libtorch") / "3").iterdir():
        file.unlink()


def unconfigured(bench: Bench, root: Path) -> None:
    """``openvino`` has no configuration."""
    second = _second(beside(bench, root, _LINK))
    _copy(bench, root, "openvino", "libtorch")
    _copy(bench, second, "onnx", "plan")
    (root / _model("openvino") / "config.pbtxt").unlink()


def wrong_outputs(bench: Bench, root: Path) -> None:
    second = _second(beside(bench, root, _LINK))
    sequences = triton_models.generated(bench, "gen_qa_sequence_models", "--onnx")
    triton_models.copy(sequences, root, "onnx_sequence_int32")
    onnx = triton_models.generated(bench, "gen_qa_models", "--onnx")
    triton_models.copy(onnx, second, _model("onnx", "int32"))
    triton_models.edit(root, "onnx_sequence_int32", ("OUTPUT", "_OUTPUT"))
    triton_models.edit(second, _model("onnx", "int32"), ("OUTPUT", "_OUTPUT"))
    _copy(bench, root, "openvino", "libtorch")
    _copy(bench, second, "onnx")


def without_versions(bench: Bench, root: Path) -> None:
    _copy(bench, root, "libtorch", "onnx", "plan")
    (root / _model("openvino")).mkdir()


def modified(bench: Bench, root: Path) -> None:
    folder = beside(bench, root, _LINK)
    _copy(bench, root, "libtorch", "plan")
    for platform in ("libtorch", "plan"):
        model = root / _model(platform)
        lines = (model / "config.pbtxt").read_text().splitlines(keepends=True)
        kept = [line for line in lines if not line.startswith("version_policy")]
        (folder / f"config.pbtxt.{platform}").write_text("".join(kept))
        wrong = "".join(lines).replace("output0_labels", "wrong_output0_labels")
        (folder / f"config.pbtxt.wrong.{platform}").write_text(wrong)
        labels = (model / "output0_labels.txt").read_text()
        (model / "wrong_output0_labels.txt").write_text(labels.replace("label", "label9"))


def deleted(bench: Bench, root: Path) -> None:
    _copy(bench, root, "onnx", "plan")
    beside(bench, root, _LINK)


def two_repositories(bench: Bench, root: Path) -> None:
    folder = beside(bench, root, _LINK)
    _copy(bench, root, "openvino", "libtorch")
    shutil.rmtree(root / _model("libtorch") / "3")
    _copy(bench, _second(folder), "onnx")
    _fresh(folder, _model("libtorch"))
    _copy(bench, folder, "libtorch")


def _with_ensembles(bench: Bench, root: Path, first: str, both: str, small: bool) -> None:
    """``plan`` and ``first`` with their ensembles in the other repository; ``both`` is in both."""
    second = _second(beside(bench, root, _LINK))
    made = triton_models.generated(bench, "gen_qa_models", "--ensemble")
    for platform in ("plan", first):
        _copy(bench, root, platform)
        model, ensemble = _model(platform), f"simple_{_model(platform)}"
        shutil.copytree(made / f"simple_{_model('onnx')}", second / ensemble)
        triton_models.edit(second, ensemble, (_model("onnx"), model))
        if platform == "libtorch":
            triton_models.copy(made, second, ensemble)
        batch = ("^max_batch_size:.*", "max_batch_size: 1")
        for folder, name in ((root, model), (second, ensemble)) if small else ():
            triton_models.edit(folder, name, batch)
    _copy(bench, root, both)
    _copy(bench, second, both)


def loaded_at_start(bench: Bench, root: Path) -> None:
    _with_ensembles(bench, root, "onnx", "libtorch", small=True)


def indexed(bench: Bench, root: Path) -> None:
    _with_ensembles(bench, root, "libtorch", "onnx", small=False)


def _identity(bench: Bench, root: Path, policy: str = "", seconds: int = 10) -> str:
    """A model that takes ``seconds`` to load; its configuration."""
    source = bench.source(SERVER) / "qa" / "L0_lifecycle"
    triton_models.copy(source, root, _IDENTITY)
    delay = (r'string_value: "\d+"', f'string_value: "{seconds}"')
    triton_models.edit(root, _IDENTITY, delay, append=policy)
    return (root / _IDENTITY / "config.pbtxt").read_text()


def reloaded(bench: Bench, root: Path) -> None:
    _identity(bench, root)
    beside(bench, root, _LINK)


def reloaded_by_policy(bench: Bench, root: Path) -> None:
    policy = "version_policy: {{ specific {{ versions: [{}] }}}}\n"
    text = _identity(bench, root, policy.format(1))
    (root / _IDENTITY / "2").mkdir()
    folder = beside(bench, root, _LINK)
    (folder / "config.pbtxt.new").write_text(text)
    (folder / "config.pbtxt.v2").write_text(text.replace("[1]", "[2]"))


def another_platform(bench: Bench, root: Path) -> None:
    """A model that changes from ONNX to TorchScript."""
    folder, name = beside(bench, root, _LINK), _model("simple")
    _fresh(folder, name)
    for platform, place in (("plan", root), ("libtorch", folder)):
        _copy(bench, place, platform)
        _fresh(place, name)
        triton_models.renamed(place, _model(platform), name)
        shutil.rmtree(place / _model(platform))


def overridden(bench: Bench, root: Path) -> None:
    """Only version 2 has its file."""
    _copy(bench, root, "onnx")
    for version in ("1", "3"):
        for file in (root / FLOATS / version).iterdir():
            file.unlink()


def files_overridden(bench: Bench, root: Path) -> None:
    _copy(bench, root, "onnx")
    shutil.rmtree(root / FLOATS / "1")
    beside(bench, root, _LINK)


def _custom(bench: Bench, root: Path, parameter: str, *more: str) -> None:
    custom = bench.source(SERVER) / "qa" / "custom_models"
    triton_models.copy(custom, root, "custom_zero_1_float32")
    for name in more:
        triton_models.copy(bench.source(SERVER) / "qa" / "L0_lifecycle", root, name)
    key, value = parameter.split("=")
    triton_models.edit(
        *(root, "custom_zero_1_float32"),
        append=f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n',
    )


def slow(bench: Bench, root: Path) -> None:
    _custom(bench, root, "execute_delay_ms=5000", "ensemble_zero_1_float32")
    triton_models.edit(root, "custom_zero_1_float32", append="dynamic_batching {}\n")


def slow_to_load(bench: Bench, root: Path) -> None:
    """Two pairs of models that take ten seconds each."""
    _identity(bench, root)
    slow_to_initialize(10, True)(bench, root)
    for name, prefix in ((_IDENTITY, ""), ("identity_fp32", "python_")):
        for number in ("1", "2"):
            triton_models.renamed(root, name, f"{prefix}{name}_{number}")
        shutil.rmtree(root / name)


def loading(bench: Bench, root: Path) -> None:
    _identity(bench, root)
    _custom(bench, root, "creation_delay_sec=10", "ensemble_zero_1_float32")


def stressed(bench: Bench, root: Path) -> None:
    _identity(bench, root, seconds=0)


def _coded(bench: Bench, root: Path, *code: str, name: str = "identity_fp32") -> None:
    """The Python model ``identity_fp32`` with another method; it derives its configuration."""
    python = bench.source(SERVER) / "qa" / "python_models"
    triton_models.copy(python, root, "identity_fp32")
    if name != "identity_fp32":
        (root / "identity_fp32").rename(root / name)
    with (root / name / "1" / "model.py").open("a") as file:
        file.writelines(f"    {line}\n" for line in code)
    beside(bench, root, _LINK)


def slow_to_initialize(seconds: int, configured: bool = False) -> Build:
    def build(bench: Bench, root: Path) -> None:
        wait = ("def initialize(self, args):", "    import time", f"    time.sleep({seconds})")
        _coded(bench, root, *wait)
        if not configured:
            (root / "identity_fp32" / "config.pbtxt").unlink()

    return build


def slow_to_finalize(bench: Bench, root: Path) -> None:
    _coded(bench, root, "def finalize(self):", "    import time", "    time.sleep(10)")


def loading_each_version(bench: Bench, root: Path) -> None:
    note = "pb_utils.Logger.log_info(f'[PB model] Loading version {args[\"model_version\"]}')"
    _coded(bench, root, "def initialize(self, args):", f"    {note}")
    for version in ("2", "3"):
        shutil.copytree(root / "identity_fp32" / "1", root / "identity_fp32" / version)
    policy = "version_policy: { specific: { versions: [1, 2] } }\n"
    triton_models.edit(root, "identity_fp32", append=policy)


def without_configurations(bench: Bench, root: Path) -> None:
    """A Python model and one of ONNX."""
    _coded(bench, root, name="python_float32_float32_float32")
    _copy(bench, root, "onnx")
    for version in ("2", "3"):
        shutil.rmtree(root / FLOATS / version)
    for config in root.glob("*/config.pbtxt"):
        config.unlink()


def with_instances(bench: Bench, root: Path) -> None:
    """A model beside the test, which imports from its folder."""
    beside(bench, root, "L0_model_update/models")
    name = "model_init_del"
    shutil.copytree(bench.source(SERVER) / "qa" / "python_models" / name, root / name)
    (root / name / "1").mkdir()
    (root / name / "model.py").rename(root / name / "1" / "model.py")


def another_backend(bench: Bench, root: Path) -> None:
    """A model of the backend ``identity``, and one of its name in Python.

    The test replaces the repository itself, so it is beside the test.
    """
    folder = beside(bench, root, _LINK)
    (folder / "models").unlink()
    _identity(bench, folder / "models")
    triton_models.renamed(folder / "models", _IDENTITY, "identity_model")
    shutil.rmtree(folder / "models" / _IDENTITY)
    _fresh(folder, "models_v1", "models_v2")
    python = bench.source(SERVER) / "qa" / "python_models"
    triton_models.copy(python, folder / "models_v2", "identity_fp32")
    triton_models.renamed(folder / "models_v2", "identity_fp32", "identity_model")
    shutil.rmtree(folder / "models_v2" / "identity_fp32")


def custom_configured(there: bool) -> Build:
    """A model with a folder for another configuration, which is ``there`` or beside the test."""

    def build(bench: Bench, root: Path) -> None:
        _copy(bench, root, "libtorch")
        folder, model = beside(bench, root, _LINK), root / _model("libtorch")
        (model / "configs").mkdir()
        text = (model / "config.pbtxt").read_text()
        policy = "version_policy: { specific: { versions: [2] }}"
        custom = re.sub("^version_policy:.*", policy, text, flags=re.MULTILINE)
        file = (
            model / "configs" / "custom.pbtxt" if there else folder / "config.pbtxt.custom.libtorch"
        )
        file.write_text(custom)

    return build
