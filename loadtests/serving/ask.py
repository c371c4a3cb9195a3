"""One request, one answer, over HTTP with JSON: what is asked before there is any load."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from loadtests.serving.cases import DTYPES, Array, Case, Cases
from loadtests.target import Protocol, Target

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
        document = json.loads(content)
        if target.protocol is Protocol.TFSERVING_HTTP:
            return _columns(document["outputs"], cases, case)
        return {
            row["name"]: np.array(row["data"], DTYPES[row["datatype"]]).reshape(row["shape"])
            for row in document["outputs"]
        }
    except (ValueError, KeyError, TypeError) as error:
        raise Refused(f"an answer that cannot be read ({error!r}): {content[:300]!r}") from error


def _oip(target: Target, cases: Cases, case: Case) -> tuple[str, bytes]:
    tensors = [
        {
            "name": name,
            "datatype": cases.inputs[name],
            "shape": list(array.shape),
            "data": array.ravel().tolist(),
        }
        for name, array in case.inputs.items()
    ]
    body = json.dumps({"inputs": tensors}).encode()
    version = target.version
    if target.protocol is Protocol.TORCHSERVE_HTTP:
        return f"/predictions/{target.model}{f'/{version}' if version else ''}", body
    return f"/v2/models/{target.model}{f'/versions/{version}' if version else ''}/infer", body


def _tfserving(target: Target, cases: Cases, case: Case) -> tuple[str, bytes]:
    inputs = {}
    for name, array in case.inputs.items():
        if name in cases.reshape:
            array = array.reshape(len(array), *cases.reshape[name])
        inputs[name] = array.tolist()
    version = f"/versions/{target.version}" if target.version else ""
    return f"/v1/models/{target.model}{version}:predict", json.dumps({"inputs": inputs}).encode()


def _columns(outputs: Any, cases: Cases, case: Case) -> dict[str, Array]:
    """In the wire's shapes; a model with one output answers with that tensor, without its name."""
    if not isinstance(outputs, Mapping):
        outputs = {next(iter(cases.outputs)): outputs}
    found = {}
    for name, datatype in cases.outputs.items():
        array = np.array(outputs[name], DTYPES[datatype])
        wire = case.expected[name].shape
        found[name] = array.reshape(wire) if name in cases.reshape else array
    return found
