"""``/openapi.json`` lists every status and content type that occurs.

``make peer-suites`` (``schemathesis``) generates thousands of requests from it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance import wire
from tests.conformance.wire import KeptConnection, WireReply
from tests.server import Gateway

GIVEN = {"{model}": "x2", "{version}": "1", "{label}": "stable", "{region}": "r"}
UNKNOWN = dict.fromkeys(GIVEN, "nope")
EVENT = {f"ce-{name}": "1.0" for name in ("specversion", "id", "source", "type")}
ROWS = b'{"instances": [[1, 2, 3, 4]]}'
REQUESTS: tuple[tuple[bytes, dict[str, str]], ...] = (
    *((body, {}) for body in (b"", b"{", wire.good_body(), ROWS)),
    (b"", {"content-encoding": "br"}),
    (ROWS, EVENT),
)
Exchange = tuple[str, str, WireReply]


@pytest.fixture(scope="module")
def document(gateway: Gateway) -> Any:
    return wire.send(gateway.http, "GET", "/openapi.json").json


@pytest.fixture(scope="module")
def exchanges(gateway: Gateway, document: Any) -> list[Exchange]:
    return list(exchanged(KeptConnection(gateway.http), document))


def exchanged(connection: KeptConnection, document: Any) -> Iterator[Exchange]:
    for path, operations in document["paths"].items():
        for method in operations:
            for names in (GIVEN, UNKNOWN):
                asked = path
                for name, value in names.items():
                    asked = asked.replace(name, value)
                for body, headers in REQUESTS if method in ("post", "put") else REQUESTS[:1]:
                    yield path, method, connection.send(method.upper(), asked, body, headers)
    connection.close()


def undocumented(document: Any, exchanges: list[Exchange]) -> set[tuple[str, str, int, str]]:
    """Path, method, status and content type of responses that the document does not have."""
    found = set()
    for path, method, reply in exchanges:
        responses = document["paths"][path][method]["responses"]
        kind = reply.headers.get("content-type", "").partition(";")[0]
        response = responses.get(str(reply.status))
        if response is None or (reply.body and kind not in response.get("content", {})):
            found.add((path, method, reply.status, kind))
    return found


def test_every_response_is_documented(document: Any, exchanges: list[Exchange]) -> None:
    statuses = {reply.status for _, _, reply in exchanges}
    assert statuses >= {200, 400, 404, 501}
    assert undocumented(document, exchanges) == set()


def test_a_status_or_a_content_type_that_is_missing_is_found(
    document: Any, exchanges: list[Exchange]
) -> None:
    """Known-bad documents."""
    poor = copy.deepcopy(document)
    del poor["paths"]["/v2/models/{model}/infer"]["post"]["responses"]["404"]
    del poor["paths"]["/v1/models/{model}:predict"]["post"]["responses"]["200"]["content"]
    assert undocumented(poor, exchanges) == {
        ("/v2/models/{model}/infer", "post", 404, "application/json"),
        ("/v1/models/{model}:predict", "post", 200, "application/json"),
    }
