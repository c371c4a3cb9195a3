"""The context of a request: its caller, operation and record, and those of no other request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from modelport.gateway.access.context import AccessContext, AccessRecord
from modelport.gateway.access.operations import Operation
from modelport.gateway.access.policy import AccessPolicy, Rule
from modelport.gateway.access.principal import UNKNOWN_CONNECTION, Principal
from modelport.gateway.errors import PermissionDenied
from tests.gateway.access.gateway import serving
from tests.gateway.access.test_every_route import OIP

RULES = """
[[rules]]
principals = ["ci", "root"]
operations = ["infer"]
models = ["mine"]

[[rules]]
principals = ["root"]
operations = "*"

[[quotas]]
principals = ["root"]
requests_per_second = 1000
"""


def context(record: AccessRecord | None = None) -> AccessContext:
    operations = frozenset({Operation.INFER, Operation.METADATA})
    policy = AccessPolicy([Rule(("ci",), operations)])
    return AccessContext(policy.rights(Principal("ci")), record)


def test_requests_that_share_a_context_share_no_operation() -> None:
    shared = context()
    infer, metadata = shared.entering(Operation.INFER), shared.entering(Operation.METADATA)
    assert shared.operation is None
    assert infer.operation is Operation.INFER
    assert metadata.operation is Operation.METADATA
    assert not shared.rights.versions["fraud"]
    with pytest.raises(PermissionDenied):
        infer.entering(Operation.CONTROL)


def test_a_request_keeps_its_record_in_its_operation_and_no_other_request_gets_it() -> None:
    record = AccessRecord((), UNKNOWN_CONNECTION, None)
    recorded = context(record)
    entered = recorded.entering(Operation.INFER)
    assert entered.record is record
    assert entered.operation is Operation.INFER
    assert not recorded.entered


async def test_each_pipelined_request_has_the_rights_of_its_own_credential(tmp_path: Path) -> None:
    """The task of a pipelined request starts in the context of the one before."""
    expected = [
        ("root", "mine", 200), ("ci", "mine", 200), ("ci", "yours", 404), ("none", "mine", 401),
        ("root", "yours", 200), ("ci", "yours", 404), ("wrong", "mine", 401),
    ]  # fmt: skip
    body = json.dumps(OIP).encode()
    async with serving(tmp_path, RULES, "ci", "root") as gateway:
        host, port = gateway.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for caller, model, _ in expected:
            lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "host: localhost"]
            lines += [f"{name}: {value}" for name, value in gateway.headers(caller).items()]
            lines += [f"content-length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode() + body)
        for caller, _, status in expected:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            assert int(head.split()[1]) == status
            assert (b"ratelimit:" in head) == (caller == "root")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
        writer.close()
