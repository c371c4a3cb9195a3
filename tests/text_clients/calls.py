"""Calls of unmodified clients, in an environment of their own: ``calls.py http://HOST:PORT``.

Each prints what it has found as one line of JSON, or raises.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import cohere
import openai
from langchain_openai import OpenAIEmbeddings
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

TEXTS = ["hello world", "Berlin is the capital"]
QUERY = "what"
KEY = "none"


def with_openai(url: str) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
    found = client.embeddings.create(model="sentences", input=TEXTS)
    plain = client.embeddings.create(model="sentences", input=TEXTS, encoding_format="float")
    close(found.data[0].embedding, plain.data[0].embedding)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 4
    assert [each.id for each in client.models.list()] == ["reranker", "sentences", "sentiment"]
    assert client.models.retrieve("sentences").id == "sentences"
    short = client.embeddings.create(model="sentences", input=TEXTS, dimensions=3)
    assert {len(each.embedding) for each in short.data} == {3}
    refused(openai.NotFoundError, lambda: client.embeddings.create(model="nope", input="x"))
    refused(
        openai.NotFoundError,
        lambda: client.chat.completions.create(
            model="sentences", messages=[{"role": "user", "content": "x"}], stream=True
        ),
    )
    refused(
        openai.BadRequestError, lambda: client.embeddings.create(model="sentences", input="x " * 99)
    )
    return [each.embedding for each in found.data]


def with_openai_async(url: str) -> Any:
    async def call() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
            asked = (client.embeddings.create(model="sentences", input=text) for text in TEXTS)
            return [each.data[0].embedding for each in await asyncio.gather(*asked)]

    return asyncio.run(call())


def with_langchain_openai(url: str) -> Any:
    client = OpenAIEmbeddings(
        base_url=f"{url}/v1", api_key=KEY, model="sentences", check_embedding_ctx_length=False
    )
    found = client.embed_documents(TEXTS)
    close(client.embed_query(TEXTS[0]), found[0])
    return found


def with_llama_index(url: str) -> Any:
    client = TextEmbeddingsInference(model_name="sentences", base_url=url)
    return client.get_text_embedding_batch(TEXTS)


def with_llama_index_rerank(url: str) -> Any:
    client = TextEmbeddingInference(base_url=url, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    return [[each.text, each.score] for each in client.postprocess_nodes(nodes, query_str=QUERY)]


def with_cohere(url: str) -> Any:
    client = cohere.ClientV2(base_url=url, api_key=KEY)
    found = client.rerank(model="reranker", query=QUERY, documents=TEXTS)
    older = cohere.Client(base_url=url, api_key=KEY)
    again = older.rerank(model="reranker", query=QUERY, documents=TEXTS, top_n=1)
    assert again.results[0].index == found.results[0].index
    return [[TEXTS[each.index], each.relevance_score] for each in found.results]


def close(one: list[float], other: list[float]) -> None:
    assert len(one) == len(other)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-6


def refused(kind: type[Exception], call: Callable[[], Any]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


CALLS = (
    with_openai, with_openai_async, with_langchain_openai, with_llama_index,
    with_llama_index_rerank, with_cohere,
)  # fmt: skip

if __name__ == "__main__":
    for each in CALLS:
        print(json.dumps({"call": each.__name__, "found": each(sys.argv[1])}), flush=True)
