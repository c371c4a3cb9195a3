"""Models with a text interface, in every dialect; the answers are those of the models' tables."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from huggingface_hub import InferenceClient

from modelport.gateway.types import Array
from tests import texts
from tests.conformance.wire import KeptConnection, WireReply
from tests.server import Gateway, serving
from tests.texts import mean_of, table

LABELS = ("bad", "neutral", "good")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    root = texts.repository(tmp_path_factory.mktemp("texts"))
    with serving(root) as served:
        yield served


@pytest.fixture
def rest(gateway: Gateway) -> Iterator[KeptConnection]:
    connection = KeptConnection(gateway.http)
    yield connection
    connection.close()


def post(rest: KeptConnection, path: str, document: Any, kind: str = "json") -> WireReply:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    return rest.send("POST", path, body, {"content-type": f"application/{kind}"})


def classes(*pair: str) -> list[dict[str, Any]]:
    """The classes of a text by the model ``sentiment``, the likeliest first."""
    powers = np.exp(mean_of(table(3), *pair))
    found = zip(LABELS, powers / powers.sum(), strict=True)
    rows = [{"label": label, "score": pytest.approx(score, abs=1e-5)} for label, score in found]
    return sorted(rows, key=lambda row: -row["score"].expected)


def columns(*rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: [[item[key] for item in row] for row in rows] for key in ("label", "score")}


def unit(vector: Array) -> Array:
    found: Array = vector / np.linalg.norm(vector)
    return found


HELLO, WORLD = "hello world", "Berlin is the capital"
BOTH = columns(classes(HELLO), classes(WORLD))


def test_the_open_inference_protocol_takes_texts_beside_tensors(rest: KeptConnection) -> None:
    asked = {"name": "text", "datatype": "BYTES", "shape": [2, 1], "data": [HELLO, WORLD]}
    reply = post(rest, "/v2/models/sentiment/infer", {"inputs": [asked]}).json
    found = {output["name"]: output for output in reply["outputs"]}
    for name, rows in BOTH.items():
        assert found[name]["data"] == [*rows[0], *rows[1]]
    assert found["score"]["shape"] == [2, 3]
    assert reply["parameters"] == {
        "prompt_tokens": sum(len(texts.tokenizer().encode(text).ids) for text in (HELLO, WORLD))
    }
    ids = texts.tokenizer().encode(HELLO).ids
    tensors = [
        {"name": name, "datatype": "INT64", "shape": [1, len(ids)], "data": data}
        for name, data in zip(texts.TEXT_INPUTS, (ids, [1] * len(ids), [0] * len(ids)), strict=True)
    ]
    (logits,) = post(rest, "/v2/models/sentiment/infer", {"inputs": tensors}).json["outputs"]
    np.testing.assert_allclose(logits["data"], mean_of(table(3), HELLO), atol=1e-5)


def test_triton_s_client_sends_texts_over_grpc(gateway: Gateway) -> None:
    client = tritonclient.grpc.InferenceServerClient(gateway.grpc)
    asked = tritonclient.grpc.InferInput("text", [1], "BYTES")
    asked.set_data_from_numpy(np.array([WORLD.encode()], object))
    label = tritonclient.grpc.InferRequestedOutput("label")
    reply = client.infer("sentiment", [asked], outputs=[label], parameters={"top_k": 1})
    assert [each.decode() for each in reply.as_numpy("label")[0]] == BOTH["label"][1][:1]
    assert reply.as_numpy("score") is None
    client.close()


def test_tensorflow_serving_s_instances_may_be_texts(rest: KeptConnection) -> None:
    path = "/v1/models/sentiment:predict"
    rows = [{key: BOTH[key][i] for key in BOTH} for i in range(2)]
    assert post(rest, path, {"instances": [HELLO, WORLD]}).json == {"predictions": rows}
    assert post(rest, path, {"inputs": [HELLO, WORLD]}).json == {"outputs": BOTH}
    named = {"signature_name": "text", "instances": [{"text": HELLO}, {"text": WORLD}]}
    assert post(rest, path, named).json == {"predictions": rows}
    pair = [{"text": HELLO, "text_pair": WORLD}]
    expected = columns(classes(HELLO, WORLD))
    found = post(rest, path, {"instances": pair}).json["predictions"]
    assert found == [{key: expected[key][0] for key in expected}]
    (vector,) = post(rest, "/v1/models/sentences:predict", {"instances": [HELLO]}).json[
        "predictions"
    ]
    np.testing.assert_allclose(vector, mean_of(table(8), HELLO), atol=1e-5)


@pytest.mark.parametrize("path", ["/predictions/sentiment", "/models/sentiment/invoke"])
@pytest.mark.parametrize("kind", ["json", "x-www-form-urlencoded"])
def test_the_form_of_hugging_face_answers_as_its_inference_api(
    rest: KeptConnection, path: str, kind: str
) -> None:
    assert post(rest, path, {"inputs": HELLO}, kind).json == [classes(HELLO)]
    several = {"inputs": [HELLO, WORLD], "parameters": {"top_k": 1}, "options": {}}
    assert post(rest, path, several, kind).json == [classes(HELLO)[:1], classes(WORLD)[:1]]
    pair = {"inputs": {"text": HELLO, "text_pair": WORLD}}
    assert post(rest, path, pair, kind).json == [classes(HELLO, WORLD)]
    assert post(rest, path, {"instances": [HELLO]}, kind).json["predictions"][0]["label"]


def test_a_body_that_is_no_json_is_a_text(rest: KeptConnection) -> None:
    assert post(rest, "/predictions/sentiment", HELLO.encode(), "octet-stream").json == [
        classes(HELLO)
    ]
    assert post(rest, "/predictions/sentiment", b"\xff", "octet-stream").status == 400


def test_unmodified_clients_of_hugging_face_read_the_answers(gateway: Gateway) -> None:
    client = InferenceClient(f"http://{gateway.http}/predictions/sentiment")
    found = client.text_classification(HELLO, top_k=2)
    assert [each.label for each in found] == BOTH["label"][0][:2]
    embed = InferenceClient(f"http://{gateway.http}/embed")
    vector = embed.feature_extraction(WORLD)
    np.testing.assert_allclose(vector, [unit(mean_of(table(8), WORLD))], atol=1e-5)
    whole = InferenceClient(f"http://{gateway.http}/predictions/sentences")
    similar = whole.sentence_similarity(HELLO, other_sentences=[HELLO, WORLD])
    ours = unit(mean_of(table(8), HELLO)) @ unit(mean_of(table(8), WORLD))
    assert similar == pytest.approx([1, ours], abs=1e-5)


def test_openai_s_embeddings(rest: KeptConnection) -> None:
    asked = {"input": [HELLO, WORLD], "model": "sentences"}
    reply = post(rest, "/v1/embeddings", asked).json
    rows = [mean_of(table(8), text) for text in (HELLO, WORLD)]
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], rows, atol=1e-5)
    assert [(each["object"], each["index"]) for each in reply["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    tokens = sum(len(texts.tokenizer().encode(text).ids) for text in (HELLO, WORLD))
    assert reply["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (reply["object"], reply["model"]) == ("list", "sentences")
    coded = post(rest, "/v1/embeddings", {**asked, "encoding_format": "base64"}).json["data"]
    decoded = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in coded]
    np.testing.assert_allclose(decoded, rows, atol=1e-5)
    few = post(rest, "/v1/embeddings", {**asked, "dimensions": 3}).json["data"][0]["embedding"]
    np.testing.assert_allclose(few, unit(rows[0][:3]), atol=1e-5)


def test_models_are_listed_for_openai_and_kserve_alike(rest: KeptConnection) -> None:
    names = ["reranker", "sentences", "sentiment"]
    reply = rest.send("GET", "/v1/models").json
    assert reply["models"] == [each["id"] for each in reply["data"]] == names
    assert reply["object"] == "list"
    one = rest.send("GET", "/v1/models/sentences").json
    assert one["model_version_status"]
    assert (one["id"], one["object"]) == ("sentences", "model")


BAD_EMBEDDINGS: list[tuple[dict[str, Any], int, str]] = [
    ({"input": HELLO}, 400, "you must provide a model parameter"),
    ({"input": HELLO, "model": "nope"}, 404, "The model `nope` does not exist"),
    ({"input": HELLO, "model": "sentiment"}, 404, "is not a model for embeddings"),
    ({"input": [], "model": "sentences"}, 400, "'input' must be a string, or an array"),
    ({"input": [[1, 2]], "model": "sentences"}, 400, "token ids of another model's tokenizer"),
    ({"input": HELLO, "model": "sentences", "dimensions": 9}, 400, "an integer from 1 to 8"),
    ({"input": HELLO, "model": "sentences", "encoding_format": "x"}, 400, "float or base64"),
    ({"input": HELLO, "model": "sentences", "stream": True}, 400, "are not streamed"),
    ({"input": HELLO, "model": "sentences", "sort": 1}, 400, "there is no member 'sort'"),
    ({"input": "x" * 300_000, "model": "sentences"}, 400, "at most 262144 are taken; split it"),
    ({"input": ["x"] * 3000, "model": "sentences"}, 400, "3000 texts, 1 to 2048 are taken"),
    ({"input": HELLO * 40, "model": "sentences"}, 400, "tokens, at most 32 are taken; shorten"),
]


@pytest.mark.parametrize(("asked", "status", "message"), BAD_EMBEDDINGS)
def test_errors_of_embeddings_have_openai_s_form(
    rest: KeptConnection, asked: dict[str, Any], status: int, message: str
) -> None:
    reply = post(rest, "/v1/embeddings", asked)
    error = reply.json["error"]
    assert (reply.status, error["type"]) == (status, "invalid_request_error")
    assert message in error["message"]
    assert error["code"] == ("model_not_found" if status == 404 else None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_generation_is_refused_by_name(rest: KeptConnection, path: str) -> None:
    reply = post(rest, path, {"model": "sentences", "stream": True})
    assert reply.status == 404
    assert "generates no text, streamed or not" in reply.json["error"]["message"]


def test_rerankers_order_texts_for_both_of_their_apis(rest: KeptConnection) -> None:
    documents = ["sport", WORLD, HELLO]
    raw = [float(mean_of(table(1), "what", each)[0]) for each in documents]
    order = sorted(range(3), key=lambda i: -raw[i])
    scores = [1 / (1 + np.exp(-raw[i])) for i in order]
    asked = {"query": "what", "texts": documents, "return_text": True}
    tei = post(rest, "/rerank", asked).json
    assert [(each["index"], each["text"]) for each in tei] == [(i, documents[i]) for i in order]
    assert [each["score"] for each in tei] == pytest.approx(scores, abs=1e-5)
    tei = post(rest, "/rerank", {"query": "what", "texts": documents, "raw_scores": True}).json
    assert [each["score"] for each in tei] == pytest.approx(sorted(raw, reverse=True), abs=1e-5)
    for path in ("/v1/rerank", "/v2/rerank"):
        asked = {"model": "reranker", "query": "what", "documents": documents, "top_n": 2}
        found = post(rest, path, asked).json["results"]
        assert [each["index"] for each in found] == order[:2]
        assert [e["relevance_score"] for e in found] == pytest.approx(scores[:2], abs=1e-5)


def test_text_embeddings_inference_s_other_routes(rest: KeptConnection) -> None:
    vector = mean_of(table(8), HELLO)
    np.testing.assert_allclose(
        post(rest, "/embed", {"inputs": HELLO, "truncate": True}).json, [unit(vector)], atol=1e-5
    )
    np.testing.assert_allclose(
        post(rest, "/embed", {"inputs": [HELLO], "normalize": False}).json, [vector], atol=1e-5
    )
    asked = {"model": "sentiment", "inputs": HELLO}
    assert post(rest, "/predict", asked).json == classes(HELLO)
    pairs = {"model": "sentiment", "inputs": [[HELLO], [WORLD]]}
    assert post(rest, "/predict", pairs).json == [classes(HELLO), classes(WORLD)]
    pair = {"model": "sentiment", "inputs": [HELLO, WORLD]}
    assert post(rest, "/predict", pair).json == classes(HELLO, WORLD)
    assert post(rest, "/", {"model": "sentiment", "inputs": HELLO}).json == [classes(HELLO)]
    reply = post(rest, "/predict", {"inputs": HELLO})
    assert (reply.status, reply.json["error_type"]) == (413, "Validation")
    assert "it has reranker, sentiment" in reply.json["error"]
    assert {rest.send("POST", "/predict", body).status for body in (b"[1]", b"{")} == {400}
    assert rest.send("GET", "/").json == {"status": "alive"}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"inputs": HELLO, "parameters": {"topk": 1}}, "there is no parameter 'topk' for this"),
        ({"inputs": HELLO, "parameters": {"top_k": 0}}, "'top_k' must be an integer from 1"),
        ({"inputs": HELLO, "parameters": {"top_k": True}}, "'top_k' must be an integer from 1"),
        ({"inputs": HELLO, "parameters": 1}, "'parameters' must be an object"),
        ({"inputs": HELLO, "parameters": {"candidate_labels": ["a"]}}, "a class 'entailment'"),
        ({"inputs": [1]}, "'inputs' must be texts, or objects with"),
        ({"inputs": {"txt": HELLO}}, "'inputs' must be texts, or objects with"),
        ({"inputs": {"text": 1}}, "'text' must be strings"),
        ({"inputs": [HELLO, {"text": HELLO}]}, "'inputs' must be texts, or objects with"),
        ({"inputs": {"text_pair": HELLO}}, "missing required input(s) ['text']"),
        ({"inputs": {"question": "a", "context": "b"}}, "'inputs' must be texts, or objects"),
        ({"inputs": HELLO * 40}, "at most 32 are taken; shorten it, or send the parameter trunc"),
    ],
)
def test_invalid_texts_are_refused_in_one_line(
    rest: KeptConnection, document: dict[str, Any], message: str
) -> None:
    reply = post(rest, "/predictions/sentiment", document)
    assert reply.status == 400
    assert message in reply.json["message"]
    assert "\n" not in reply.json["message"]


def test_statistics_count_a_request_of_texts_once(gateway: Gateway, rest: KeptConnection) -> None:
    def counted() -> dict[str, Any]:
        (found,) = rest.send("GET", "/v2/models/reranker/stats").json["model_stats"]
        return {"requests": found["inference_stats"]["success"]["count"], **found}

    before = counted()
    post(rest, "/rerank", {"query": "what", "texts": [HELLO] * 20})
    after = counted()
    assert after["requests"] == before["requests"] + 1
    assert int(after["inference_count"]) > int(before["inference_count"])


async def test_the_openai_client_works_unmodified(gateway: Gateway) -> None:
    openai = pytest.importorskip("openai")
    url, rows = f"http://{gateway.http}/v1", [mean_of(table(8), text) for text in (HELLO, WORLD)]
    client = openai.OpenAI(base_url=url, api_key="none")
    found = client.embeddings.create(model="sentences", input=[HELLO, WORLD])
    np.testing.assert_allclose([each.embedding for each in found.data], rows, atol=1e-5)
    assert [each.id for each in client.models.list()] == ["reranker", "sentences", "sentiment"]
    assert client.models.retrieve("sentences").id == "sentences"
    with pytest.raises(openai.NotFoundError, match="generates no text"):
        client.chat.completions.create(model="sentences", messages=[], stream=True)
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as later:
        found = await later.embeddings.create(model="sentences", input=HELLO)
        np.testing.assert_allclose(found.data[0].embedding, rows[0], atol=1e-5)
        with pytest.raises(openai.BadRequestError, match="at most 32 are taken"):
            await later.embeddings.create(model="sentences", input="x " * 99)
    client.close()
