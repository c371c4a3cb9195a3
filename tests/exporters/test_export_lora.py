"""Causal language models with LoRA adapters, held against transformers' and PEFT's own results."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modelport.exporters.cli.export import export
from modelport.exporters.errors import ParityError
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.proof import parity
from modelport.exporters.requests.random_inputs import corners, draw, name_axes
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.types import Array
from tests.pickle_bomb import PickleBomb
from tests.thorough import thorough

VOCABULARY = 61
LONGEST = 24
BASES = ("llama", "gpt2")


def base(kind: str, **config: Any) -> Any:
    """A tiny language model, every weight of it different."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "bos_token_id": 0}
    only = {"llama": {"intermediate_size": 48, "num_key_value_heads": 2}}.get(kind, {})
    made = AutoConfig.for_model(kind, **{**sizes, **ends, "eos_token_id": 0, **only, **config})
    model = AutoModelForCausalLM.from_config(made).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def adapt(model: Any, folder: Path, **options: Any) -> nn.Module:
    """``model`` with adapters that do something, saved to ``folder``; not merged."""
    import peft

    gpt2 = model.config.model_type == "gpt2"
    options.setdefault("target_modules", ["c_attn", "c_fc"] if gpt2 else ["q_proj", "down_proj"])
    config = peft.LoraConfig(
        r=4, lora_alpha=8, init_lora_weights=False, fan_in_fan_out=gpt2, **options
    )
    adapted: Any = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return adapted


@pytest.fixture(scope="module", params=BASES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folders of a model and of its adapters, and the model with its adapters unmerged."""
    place = tmp_path_factory.mktemp(request.param)
    with quiet():
        model = base(request.param)
        model.save_pretrained(place / "base")
        return place / "base", place / "adapters", adapt(model, place / "adapters")


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Path]:
    """Folders to damage: a model, and adapters to it."""
    with quiet():
        model = base("llama")
        model.save_pretrained(tmp_path / "base")
        adapt(model, tmp_path / "adapters")
    return tmp_path / "base", tmp_path / "adapters"


def padded(batch: int, length: int, side: str) -> dict[str, Array]:
    """Random tokens, rows padded by different amounts on one side; one row at least is full."""
    rng = np.random.default_rng(length)
    mask = np.ones((batch, length), np.int64)
    for row in range(1, batch):
        padding = row % length
        mask[row, :padding] = 0 if side == "left" else 1
        mask[row, length - padding :] = 0 if side == "right" else 1
    return {"input_ids": rng.integers(VOCABULARY, size=mask.shape), "attention_mask": mask}


def own(model: Any, inputs: dict[str, Array]) -> Array:
    tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
    with torch.no_grad(), quiet():
        return np.asarray(model(**tensors).logits)


def distance(model: Any, source: Source, inputs: dict[str, Array]) -> float:
    """Between what a model of transformers gives and what we do, at tokens that are real."""
    real = inputs["attention_mask"] == 1
    return float(np.abs(own(model, inputs) - source.reference(inputs)["logits"])[real].max())


def refusal(folder: Path, lora: Path | None = None, **request: Any) -> ModelportError:
    with pytest.raises(ModelportError) as caught:
        load(SourceRequest(folder, lora=lora, **request))
    assert "\n" not in str(caught.value)
    return caught.value


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("trained", "kind"),
    [
        ("llama", "torchscript"),
        thorough("gpt2", "onnx"),
        thorough("llama", "onnx"),
        thorough("gpt2", "torchscript"),
    ],
    indirect=["trained"],
    scope="module",
)
def test_the_merged_adapters_are_what_is_exported(trained: Any, tmp_path: Path, kind: str) -> None:
    folder, adapters, unmerged = trained
    source = load(SourceRequest(folder, lora=adapters, max_batch_size=8))
    plain = load(SourceRequest(folder))
    row = find_format(kind)
    path = tmp_path / row.platform.default_filename
    row.export(source, path, ExportTarget(opset=row.routes[Framework.PYTORCH].default_opset))
    session = row.open_session(path)
    for batch in (1, 2, 8):
        for length in (1, 9, LONGEST):
            for side in ("left", "right"):
                inputs = padded(batch, length, side)
                real = inputs["attention_mask"] == 1
                exported = session(inputs)["logits"]
                assert exported.shape == (batch, length, VOCABULARY)
                assert np.abs(exported - own(unmerged, inputs))[real].max() < 1e-5
                assert np.abs(exported - plain.reference(inputs)["logits"])[real].max() > 0.01
    spec = source.spec
    report = parity.check(source, session, samples=60, seed=0, atol=spec.atol, rtol=spec.rtol)
    assert report.max_abs_error < 5e-6
    assert report.agreement == 1
    assert report.batch_sizes == {1, 2, 3, 8}  # three: edges beside each other


def test_the_model_computes_what_transformers_computes_with_another_attention(
    trained: Any,
) -> None:
    """The oracle runs with its default, ``sdpa``; padding on either side."""
    from transformers import AutoModelForCausalLM

    folder, _, _ = trained
    source = load(SourceRequest(folder))
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config._attn_implementation == "sdpa"
    for side in ("left", "right"):
        assert distance(model, source, padded(4, 13, side)) < 1e-5


def test_logits_are_zero_at_padding_and_so_for_a_mask_without_tokens(trained: Any) -> None:
    """The corners of the signature hold such masks; what runtimes compute there differs."""
    source = load(SourceRequest(trained[0]))
    signature = name_axes(source.signature)
    rng = np.random.default_rng(0)
    empty = 0
    for sizes, fills in corners(signature):
        inputs = draw(signature, 2, sizes, rng, fills)
        real = inputs["attention_mask"] == 1
        logits = source.reference(inputs)["logits"]
        assert not logits[~real].any()
        assert logits[real].all()
        empty += int(not real.any())
    assert empty


def test_samples_have_a_real_token_in_each_row_and_padding_on_both_sides(trained: Any) -> None:
    source = load(SourceRequest(trained[0]))
    assert source.spec.sample is not None
    drawn = source.spec.sample(source.signature, 200, {"sequence": 7}, np.random.default_rng(0))
    mask = drawn["attention_mask"]
    assert (mask.sum(axis=1) >= 1).all()
    steps = np.diff(mask, axis=1)
    assert ((steps == 1).sum(axis=1) + (steps == -1).sum(axis=1) <= 1).all(), "one run of tokens"
    assert (mask[:, 0] == 0).any()
    assert (mask[:, -1] == 0).any()
    assert mask.all(axis=1).any()


def test_the_signature_follows_the_configuration(trained: Any) -> None:
    folder, adapters, _ = trained
    source = load(SourceRequest(folder, "causal-lm", {"max_positions": 5}, 3, adapters))
    assert source.signature.axes["sequence"].maximum == 5
    assert source.signature.max_batch_size == 3
    assert source.signature.inputs[0].maximum == VOCABULARY - 1
    assert [origin.name for origin in source.origins] == ["base", "adapters"]
    assert load(SourceRequest(folder)).signature.axes["sequence"].maximum == LONGEST
    for wrong in (0, LONGEST + 1, "many"):
        told = str(refusal(folder, model_kwargs={"max_positions": wrong}))
        assert f"takes 1 to {LONGEST}" in told
    assert "has no depth, only max_positions" in str(refusal(folder, model_kwargs={"depth": 1}))


def test_pickled_weights_are_read_without_running_them(trained: Any, tmp_path: Path) -> None:
    folder, adapters, unmerged = trained
    pickled = {}
    for name, path in (("pytorch_model", folder), ("adapter_model", adapters)):
        pickled[name] = tmp_path / name
        shutil.copytree(path, pickled[name])
        weights = next(pickled[name].glob("*.safetensors"))
        torch.save(load_file(weights), pickled[name] / f"{name}.bin")
        weights.unlink()
    source = load(SourceRequest(pickled["pytorch_model"], lora=pickled["adapter_model"]))
    assert distance(unmerged, source, padded(2, 6, "right")) < 1e-5
    for name, path in pickled.items():
        torch.save({"x": PickleBomb(tmp_path / "ran")}, path / f"{name}.bin")
    for request in ((pickled["pytorch_model"], None), (folder, pickled["adapter_model"])):
        assert "wants to run" in str(refusal(*request))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("entries", "error", "message"),
    [
        ({"model_type": "nonesuch"}, Unsupported, "type 'nonesuch', which transformers does not"),
        ({"model_type": ["llama"]}, Unsupported, "which transformers does not support"),
        ({"model_type": "t5"}, UsageError, "holds a LlamaForCausalLM; add --task"),
        ({"quantization_config": {"quant_method": "gptq"}}, Unsupported, "is quantized already"),
        ({"num_hidden_layers": 3}, UsageError, "9 missing keys: model.layers.2"),
        ({"num_hidden_layers": 1}, UsageError, "9 unexpected keys: model.layers.1"),
        ({"intermediate_size": 40}, UsageError, "6 wrongly shaped keys: model.layers.0.mlp.down"),
        ({"hidden_size": "wide"}, Unsupported, "cannot be loaded: .*hidden_size"),
        ({"hidden_act": "nonesuch"}, Unsupported, "cannot be loaded: there is no 'nonesuch'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(
    llama: tuple[Path, Path], entries: dict[str, Any], error: type[ModelportError], message: str
) -> None:
    edit(llama[0] / "config.json", **entries)
    assert type(refused := refusal(llama[0])) is error
    assert re.search(message, str(refused)), refused


def test_code_in_a_folder_is_never_run(llama: tuple[Path, Path]) -> None:
    """If transformers knows the model, its own code is used; otherwise none."""
    folder, _ = llama
    expected = load(SourceRequest(folder)).reference(padded(2, 5, "right"))["logits"]
    (folder / "custom.py").write_text("raise SystemExit('the code in the folder was run')")
    edit(folder / "config.json", auto_map={"AutoModelForCausalLM": "custom.Model"})
    found = load(SourceRequest(folder)).reference(padded(2, 5, "right"))["logits"]
    assert np.array_equal(found, expected)
    edit(folder / "config.json", model_type="custom", auto_map={"AutoConfig": "custom.Config"})
    assert "the code that comes with it is not run" in str(refusal(folder))


@pytest.mark.parametrize(
    "entries",
    [
        {"_attn_implementation": "someone/kernels", "attn_implementation": "flash_attention_2"},
        {"_attn_implementation_internal": "sdpa", "_experts_implementation": "someone/kernels"},
        {"return_dict": False, "output_attentions": True, "output_hidden_states": True},
        {"dtype": "bfloat16", "use_cache": True},
    ],
)
def test_how_to_compute_is_not_the_configurations_to_say(
    llama: tuple[Path, Path], entries: dict[str, Any]
) -> None:
    """transformers would fetch and run kernels that an attention implementation names."""
    inputs = padded(3, 7, "left")
    expected = load(SourceRequest(llama[0])).reference(inputs)["logits"]
    edit(llama[0] / "config.json", **entries)
    source = load(SourceRequest(llama[0]))
    assert source.model.model.config._attn_implementation == "eager"
    assert np.array_equal(source.reference(inputs)["logits"], expected)


def first_lora(state: dict[str, Tensor]) -> str:
    return next(key for key in state if "lora_A" in key)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s.pop(first_lora(s)), UsageError, "1 missing keys: base_model.model"),
        (lambda s: s.update(extra=torch.ones(1)), UsageError, "1 unexpected keys"),
        (lambda s: s.update({first_lora(s): torch.ones(4, 7)}), UsageError, "size mismatch"),
        (lambda s: s[first_lora(s)].fill_(torch.nan), IntegrityError, "contains NaN"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    llama: tuple[Path, Path],
    change: Callable[[dict[str, Tensor]], object],
    error: type[ModelportError],
    message: str,
) -> None:
    edit_weights(llama[1] / "adapter_model.safetensors", change)
    assert type(refused := refusal(*llama)) is error
    assert re.search(message, str(refused)), refused


@pytest.mark.parametrize(
    ("entries", "code", "message"),
    [
        ({"target_modules": ["c_attn"]}, 2, "c_attn.* not found in the base model"),
        ({"target_modules": ["q_proj"]}, 2, "unexpected keys"),
        ({"target_modules": ["q_proj", "down_proj", "k_proj"]}, 2, "4 missing keys"),
        ({"r": 3}, 2, "size mismatch"),
        ({"peft_type": "PREFIX_TUNING"}, 4, "PREFIX_TUNING adapters; only LORA is merged"),
    ],
)
def test_an_adapter_configuration_that_does_not_fit_is_refused(
    llama: tuple[Path, Path], entries: dict[str, Any], code: int, message: str
) -> None:
    edit(llama[1] / "adapter_config.json", **entries)
    assert exit_code(refused := refusal(*llama)) == code
    assert re.search(message, str(refused)), refused


def test_adapters_of_another_model_are_refused(llama: tuple[Path, Path], tmp_path: Path) -> None:
    with quiet():
        base("llama", hidden_size=16).save_pretrained(tmp_path / "narrow")
        base("gpt2").save_pretrained(tmp_path / "gpt2")
    for name in ("narrow", "gpt2"):
        assert exit_code(refusal(tmp_path / name, llama[1])) == 2
    shutil.copy(llama[0] / "config.json", llama[1])
    assert "holds adapters; give the model they belong to" in str(refusal(llama[1]))


def test_adapters_of_a_shared_weight_cannot_be_merged_and_that_is_seen(tmp_path: Path) -> None:
    """GPT-2's output layer is its embedding: merging would adapt both, training adapted one."""
    with quiet():
        model = base("gpt2")
        model.save_pretrained(tmp_path / "base")
        adapt(model, tmp_path / "adapters", target_modules=["wte"])
    with pytest.raises(ParityError, match="shared with another layer"):
        load(SourceRequest(tmp_path / "base", lora=tmp_path / "adapters"))


def test_damaged_folders_are_refused(llama: tuple[Path, Path]) -> None:
    folder, adapters = llama
    edit_weights(folder / "model.safetensors", lambda s: s["lm_head.weight"][3].fill_(torch.nan))
    assert "'lm_head.weight' contains NaN" in str(refusal(folder, adapters))
    weights = adapters / "adapter_model.safetensors", folder / "model.safetensors"
    for path in reversed(weights):
        path.write_bytes(path.read_bytes()[:-100])
        assert exit_code(refusal(folder, adapters)) == 5
    for path in weights:
        path.unlink()
        assert f"'{path.parent}' holds no weights" in str(refusal(folder, adapters))
        path.touch()
    assert "holds no adapter_config.json" in str(refusal(folder, folder))


@pytest.mark.parametrize("missing", ["transformers", "peft"])
def test_a_missing_library_is_named_with_its_extra(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    refused = refusal(*llama)
    assert exit_code(refused) == 4
    assert f"'{missing}' is not installed" in str(refused)
    assert "pip install '.[huggingface]'" in str(refused)


def test_a_state_dict_is_not_a_language_model(fraud_checkpoint: Path) -> None:
    assert "give the folder that holds its config.json" in str(
        refusal(fraud_checkpoint, model="causal-lm")
    )


@pytest.mark.thorough
def test_the_command_exports_a_model_with_adapters(trained: Any, tmp_path: Path) -> None:
    folder, adapters, _ = trained
    fixed = [str(folder), "--lora", str(adapters), "--repository", str(tmp_path / "repository")]
    small = ["--model-kwargs", '{"max_positions": 6}', "--max-batch-size", "2", "--samples", "20"]
    done = CliRunner().invoke(export, [*fixed, *small, "--format", "torchscript"])
    assert done.exit_code == 0, done.output
    published = tmp_path / "repository" / folder.name / "1"
    certificate = json.loads((published / "certificate.json").read_text())
    assert certificate["model"]["model_kwargs"] == {"max_positions": 6}
    assert [adapter["file"] for adapter in certificate["adapters"]] == ["adapters"]
