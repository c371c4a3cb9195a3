"""The handler of a TorchServe archive, run as TorchServe runs it, on rows with named tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.http
from torch import nn

from modelport.exporters.formats.registry import FORMATS
from modelport.exporters.loaded_model import Source
from modelport.exporters.model_spec import ModelSpec
from modelport.exporters.models.fraud import FraudTransformer
from modelport.exporters.runtime.output_capture import quiet
from modelport.exporters.sources import pytorch
from modelport.gateway.backends.remote import torchserve_model
from modelport.gateway.repository import config, manifest
from modelport.gateway.types import Array, Datatype, ModelSignature, TensorSpec
from tests.packages import packaged, put, put_torchscript
from tests.torchserve.clients import as_tensors, document, read
from tests.torchserve.comparison import compare, inputs_of, wire
from tests.torchserve.fake import Context, ServedArchive, unpacked

KWARGS = {
    "vocab_size": 32,
    "d_model": 16,
    "nhead": 2,
    "num_layers": 2,
    "dim_feedforward": 24,
    "max_positions": 12,
}
LENGTH = "Inference-Header-Content-Length"


@contextmanager
def serving(tmp_path: Path, source: Source) -> Iterator[ServedArchive]:
    folder = put_torchscript(tmp_path / "repository", "m", source.model, source.signature)
    with unpacked(packaged(folder, "torchserve", tmp_path / "m.mar"), source) as served:
        yield served


def plain_source(module: nn.Module, signature: ModelSignature) -> Source:
    return pytorch.source(module, ModelSpec("m", lambda *_: signature), signature)


def fraud_source(seed: int = 0) -> Source:
    torch.manual_seed(seed)
    module = FraudTransformer(**KWARGS)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    spec = module.modelport_spec
    return pytorch.source(module, spec, spec.signature(module, 8))


@pytest.fixture
def fraud(tmp_path: Path) -> Iterator[ServedArchive]:
    with serving(tmp_path, fraud_source()) as served:
        yield served


@pytest.fixture
def unchecked(tmp_path: Path) -> Iterator[ServedArchive]:
    """The same model with its ranges taken out of ``config.pbtxt``: a wrong id reaches it."""
    source = fraud_source()
    folder = put_torchscript(tmp_path / "repository", "m", source.model, source.signature)
    inputs = tuple(replace(i, minimum=None, maximum=None) for i in source.signature.inputs)
    signature = replace(source.signature, inputs=inputs)
    changed = config.build("m", FORMATS.builtin["torchscript"].platform, signature)
    (folder.parent / config.FILENAME).write_text(config.to_text(changed))
    with unpacked(packaged(folder, "torchserve", tmp_path / "m.mar"), source) as served:
        yield served


def as_json(source: Source, inputs: Mapping[str, Array], **more: Any) -> dict[str, Any]:
    """A body that TorchServe has parsed."""
    return document(wire(source.signature.inputs, inputs), **more)


def as_bytes(source: Source, inputs: Mapping[str, Array]) -> tuple[bytearray, dict[str, str]]:
    """The body of ``tritonclient``'s request, and its header."""
    tensors = as_tensors(wire(source.signature.inputs, inputs))
    body, length = tritonclient.http.InferenceServerClient.generate_request_body(tensors)
    return bytearray(body), {LENGTH: str(length)}


def right(served: ServedArchive, inputs: Mapping[str, Array], answer: tuple[int, Any]) -> None:
    problem, _ = compare(served.source, inputs, *answer)
    assert problem is None


def refused(answer: tuple[int, Any], status: int, *words: str) -> None:
    assert answer[0] == status
    assert all(word in answer[1] for word in words), answer


@pytest.mark.thorough
@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 5, 12])
def test_json_and_binary_rows_are_answered_as_eager_would(
    fraud: ServedArchive, batch: int, length: int
) -> None:
    inputs = inputs_of(fraud.source, batch, length, seed=batch)
    body, header = as_bytes(fraud.source, inputs)
    for answer in (
        *fraud(as_json(fraud.source, inputs)),
        *fraud(json.dumps(as_json(fraud.source, inputs)).encode()),
        *fraud(body, headers=header),
        *fraud(body, headers={name.lower(): value for name, value in header.items()}),
        *fraud(body),  # without the header, as over gRPC
    ):
        right(fraud, inputs, answer)


def test_rows_of_one_batch_run_together_where_their_lengths_agree(fraud: ServedArchive) -> None:
    sizes = [(1, 4), (2, 9), (3, 4), (1, 9), (1, 1)]
    cases = [inputs_of(fraud.source, *size, seed=seed) for seed, size in enumerate(sizes)]
    answers = fraud(*(as_json(fraud.source, inputs) for inputs in cases))
    for inputs, answer in zip(cases, answers, strict=True):
        right(fraud, inputs, answer)
    assert fraud.batches == [4, 3, 1]


def test_text_that_is_not_ascii_survives_in_front_of_bytes(fraud: ServedArchive) -> None:
    inputs = inputs_of(fraud.source, 1, 4, seed=0)
    body, header = as_bytes(fraud.source, inputs)
    size = int(header[LENGTH])
    text = json.dumps({**json.loads(body[:size]), "id": "größe"}, ensure_ascii=False).encode()
    context = Context(fraud.folder, [{}])
    (answer,) = fraud.handle([{"body": text + bytes(body[size:])}], context)
    assert json.loads(answer[: int(context.answered[0][LENGTH])])["id"] == "größe"


def test_no_more_than_max_batch_size_elements_run_together(fraud: ServedArchive) -> None:
    cases = [inputs_of(fraud.source, batch, 3, seed=batch) for batch in (5, 3, 1, 8, 7)]
    answers = fraud(*(as_json(fraud.source, inputs) for inputs in cases))
    for inputs, answer in zip(cases, answers, strict=True):
        right(fraud, inputs, answer)
    assert fraud.batches == [8, 1, 8, 7]


def wrong_rows(source: Source) -> list[tuple[Any, str]]:
    """Bodies and what is said about them."""
    good = inputs_of(source, 2, 4, seed=9)

    def changed(name: str, /, **members: Any) -> dict[str, Any]:
        body = as_json(source, good)
        next(each for each in body["inputs"] if each["name"] == name).update(members)
        return body

    binary = bytes(as_bytes(source, good)[0])
    tokens = as_json(source, good)["inputs"][0]
    without = {key: value for key, value in tokens.items() if key != "data"}
    return [
        (b"{", "does not start with JSON"),
        (b"", "does not start with JSON"),
        (b"\xff\xfe", "does not start with JSON"),
        (b"[" * 100_000, "does not start with JSON"),
        ("{}", "'inputs' must be an array"),
        ([1], "must be a JSON object"),
        ({"inputs": {}}, "'inputs' must be an array"),
        ({"inputs": [1]}, "needs a 'name'"),
        ({"inputs": [tokens, tokens]}, "'tokens' is given twice"),
        ({"inputs": [tokens]}, "missing input 'seq_lens'"),
        ({"inputs": [without]}, "needs either 'data' or 'binary_data_size'"),
        ({**as_json(source, good), "id": 5}, "'id' must be a string"),
        ({**as_json(source, good), "parameters": 5}, "'parameters' must be an object"),
        ({**as_json(source, good), "outputs": [{"name": "p"}]}, "unexpected output 'p'"),
        ({**as_json(source, good), "outputs": "p"}, "'outputs' must be an array"),
        (changed("tokens", name="token"), "unexpected input 'token'; the inputs are 'tokens'"),
        (changed("tokens", datatype="INT32"), "must be INT64, not INT32"),
        (changed("tokens", datatype="int64"), "must be one of BOOL"),
        (changed("tokens", shape=[2, 2, 2]), "must have shape [-1, -1], not [2, 2, 2]"),
        (changed("tokens", shape=[2, True]), "must be an array of sizes"),
        (changed("tokens", shape=[2, 5]), "needs 10 values, not 8"),
        (changed("tokens", data=[0.5] * 8), "holds float"),
        (changed("tokens", data=[True] * 8), "holds bool"),
        (changed("tokens", data=[[1], *range(7)]), "but its 'data' holds list"),
        (changed("tokens", data=[2**70] * 8), "does not fit INT64"),
        (changed("tokens", data="12345678"), "must be an array"),
        (changed("tokens", data=[32] * 8), "must lie in [0, 31], got 32"),
        (changed("tokens", data=[-1] * 8), "must lie in [0, 31], got -1"),
        (changed("tokens", shape=[2, 0], data=[]), "'sequence' must be from 1 to 12, not 0"),
        (changed("tokens", shape=[0, 4], data=[]), "different batch sizes: [0, 2]"),
        (changed("seq_lens", data=[5, 1]), "must lie in [1, 4], got 5"),
        (changed("seq_lens", data=[0, 1]), "must lie in [1, 4], got 0"),
        (changed("seq_lens", shape=[1, 1], data=[1]), "different batch sizes: [1, 2]"),
        (as_json(source, inputs_of(source, 9, 4, 0)), "must be from 1 to 8, not 9"),
        (binary[:-1], "'binary_data_size' of input 'seq_lens' is 16, but 15 bytes are left"),
        (binary + b" ", "1 bytes follow the last input"),
    ]


def test_a_bad_row_gets_an_error_and_the_rest_of_the_batch_is_answered(
    fraud: ServedArchive,
) -> None:
    good = inputs_of(fraud.source, 2, 4, seed=1)
    wrong = wrong_rows(fraud.source)
    for start in range(0, len(wrong), 7):
        some = wrong[start : start + 7]
        rows = [as_json(fraud.source, good), *(body for body, _ in some)]
        first, *others = fraud(*rows)
        right(fraud, good, first)
        for (_, words), answer in zip(some, others, strict=True):
            refused(answer, 400, words)
    assert len(wrong) > 30


@pytest.mark.parametrize("value", ["-1", "x", "", "1.0", "٣", "99999"])
def test_a_wrong_header_length_is_refused(fraud: ServedArchive, value: str) -> None:
    body, _ = as_bytes(fraud.source, inputs_of(fraud.source, 1, 4, seed=0))
    (answer,) = fraud(body, headers={LENGTH: value})
    refused(answer, 400, LENGTH)


def test_the_error_for_a_row_without_a_body_says_what_to_send(fraud: ServedArchive) -> None:
    context = Context(fraud.folder, [{}, {}])
    inputs = inputs_of(fraud.source, 1, 4, seed=0)
    rows = [{'{"inputs": []}': b""}, {"data": as_json(fraud.source, inputs)}]
    first, second = fraud.handle(rows, context)
    assert context.statuses == {0: 400}
    assert "send application/json" in json.loads(first)["error"]
    right(fraud, inputs, read(200, context.answered[1], second))


def test_a_row_that_the_model_fails_on_fails_alone(unchecked: ServedArchive) -> None:
    cases = [inputs_of(unchecked.source, 1, 6, seed=seed) for seed in range(5)]
    cases[2]["tokens"][0, 0] = 1000
    answers = unchecked(*(as_json(unchecked.source, inputs) for inputs in cases))
    refused(answers.pop(2), 500, "the model failed", "index out of range")
    del cases[2]
    for inputs, answer in zip(cases, answers, strict=True):
        right(unchecked, inputs, answer)
    assert unchecked.batches == [5, 1, 1, 1, 1, 1]


def test_a_row_says_which_outputs_it_wants_and_in_what_form(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, (x > 0)

    outputs = (TensorSpec("more", Datatype.FP32, (3,)), TensorSpec("big", Datatype.BOOL, (3,)))
    signature = ModelSignature((TensorSpec("x", Datatype.FP32, (3,)),), outputs, 4)
    x = np.array([[1.5, -2, np.inf]], np.float32)
    with serving(tmp_path, plain_source(Two(), signature)) as served:

        def ask(**more: Any) -> tuple[dict[str, Any], dict[str, str], bytes]:
            context = Context(served.folder, [{}])
            (answer,) = served.handle([{"body": document({"x": x}, **more)}], context)
            text, _ = json.JSONDecoder().raw_decode(answer.decode("latin-1"))
            return text, context.answered[0], answer

        told, headers, _ = ask(id="aä")
        assert (told["id"], told["model_name"], told["model_version"]) == ("aä", "m", "1")
        assert [output["name"] for output in told["outputs"]] == ["more", "big"]
        assert told["outputs"][0]["data"] == [2.5, -1, float("inf")]
        assert told["outputs"][1]["data"] == [True, False, True]
        assert headers == {"content-type": "application/json"}

        wanted = [{"name": "big", "parameters": {"binary_data": True}}, {"name": "more"}]
        told, headers, answer = ask(outputs=wanted)
        assert told["outputs"][0]["parameters"] == {"binary_data_size": 3}
        assert told["outputs"][1]["data"] == [2.5, -1, float("inf")]
        assert answer[int(headers[LENGTH]) :] == b"\1\0\1"
        assert headers["content-type"] == "application/octet-stream"

        told, _, _ = ask(outputs=[{"name": "big"}])
        assert [output["name"] for output in told["outputs"]] == ["big"]
        told, headers, answer = ask(parameters={"binary_data_output": True})
        assert answer[int(headers[LENGTH]) :] == (x + 1).astype("<f4").tobytes() + b"\1\0\1"


def test_half_precision_travels_as_bytes_only(tmp_path: Path) -> None:
    class DoubledPair(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return a * 2, b * 2

    types = (Datatype.BF16, Datatype.FP16)
    inputs = tuple(TensorSpec(n, t, (2,)) for n, t in zip("ab", types, strict=True))
    outputs = tuple(TensorSpec(n, t, (2,)) for n, t in zip("cd", types, strict=True))
    signature = ModelSignature(inputs, outputs, 4)
    folder = put(tmp_path / "repository", "m", "torchscript", signature)
    bfloat, half = torch.tensor([[1.5, -3]]).bfloat16(), torch.tensor([[1.5, -3]]).half()
    with quiet():
        torch.jit.trace(DoubledPair(), (bfloat, half)).save(folder / "model.pt")
    manifest.write(folder)
    heads = [
        {"name": n, "datatype": t, "shape": [1, 2], "parameters": {"binary_data_size": 4}}
        for n, t in zip("ab", types, strict=True)
    ]
    raw = bfloat.view(torch.int16).numpy().tobytes() + half.numpy().tobytes()
    archive = packaged(folder, "torchserve", tmp_path / "m.mar")
    with unpacked(archive, plain_source(DoubledPair(), signature)) as served:
        body = {"inputs": heads, "parameters": {"binary_data_output": True}}
        (answer,) = served.handle(
            [{"body": json.dumps(body).encode() + raw}], Context(folder, [{}])
        )
        assert json.loads(answer[:-8])["outputs"][0]["datatype"] == "BF16"
        assert torch.frombuffer(bytearray(answer[-8:-4]), dtype=torch.bfloat16).tolist() == [3, -6]
        assert np.frombuffer(answer[-4:], np.float16).tolist() == [3, -6]

        (answer,) = served(json.dumps({"inputs": heads}).encode() + raw)
        refused(answer, 400, "output 'c' is BF16: ask for 'binary_data'")
        sent = [{"name": "b", "datatype": "FP16", "shape": [1, 2], "data": [1, 2]}]
        (answer,) = served({"inputs": sent})
        refused(answer, 400, "'b' is FP16: send it with 'binary_data_size'")


def test_a_model_that_does_not_batch_runs_each_row_alone(tmp_path: Path) -> None:
    class RowTotal(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0, keepdim=True)

    signature = ModelSignature(
        (TensorSpec("x", Datatype.FP32, (-1, 2)),), (TensorSpec("y", Datatype.FP32, (1, 2)),), 0
    )
    with serving(tmp_path, plain_source(RowTotal(), signature)) as served:
        rows = [np.full((count, 2), count, np.float32) for count in (3, 3, 1)]
        answers = served(*(document({"x": x}) for x in rows))
        assert [answer[1]["y"].tolist() for answer in answers] == [
            [[9, 9]],
            [[9, 9]],
            [[1, 1]],
        ]
        assert served.batches == [3, 3, 1]


def test_a_model_that_gives_something_else_than_declared_is_not_believed(tmp_path: Path) -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0)

    spec = TensorSpec("x", Datatype.FP32, (2,))
    signature = ModelSignature((spec,), (TensorSpec("y", Datatype.FP32, (2,)),), 4)
    with serving(tmp_path, plain_source(Wrong(), signature)) as served:
        (answer,) = served(document({"x": np.ones((3, 2), np.float32)}))
        refused(answer, 500, "output 'y' is float32 [2] for a batch of [3]")


def test_a_row_that_asks_for_a_description_gets_the_signature_and_its_mates_their_answers(
    fraud: ServedArchive,
) -> None:
    inputs = inputs_of(fraud.source, 1, 3, seed=1)
    context = Context(fraud.folder, [{"describe": "True"}, {}])
    described, answer = fraud.handle([{}, {"body": as_json(fraud.source, inputs)}], context)
    right(fraud, inputs, read(200, context.answered[1], bytes(answer)))
    found = torchserve_model.described_by_handler(without_null(json.loads(described)))
    assert found is not None
    assert config.signature(found) == config.signature(
        config.build("m", FORMATS.builtin["torchscript"].platform, fraud.source.signature)
    )


def without_null(value: Any) -> Any:
    """The description that TorchServe passes on."""
    if isinstance(value, dict):
        return {key: without_null(item) for key, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "told", [None, [], {}, {"inputs": 1}, {"axes": {}, "inputs": [], "outputs": [{}]}, {"axes": []}]
)
def test_descriptions_by_other_handlers_are_ignored(told: Any) -> None:
    assert torchserve_model.described_by_handler(told) is None
