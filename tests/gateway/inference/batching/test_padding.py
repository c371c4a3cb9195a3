"""Sequences of different lengths in one batch: padded where that is declared safe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelport.gateway.errors import InvalidArgument
from modelport.gateway.repository import config as configuration
from modelport.gateway.types import NO_DEADLINE, Axis, Datatype, InferRequest, InferResponse, Tensor
from tests.gateway.inference.batching.batchers import DoublingModelBackend, gathered, make

#: Tokens and how many of them are real; each token's embedding, and their sum.
CONFIG = """
name: "m"
backend: "fake"
max_batch_size: 8
input { name: "tokens" data_type: TYPE_INT64 dims: -1 }
input { name: "length" data_type: TYPE_INT64 dims: 1 reshape { } }
output { name: "embedded" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "total" data_type: TYPE_FP32 dims: 1 reshape { } }
parameters { key: "axes.tokens" value { string_value: "sequence" } }
parameters { key: "axes.embedded" value { string_value: "sequence" } }
parameters { key: "axis.sequence" value { string_value: "1..16" } }
parameters { key: "range.tokens" value { string_value: "0..99" } }
parameters { key: "range.length" value { string_value: "1..sequence" } }
dynamic_batching { }
"""


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


class Embedding(DoublingModelBackend):
    """Masks what is beyond the length, as a model has to for which padding is safe."""

    def answer(self, request: InferRequest) -> InferResponse:
        given = {tensor.name: tensor.data for tensor in request.inputs}
        tokens = given["tokens"]
        embedded = np.stack([tokens, -tokens], axis=-1).astype(np.float32)
        real = np.arange(tokens.shape[1]) < given["length"][:, None]
        outputs = {
            "embedded": Tensor("embedded", Datatype.FP32, embedded),
            "total": Tensor("total", Datatype.FP32, np.float32((tokens * real).sum(axis=1))),
        }
        return InferResponse("m", 1, [outputs[n] for n in request.outputs or outputs])


def asked(
    *rows: list[int], length: int | None = None, outputs: tuple[str, ...] = ()
) -> InferRequest:
    tokens = np.array(rows, np.int64)
    lengths = np.full(len(rows), length or tokens.shape[1], np.int64)
    return InferRequest(
        "m",
        [Tensor("tokens", Datatype.INT64, tokens), Tensor("length", Datatype.INT64, lengths)],
        outputs,
    )


REQUESTS = (
    lambda: asked([1, 2, 3]),
    lambda: asked([4]),
    lambda: asked([5, 6], [7, 8], length=1),
    lambda: asked([9, 9, 9, 9, 9], outputs=("total",)),
    lambda: asked([10, 11], outputs=("embedded", "total")),
)


def content(response: Any) -> dict[str, Any]:
    return {tensor.name: tensor.data.tolist() for tensor in response.outputs}


async def test_padded_answers_are_those_of_each_request_alone() -> None:
    infer, model, _ = make("", CONFIG + parameter("padding.sequence", "7"), Embedding)
    answers = await gathered(infer, model, *(build() for build in REQUESTS), first=asked([1]))
    assert [len(batch) for batch in model.batches] == [6]
    tokens, lengths = model.requests[1].inputs
    assert tokens.data.tolist() == [
        *([1, 2, 3, 7, 7], [4, 7, 7, 7, 7], [5, 6, 7, 7, 7], [7, 8, 7, 7, 7]),
        *([9, 9, 9, 9, 9], [10, 11, 7, 7, 7]),
    ]
    assert lengths.data.tolist() == [3, 1, 1, 1, 5, 2]
    alone, _, _ = make("", CONFIG, Embedding)
    for build, answer in zip(REQUESTS, answers, strict=True):
        expected = await alone(build(), NO_DEADLINE)
        assert content(answer) == content(expected)


async def test_without_the_declaration_lengths_do_not_mix() -> None:
    infer, model, _ = make("", CONFIG, Embedding)
    lengths = (3, 1, 3, 1, 2)
    answers = await gathered(infer, model, *(asked([n] * n) for n in lengths), first=asked([1]))
    assert model.batches == [[3, 3], [1, 1], [2]]
    assert [content(answer)["total"] for answer in answers] == [[n * n] for n in lengths]


class Stretched(Embedding):
    """Gives an output that is longer than its input."""

    def answer(self, request: InferRequest) -> InferResponse:
        response = super().answer(request)
        if len(request.inputs[0].data) > 1:
            response.outputs[0].data = np.repeat(response.outputs[0].data, 2, axis=1)
        return response


async def test_a_batch_whose_output_lacks_the_padded_length_is_run_again_one_by_one() -> None:
    infer, model, _ = make("", CONFIG + parameter("padding.sequence", "0"), Stretched)
    answers = await gathered(infer, model, asked([1, 2]), asked([3]), first=asked([1]))
    assert [len(batch) for batch in model.batches] == [2, 1, 1]
    assert [content(answer)["embedded"] for answer in answers] == [
        [[[1, -1], [2, -2]]],
        [[[3, -3]]],
    ]


@pytest.mark.parametrize(
    ("kind", "value", "first", "padded"),
    [
        ("FP32", "-0.5", [1.0], -0.5),
        ("BF16", "1", [2], 0x3F80),
        ("BOOL", "0", [True], False),
        ("STRING", "0", [b"a"], b""),
        ("UINT8", "255", [1], 255),
    ],
)
async def test_every_datatype_has_its_pad(kind: str, value: str, first: Any, padded: Any) -> None:
    config = (
        'name: "m" max_batch_size: 8 dynamic_batching { } '
        f'input {{ name: "x" data_type: TYPE_{kind} dims: -1 }} '
        f'output {{ name: "y" data_type: TYPE_{kind} dims: -1 }} '
        + parameter("axes.x", "n")
        + parameter("axes.y", "n")
        + parameter("padding.n", value)
    )
    infer, model, _ = make("", config)
    datatype = Datatype("BYTES" if kind == "STRING" else kind)
    dtype = {"STRING": object, "BOOL": bool, "BF16": np.uint16, "FP32": np.float32}.get(
        kind, np.uint8
    )

    def one(length: int) -> InferRequest:
        return InferRequest("m", [Tensor("x", datatype, np.array([first * length], dtype))])

    await gathered(infer, model, one(1), one(2), first=one(1))
    assert model.requests[1].inputs[0].data.tolist() == [[*first, padded], first * 2]


async def test_each_input_may_have_a_pad_of_its_own() -> None:
    config = CONFIG.replace("dims: 1 reshape { } }\noutput", "dims: -1 }\noutput", 1)
    config = config.replace("range.length", "range.total").replace("1..sequence", "")
    config += parameter("axes.length", "sequence") + parameter(
        "padding.sequence", "tokens=9, length=0"
    )

    class EmptyAnswer(DoublingModelBackend):
        def answer(self, request: InferRequest) -> InferResponse:
            return InferResponse("m", 1, [])

    infer, model, _ = make("", config, EmptyAnswer)

    def one(n: int) -> InferRequest:
        return InferRequest(
            "m",
            [Tensor(k, Datatype.INT64, np.full((1, n), 1)) for k in ("tokens", "length")],
        )

    await gathered(infer, model, one(1), one(2), first=one(1))
    assert [t.data.tolist() for t in model.requests[1].inputs] == [
        [[1, 9], [1, 1]],
        [[1, 0], [1, 1]],
    ]


# -- the declaration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("padding.other", "0", "no input has an axis 'other'; name it in 'axes.<input>'"),
        ("padding.sequence", "", "'' is not a number"),
        ("padding.sequence", "pad", "'pad' is not a number"),
        ("padding.sequence", "100", "100 is not a valid value of input 'tokens'"),
        ("padding.sequence", "0.5", "0.5 is not a valid value of input 'tokens'"),
        ("padding.sequence", "-1", "-1 is not a valid value of input 'tokens'"),
        ("padding.sequence", "nan", "nan is not a valid value of input 'tokens'"),
        ("padding.sequence", "token=0", "must be a number, or 'tokens=<value>'"),
        ("padding.sequence", "tokens=0,length=0", "must be a number, or 'tokens=<value>'"),
        ("padding.sequence", "tokens=0,tokens=1", "must be a number, or 'tokens=<value>'"),
    ],
)
def test_an_invalid_padding_declaration_is_refused(key: str, value: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        make("", CONFIG + parameter(key, value), Embedding)


def test_no_number_is_no_padding_for_floats_either() -> None:
    config = CONFIG.replace("INT64", "FP32").replace("0..99", "..")
    with pytest.raises(InvalidArgument, match="nan is not a valid value of input 'tokens'"):
        make("", config + parameter("padding.sequence", "nan"), Embedding)


def test_padding_needs_the_axes_of_the_outputs() -> None:
    config = CONFIG.replace('"axes.embedded"', '"other.embedded"')
    with pytest.raises(InvalidArgument, match=r"name it in the parameter 'axes\.embedded'"):
        make("", config + parameter("padding.sequence", "0"), Embedding)
    make("", config, Embedding)


@pytest.mark.parametrize("other", ["0", "tokens=0"])
def test_two_axes_of_one_input_are_padded_with_one_value(other: str) -> None:
    axes = 'parameters { key: "axes.%s" value { string_value: "sequence,width" } }'
    config = CONFIG.replace("INT64 dims: -1 }", "INT64 dims: [ -1, -1 ] }").replace(
        "dims: [ -1, 2 ]", "dims: [ -1, -1 ]"
    )
    for name in ("tokens", "embedded"):
        config = config.replace(
            f'parameters {{ key: "axes.{name}" value {{ string_value: "sequence" }} }}', axes % name
        )
    config += parameter("padding.sequence", "0")
    make("", config + parameter("padding.width", other), Embedding)
    with pytest.raises(InvalidArgument, match="'tokens' has axes with different values"):
        make("", config + parameter("padding.width", other.replace("0", "1")), Embedding)


@pytest.mark.parametrize(
    ("text", "padding"),
    [("0", 0), ("1.5", 1.5), ("tokens=3", (("tokens", 3),)), ("1234567", 1234567)],
)
def test_what_is_declared_is_written_as_it_is_read(text: str, padding: Any) -> None:
    config = CONFIG.replace("INT64", "FP32").replace("0..99", "0..9999999")
    read = configuration.signature(
        configuration.parse(config + parameter("padding.sequence", text))
    )
    assert read.axes["sequence"] == Axis("sequence", 1, 16, padding)
    written = configuration.build("m", configuration.PLATFORMS[0], read)
    assert written.parameters["padding.sequence"].string_value == text
    assert configuration.signature(written) == read
