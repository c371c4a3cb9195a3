"""The Open Inference Protocol's own documents held against a server on the usual ports.

``OIP`` names the folder of ``open_inference_rest.yaml`` and ``open_inference_grpc.proto``. Every
answer must be of the schema that the document has for it, and every call of the proto must work
with messages compiled from it. The model is ``x2`` (FP32 ``y`` = 2 ``x``, a row of 4).
"""

import os
import struct
import sys
import tempfile
from pathlib import Path

import grpc
import jsonschema
import pytest
import requests
import yaml

FOLDER = Path(os.environ["OIP"])
DOCUMENT = yaml.safe_load((FOLDER / "open_inference_rest.yaml").read_text())
URL, GRPC = "http://localhost:8000", "localhost:8001"
TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
VALUES = struct.pack("<4f", 2, 4, 6, 8)


def check(document, name):
    """Raise unless ``document`` is of the schema ``name``."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.validate(document, schema)


def path_of(template, model="x2", version="1"):
    return template.replace("${MODEL_NAME}", model).replace("${MODEL_VERSION}", version)


def schema_of(operation, status):
    content = operation["responses"][status].get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return reference.rpartition("/")[2]


GETS = [path for path, item in DOCUMENT["paths"].items() if "get" in item]
POSTS = [path for path, item in DOCUMENT["paths"].items() if "post" in item]


@pytest.mark.parametrize("path", GETS)
def test_a_documented_path_answers_200_with_its_schema(path):
    reply = requests.get(URL + path_of(path), timeout=10)
    assert reply.status_code == 200
    name = schema_of(DOCUMENT["paths"][path]["get"], "200")
    if name:
        check(reply.json(), name)


@pytest.mark.parametrize("path", GETS)
def test_without_a_version_too(path):
    short = path.replace("/versions/${MODEL_VERSION}", "")
    assert requests.get(URL + path_of(short), timeout=10).status_code == 200


@pytest.mark.parametrize("path", [path for path in GETS if "MODEL_NAME" in path])
def test_an_unknown_model_is_an_error_of_the_schema(path):
    reply = requests.get(URL + path_of(path, "nobody"), timeout=10)
    assert 400 <= reply.status_code < 500
    check(reply.json(), "metadata_model_error_response")


BODIES = {
    "plain": {"inputs": [TENSOR]},
    "nested": {"inputs": [{**TENSOR, "data": [[1, 2, 3, 4]]}]},
    "with an id": {"id": "42", "inputs": [TENSOR]},
    "with parameters": {"parameters": {"mine": "1"}, "inputs": [{**TENSOR, "parameters": {}}]},
    "with outputs": {"inputs": [TENSOR], "outputs": [{"name": "y", "parameters": {}}]},
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("path", POSTS)
def test_an_inference_request_is_answered_by_its_schema(path, body):
    check(BODIES[body], "inference_request")
    reply = requests.post(URL + path_of(path), json=BODIES[body], timeout=10)
    assert reply.status_code == 200
    check(reply.json(), "inference_response")
    assert reply.json()["outputs"][0]["data"] == [2, 4, 6, 8]
    assert reply.json().get("id") == BODIES[body].get("id")


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("body", [{}, {"inputs": []}, {"inputs": [{**TENSOR, "shape": [3]}]}, []])
def test_a_bad_inference_request_is_an_error_of_the_schema(path, body):
    reply = requests.post(URL + path_of(path), json=body, timeout=10)
    assert reply.status_code == 400
    check(reply.json(), "inference_error_response")


@pytest.mark.parametrize(("path", "key"), [("live", "live"), ("ready", "ready")])
def test_health_has_the_documents_body(path, key):
    """``inference_rest.md``: ``$live_server_response``, ``$ready_server_response``."""
    assert requests.get(f"{URL}/v2/health/{path}", timeout=10).json() == {key: True}


def test_a_ready_model_has_the_documents_body():
    """``inference_rest.md``: ``$ready_model_response``."""
    told = requests.get(f"{URL}/v2/models/x2/ready", timeout=10).json()
    assert told == {"name": "x2", "ready": True}


# -- gRPC -----------------------------------------------------------------------------------------


def compiled():
    from grpc_tools import protoc

    folder = tempfile.mkdtemp()
    proto = FOLDER / "open_inference_grpc.proto"
    where = [f"-I{proto.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main(["protoc", *where, str(proto)]) == 0
    sys.path.insert(0, folder)
    import open_inference_grpc_pb2 as pb
    import open_inference_grpc_pb2_grpc as services

    return pb, services.GRPCInferenceServiceStub(grpc.insecure_channel(GRPC))


pb, stub = compiled()


def test_server_live():
    assert stub.ServerLive(pb.ServerLiveRequest()).live is True


def test_server_ready():
    assert stub.ServerReady(pb.ServerReadyRequest()).ready is True


@pytest.mark.parametrize("version", ["", "1"])
def test_model_ready(version):
    assert stub.ModelReady(pb.ModelReadyRequest(name="x2", version=version)).ready is True


def test_server_metadata():
    told = stub.ServerMetadata(pb.ServerMetadataRequest())
    assert told.name
    assert told.version


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata(version):
    told = stub.ModelMetadata(pb.ModelMetadataRequest(name="x2", version=version))
    assert [(t.name, t.datatype, list(t.shape)) for t in told.inputs] == [("x", "FP32", [-1, 4])]
    assert [(t.name, t.datatype) for t in told.outputs] == [("y", "FP32")]


@pytest.mark.parametrize("raw", [True, False])
def test_model_infer(raw):
    request = pb.ModelInferRequest(model_name="x2", id="42")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    if raw:
        request.raw_input_contents.append(struct.pack("<4f", 1, 2, 3, 4))
    else:
        tensor.contents.fp32_contents.extend([1, 2, 3, 4])
    reply = stub.ModelInfer(request)
    assert (reply.model_name, reply.model_version, reply.id) == ("x2", "1", "42")
    assert reply.raw_output_contents[0] == VALUES


def test_an_unknown_model_is_an_error():
    with pytest.raises(grpc.RpcError):
        stub.ModelInfer(pb.ModelInferRequest(model_name="nobody"))
