"""Output of the clients, and their bytes on the wire."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from benchmarks.peers import clients, http_formats, models
from benchmarks.peers.models import Files
from benchmarks.peers.results import PeerSample
from modelport.loadtests.system.processes import ServerFailed

X2, FRAUD, VIT = (models.ALL[name] for name in ("x2", "fraud128", "vit_b16"))

H2LOAD = """\
finished in 2.00s, 1000.00 req/s, 90.00KB/s
requests: 2000 total, 2000 started, 2000 done, 2000 succeeded, 0 failed, 0 errored, 0 timeout
status codes: 2000 2xx, 0 3xx, 0 4xx, 0 5xx
traffic: 180.00KB (184320) total, 20.00KB (20480) headers (space savings 90%), 97.66KB ({data}) data
"""


def log(statuses: list[str], microseconds: int = 1500) -> str:
    return "".join(
        f"{number}\t{status}\t{microseconds}\n" for number, status in enumerate(statuses)
    )


def test_wrk_is_read_from_the_line_that_its_script_prints() -> None:
    line = 'JSON {"requests": 300, "seconds": 2.0, "failed": 100, "p50_us": 1500.0, "p99_us": 9000}'
    got = clients.wrk_sample(f"Running 2s test\n{line}\n")
    assert got == PeerSample(100.0, 100, 1.5, 9.0)


def test_connections_that_wrk_could_not_make_are_no_negative_rate() -> None:
    line = 'JSON {"requests": 5, "seconds": 1.0, "failed": 90, "p50_us": 0, "p99_us": 0}'
    assert clients.wrk_sample(line) == PeerSample(0.0, 90, 0.0, 0.0)


def test_wrk_without_that_line_is_an_error_not_a_zero() -> None:
    with pytest.raises(ServerFailed, match="unable to connect"):
        clients.wrk_sample("unable to connect")


def test_h2load_counts_what_was_answered() -> None:
    got = clients.h2load_sample(H2LOAD.format(data=2000 * 50), log(["200"] * 2000), 50)
    assert got == PeerSample(1000.0, 0, 1.5, 1.5)


def test_grpc_errors_are_no_requests_per_second() -> None:
    """They are HTTP 200 without data, and quicker than any answer."""
    got = clients.h2load_sample(H2LOAD.format(data=500 * 50), log(["200"] * 2000), 50)
    assert got.failed == 1500
    assert got.requests_per_second == pytest.approx(250)


def test_grpc_errors_are_distinguished_from_requests_cut_off_at_the_end() -> None:
    text = H2LOAD.replace("2000", "32").format(data=20 * 50)
    assert clients.h2load_sample(text, log(["200"] * 32), 50).failed == 12
    assert clients.h2load_sample(text, log(["200"] * 32), 50, under_way=16).failed == 0


def test_http_errors_are_no_requests_per_second() -> None:
    got = clients.h2load_sample(
        H2LOAD.format(data=2000 * 50), log(["200"] * 1000 + ["503"] * 1000), 50
    )
    assert got.failed == 1000
    assert got.requests_per_second == pytest.approx(500)


def test_a_server_that_never_answers_failed() -> None:
    got = clients.h2load_sample(H2LOAD.format(data=0), log(["500"] * 3), 50)
    assert (got.requests_per_second, got.failed) == (0.0, 3)


def test_statuses_that_h2load_cannot_read_count_where_all_the_bytes_came() -> None:
    """TorchServe's status lines have no reason, and h2load then says 0 and "failed"."""
    text = H2LOAD.replace("2000 succeeded, 0 failed", "0 succeeded, 2000 failed")
    got = clients.h2load_sample(text.format(data=2000 * 50), log(["0"] * 2000), 50)
    assert got == PeerSample(1000.0, 0, 1.5, 1.5)
    short = clients.h2load_sample(text.format(data=2000 * 49), log(["0"] * 2000), 50)
    assert (short.requests_per_second, short.failed) == (0.0, 2000)


def test_perf_analyzer_is_read_from_its_table() -> None:
    report = (
        "Concurrency,Inferences/Second,Client Send,p50 latency,p99 latency\n16,1234.5,1,900,4000\n"
    )
    assert clients.perf_analyzer_sample(report) == PeerSample(1234.5, 0, 0.9, 4.0)
    with pytest.raises(ServerFailed):
        clients.perf_analyzer_sample("Concurrency,Inferences/Second\n")


def test_json_requests_hold_the_models_tensors() -> None:
    exchange = http_formats.oip_json(FRAUD)
    inputs = {one["name"]: one for one in json.loads(exchange.body)["inputs"]}
    assert inputs["seq_lens"] == {
        "name": "seq_lens",
        "shape": [1, 1],
        "datatype": "INT64",
        "data": [64],
    }
    assert len(inputs["tokens"]["data"]) == 64
    assert exchange.path == "/v2/models/fraud128/infer"


def test_binary_requests_say_where_their_json_ends() -> None:
    exchange = http_formats.oip_binary(VIT)
    size = int(exchange.headers[http_formats.BINARY_SIZE])
    (tensor,) = json.loads(exchange.body[:size])["inputs"]
    assert tensor["parameters"]["binary_data_size"] == 4 * 3 * 224 * 224
    sent = np.frombuffer(exchange.body[size:], "<f4").reshape(tensor["shape"])
    np.testing.assert_array_equal(sent, VIT.tensors["image"])


@pytest.mark.parametrize("binary", [False, True])
def test_oip_answers_are_read_with_numbers_and_with_bytes(binary: bool) -> None:
    output = {"name": "y", "shape": [1, 2], "datatype": "FP32"}
    if binary:
        head = json.dumps({"outputs": [output | {"parameters": {"binary_data_size": 8}}]}).encode()
        body, headers = head + struct.pack("<2f", 1, 2), {http_formats.BINARY_SIZE: str(len(head))}
    else:
        body, headers = json.dumps({"outputs": [output | {"data": [1.0, 2.0]}]}).encode(), {}
    got = http_formats.oip_json(X2).read(body, headers)
    np.testing.assert_array_equal(got["y"], [[1, 2]])


def test_grpc_requests_are_framed_messages() -> None:
    frame = http_formats.oip_grpc(X2)
    compressed, length = http_formats.GRPC_FRAME.unpack_from(frame)
    assert (compressed, length) == (0, len(frame) - http_formats.GRPC_FRAME.size)
    request = pb.ModelInferRequest.FromString(frame[http_formats.GRPC_FRAME.size :])
    assert request.model_name == "x2"
    assert struct.unpack("<4f", request.raw_input_contents[0]) == (1, 2, 3, 4)


def test_grpc_answers_are_read_raw_and_typed() -> None:
    reply = pb.ModelInferResponse()
    reply.outputs.add(name="y", datatype="FP32", shape=[2]).contents.fp32_contents.extend([1, 2])
    np.testing.assert_array_equal(
        http_formats.read_oip_grpc(reply.SerializeToString())["y"], [1, 2]
    )
    reply.outputs[0].ClearField("contents")
    reply.raw_output_contents.append(struct.pack("<2f", 3, 4))
    np.testing.assert_array_equal(
        http_formats.read_oip_grpc(reply.SerializeToString())["y"], [3, 4]
    )


def test_plain_answers_are_read_as_json_and_as_npz() -> None:
    exchange = http_formats.npy("/predict")(VIT)
    np.testing.assert_array_equal(np.load(io.BytesIO(exchange.body)), VIT.tensors["image"])
    np.testing.assert_array_equal(exchange.read(b'{"y": [[1, 2]]}', {})["y"], [[1, 2]])
    file = io.BytesIO()
    np.savez(file, y=np.array([3]))
    np.testing.assert_array_equal(exchange.read(file.getvalue(), {})["y"], [3])


def test_wrong_answers_are_distinguished_from_right_ones() -> None:
    expected = {"y": np.array([[2, 4]], np.float32)}
    files = Files(X2, Path("repository"), Path("batching"), X2.tensors, expected)
    assert files.problem({"y": np.array([2, 4.00001]), "other": np.zeros(1)}) is None
    for wrong in ({}, {"y": np.array([2])}, {"y": np.array([1, 2])}, {"y": np.array([2, np.nan])}):
        assert files.problem(wrong) is not None
