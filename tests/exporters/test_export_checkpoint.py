"""Checkpoints are read strictly and never run."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
import re
import resource
import struct
import time
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from modelport.exporters import model_spec
from modelport.exporters.sources import SourceRequest, checkpoint, pytorch
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, Unsupported, UsageError
from tests import processor
from tests.exporters.conftest import FRAUD_KWARGS
from tests.pickle_bomb import PickleBomb


def saved(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict"])
def test_a_training_checkpoint_gives_its_weights_and_hyperparameters(
    fraud: nn.Module, tmp_path: Path, key: str
) -> None:
    content = {key: fraud.state_dict(), "model_kwargs": {"nhead": 2}, "epoch": 3}
    read = checkpoint.read(saved(content, tmp_path / "a.pt"))
    assert read.model_kwargs == {"nhead": 2}
    assert torch.equal(read.state["head.weight"], fraud.state_dict()["head.weight"])


#: Keys around the state dict, as training scripts and their frameworks write them.
NESTINGS = [
    *([key] for key in checkpoint.STATE_DICT_KEYS),
    *(["model", key] for key in checkpoint.STATE_DICT_KEYS),
    *([key, "state_dict"] for key in checkpoint.STATE_DICT_KEYS),
    ["checkpoint", "model", "state_dict"],
    ["anything"],
    ["some", "thing"],
]


@pytest.mark.parametrize("keys", NESTINGS, ids="/".join)
def test_a_state_dict_is_found_under_the_keys_of_training_scripts(
    keys: list[str], tmp_path: Path
) -> None:
    weights = {"layer.weight": torch.arange(4.0), "layer.bias": torch.zeros(1)}
    content: dict[str, Any] = weights
    for key in reversed(keys):
        content = {key: content, "epoch": 3, "optimizer": {"state": {0: {"step": torch.ones(1)}}}}
    content["model_kwargs"] = {"nhead": 2}
    read = checkpoint.read(saved(content, tmp_path / "a.pt"))
    assert read.state.keys() == weights.keys()
    assert read.model_kwargs == {"nhead": 2}


def test_of_several_state_dicts_none_is_guessed(tmp_path: Path) -> None:
    one = {"weight": torch.zeros(1)}
    path = saved({"generator": one, "discriminator": one}, tmp_path / "a.pt")
    with pytest.raises(IntegrityError, match="several state dicts: generator, discriminator; save"):
        checkpoint.read(path)
    deep: dict[str, Any] = one
    for _ in range(9):
        deep = {"model": deep}
    with pytest.raises(IntegrityError, match="holds no state dict"):
        checkpoint.read(saved(deep, tmp_path / "deep.pt"))


def test_safetensors_give_weights_and_the_hyperparameters_in_their_metadata(
    fraud: nn.Module, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(fraud.state_dict(), path, {"model_kwargs": '{"nhead": 2}'})
    read = checkpoint.read(path)
    assert read.model_kwargs == {"nhead": 2}
    checkpoint.load_into(fraud, read)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_prefixes_that_wrappers_leave_on_every_key_are_stripped(
    fraud: nn.Module, tmp_path: Path, prefix: str
) -> None:
    state = {prefix + key: value for key, value in fraud.state_dict().items()}
    checkpoint.load_into(fraud, checkpoint.read(saved(state, tmp_path / "a.pt")))


class Versioned(nn.Linear):
    """It reads layouts of versions 1 and 2, as ``torchvision.models.MNASNet`` does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version") not in (1, 2):
            raise ValueError("version should be 1 or 2")
        self.loaded = metadata["version"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("wrap", [nn.Identity, nn.DataParallel])
@pytest.mark.parametrize("extension", [".pth", ".safetensors"])
def test_a_module_learns_the_version_of_the_weights_layout(
    wrap: Callable[[nn.Module], nn.Module], extension: str, tmp_path: Path
) -> None:
    """A file that has none, as safetensors, has the layout of today."""
    trained, path = nn.Sequential(Versioned(2, 3)), tmp_path / f"a{extension}"
    state: Any = (trained if wrap is nn.Identity else wrap(trained)).state_dict()
    for entry in state._metadata.values():
        entry["version"] = 1
    if extension == ".pth":
        torch.save(state, path)
    else:
        safetensors.torch.save_file(state, path)
    module = nn.Sequential(Versioned(2, 3))
    checkpoint.load_into(module, checkpoint.read(path))
    assert module[0].loaded == (1 if extension == ".pth" else 2)
    assert torch.equal(module.state_dict()["0.weight"], trained.state_dict()["0.weight"])


def test_a_hook_that_refuses_the_weights_is_quoted(tmp_path: Path) -> None:
    state: Any = nn.Sequential(Versioned(2, 3)).state_dict()
    state._metadata["0"]["version"] = 7
    with pytest.raises(UsageError, match=r"does not fit the model \(version should be 1 or 2\)"):
        checkpoint.load_into(
            nn.Sequential(Versioned(2, 3)), checkpoint.read(saved(state, tmp_path / "a.pt"))
        )


def test_a_module_without_weights_has_a_state_dict(tmp_path: Path) -> None:
    read = checkpoint.read(saved(nn.Softmax(-1).state_dict(), tmp_path / "a.pt"))
    checkpoint.load_into(nn.Softmax(-1), read)
    with pytest.raises(UsageError, match="missing keys: weight, bias"):
        checkpoint.load_into(nn.Linear(2, 2), read)


def test_a_prefix_on_some_keys_only_is_part_of_their_names(tmp_path: Path) -> None:
    state = {"module.weight": torch.zeros(1), "weight": torch.zeros(1)}
    assert set(checkpoint.read(saved(state, tmp_path / "a.pt")).state) == set(state)


def test_hyperparameters_that_no_certificate_can_hold_are_refused(tmp_path: Path) -> None:
    content = {"state_dict": {"weight": torch.zeros(1)}, "model_kwargs": {"dtype": torch.float16}}
    with pytest.raises(UsageError, match="'model_kwargs' holds more than plain values"):
        checkpoint.read(saved(content, tmp_path / "a.pt"))


def test_a_pickle_that_another_tool_wrote_is_refused_without_a_warning(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(pickle.dumps({"weight": 1}, protocol=4))
    with pytest.raises(IntegrityError, match="not the pickle of a checkpoint"):
        checkpoint.read(tmp_path / "a.pt")


def test_missing_and_unexpected_keys_are_named_and_counted(
    fraud: nn.Module, tmp_path: Path
) -> None:
    state = fraud.state_dict()
    for number in range(5):
        state[f"extra.{number}"] = torch.zeros(1)
    del state["head.weight"]
    with pytest.raises(UsageError) as caught:
        checkpoint.load_into(fraud, checkpoint.read(saved(state, tmp_path / "a.pt")))
    assert "1 missing keys: head.weight" in str(caught.value)
    assert "5 unexpected keys: extra.0, extra.1, extra.2 and 2 more" in str(caught.value)


def test_a_wrong_shape_is_named_with_both_shapes(fraud: nn.Module, tmp_path: Path) -> None:
    state = {**fraud.state_dict(), "head.weight": torch.zeros(1, 7)}
    with pytest.raises(UsageError, match=r"weight is \[1, 7\], but the model expects \[1, 16\]"):
        checkpoint.load_into(fraud, checkpoint.read(saved(state, tmp_path / "a.pt")))


def test_a_weight_of_integers_is_not_taken_for_numbers(fraud: nn.Module, tmp_path: Path) -> None:
    state = fraud.state_dict() | {"head.weight": fraud.state_dict()["head.weight"].char()}
    with pytest.raises(Unsupported, match=r"'head.weight' is int8, as in a quantised model"):
        checkpoint.load_into(fraud, checkpoint.read(saved(state, tmp_path / "a.pt")))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_a_weight_of_eight_bits_is_not_taken_for_numbers(
    fraud: nn.Module, tmp_path: Path, dtype: torch.dtype
) -> None:
    state = fraud.state_dict() | {"head.weight": fraud.state_dict()["head.weight"].to(dtype)}
    with pytest.raises(Unsupported, match=r"'head.weight' is float8_\w+, as in a quantised model"):
        checkpoint.load_into(fraud, checkpoint.read(saved(state, tmp_path / "a.pt")))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(1).expand(1 << 20, 1 << 20), "claims 1099511627776 values, and the file holds"),
        (torch.ones(1, 16, device="meta"), "has a shape and no values"),
    ],
    ids=["repeated", "meta"],
)
def test_a_tensor_without_its_values_is_refused(
    tmp_path: Path, value: torch.Tensor, reason: str
) -> None:
    with pytest.raises(IntegrityError, match=f"'head.weight' {reason}"):
        checkpoint.read(saved({"head.weight": value}, tmp_path / "a.pt"))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_weight_of_a_dense_model_is_named(
    fraud: nn.Module, tmp_path: Path, layout: torch.layout
) -> None:
    weight = fraud.state_dict()["head.weight"].to_sparse(layout=layout)
    path = saved(fraud.state_dict() | {"head.weight": weight}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=f"head.weight is {layout}, the model's is dense"):
        checkpoint.load_into(fraud, checkpoint.read(path))


def test_a_lazy_module_that_never_ran_is_named(tmp_path: Path) -> None:
    path = saved({"weight": torch.ones(2, 3), "bias": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="weights without a shape: weight, bias; run its lazy"):
        checkpoint.load_into(nn.LazyLinear(2), checkpoint.read(path))


def test_sizes_that_contradict_the_weights_build_nothing(fraud: nn.Module, tmp_path: Path) -> None:
    kwargs = {**FRAUD_KWARGS, "num_layers": 10**12}
    path = saved({"state_dict": fraud.state_dict(), "model_kwargs": kwargs}, tmp_path / "a.pt")
    with pytest.raises(
        UsageError, match=r"'a\.pt': num_layers is 1000000000000 in model_kwargs, and 2 in"
    ):
        pytorch.load(SourceRequest(path, "fraud"))
    state = {
        k.replace(".layers.1.", ".layers.999999999999."): v for k, v in fraud.state_dict().items()
    }
    path = saved(state, tmp_path / "b.pt")
    with pytest.raises(UsageError, match=r"no usable 'encoder\.layers\.999999999999\.'"):
        pytorch.load(SourceRequest(path, "fraud", {"nhead": 2}))


def test_a_weight_that_is_nan_is_named(fraud: nn.Module, tmp_path: Path) -> None:
    state = {**fraud.state_dict(), "head.bias": torch.tensor([float("nan")])}
    with pytest.raises(IntegrityError, match=r"'head.bias' contains NaN"):
        checkpoint.load_into(fraud, checkpoint.read(saved(state, tmp_path / "a.pt")))


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_pickle_that_wants_to_run_code_is_refused_and_not_run(
    tmp_path: Path, legacy: bool
) -> None:
    target, path = tmp_path / "ran", tmp_path / "bomb.pt"
    content = {"state_dict": PickleBomb(target)}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(IntegrityError, match=r"wants to run '\w+\.mkdir'.*refused") as caught:
        checkpoint.read(path)
    assert exit_code(caught.value) == 5
    assert not target.exists()
    torch.load(path, weights_only=False)
    assert target.exists(), "the bomb is a dud: this test could not fail"


@pytest.mark.parametrize("key", [None, "model"])
def test_a_pickled_module_gives_its_weights_and_runs_nothing(
    fraud: nn.Module, tmp_path: Path, key: str | None
) -> None:
    fraud.register_buffer("passing", torch.ones(2), persistent=False)
    expected = fraud.state_dict()
    path = saved({key: fraud} if key else fraud, tmp_path / "a.pt")
    found = checkpoint.read(path).state
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[each], value) for each, value in expected.items())


class TrainingSettings:
    """Settings of a training script, saved beside the weights; the class is not loaded."""

    def __init__(self) -> None:
        self.rate, self.folder, self.started = 0.1, Path("runs"), datetime.now(UTC)

    def __setstate__(self, state: object) -> None:
        raise AssertionError("a class of the file was loaded")


@pytest.mark.parametrize("suffix", [".ckpt", ".pth.tar"])
def test_objects_beside_the_weights_are_not_loaded(tmp_path: Path, suffix: str) -> None:
    """Checkpoints of PyTorch Lightning have them."""
    score = {
        "hyper_parameters": TrainingSettings(),
        "best": np.float64(0.5),
        "kind": TrainingSettings,
    }
    content = {"state_dict": {"a": torch.ones(2)}, **score}
    assert checkpoint.read(saved(content, tmp_path / f"a{suffix}")).shapes == {"a": (2,)}


def test_a_module_that_shares_its_parts_without_end_is_refused(tmp_path: Path) -> None:
    module: nn.Module = nn.Identity()
    for _ in range(40):
        module = nn.Sequential(module, module)
    with pytest.raises(IntegrityError, match="more submodules than any model"):
        checkpoint.read(saved(module, tmp_path / "a.pt"))


@pytest.mark.parametrize("name", ["a", "a" * 100_000])
def test_a_module_below_itself_is_refused_before_its_names_fill_the_memory(
    tmp_path: Path, name: str
) -> None:
    module = nn.Linear(2, 2)
    module._modules[name] = module
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(IntegrityError, match="more submodules than any model"):
        checkpoint.read(saved(module, tmp_path / "a.pt"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 512 * 1024, "KiB"


@pytest.mark.parametrize(
    ("record", "said"),
    [("constants.pkl", "TorchScript program; serve it"), (".data/extern_modules", "torch.package")],
)
def test_a_program_is_not_called_a_damaged_checkpoint(
    tmp_path: Path, record: str, said: str
) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr(f"a/{record}", b"")
    with pytest.raises((IntegrityError, UsageError), match=said):
        checkpoint.read(tmp_path / "a.pt")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_checkpoint_cut_anywhere_is_an_integrity_error(
    fraud: nn.Module, tmp_path: Path, suffix: str
) -> None:
    whole = tmp_path / f"whole{suffix}"
    if suffix == ".pt":
        saved(fraud.state_dict(), whole)
    else:
        safetensors.torch.save_file(fraud.state_dict(), whole)
    content = whole.read_bytes()
    cut = tmp_path / f"cut{suffix}"
    for length in [0, 1, 8, *random.Random(0).sample(range(len(content)), 25), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(IntegrityError, match="truncated or damaged"):
            checkpoint.read(cut)


def test_damage_inside_the_pickle_is_never_a_traceback(fraud: nn.Module, tmp_path: Path) -> None:
    whole = saved(fraud.state_dict(), tmp_path / "whole.pt")
    with zipfile.ZipFile(whole) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    chance = random.Random(1)
    for _ in range(60):
        damaged = bytearray(members[pickled])
        damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, data in members.items():
                archive.writestr(name, bytes(damaged) if name == pickled else data)
        path = tmp_path / "damaged.pt"
        path.write_bytes(buffer.getvalue())
        # Some damage only renames a key, some of it does no harm.
        with contextlib.suppress(IntegrityError, UsageError):
            checkpoint.load_into(fraud, checkpoint.read(path))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "holds a list, not a state dict"),
        ({}, "holds no state dict"),
        ({"epoch": 3}, "not tensors: epoch"),
        ({"state_dict": 3}, "holds no state dict under 'state_dict'"),
        ({"state_dict": {"a": torch.zeros(1)}, "model_kwargs": [1]}, "'model_kwargs' is not a"),
    ],
)
def test_a_file_without_a_state_dict_says_what_it_holds(
    tmp_path: Path, content: Any, said: str
) -> None:
    with pytest.raises(IntegrityError) as caught:
        checkpoint.read(saved(content, tmp_path / "a.pt"))
    assert said in str(caught.value)


def test_a_missing_file_and_an_unknown_extension_are_usage_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        checkpoint.read(tmp_path / "absent.pt")
    (tmp_path / "a.h5").write_bytes(b"x")
    with pytest.raises(
        UsageError, match=r"extension '.h5'; .* named .bin, .ckpt, .pt, .pth, .safetensors"
    ):
        checkpoint.read(tmp_path / "a.h5")


def test_hyperparameters_are_inferred_from_shapes(fraud: nn.Module, vit: nn.Module) -> None:
    shapes = {key: tuple(value.shape) for key, value in fraud.state_dict().items()}
    built, _, kwargs = model_spec.build("fraud", shapes, {"nhead": 2})
    assert (kwargs["vocab_size"], kwargs["num_layers"], kwargs["max_positions"]) == (32, 2, 12)
    built.load_state_dict(fraud.state_dict())
    shapes = {key: tuple(value.shape) for key, value in vit.state_dict().items()}
    built, _, kwargs = model_spec.build("vit", shapes, {"num_heads": 2})
    assert (kwargs["image_size"], kwargs["patch_size"], kwargs["depth"]) == (8, 4, 2)
    built.load_state_dict(vit.state_dict())


def test_the_published_vit_sizes_need_no_head_count() -> None:
    from modelport.exporters.models.vit import VisionTransformer

    tiny = VisionTransformer(8, 4, 3, 2, dim=192, depth=1, num_heads=3, mlp_dim=8)
    shapes = {key: tuple(value.shape) for key, value in tiny.state_dict().items()}
    assert model_spec.build("vit", shapes, {})[2]["num_heads"] == 3


@pytest.mark.parametrize(("model", "remedy"), [("fraud", '"nhead": N'), ("vit", '"num_heads": N')])
def test_a_head_count_that_cannot_be_inferred_is_asked_for(
    request: pytest.FixtureRequest, model: str, remedy: str
) -> None:
    module: nn.Module = request.getfixturevalue(model)
    shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        model_spec.build(model, shapes, {})
    assert remedy in str(caught.value)


def test_a_text_file_is_not_called_a_damaged_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "notes.pt"
    path.write_text("epoch 1: loss 0.3\n")
    with pytest.raises(IntegrityError, match="is not a PyTorch checkpoint; give a file"):
        checkpoint.read(path)


def test_an_unknown_model_is_named_before_the_checkpoint_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.pt"
    path.write_text("")
    read: list[Path] = []
    monkeypatch.setattr(checkpoint, "read", read.append)
    with pytest.raises(UsageError, match=r"'frod' is not registered.* did you mean 'fraud'"):
        pytorch.load(SourceRequest(path, "frod", {}, 8))
    assert not read


def _with_header(path: Path, header: str) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    return path


_TENSOR = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ('{"a":[' + "{}," * 3_000_000 + "{}]}", "no description of a tensor at 5"),
        ('{"__metadata__":{"a":' + "[" * 9_000_000 + "}}", "no string at 21"),
        (
            "{" + ",".join(f'"{i:x}":{_TENSOR}' for i in range(140_000)) + "}",
            "more than 131072 members",
        ),
        (f'{{"a":{_TENSOR},"a":{_TENSOR}}}', "a name occurs twice"),
        ('{"__metadata__":{"a":"","a":""}}', "a name occurs twice"),
        ('{"a":{"dtype":"U8","dtype":"I8","shape":[0],"data_offsets":[0,0]}}', "occurs twice"),
        (f'{{"a":{_TENSOR}}}{{}}', "text follows its header"),
        (f'{{"a":{_TENSOR},}}', "no string at"),
        (f'{{"a":{_TENSOR}', "no ',}' at"),
    ],
    ids=lambda value: value[:30],
)
def test_a_header_that_no_tool_writes_is_refused_at_its_first_wrong_byte(
    tmp_path: Path, header: str, reason: str
) -> None:
    path = _with_header(tmp_path / "a.safetensors", header)
    began = time.process_time()
    with pytest.raises(IntegrityError, match=re.escape(reason)):
        checkpoint.read(path)
    assert processor.seconds_since(began) < 2.0  # as many tensors as that take PyTorch 5 s


def test_a_file_without_a_tensor_is_refused(tmp_path: Path) -> None:
    for header in ("{}", '{ "__metadata__" : { "format" : "pt" } }   '):
        path = _with_header(tmp_path / "a.safetensors", header)
        with pytest.raises(IntegrityError, match="holds no tensors"):
            checkpoint.read(path)


def test_names_and_metadata_may_hold_any_character(tmp_path: Path) -> None:
    state = {'a"{}\\:,\n': torch.ones(2), "é☃": torch.zeros(1, 3)}
    path = tmp_path / "a.safetensors"
    safetensors.torch.save_file(state, path, {"}{": '"{,:\\'})
    assert checkpoint.read(path).state.keys() == state.keys()
