"""Keras files and SavedModels that want more than to be loaded are refused before they are."""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras, tf
from modelport.exporters.sources import keras_file
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, ModelportError, UsageError
from tests.keras_models import functional, layers, read, saved, saved_graph, scorer


@pytest.fixture(scope="module")
def scorer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(scorer, tmp_path_factory.mktemp("keras") / "scorer.keras")


@pytest.fixture
def saved_model(tmp_path: Path) -> Callable[..., Path]:
    return functools.partial(saved_graph, tmp_path / "saved")


def edited(source: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "config.json":
                config = json.loads(content)
                edit(config)
                content = json.dumps(config).encode()
            changed.writestr(name, content)
    return target


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal must come before Keras or TensorFlow has looked at the file."""

    def load_model(*_: Any, **__: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(keras.saving, "load_model", load_model)
    monkeypatch.setattr(tf.saved_model, "load", load_model)


def function(module: str | None, name: str, **more: Any) -> dict[str, Any]:
    return {"module": module, "class_name": "function", "config": name, **more}


def a_class(module: str | None, name: str, **more: Any) -> dict[str, Any]:
    return {"module": module, "class_name": name, "config": {}, **more}


HOSTILE = {
    "os.system": function("os", "system"),
    "subprocess.Popen": a_class("subprocess", "Popen"),
    "builtins.eval": a_class("builtins", "eval"),
    "keras.utils.get_file": function("keras.utils", "get_file"),
    "keras.config.enable_unsafe_deserialization": function(
        "keras.config", "enable_unsafe_deserialization"
    ),
    "keras.models.load_model": function("keras.models", "load_model"),
    "keras.load_model": function("keras", "load_model"),
    "keras.src.saving.saving_lib.load_model": function("keras.src.saving.saving_lib", "load_model"),
    "keras_hub.x.Y": a_class("keras_hub.x", "Y"),
    "kerasx.layers.Y": a_class("kerasx.layers", "Y"),
    # Keras looks up module and name together.
    "keras.saving.load_model": a_class("keras", "saving.load_model"),
    "keras.layers.x.Y": a_class("keras.layers", "x.Y"),
    "keras.ops.x.y": function("keras.ops", "x.y"),
    "Acme>Layer": a_class(None, "Layer", registered_name="Acme>Layer"),
    # Names of ours open no door to others' modules.
    "modelport>Positions": a_class("os", "system", registered_name="modelport>Positions"),
    "os.popen": function("os", "popen", registered_name="modelport>Positions"),
}


OWN_LAYERS = """
import keras

@keras.saving.register_keras_serializable(package="Acme")
class Scale(keras.layers.Layer):
    def call(self, x):
        return 3 * x
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with a layer that ``own_layers`` registers."""
    (tmp_path / "own_layers.py").write_text(OWN_LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    scale = importlib.import_module("own_layers").Scale
    model = keras.Sequential([keras.Input((2,)), scale()])
    return saved(lambda: model, tmp_path / "own.keras")


def test_a_registered_class_is_loaded_with_the_module_that_registers_it(own_file: Path) -> None:
    with pytest.raises(IntegrityError, match="--custom-objects MODULE"):
        read(own_file)
    source = read(own_file, model="own_layers")
    (name,) = (spec.name for spec in source.signature.inputs)
    (answer,) = source.reference({name: np.float32([[1, 2]])}).values()
    assert answer.tolist() == [[3, 6]]
    with pytest.raises(UsageError, match="importing 'no_such_module' failed"):
        read(own_file, model="no_such_module")


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("kind", ["function", "__lambda__"])
def test_the_name_of_a_registered_class_vouches_for_no_other_code(
    own_file: Path, tmp_path: Path, kind: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["config"]["layers"][-1] |= {"class_name": kind, "config": "system", "module": "os"}

    with pytest.raises(IntegrityError):
        read(edited(own_file, tmp_path / "a.keras", edit), model="own_layers")


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("wanted", HOSTILE)
def test_a_configuration_that_names_other_code_is_refused_before_keras_sees_it(
    scorer_file: Path, tmp_path: Path, wanted: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        deep = config["config"]["layers"][-1]["config"]
        deep["kernel_initializer"] = {"config": [{"nested": HOSTILE[wanted]}]}

    with pytest.raises(IntegrityError) as caught:
        read(edited(scorer_file, tmp_path / "a.keras", edit))
    assert f"wants to run '{wanted}'" in str(caught.value)
    assert "refused and not run" in str(caught.value)
    assert exit_code(caught.value) == 5


@pytest.mark.parametrize("place", ["", "layers.", "src.layers.core.lambda_layer.", "keras>"])
@pytest.mark.parametrize("kind", ["Lambda", "TorchModuleWrapper", "TFSMLayer"])
@pytest.mark.usefixtures("never_loaded")
def test_a_layer_whose_computation_is_code_is_refused(
    scorer_file: Path, tmp_path: Path, kind: str, place: str
) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["config"]["layers"][-1] |= {"class_name": place + kind, "module": "keras"}

    with pytest.raises(IntegrityError, match=f"is a {kind}, which .*: refused and not run"):
        read(edited(scorer_file, tmp_path / "a.keras", edit))


def test_a_lambda_layer_is_refused_and_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    value = keras.Input((2,), name="x")
    code = eval(f"lambda x: (__import__('os').makedirs({str(target)!r}), x)[1]")
    bomb = layers.Lambda(code, name="bomb")
    path = saved(functional(value, bomb(value)), tmp_path / "a.keras")
    os.rmdir(target)
    with pytest.raises(IntegrityError, match="layer 'bomb' is a Lambda, which holds Python code"):
        read(path)
    assert not target.exists()
    with quiet():
        keras.saving.load_model(path, safe_mode=False)
    assert target.exists(), "the bomb is a dud: this test could not fail"


@pytest.mark.usefixtures("never_loaded")
def test_a_vocabulary_in_another_file_is_refused(scorer_file: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["config"]["layers"][0]["config"]["vocabulary"] = "/etc/passwd"

    with pytest.raises(IntegrityError, match="vocabulary from the file '/etc/passwd'"):
        read(edited(scorer_file, tmp_path / "a.keras", edit))


def test_a_custom_loss_is_no_reason_to_refuse_a_model(scorer_file: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        config["compile_config"] = {"loss": function("acme.losses", "focal")}

    assert read(edited(scorer_file, tmp_path / "a.keras", edit)).signature.outputs


@pytest.mark.usefixtures("never_loaded")
def test_a_whole_model_in_hdf5_with_another_suffix_is_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    path = saved(scorer, tmp_path / "legacy.h5").rename(tmp_path / "a.keras")
    with pytest.raises(UsageError, match=r"model.save\('model.keras'\)"):
        read(path)


def lambda_model() -> Any:
    return keras.Sequential([keras.Input((3,)), layers.Lambda(lambda x: x + 1)])


@pytest.mark.usefixtures("never_loaded")
def test_code_in_a_whole_model_in_hdf5_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"is a Lambda, which holds Python code"):
        read(saved(lambda_model, tmp_path / "a.h5"))
    path = saved(scorer, tmp_path / "b.h5")
    with h5py.File(path, "a") as file:
        config = json.loads(file.attrs["model_config"])
        config["config"]["layers"][-1]["config"]["activation"] = function("os", "system")
        file.attrs["model_config"] = json.dumps(config)
    with pytest.raises(IntegrityError, match=r"wants to run 'os.system'"):
        read(path)
    with h5py.File(path, "a") as file:
        file["model_weights/x"] = h5py.ExternalLink("/etc/other.h5", "/")
    with pytest.raises(IntegrityError, match=r"'model_weights/x' leads elsewhere"):
        read(path)
    saved(scorer, tmp_path / "c.keras")
    with zipfile.ZipFile(tmp_path / "c.keras") as archive:
        (tmp_path / "c.h5").write_bytes(archive.read("model.weights.h5"))
    with pytest.raises(UsageError, match=r"'c.h5' holds only weights; build their model"):
        read(tmp_path / "c.h5")


def test_a_keras_file_cut_anywhere_is_an_integrity_error(scorer_file: Path, tmp_path: Path) -> None:
    content, cut = scorer_file.read_bytes(), tmp_path / "cut.keras"
    for length in (0, 4, 100, len(content) // 2, len(content) - 1):
        cut.write_bytes(content[:length])
        with pytest.raises(IntegrityError, match=r"'cut.keras' is damaged"):
            read(cut)


def test_damage_inside_a_keras_file_is_never_a_traceback(scorer_file: Path, tmp_path: Path) -> None:
    content, path = scorer_file.read_bytes(), tmp_path / "damaged.keras"
    chance = np.random.default_rng(0)
    refused = 0
    for place in chance.integers(0, len(content), 40):
        damaged = bytearray(content)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            read(path)
        except ModelportError:
            refused += 1
    assert refused > 20


@pytest.mark.usefixtures("never_loaded")
def test_a_zip_that_unpacks_to_a_thousand_times_its_size_is_refused(
    scorer_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.keras"
    path.write_bytes(scorer_file.read_bytes())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("assets/zeros", bytes(40 << 20))
    with pytest.raises(IntegrityError, match="decompression bomb"):
        read(path)


@pytest.mark.usefixtures("never_loaded")
def test_a_member_that_would_be_unpacked_elsewhere_is_refused(
    scorer_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.keras"
    path.write_bytes(scorer_file.read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("assets/../../escaped", b"x")
    with pytest.raises(IntegrityError, match="is not safe; refused"):
        read(path)


def outside(kind: str, folder: Path) -> Callable[[h5py.File], None]:
    """Ways in which an HDF5 file can have its values elsewhere, or have none."""
    (folder / "secret").write_bytes(bytes(64))
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "x", (4,))
    big = (1 << 30,)
    edits: dict[str, Callable[[h5py.File], Any]] = {
        "soft": lambda file: file.__setitem__("x", h5py.SoftLink("/layers")),
        "external": lambda file: file.__setitem__("x", h5py.ExternalLink("/etc/other.h5", "/")),
        "raw": lambda file: file.create_dataset(
            "x", (4,), "f4", external=[(str(folder / "secret"), 0, 16)]
        ),
        "virtual": lambda file: file.create_virtual_dataset("x", layout),
        "bomb": lambda file: file.create_dataset("x", big, "f4", chunks=(1 << 20,)),
    }
    return edits[kind]


@pytest.mark.parametrize("kind", ["soft", "external", "raw", "virtual", "bomb"])
@pytest.mark.usefixtures("never_loaded")
def test_weights_that_are_not_in_the_file_are_refused(
    scorer_file: Path, tmp_path: Path, kind: str
) -> None:
    weights, path = tmp_path / "weights.h5", tmp_path / "a.keras"
    with zipfile.ZipFile(scorer_file) as archive, zipfile.ZipFile(path, "w") as changed:
        weights.write_bytes(archive.read("model.weights.h5"))
        with h5py.File(weights, "a") as file:
            outside(kind, tmp_path)(file)
        changed.write(weights, "model.weights.h5")
        changed.writestr("config.json", archive.read("config.json"))
    with pytest.raises(IntegrityError, match=r"'a.keras'.* refused$"):
        read(path)


def hostile_graphs(target: str) -> dict[str, Callable[[Any], Any]]:
    def write(x: Any) -> Any:
        with tf.control_dependencies([tf.io.write_file(target, "hi")]):
            return tf.identity(x)

    def save(x: Any) -> Any:
        with tf.control_dependencies(
            [
                tf.raw_ops.SaveV2(
                    prefix=target, tensor_names=["x"], shape_and_slices=[""], tensors=[x]
                )
            ]
        ):
            return tf.identity(x)

    return {
        "WriteFile": write,
        "SaveV2": save,
        "ReadFile": lambda x: x + tf.cast(tf.strings.length(tf.io.read_file(target)), tf.float32),
        "EagerPyFunc": lambda x: tf.ensure_shape(
            tf.py_function(lambda y: y, [x], tf.float32), [None, 3]
        ),
        "MatchingFiles": lambda x: x + tf.cast(tf.size(tf.io.matching_files("/*")), tf.float32),
        "RestoreV2": lambda x: (
            x
            + tf.raw_ops.RestoreV2(
                prefix=target, tensor_names=["x"], shape_and_slices=[""], dtypes=[tf.float32]
            )[0]
        ),
    }


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "in a branch"])
@pytest.mark.parametrize("operator", sorted(hostile_graphs("")))
def test_a_graph_that_reaches_files_or_python_is_refused_and_not_loaded(
    saved_model: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    nested: bool,
) -> None:
    hostile = hostile_graphs(str(tmp_path / "written"))[operator]

    def serve(x: Any) -> Any:
        return tf.cond(tf.size(x) > 0, lambda: hostile(x), lambda: x) if nested else hostile(x)

    path = saved_model(serve)
    with monkeypatch.context() as patch:
        patch.setattr(tf.saved_model, "load", None)
        with pytest.raises(IntegrityError, match=f"operator {operator} .*refused and not loaded"):
            read(path)
    assert not list(tmp_path.glob("written*"))
    if operator in ("WriteFile", "SaveV2"):
        tf.saved_model.load(str(path)).signatures["serving_default"](x=tf.ones([1, 3]))
        assert list(tmp_path.glob("written*")), "the bomb is a dud: this test could not fail"


@pytest.mark.parametrize("name", ["saved_model.pb", "variables/variables.data-00000-of-00001"])
def test_a_damaged_saved_model_is_an_integrity_error(
    saved_model: Callable[..., Path], name: str
) -> None:
    path = saved_model(lambda x: x)
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(IntegrityError, match="is damaged"):
        read(path)


def test_the_cost_of_names_grows_with_their_number_only() -> None:
    """A file of 50 kB may name the output of one layer thousands of times."""
    began = time.process_time()
    names = keras_file._names(["dense", "dense_2"] + ["dense"] * 2_000, "output")
    assert time.process_time() - began < 1.0
    assert names[:4] == ["dense", "dense_2", "dense_1", "dense_3"]
    assert len(set(names)) == len(names) == 2_002
