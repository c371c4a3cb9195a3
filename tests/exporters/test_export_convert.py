"""Weights travel between Keras and PyTorch bit by bit, and a conversion gone wrong is caught."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import safetensors.torch
import torch
from click.testing import Result
from torch import nn

from modelport.exporters.keras_ports import KerasPort, find_port
from modelport.exporters.keras_ports.weights import dense
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.models.vit import VisionTransformer
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.runtime.tensorflow_runtime import keras
from modelport.gateway.types import Datatype, ModelSignature, TensorSpec
from tests.conversion import (
    FRAUD_KWARGS,
    State,
    distinct,
    done,
    failed,
    fraud,
    report_of,
    run,
    save,
)
from tests.thorough import sampled

LAYER = "encoder.layers"

VIT_KWARGS: dict[str, Any] = {
    "image_size": 8,
    "patch_size": 4,
    "in_channels": 1,
    "num_classes": 5,
    "dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_dim": 24,
}


def state_of(path: Path) -> State:
    if path.suffix == ".safetensors":
        return safetensors.torch.load_file(path)
    content: State = torch.load(path, weights_only=True)["model_state_dict"]
    return content


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return fraud()


@pytest.fixture(scope="module")
def files(module: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one fraud model as ``a.pt`` and as ``a.keras``."""
    folder = tmp_path_factory.mktemp("convert")
    save(module.state_dict(), folder / "a.pt")
    done(run(folder / "a.pt", folder / "a.keras"))
    return folder


@pytest.fixture
def state(module: nn.Module) -> State:
    return {key: value.clone() for key, value in module.state_dict().items()}


@pytest.fixture
def port_file(module: nn.Module, tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """``b.keras`` of a Keras model that is changed before it is saved."""

    def write(change: Callable[[Any], None]) -> Path:
        from modelport.exporters.keras_ports.weights import port

        keras_port = find_port("modelport.exporters.keras_ports.fraud:PORT")
        with quiet():
            model = keras_port.build(FRAUD_KWARGS, "float32")
            port(module.state_dict(), model, keras_port.links(FRAUD_KWARGS))
            change(model)
            model.save(tmp_path / "b.keras")
        return tmp_path / "b.keras"

    return write


@pytest.fixture(scope="module")
def weights(files: Path) -> Path:
    """The weights alone, of the same model."""
    done(run(files / "a.pt", files / "a.weights.h5"))
    return files / "a.weights.h5"


@pytest.mark.parametrize(
    ("between", "back"),
    [("a.keras", "c.pt"), ("a.weights.h5", "c.pth"), ("a.keras", "c.safetensors")],
)
def test_there_and_back_every_bit_is_the_same(
    files: Path, weights: Path, state: State, tmp_path: Path, between: str, back: str
) -> None:
    done(run(files / between, tmp_path / back))
    returned = state_of(tmp_path / back)
    assert returned.keys() == state.keys()
    assert all(torch.equal(returned[key], state[key]) for key in state)


def test_a_vit_travels_with_the_settings_that_no_shape_shows(tmp_path: Path) -> None:
    kwargs = {**VIT_KWARGS, "layer_norm_eps": 1e-3}
    model = distinct(VisionTransformer(**kwargs))
    save(model.state_dict(), tmp_path / "a.pt", kwargs)
    done(run(tmp_path / "a.pt", tmp_path / "b.keras", model="vit"))
    done(run(tmp_path / "b.keras", tmp_path / "c.pt", model="vit"))
    content = torch.load(tmp_path / "c.pt", weights_only=True)
    assert content["model_kwargs"] == kwargs
    assert all(
        torch.equal(v, content["model_state_dict"][k]) for k, v in model.state_dict().items()
    )


def test_the_report_has_every_tensor_and_lies_beside_the_checkpoint(
    files: Path, state: State
) -> None:
    report = report_of(files / "a.keras")
    assert report["passed"]
    assert (report["source"]["file"], report["source"]["framework"]) == ("a.pt", "pytorch")
    rows = {row["tensor"]: row for row in report["tensors"]}
    assert len(rows) == len(state) + 2 * 2 * FRAUD_KWARGS["num_layers"]  # q, k and v are apart
    row = rows[f"{LAYER}.1.linear2/kernel"]
    norm = float(torch.linalg.vector_norm(state[f"{LAYER}.1.linear2.weight"].double()))
    assert row["layer"] == f"{LAYER}.1.linear2"
    assert row["shape"] == {"source": [16, 16], "target": [16, 16]}
    assert row["norm"] == {"source": pytest.approx(norm), "target": pytest.approx(norm)}
    assert (row["max_abs_error"], row["verdict"]) == (0, "same")
    assert report["outputs"]["samples"] == 24
    assert report["outputs"]["errors"][0]["mean_abs_error"] < 1e-6
    assert report["activations"]["first_divergence"] is None
    assert len(report["activations"]["relative_errors"]) > 3 * 4


def test_the_table_names_tensors_shapes_and_norms(files: Path) -> None:
    lines = done(run(files / "a.pt", files / "a.keras", "--check")).splitlines()
    row = next(line.split() for line in lines if line.startswith(f"{LAYER}.0.linear1/kernel"))
    assert (row[1], row[2], row[4]) == ("16x16", row[3], "0")
    assert any(line.startswith("probability") and "over 24 inputs" in line for line in lines)


def transpose(state: State) -> None:
    key = f"{LAYER}.1.linear1.weight"
    state[key] = state[key].T.contiguous()


def swap_query_and_key(state: State) -> None:
    for key in (f"{LAYER}.2.self_attn.in_proj_weight", f"{LAYER}.2.self_attn.in_proj_bias"):
        query, keys, value = state[key].chunk(3)
        state[key] = torch.cat([keys, query, value])


def swap_layers(state: State) -> None:
    for key in [key for key in state if key.startswith(f"{LAYER}.0.")]:
        other = key.replace(f"{LAYER}.0.", f"{LAYER}.2.")
        state[key], state[other] = state[other], state[key]


def drop_a_bias(state: State) -> None:
    state[f"{LAYER}.2.linear2.bias"].zero_()


def nudge(state: State) -> None:
    state["head.weight"][0, 3] += 1e-4


FAULTS = {
    transpose: f"layer '{LAYER}.1.linear1': kernel looks transposed",
    swap_query_and_key: (
        f"layer '{LAYER}.2.self_attn.query' looks swapped with '{LAYER}.2.self_attn.key'"
    ),
    swap_layers: f"layer '{LAYER}.0' looks swapped with '{LAYER}.2'",
    drop_a_bias: f"layer '{LAYER}.2.linear2': bias looks dropped: it is all zeros",
    nudge: "layer 'head': kernel differs by up to 0.0001",
}


@pytest.mark.parametrize(
    "fault", sampled(FAULTS, transpose, swap_layers, nudge), ids=lambda fault: fault.__name__
)
def test_a_fault_is_named_with_its_layer_though_the_outputs_hardly_show_it(
    files: Path, state: State, tmp_path: Path, fault: Callable[[State], None]
) -> None:
    fault(state)
    target = save(state, tmp_path / "b.pt")
    content = target.read_bytes()
    line = failed(run(files / "a.keras", target, "--check"), 3)
    assert line.startswith(f"'b.pt' is not the model in 'a.keras': {FAULTS[fault]}; convert it")
    report = report_of(target)
    assert not report["passed"]
    assert FAULTS[fault] in report["reason"]
    assert report["outputs"]["errors"][0]["mean_abs_error"] < report["outputs"]["bound"]
    assert target.read_bytes() == content


@pytest.mark.parametrize(
    "fault", sampled(FAULTS, swap_query_and_key), ids=lambda fault: fault.__name__
)
def test_a_fault_in_the_keras_file_is_named_as_well(
    files: Path,
    state: State,
    port_file: Callable[[Callable[[Any], None]], Path],
    fault: Callable[[State], None],
) -> None:
    from modelport.exporters.keras_ports.weights import port

    fault(state)
    links = find_port("modelport.exporters.keras_ports.fraud:PORT").links(FRAUD_KWARGS)
    target = port_file(lambda model: port(state, model, links))
    assert FAULTS[fault] in failed(run(files / "a.pt", target, "--check"), 3)


def test_the_first_layer_whose_activations_part_is_in_the_report(
    files: Path, state: State, tmp_path: Path
) -> None:
    drop_a_bias(state)
    target = save(state, tmp_path / "b.pt")
    run(files / "a.keras", target, "--check")
    activations = report_of(target)["activations"]
    assert activations["first_divergence"] == f"{LAYER}.2.linear2"
    assert activations["relative_errors"][f"{LAYER}.2.linear1"] < 1e-5


def misfits() -> dict[str, tuple[Callable[[State], object], str]]:
    key = f"{LAYER}.1.norm1.bias"
    return {
        "missing": (lambda s: s.pop(key), f"layer '{LAYER}.1.norm1': beta is missing"),
        "extra": (
            lambda s: s.update(more=torch.ones(1)),
            "tensor 'more' is not in the other model",
        ),
        "shape": (lambda s: s.update({key: torch.ones(3)}), "beta has shape [3], not [16]"),
        "rank": (
            lambda s: s.update({"head.bias": torch.tensor(1.0)}),
            "bias has shape [], not [1]",
        ),
        "nan": (lambda s: s[key].fill_(torch.nan), "beta holds values that are not finite"),
    }


@pytest.mark.parametrize("kind", misfits())
def test_a_target_that_does_not_load_has_its_own_error(
    files: Path, state: State, tmp_path: Path, kind: str
) -> None:
    change, said = misfits()[kind]
    change(state)
    target = save(state, tmp_path / "b.pt")
    assert said in failed(run(files / "a.keras", target, "--check"), 3)
    assert report_of(target)["outputs"]["errors"] == []


def test_other_hyperparameters_are_another_model(files: Path, state: State, tmp_path: Path) -> None:
    target = save(state, tmp_path / "b.pt", {**FRAUD_KWARGS, "nhead": 4})
    said = failed(run(files / "a.keras", target, "--check"), 3)
    assert "hyper-parameter 'nhead' is 4, not 2" in said


def test_a_bare_state_dict_is_checked_with_what_the_keras_file_says(
    files: Path, state: State, tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "bare.pt")
    done(run(tmp_path / "bare.pt", files / "a.keras", "--check"))


def test_weights_alone_ask_for_what_they_do_not_say(weights: Path, tmp_path: Path) -> None:
    target = tmp_path / "c.pt"
    weights = Path(shutil.copy(weights, tmp_path / "b.weights.h5"))
    with h5py.File(weights, "a") as file:
        del file.attrs["model_kwargs"]
    assert """add --model-kwargs '{"nhead": N}'""" in failed(run(weights, target), 2)
    done(run(weights, target, "--model-kwargs", '{"nhead": 2}'))


@pytest.mark.thorough
def test_a_trained_file_with_its_optimizer_converts(
    port_file: Callable[[Callable[[Any], None]], Path], tmp_path: Path
) -> None:
    def train(model: Any) -> None:
        model.compile("adam", loss="mse", run_eagerly=True)
        inputs = {"tokens": np.ones((2, 3), np.int64), "seq_lens": np.ones(2, np.int64)}
        model.fit(inputs, {"probability": np.ones(2, np.float32)}, verbose=0)

    done(run(port_file(train), tmp_path / "c.pt"))


# A port that computes something else, as a wrong mapping or a bug in a runtime would.


class Skewed(nn.Module):
    """A model whose port multiplies by ``scale``."""

    modelport_spec = ModelSpec(
        name="skewed",
        signature=lambda module, max_batch_size: ModelSignature(
            (TensorSpec("x", Datatype.FP32, (4,)),),
            (TensorSpec("y", Datatype.FP32, (2,)),),
            max_batch_size,
        ),
        keras_port=f"{__name__}:PORT",
    )

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result


def build_skewed(kwargs: Any, dtype: str) -> Any:
    x = keras.Input((4,), name="x")
    hidden = keras.layers.Dense(4, name="first")(x)
    scaled = keras.ops.tanh(hidden * kwargs["scale"])
    return keras.Model({"x": x}, {"y": keras.layers.Dense(2, name="second")(scaled)})


PORT = KerasPort(
    build_skewed,
    lambda kwargs: [*dense("first"), *dense("second")],
    lambda kwargs: (("first", "first"), ("second", "second")),
)


def convert_skewed(folder: Path, scale: float) -> Result:
    torch.manual_seed(0)
    kwargs = {"scale": scale}
    save(Skewed(**kwargs).state_dict(), folder / "a.pt", kwargs)
    return run(folder / "a.pt", folder / "b.keras", model=f"{__name__}:Skewed")


def test_outputs_that_differ_refuse_a_conversion_and_name_where(tmp_path: Path) -> None:
    said = failed(convert_skewed(tmp_path, 1.5), 3)
    assert "output 'y' differs by" in said
    assert "over 24 inputs, bound 0.01; activations first differ at layer 'second'; nothing" in said
    assert not (tmp_path / "b.keras").exists()
    assert "output 'y' differs by" in report_of(tmp_path / "b.keras")["reason"]


def test_outputs_that_differ_a_little_are_a_warning(tmp_path: Path) -> None:
    result = convert_skewed(tmp_path, 1.005)
    assert done(result)
    assert "modelport: warning: output 'y' differs by" in result.stderr
    assert report_of(tmp_path / "b.keras")["warnings"]
    assert (tmp_path / "b.keras").exists()
