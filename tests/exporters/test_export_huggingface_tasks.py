"""Folders of every family of ``transformers``, held against ``transformers``' own classes."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from modelport.exporters.cli.export import export
from modelport.exporters.cli.verify import verify
from modelport.exporters.formats.base import ExportTarget
from modelport.exporters.formats.registry import find_format
from modelport.exporters.loaded_model import Framework, Source
from modelport.exporters.proof import parity
from modelport.exporters.requests.random_inputs import draw, name_axes, sizes_of
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import SourceRequest
from modelport.exporters.sources.reader_selection import load
from modelport.gateway.cli.errors import exit_code
from modelport.gateway.errors import IntegrityError, ModelportError, Unsupported, UsageError
from modelport.gateway.types import Array
from tests.exporters.huggingface_folders import FAMILIES, refusal, write
from tests.thorough import sampled

#: Families that every run of the suite proves, and more of them that the thorough suite does;
#: `MODELPORT_SLOW_TESTS=1` proves all.
QUICK, MORE = ("bert-answers",), ("clip",)
SLOW = os.environ.get("MODELPORT_SLOW_TESTS")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family, written once."""
    place, written = tmp_path_factory.mktemp("folders"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write(name, place)
        return written[name]

    return folder


@pytest.fixture
def bert(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A text classifier's folder to damage."""
    return Path(shutil.copytree(folders("bert"), tmp_path / "bert"))


def inputs_of(source: Source) -> dict[str, Array]:
    """Two rows at middle sizes, without padding."""
    signature = name_axes(source.signature)
    sizes = {name: sizes_of(axis)[1] for name, axis in signature.axes.items()}
    drawn = draw(signature, 2, sizes, np.random.default_rng(0), masks=source.spec.masks)
    masked = {mask.input for mask in source.spec.masks} | {"attention_mask"}
    return {name: np.ones_like(x) if name in masked else x for name, x in drawn.items()}


def own(folder: Path, architecture: str, inputs: dict[str, Array]) -> dict[str, Any]:
    """The answers of transformers' class with its default attention."""
    import transformers

    with quiet(), torch.no_grad():
        model = getattr(transformers, architecture).from_pretrained(folder).eval()
        result = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    return dict(result)


#: One family of each task, by the head that its class has.
OF_A_TASK = {family.architecture.partition("For")[2]: name for name, family in FAMILIES.items()}


@pytest.mark.parametrize("name", sampled(FAMILIES, *OF_A_TASK.values()))
def test_a_folder_is_enough(folders: Callable[[str], Path], name: str) -> None:
    family = FAMILIES[name]
    source = load(SourceRequest(folders(name), task=family.task, max_batch_size=3))
    signature = source.signature
    assert tuple(spec.name for spec in signature.inputs) == family.inputs
    assert {spec.name: spec.dims for spec in signature.outputs} == family.outputs
    assert source.labels == family.labels
    inputs = inputs_of(source)
    answers = source.reference(inputs)
    assert all(np.isfinite(answer).all() for answer in answers.values())
    if family.task in (None, "image-classification"):
        encoder = family.architecture.startswith("Whisper")
        expected = {} if encoder else own(folders(name), family.architecture, inputs)
        for output, answer in answers.items():
            if output in expected:
                assert np.abs(answer - expected[output].numpy()).max() < 2e-5
        assert encoder or set(answers) <= set(expected)


def test_a_text_is_classified_by_its_own_last_end_of_text_token(
    folders: Callable[[str], Path],
) -> None:
    """transformers takes a batch only if all of its texts have equally many."""
    folder = folders("bart-classifier")
    source = load(SourceRequest(folder))
    ids = np.random.default_rng(0).integers(3, 61, (3, 9))
    ids[0, [4]] = ids[1, [2, 6]] = ids[2, [8]] = 2
    inputs = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    answer = source.reference(inputs)["logits"]
    for row in range(3):
        alone = {name: array[row : row + 1] for name, array in inputs.items()}
        expected = own(folder, "BartForSequenceClassification", alone)["logits"].numpy()
        assert np.abs(answer[row] - expected[0]).max() < 2e-5


@pytest.mark.parametrize("name", sampled(FAMILIES if SLOW else (*QUICK, *MORE), *QUICK))
def test_the_artifact_of_a_family_is_proven(
    folders: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    source = load(SourceRequest(folders(name), task=FAMILIES[name].task, max_batch_size=3))
    row = find_format("onnx")
    path = tmp_path / row.platform.default_filename
    row.export(source, path, ExportTarget(opset=row.routes[Framework.PYTORCH].default_opset))
    session = row.open_session(path)
    spec = source.spec
    parity.check(source, session, samples=30, seed=0, atol=spec.atol, rtol=spec.rtol)


def test_ranges_are_those_of_the_configuration(folders: Callable[[str], Path]) -> None:
    bert = load(SourceRequest(folders("bert"))).signature
    assert [spec.maximum for spec in bert.inputs] == [60, 1, 1]
    assert bert.axes["sequence"].maximum == 24
    roberta = load(SourceRequest(folders("roberta"))).signature
    assert roberta.axes["sequence"].maximum == 22, "its positions begin after the padding's"
    waves = load(SourceRequest(folders("wav2vec2"))).signature
    assert waves.axes["sequence"].minimum == 30, "the first frame's samples"
    squeezed = load(SourceRequest(folders("sew"))).signature
    assert squeezed.axes["sequence"].minimum == 50, "the samples of two frames"
    short = {"max_positions": 4}
    outputs = load(SourceRequest(folders("t5"), model_kwargs=short)).signature.outputs
    assert [output.dims[0] for output in outputs] == ["decoder_sequence", "encoder_sequence"]
    shorter = load(SourceRequest(folders("bert"), model_kwargs={"max_positions": 7})).signature
    assert shorter.axes["sequence"].maximum == 7


def test_masks_are_padded_on_the_tokenizers_side(bert: Path) -> None:
    assert [mask.padding for mask in load(SourceRequest(bert)).spec.masks] == ["right"]
    (bert / "tokenizer_config.json").write_text(json.dumps({"padding_side": "left"}))
    assert [mask.padding for mask in load(SourceRequest(bert)).spec.masks] == ["left"]


def edit(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path, metadata={"format": "pt"})


def test_tasks_that_do_not_fit_name_those_that_do(bert: Path) -> None:
    assert "is not a task; use text-classification, " in str(refusal(bert, task="text-class"))
    refused = str(refusal(bert, task="object-detection"))
    assert "use --task text-classification or feature-extraction" in refused
    missing = str(refusal(bert, task="fill-mask"))
    assert "missing keys: cls.predictions.bias" in missing
    assert "use --task text-classification or feature-extraction" in missing
    edit(bert, architectures=None)
    assert "names no architecture; add --task text-classification or " in str(refusal(bert))
    assert load(SourceRequest(bert, task="text-classification")).labels == ("a", "b", "c")
    edit(bert, architectures=["BertForPreTraining"])
    assert "add --task feature-extraction" in str(refusal(bert))


def test_a_task_is_for_folders_only(fraud_checkpoint: Path, bert: Path) -> None:
    assert "--task needs a Hugging Face folder" in str(
        refusal(fraud_checkpoint, model="fraud", task="fill-mask")
    )
    assert "are mutually exclusive" in str(refusal(bert, model="causal-lm", task="fill-mask"))
    without = refusal(bert, max_batch_size=0)
    assert (exit_code(without), "--max-batch-size 0 is for" in str(without)) == (2, True)
    own = refusal(fraud_checkpoint, model="fraud", max_batch_size=0)
    assert (exit_code(own), "--max-batch-size 0 is for" in str(own)) == (2, True)
    assert "--lora is for --task text-generation" in str(refusal(bert, lora=bert))
    assert "has no depth, only image_size and max_positions" in str(
        refusal(bert, model_kwargs={"depth": 1})
    )
    for wrong in (0, 25, "many"):
        assert "takes 1 to 24" in str(refusal(bert, model_kwargs={"max_positions": wrong}))


def test_heads_of_other_tasks_are_left_out_and_an_output_without_its_weights_too(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Missing weights are NaN while the outputs are found, so none of them can be published."""
    folder = folders("bert-mask")
    source = load(SourceRequest(folder, task="feature-extraction"))
    assert [spec.name for spec in source.signature.outputs] == ["last_hidden_state"]
    assert all(not p.isnan().any() for p in source.model.parameters())
    other = Path(shutil.copytree(folder, tmp_path / "pretrained"))
    edit_weights(other, lambda s: s.update({"cls.seq_relationship.weight": torch.ones(2, 32)}))
    inputs = inputs_of(source)
    answers = [load(SourceRequest(f)).reference(inputs)["logits"] for f in (folder, other)]
    assert np.array_equal(*answers)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s.pop("classifier.weight"), UsageError, "1 missing keys: classifier.weight"),
        (
            lambda s: s.pop("bert.encoder.layer.1.output.dense.weight"),
            UsageError,
            "missing keys: bert.encoder.layer.1.output.dense.weight",
        ),
        (
            lambda s: s.update({"bert.encoder.layer.2.output.dense.bias": torch.ones(32)}),
            UsageError,
            "1 unexpected keys: bert.encoder.layer.2",
        ),
        (
            lambda s: s.update({"classifier.scale": torch.ones(3)}),
            UsageError,
            "1 unexpected keys: classifier.scale",
        ),
        (
            lambda s: s.update({"classifier.bias": torch.ones(4)}),
            UsageError,
            "1 wrongly shaped keys: classifier.bias",
        ),
        (lambda s: s["classifier.bias"].fill_(torch.nan), IntegrityError, "contains NaN"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    bert: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    error: type[ModelportError],
    message: str,
) -> None:
    edit_weights(bert, change)
    refused = refusal(bert)
    assert type(refused) is error
    assert message in str(refused)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers of config.json is 1000000000"),
        ({"hidden_size": 10**6}, "a larger model than its weights hold"),
        ({"vocab_size": 10**12}, "a larger model than its weights hold"),
        ({"max_position_embeddings": 10**11}, "a larger model than its weights hold"),
        ({"num_labels": 10**9, "id2label": None}, "num_labels of config.json is 1000000000"),
        ({"auto_map": {"AutoModel": "code.Bert"}}, "remove auto_map if transformers' Bert"),
    ],
)
def test_hostile_configurations_cost_nothing(
    bert: Path, entries: dict[str, Any], message: str
) -> None:
    """The model would take terabytes; nothing of it is allocated."""
    edit(bert, **entries)
    refused = refusal(bert)
    assert exit_code(refused) == 5
    assert message in str(refused)


def test_sizes_of_images_and_audio_in_a_file_are_bounded(
    folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Running the model once on what a file asks for would take gigabytes."""
    waves = Path(shutil.copytree(folders("wav2vec2"), tmp_path / "waves"))
    edit(waves, conv_stride=[10**6] * 3)
    assert "make no frames of audio" in str(refusal(waves))
    multiples = load(SourceRequest(folders("glpn"))).signature
    assert multiples.inputs[0].dims == (3, 224, 224), "no other than multiples of its strides"
    pixels = Path(shutil.copytree(folders("convnext"), tmp_path / "pixels"))
    edit(pixels, image_size=10**4)
    assert load(SourceRequest(pixels)).signature.axes["height"].maximum == 512
    size = {"shortest_edge": 100, "longest_edge": 300}
    (pixels / "preprocessor_config.json").write_text(json.dumps({"size": size}))
    assert load(SourceRequest(pixels)).signature.axes["height"].maximum == 300
    fixed = load(SourceRequest(pixels, model_kwargs={"image_size": [64, 96]})).signature
    assert fixed.inputs[0].dims == (3, 64, 96)
    assert "give a side" in str(refusal(pixels, model_kwargs={"image_size": "large"}))


def test_images_that_are_cut_into_patches_beforehand_are_refused_by_name(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 20, "num_patches": 16}
    with quiet():
        config = transformers.Siglip2Config(text_config=sizes, vision_config=sizes)
        transformers.Siglip2Model(config).save_pretrained(tmp_path)
    refused = refusal(tmp_path)
    assert exit_code(refused) == 4
    assert "takes spatial_shapes, whose values decide on sizes" in str(refused)


def test_a_quantized_folder_is_refused_with_the_way_that_works(bert: Path) -> None:
    edit(bert, quantization_config={"quant_method": "bitsandbytes"})
    refused = refusal(bert)
    assert isinstance(refused, Unsupported)
    assert "export the model it was made from, and use --quantize" in str(refused)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_computed_in_single(bert: Path, dtype: torch.dtype) -> None:
    exact = load(SourceRequest(bert))
    inputs = inputs_of(exact)
    edit_weights(bert, lambda s: s.update({k: v.to(dtype) for k, v in s.items()}))
    found = load(SourceRequest(bert))
    assert {p.dtype for p in found.model.parameters()} == {torch.float32}
    difference = found.reference(inputs)["logits"] - exact.reference(inputs)["logits"]
    assert 0 < np.abs(difference).max() < 0.05


@pytest.fixture
def no_sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The addresses that a socket was asked for."""
    asked: list[Any] = []

    def refuse(*args: Any, **_: Any) -> Any:
        asked.append(args)
        raise OSError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return asked


def test_nothing_is_fetched(
    folders: Callable[[str], Path], bert: Path, no_sockets: list[Any]
) -> None:
    """Neither by a folder that is complete, nor by one that names what lies elsewhere."""
    for name in ("bert", "llama", "detr", "clip"):
        load(SourceRequest(folders(name)))
    edit(bert, _name_or_path="someone/model", transformers_weights="elsewhere.safetensors")
    load(SourceRequest(bert))
    assert no_sockets == []


@pytest.mark.thorough
def test_the_command_exports_a_folder_with_its_labels(bert: Path, tmp_path: Path) -> None:
    place = ["--repository", str(tmp_path / "repository"), "--samples", "20"]
    small = ["--max-batch-size", "2", "--model-kwargs", '{"max_positions": 6}']
    done = CliRunner().invoke(export, [str(bert), "--format", "torchscript", *place, *small])
    assert done.exit_code == 0, done.output
    published = tmp_path / "repository" / "bert"
    assert (published / "labels.txt").read_text() == "a\nb\nc\n"
    certificate = json.loads((published / "1" / "certificate.json").read_text())
    assert certificate["parity"]["passed"]
    assert certificate["model"]["task"] is None
    done = CliRunner().invoke(verify, [str(published), "--checkpoint", str(bert)])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        export, [str(bert), "--format", "onnx", "--task", "fill-mask", *place]
    )
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
