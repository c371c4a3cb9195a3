"""Attention masks: the proof's inputs have data somewhere, and undefined positions do not count."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

from modelport.exporters import api
from modelport.exporters.errors import ParityError
from modelport.exporters.model_spec import AttentionMask, Decision, ModelSpec
from modelport.exporters.proof import evaluation, parity
from modelport.exporters.requests import attention_masks
from modelport.exporters.requests.random_inputs import (
    Fill,
    corners,
    draw,
    name_axes,
    unpadded_sampler,
)
from modelport.exporters.sources import SourceRequest, signature_inference
from modelport.exporters.sources.pytorch import source
from modelport.gateway.errors import UsageError
from modelport.gateway.types import Array, Axis, Datatype, ModelSignature, TensorSpec
from tests.exporters.test_export_parity import ModuleSession

TOKENS = TensorSpec("tokens", Datatype.INT64, ("n",), 0, 30)
MASK = TensorSpec("mask", Datatype.INT64, ("n",), 0, 1)
LENGTHS = TensorSpec("lengths", Datatype.INT64, (1,), 1, "n", reshape=())
TAGS = TensorSpec("tags", Datatype.FP32, ("n", 3))
AXES = {"n": Axis("n", 1, 12)}
SIGNATURE = ModelSignature((TOKENS, MASK), (TAGS,), 4, AXES)
COUNTED = ModelSignature((TOKENS, LENGTHS), (TAGS,), 4, AXES)


class Attends(nn.Module):
    """A causal layer: NaN for a row without data, and for a position before any."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 8)
        self.head = nn.Linear(8, 3)
        self.counts = counts

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        length = tokens.shape[1]
        steps = torch.arange(length)
        if self.counts:
            mask = (steps < mask[:, None]).long()
        hidden = self.embedding(tokens)
        allowed = (mask[:, None, :] != 0) & (steps[None, None] <= steps[None, :, None])
        scores = (hidden @ hidden.transpose(1, 2)).masked_fill(~allowed, -torch.inf)
        result: Tensor = self.head(torch.softmax(scores, -1) @ hidden)
        return result


def spec(*masks: AttentionMask, **more: Any) -> ModelSpec:
    return ModelSpec("m", lambda *_: SIGNATURE, masks=masks, **more)


def check(spec: ModelSpec, artifact: Any = None, signature: ModelSignature = SIGNATURE) -> Any:
    module = Attends(counts=signature is COUNTED)
    session = artifact or ModuleSession(module, signature)
    return parity.check(
        source(module, spec, signature), session, samples=40, seed=0, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("padding", attention_masks.PADDINGS)
@pytest.mark.parametrize("datatype", [Datatype.INT64, Datatype.BOOL, Datatype.FP32])
def test_every_mask_has_a_position_with_data_and_its_padding_in_place(
    padding: str, datatype: Datatype
) -> None:
    flags = TensorSpec("mask", datatype, ("n",), 0, 1)
    signature = ModelSignature((TOKENS, flags), (), 4, AXES)
    rng = np.random.default_rng(0)
    held = [AttentionMask("mask", padding)]
    seen = set()
    for _ in range(60):
        mask = draw(signature, 4, {"n": 9}, rng, masks=held)["mask"]
        assert set(np.unique(mask.astype(int))) <= {0, 1}
        for row in mask.astype(int):
            assert row.any()
            steps = np.diff(row)
            assert padding == "any" or (steps <= 0 if padding == "right" else steps >= 0).all()
            seen.add(row.sum())
    assert seen == set(range(1, 10))
    for sizes, fills in corners(signature):
        mask = draw(signature, 2, sizes, rng, fills, held)["mask"].astype(int)
        wanted = {Fill.MINIMUM: {1}, Fill.MAXIMUM: {sizes["n"]}}
        assert set(mask.sum(axis=1)) <= wanted.get(fills.get("mask"), set(range(1, 13)))  # type: ignore[arg-type]


def test_lengths_are_one_or_more_even_if_their_range_begins_at_0() -> None:
    lengths = TensorSpec("lengths", Datatype.INT64, (1,), 0, "n", reshape=())
    signature = ModelSignature((TOKENS, lengths), (), 4, AXES)
    masks = (AttentionMask("lengths"),)
    drawn = draw(signature, 400, {"n": 5}, np.random.default_rng(0), masks=masks)["lengths"]
    assert set(drawn) == {1, 2, 3, 4, 5}
    least = {"lengths": Fill.MINIMUM}
    assert set(draw(signature, 2, {"n": 5}, np.random.default_rng(0), least, masks)["lengths"]) == {
        1
    }


def test_a_model_that_needs_one_position_is_proven_only_with_its_mask_declared() -> None:
    with pytest.raises(ParityError, match="the model's values are not finite"):
        check(spec())
    report = check(spec(AttentionMask("mask", "right")))
    assert report.masks == (AttentionMask("mask", "right"),)


def test_undefined_positions_are_not_compared_and_defined_ones_are() -> None:
    left = AttentionMask("mask", "left", ("tags",))
    with pytest.raises(ParityError, match="not finite"):
        check(spec(AttentionMask("mask", "left")))  # a row begins at no data: NaN
    assert check(spec(left, decision=Decision("tags"))).agreement == 1.0

    class Spoilt(ModuleSession):
        """Wrong where ``wrong`` says so."""

        wrong = staticmethod(lambda mask: mask == 0)

        def __call__(self, inputs: Any) -> dict[str, Array]:
            tags = super().__call__(inputs)["tags"]
            return {"tags": np.where(self.wrong(inputs["mask"])[..., None], tags + 9, tags)}

    module = Attends()
    torch.manual_seed(0)
    module.load_state_dict(Attends().state_dict())
    subject = source(module, spec(left, decision=Decision("tags")), SIGNATURE)
    spoilt = Spoilt(module, SIGNATURE)
    options: Any = {"samples": 40, "seed": 0, "atol": 1e-5, "rtol": 1e-5}
    parity.check(subject, spoilt, **options)
    spoilt.wrong = lambda mask: mask == 1  # type: ignore[assignment,method-assign]
    with pytest.raises(ParityError, match="output 'tags' differs"):
        parity.check(subject, spoilt, **options)


def test_positions_beyond_a_length_are_undefined() -> None:
    inputs = {"tokens": np.zeros((2, 4)), "lengths": np.array([1, 3])}
    for padding, wanted in (("right", [[1, 0, 0, 0], [1, 1, 1, 0]]), ("left", None)):
        masks = (AttentionMask("lengths", padding, ("tags",)),)
        attention_masks.check(COUNTED, masks)
        found = attention_masks.defined(COUNTED, masks, TAGS, inputs, (2, 4, 3))
        assert found is not None
        wanted = wanted or [row[::-1] for row in [[1, 0, 0, 0], [1, 1, 1, 0]]]
        assert (found == np.array(wanted, bool)[..., None]).all()


def test_the_certificates_samples_have_no_undefined_answers() -> None:
    masked = spec(AttentionMask("mask", "left", ("tags",)))
    inputs = unpadded_sampler(masked)(name_axes(SIGNATURE), 3, {"n": 7}, np.random.default_rng(0))
    assert (inputs["mask"] == 1).all()
    assert len(np.unique(inputs["tokens"])) > 1
    whole = spec(AttentionMask("mask", "left"))
    inputs = unpadded_sampler(whole)(name_axes(SIGNATURE), 30, {"n": 7}, np.random.default_rng(0))
    assert (inputs["mask"] == 0).any()


def test_held_out_data_counts_the_decisions_that_are_defined(tmp_path: Path) -> None:
    left = spec(AttentionMask("mask", "left", ("tags",)), decision=Decision("tags"))
    module = Attends()
    subject = source(module, left, SIGNATURE)
    tokens = np.arange(12).reshape(3, 4)
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
    with torch.no_grad():
        labels = module(torch.tensor(tokens), torch.tensor(mask)).argmax(-1).numpy()
    labels[mask == 0] = 7
    np.savez(tmp_path / "data.npz", tokens=tokens, mask=mask, labels=labels)
    data = evaluation.read(tmp_path / "data.npz", subject)
    found = evaluation.evaluate(subject, ModuleSession(module, SIGNATURE), data, None, 0.0)
    assert (found.agreement, found.reference) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [
        ("mask", AttentionMask("mask")),
        ("mask:left", AttentionMask("mask", "left")),
        ("mask:any=tags", AttentionMask("mask", "any", ("tags",))),
        ("mask=tags, more", AttentionMask("mask", "right", ("tags", "more"))),
    ],
)
def test_a_mask_is_declared_in_one_word(flag: str, wanted: AttentionMask) -> None:
    assert attention_masks.parse([flag]) == (wanted,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["mask:up"], "is not understood; write NAME, NAME:right"),
        ([""], "is not understood"),
        (["mask="], "is not understood"),
        (["mask", "mask:left"], "declares 'mask' twice"),
        (["mast"], "has no input 'mast'; did you mean 'mask'"),
        (["mask=tag"], "has no output 'tag'; did you mean 'tags'"),
        (["scale"], "mask 'scale' has no axis"),
        (["mask=score"], "output 'score' has no axis 'n'"),
        (["deep=tags"], "'deep' has 2 axes"),
    ],
)
def test_a_mask_that_the_model_lacks_is_refused(flags: list[str], message: str) -> None:
    scale = TensorSpec("scale", Datatype.FP32, (1,), reshape=())
    deep = TensorSpec("deep", Datatype.INT64, ("n", "n"), 0, 1)
    score = TensorSpec("score", Datatype.FP32, (1,), reshape=())
    signature = ModelSignature((TOKENS, MASK, scale, deep), (TAGS, score), 4, AXES)
    with pytest.raises(UsageError, match=message):
        attention_masks.check(signature, attention_masks.parse(flags))


def test_masks_are_known_by_name_and_range() -> None:
    def of(name: str, datatype: Datatype = Datatype.INT64, *bounds: int) -> TensorSpec:
        return TensorSpec(name, datatype, ("n",), *bounds)

    masks = [of("mask"), of("attention_mask", Datatype.INT32, 0, 1), of("x_attention_mask")]
    masks += [of("pixel_mask", Datatype.BOOL)]
    others = [of("key_padding_mask", Datatype.BOOL), of("mask", Datatype.INT64, 0, 9)]
    others += [of("attention_mask", Datatype.FP32), of("masked")]
    found = attention_masks.infer([*masks, *others])
    assert found == tuple(AttentionMask(m.name) for m in masks)


def test_an_inferred_mask_gets_its_range_and_the_flag_replaces_it() -> None:
    def inferred(*masks: str) -> tuple[ModelSpec, ModelSignature]:
        inputs = ("tokens:INT64[n=1..9]=0..30", "mask:INT64[n]")
        request = SourceRequest(Path("x.pt"), "m", inputs=inputs, masks=masks)
        found = signature_inference.spec(Attends(), request, None)
        return found, found.signature(Attends(), 4)

    found, signature = inferred()
    assert found.masks == (AttentionMask("mask"),)
    assert signature.inputs[1] == MASK
    assert signature.axes == {"n": Axis("n", 1, 9)}, "a range elsewhere keeps the axis's bounds"
    assert inferred("mask:left=output")[0].masks == (AttentionMask("mask", "left", ("output",)),)


@pytest.mark.thorough
def test_a_masked_model_is_published_with_its_mask_and_verified(
    invoke: Callable[..., Result], tmp_path: Path
) -> None:
    torch.save(Attends().state_dict(), tmp_path / "m.pt")
    declared = ["--input", "tokens:INT64[n=1..9]=0..30", "--input", "mask:INT64[n]=0..1"]
    command = [tmp_path / "m.pt", *declared, "--name", "m"]
    model = "tests.exporters.test_export_masks:Attends"
    refused = invoke(*command, "--mask", "mask:left", model=model)
    assert (refused.exit_code, "not finite" in refused.stderr) == (3, True)
    done = invoke(*command, "--mask", "mask:left=output", model=model)
    assert done.exit_code == 0, done.stderr
    version = tmp_path / "repository/m/1"
    document = json.loads((version / "certificate.json").read_text())
    assert document["parity"]["masks"] == [
        {"input": "mask", "padding": "left", "outputs": ["output"]}
    ]
    samples = json.loads((version / "samples.json").read_text())
    assert all(set(row["mask"]["content"]) == {1} for row in samples["data"])
    config = (version.parent / "config.pbtxt").read_text()
    assert 'key: "mask.mask"' in config
    verified = api.verify(version, checkpoint=tmp_path / "m.pt", trust=True)
    assert verified.proven is not None
    assert verified.proven.report.masks == (AttentionMask("mask", "left", ("output",)),)
