"""One request, one answer, over HTTP with JSON: what is asked before there is any load."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping

from loadtests.payloads import Array
from loadtests.serving.cases import Case, Cases
from loadtests.target import Protocol, Target
from loadtests.users import oip, oip_http, tfserving, torchserve
from loadtests.users.answers import ONLY

TIMEOUT_SECONDS = 30.0


class Refused(Exception):
    """The server answered with an error, or with nothing that can be read."""


def ask(
    target: Target, cases: Cases, case: Case, timeout_seconds: float = TIMEOUT_SECONDS
) -> dict[str, Array]:
    """Outputs by name, in the wire's shapes.

    ``target`` speaks the Open Inference Protocol, TorchServe's dialect (with the same body, as the
    archives of ``modelport package`` take it) or TensorFlow Serving's REST.

    Raises:
        Refused: an error status, or an answer that cannot be read.
        OSError: no connection, or it broke.
    """
    if target.protocol is Protocol.TFSERVING_HTTP:
        path, body = _tfserving(target, cases, case)
    else:
        path, body = _oip(target, cases, case)
    host, _, port = target.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=timeout_seconds)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"no HTTP answer: {error!r}") from error
    finally:
        connection.close()
    if reply.status != 200:
        raise Refused(f"HTTP {reply.status}: {content[:300].decode(errors='replace')}")
    try:
        if target.protocol is Protocol.TFSERVING_HTTP:
            return _columns(tfserving.read_rest(content, None), cases, case)
        return dict(oip.read_http(content, None))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"an answer that cannot be read ({error!r}): {content[:300]!r}") from error


def _oip(target: Target, cases: Cases, case: Case) -> tuple[str, bytes]:
    tensors = [
        {
            "name": name,
            "datatype": cases.inputs[name],
            "shape": list(array.shape),
            "data": oip.plain(array),
        }
        for name, array in case.inputs.items()
    ]
    body = json.dumps({"inputs": tensors}).encode()
    if target.protocol is Protocol.TORCHSERVE_HTTP:
        return torchserve.path(target), body
    return oip_http.path(target), body


def _tfserving(target: Target, cases: Cases, case: Case) -> tuple[str, bytes]:
    inputs = {}
    for name, array in case.inputs.items():
        if name in cases.reshape:
            array = array.reshape(len(array), *cases.reshape[name])
        inputs[name] = tfserving.values(array)
    return tfserving.path(target), json.dumps({"inputs": inputs}).encode()


def _columns(outputs: Mapping[str, Array], cases: Cases, case: Case) -> dict[str, Array]:
    """In the wire's shapes; a model with one output answers with that tensor, without its name."""
    if ONLY in outputs:
        outputs = {next(iter(cases.outputs)): outputs[ONLY]}
    return {
        name: array.reshape(case.expected[name].shape) if name in cases.reshape else array
        for name, array in outputs.items()
    }
