"""Two workers, one answer: whichever of them is asked, and whatever is changed through it."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from modelport.gateway.server.workers import forwarded_requests
from modelport.gateway.wire.proto import serving_pb2
from tests.faults import probes
from tests.faults.probes import EXPLICIT, ChangingRepository
from tests.faults.traffic import failures, flowing
from tests.gateway.server.workers.processes import (
    CONNECTIONS,
    TWO,
    WorkerConnection,
    everywhere,
    factors,
    indexes,
    served,
    slow,
    statistics,
    statuses,
    workers,
)
from tests.polling import eventually
from tests.server import Gateway, serving

#: Longer than the hub waits for a worker, and than this busy machine delays it.
HANGS_SECONDS = 5.0


@pytest.fixture(scope="module")
def explicit(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Gateway, ChangingRepository]]:
    root = tmp_path_factory.mktemp("explicit")
    repository = ChangingRepository(root)
    repository.version(2.0)
    repository.version(5.0, model="other")
    repository.slow(600)
    with serving(root, *TWO, *EXPLICIT, "--load-model", "m") as gateway:
        yield gateway, repository


def channels(gateway: Gateway) -> list[grpc.Channel]:
    """Connections of their own, so that both workers are asked."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return [grpc.insecure_channel(gateway.grpc, options) for _ in range(12)]


def test_statistics_are_the_sum_over_both_protocols_while_requests_flow(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO) as gateway:
        with flowing(gateway, (2.0,), ("http", "grpc", "tfserving-http"), each=3) as traffic:
            eventually(lambda: traffic.each_has(20), "traffic flows")
            during = [entry["inference_count"] for entry in statistics(gateway)]
            assert during == sorted(during), "a later answer counts less than an earlier one"
            assert set(everywhere(gateway, lambda c: c.ask("GET", "/v2/health/ready")[0])) == {200}
        assert failures(traffic.outcomes) == []
        answered = len(traffic.outcomes)
        stats = statistics(gateway)
        assert {entry["inference_stats"]["success"]["count"] for entry in stats} == {answered}
        assert {entry["inference_count"] for entry in stats} == {2 * answered}, "two rows each"
        assert [row["batch_size"] for row in stats[0]["batch_stats"]] == [2]
        for channel in channels(gateway):
            with channel:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                (entry,) = stub.ModelStatistics(pb.ModelStatisticsRequest(name="m")).model_stats
                assert entry.inference_stats.success.count == answered
                assert stub.ServerReady(pb.ServerReadyRequest()).ready
        assert served(gateway) == answered
        text = httpx.get(gateway.metrics).text
        tfserving = [o for c in traffic.clients if c.name.startswith("tf") for o in c.outcomes]
        line = ':tensorflow:serving:request_count{model_name="m",status="OK"} '
        assert f"{line}{len(tfserving)}\n" in text
        assert "nv_inference_pending_request_count" in text
        assert text.count("# TYPE nv_inference_count counter") == 1


def test_what_a_worker_that_hangs_has_counted_stays_in_the_sum(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, _ = explicit
    factors(gateway)
    total = statistics(gateway)[0]["inference_count"]
    hanging = workers(gateway)[1]
    os.kill(hanging, signal.SIGSTOP)
    try:
        assert probes.metric(gateway, "count", model="m") == total
    finally:
        os.kill(hanging, signal.SIGCONT)


def test_the_metrics_port_has_a_worker_answer_requests_of_the_console(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, _ = explicit
    before = statistics(gateway)[0]["inference_count"]
    with httpx.Client(base_url=gateway.metrics.removesuffix("/metrics")) as client:
        row = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
        reply = client.post("/v2/models/m/infer?a=b", json={"inputs": [row]})
        assert (reply.status_code, reply.json()["outputs"][0]["data"]) == (200, [2, 4, 6, 8])
        assert client.get("/v2/models/m/versions/9").status_code == 404
        assert client.post(
            "/v2/models/m/generate_stream", json={"x": [1, 2, 3, 4]}
        ).text.startswith("data: ")
        assert client.post("/v2/repository/models/other/load").status_code == 200
        states = [row.get("state") for row in client.post("/v2/repository/index").json()]
        assert states == ["READY", "READY", None]
        assert client.post("/v2/repository/models/other/unload").status_code == 200
        body = bytes(forwarded_requests.MAX_BYTES + 1)
        assert client.post("/v2/models/m/infer", content=body).status_code == 413
        assert client.get("/v2/requests").status_code == 404, "there is no access log"
        text = client.get("/metrics?model=m").text
        assert 'nv_inference_count{model="m"' in text
        assert 'model="other",version' not in text
        assert client.get("/console").status_code == 200
    assert statistics(gateway)[0]["inference_count"] == before + 2


def test_a_client_that_leaves_the_metrics_port_takes_its_request_out_of_the_worker(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, _ = explicit
    row = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = json.dumps({"inputs": [row]})

    def waits(number: int) -> None:
        count = partial(probes.metric, gateway, "modelport_requests_in_flight", model="slow")
        eventually(lambda: count() == number, f"{number} in flight")

    assert probes.load(gateway, "slow").status_code == 200
    port = httpx.URL(gateway.metrics).netloc.decode()
    for _ in range(2):
        with closing(http.client.HTTPConnection(port)) as connection:
            connection.request("POST", "/v2/models/slow/infer", body)
            waits(1)
        waits(0)
    assert probes.post(gateway, "/v2/repository/models/slow/unload").status_code == 200


@slow
def test_a_hung_worker_does_not_hang_the_answer_and_the_gateway_is_not_ready(
    repository: ChangingRepository,
) -> None:
    repository.version(2.0)
    with serving(repository.root, *TWO) as gateway:
        stopped = workers(gateway)[1]

        def ask(_: int) -> tuple[int, str] | None:
            with closing(WorkerConnection(gateway, HANGS_SECONDS)) as connection:
                try:
                    status, _text = connection.ask("GET", "/v2/health/ready")
                    return status, connection.ask("POST", "/v2/repository/index")[1]
                except TimeoutError:  # it is the stopped one that was reached
                    return None

        os.kill(stopped, signal.SIGSTOP)
        try:
            with ThreadPoolExecutor(CONNECTIONS) as threads:
                answers = set(threads.map(ask, range(CONNECTIONS)))
            (answer,) = answers - {None}
            assert answer is not None
            status, index = answer
            assert status == 400
            assert '"UNAVAILABLE","reason":"worker 1 does not respond' in index
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert len(answers) == 2, "some reached the stopped worker"
        eventually(lambda: probes.ready(gateway), "it goes on")


def test_load_unload_and_reload_reach_every_worker(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, repository = explicit
    assert factors(gateway) == {2.0}
    assert statuses(gateway, "other") == {404}
    assert probes.load(gateway, "other").status_code == 200
    assert factors(gateway, "other") == {5.0}
    (index,) = indexes(gateway)
    assert index.count("READY") == 2
    repository.version(7.0, 2, "other")
    assert factors(gateway, "other") == {5.0}, "nothing changes before it is asked for"
    assert probes.load(gateway, "other").status_code == 200
    assert factors(gateway, "other") == {7.0}
    assert probes.unload(gateway, "other").status_code == 200
    assert statuses(gateway, "other") == {404}
    eventually(lambda: len(indexes(gateway)) == 1, "version 1 is unloaded in every worker")
    (index,) = indexes(gateway)
    assert index.count('"READY"') == 1
    assert '"unloaded"' in index


def test_tensorflow_servings_reload_reaches_every_worker_and_its_status_is_one(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, repository = explicit
    repository.version(3.0, 2)
    request = serving_pb2.ReloadConfigRequest()
    config = request.config.model_config_list.config.add(name="m")
    config.model_version_policy.specific.versions.extend([1, 2])
    config.version_labels["stable"] = 1
    with grpc.insecure_channel(gateway.grpc) as channel:
        reload = channel.unary_unary("/tensorflow.serving.ModelService/HandleReloadConfigRequest")
        reload(request.SerializeToString(), timeout=30)
    base = "/v1/models/m"

    def ask(connection: WorkerConnection) -> tuple[str, str]:
        body = {"instances": [[1.0] * 4]}
        stable = connection.ask("POST", f"{base}/labels/stable:predict", body)[1]
        return stable, connection.ask("GET", base)[1]

    ((stable, status),) = set(everywhere(gateway, ask))
    assert json.loads(stable) == {"predictions": [[2.0] * 4]}
    assert status.count('"AVAILABLE"') == 2
    assert factors(gateway) == {3.0}, "the newest"


def test_torchserves_set_default_and_unregister_reach_every_worker(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, _ = explicit
    base = f"http://{gateway.http}/models/m"
    assert httpx.put(f"{base}/1/set-default").status_code == 200
    assert factors(gateway) == {2.0}
    described = everywhere(gateway, lambda c: c.get("/models/m")[0]["modelVersion"])
    assert set(described) == {"1"}
    deleted = httpx.delete(f"{base}/2")
    assert deleted.status_code == 200, deleted.text
    assert set(everywhere(gateway, lambda c: len(c.get("/models/m/all")))) == {1}


def test_a_failed_load_is_refused_with_the_reason_which_the_index_also_has(
    explicit: tuple[Gateway, ChangingRepository],
) -> None:
    gateway, repository = explicit
    repository.version(2.0, model="broken")
    repository.file(model="broken").write_bytes(b"no model")
    refusal = probes.load(gateway, "broken")
    assert refusal.status_code == 400
    assert "worker" not in refusal.text, "it fails alike everywhere"
    (index,) = indexes(gateway)
    assert '"UNAVAILABLE"' in index
    assert statuses(gateway, "broken") == {404}


def test_a_load_that_fails_in_one_worker_alone_says_so_and_is_not_ready(
    repository: ChangingRepository,
) -> None:
    """Its artifact goes when the first of them has loaded it and the second has not looked yet."""
    repository.version(2.0)
    repository.version(3.0, model="late")
    with serving(repository.root, *TWO, *EXPLICIT, "--load-model", "m") as gateway:
        artifact = repository.file(model="late")
        hidden = artifact.with_name("hidden.onnx")
        stopped = workers(gateway)[1]
        request = pb.RepositoryModelLoadRequest(model_name="late")
        os.kill(stopped, signal.SIGSTOP)
        try:
            with ExitStack() as stack:
                stubs = [
                    service_pb2_grpc.GRPCInferenceServiceStub(stack.enter_context(channel))
                    for channel in channels(gateway)
                ]
                calls = [stub.RepositoryModelLoad.future(request, timeout=30) for stub in stubs]
                gateway.wait_for("model version is ready", model="late", worker=0)
                artifact.rename(hidden)
                os.kill(stopped, signal.SIGCONT)
                errors = {str(call.exception().details()) for call in calls}
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert any("(in worker 1 of 2 workers)" in error for error in errors), errors
        state, reason = probes.index(gateway, "late")["1"]
        assert state == "UNAVAILABLE"
        assert "1 of 2 workers" in reason
        ready = "/v2/models/late/ready"
        assert set(everywhere(gateway, lambda c: c.ask("GET", ready)[0])) == {400}
        hidden.rename(artifact)
        assert probes.load(gateway, "late").status_code == 200
        assert factors(gateway, "late") == {3.0}
        assert probes.index(gateway, "late")["1"] == ("READY", "")
