"""Traces: what a real collector gets, over OTLP by HTTP and gRPC."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from prometheus_client.openmetrics import parser as openmetrics

from modelport.gateway.repository import routes_file
from modelport.gateway.telemetry import trace_settings
from modelport.gateway.telemetry.statistics import PHASES
from tests import models
from tests.gateway.telemetry import observed_gateway
from tests.gateway.telemetry.observed_gateway import STREAM, ObservedGateway, message, serving

collector_module = pytest.importorskip("tests.gateway.telemetry.collector", exc_type=ImportError)
from modelport.gateway.wire.proto import grpc_service_pb2 as pb  # noqa: E402
from tests.gateway.telemetry.collector import Collector, attributes, collecting  # noqa: E402
from tests.polling import until  # noqa: E402
from tests.server import serving as serving_process  # noqa: E402

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01", "tracestate": "vendor=1"}
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.2"
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT}-00", "baggage": "user=7"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return observed_gateway.repository(tmp_path_factory.mktemp("traced"))


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def use(monkeypatch: pytest.MonkeyPatch, collector: Collector, protocol: str) -> Any:
    for name, value in collector.environment(protocol).items():
        monkeypatch.setenv(name, value)
    return trace_settings.parse_config(())


@pytest_asyncio.fixture(params=["grpc", "http/protobuf"])
async def gateway(
    request: pytest.FixtureRequest,
    folder: Path,
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[ObservedGateway]:
    config = use(monkeypatch, collector, request.param)
    async with serving(folder, traces=config) as found:
        yield found


async def spans_of(collector: Collector, name: str, count: int = 1) -> list[Any]:
    await until(lambda: len(collector.named(name)) >= count, seconds=20)
    return collector.named(name)


async def test_a_request_is_one_trace_with_a_span_for_each_phase(
    gateway: ObservedGateway, collector: Collector
) -> None:
    await gateway.infer("cached", **SAMPLED)
    [root] = await spans_of(collector, "POST /v2/models/{model}/infer")
    assert root.trace_id.hex() == TRACE_ID
    assert root.parent_span_id.hex() == PARENT
    assert root.trace_state == "vendor=1"
    assert root.kind == root.SPAN_KIND_SERVER
    found = attributes(root)
    assert found["http.response.status_code"] == 200
    assert found["http.route"] == "/v2/models/{model}/infer"
    assert (found["modelport.model"], found["modelport.version"]) == ("cached", 1)
    assert collector.resources[0]["service.name"] == "modelport"
    assert collector.resources[0]["deployment.environment.name"] == "test"
    children = {span.name: span for span in collector.spans if span.parent_span_id == root.span_id}
    assert set(children) >= {"decode", "cache", "compute", "encode"}
    for span in children.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano


async def scraped(gateway: ObservedGateway, accept: str) -> httpx.Response:
    url = f"http://127.0.0.1:{gateway.server.ports.metrics_port}/metrics"
    return await gateway.http.get(url, headers={"accept": accept})


async def test_a_traced_request_is_an_exemplar_of_its_buckets_in_openmetrics(
    gateway: ObservedGateway, collector: Collector
) -> None:
    await gateway.infer("x2", **UNSAMPLED)
    before = await scraped(gateway, OPENMETRICS)
    assert "trace_id" not in before.text
    await gateway.infer("x2", **SAMPLED)
    await gateway.call("cached", **SAMPLED)
    [root] = await spans_of(collector, "POST /v2/models/{model}/infer")
    found = await scraped(gateway, OPENMETRICS)
    assert found.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = [*openmetrics.text_string_to_metric_families(found.text)]
    kept = {
        (family.name, sample.labels["model"]): (float(sample.labels["le"]), sample.exemplar)
        for family in families
        for sample in family.samples
        if sample.exemplar
    }
    assert {name for name, model in kept if model == "x2"} == {
        f"nv_inference_{phase}_duration_histogram_us" for phase in PHASES
    }
    for bound, exemplar in kept.values():
        assert exemplar.labels["trace_id"] == TRACE_ID
        assert exemplar.value <= bound
    [span] = {e.labels["span_id"] for (_, model), (_, e) in kept.items() if model == "x2"}
    assert span == root.span_id.hex()
    assert "trace_id" not in (await scraped(gateway, "text/plain")).text


@pytest.mark.thorough
async def test_exemplars_come_from_all_workers(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, collector, "grpc")
    with serving_process(folder, "--workers", "2", may_fork=False) as gateway:
        async with httpx.AsyncClient() as http:
            url = f"http://{gateway.http}/v2/models/x2/infer"
            await http.post(url, json=observed_gateway.OIP, headers=SAMPLED)
            found = await http.get(gateway.metrics, headers={"accept": OPENMETRICS})
    families = openmetrics.text_string_to_metric_families(found.text)
    kept = [s.exemplar for family in families for s in family.samples if s.exemplar]
    assert {each.labels["trace_id"] for each in kept} == {TRACE_ID}
    assert len(kept) == len(PHASES)


async def test_a_pipeline_has_a_span_for_each_step(
    gateway: ObservedGateway, collector: Collector
) -> None:
    await gateway.call("both", **SAMPLED)
    [root] = await spans_of(collector, "inference.GRPCInferenceService/ModelInfer")
    steps = collector.named("step")
    assert [attributes(each)["modelport.step_model"] for each in steps] == ["x2", "cached"]
    assert {each.parent_span_id for each in steps} == {root.span_id}
    inside = {s.name for s in collector.spans if s.parent_span_id == steps[1].span_id}
    assert {"cache", "compute"} <= inside
    assert attributes(root)["rpc.response.status_code"] == "OK"


async def test_a_batch_links_its_requests_of_several_traces(
    gateway: ObservedGateway, collector: Collector
) -> None:
    await asyncio.gather(gateway.infer("pairs"), gateway.infer("pairs"))
    roots = await spans_of(collector, "POST /v2/models/{model}/infer", 2)
    [batch] = collector.named("batch")
    assert {link.span_id for link in batch.links} == {root.span_id for root in roots}
    assert len({root.trace_id for root in roots}) == 2
    assert attributes(batch)["modelport.batch_size"] == 2
    computed = collector.named("compute")
    assert {each.parent_span_id for each in computed} == {root.span_id for root in roots}
    assert all(each.links[0].span_id == batch.span_id for each in computed)
    assert len(collector.named("queue")) == 2


async def test_a_failure_is_an_error_in_its_trace(
    gateway: ObservedGateway, collector: Collector
) -> None:
    await gateway.infer("nothing")
    [root] = await spans_of(collector, "POST /v2/models/{model}/infer")
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert "unknown model" in root.status.message


async def test_each_message_of_a_stream_is_a_trace(
    gateway: ObservedGateway, collector: Collector
) -> None:
    call = gateway.channel.stream_stream(
        STREAM, pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
    )
    _ = [each async for each in call(iter([message("repeat"), message("x2")]))]
    roots = await spans_of(collector, "inference.GRPCInferenceService/ModelStreamInfer", 2)
    assert {attributes(each)["modelport.model"] for each in roots} == {"repeat", "x2"}


async def test_what_is_not_sampled_sends_nothing(
    gateway: ObservedGateway, collector: Collector
) -> None:
    await gateway.infer("both", **UNSAMPLED)
    await gateway.http.get("/v2/health/ready")
    await gateway.infer("x2", traceparent="00-junk-junk-01")  # no context: a trace of its own
    [root] = await spans_of(collector, "POST /v2/models/{model}/infer")
    assert attributes(root)["modelport.model"] == "x2"
    assert {span.trace_id for span in collector.spans} == {root.trace_id}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_trace_goes_on_in_the_server_behind(
    protocol: str, folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = use(monkeypatch, collector, "grpc")
    with serving_process(folder) as behind:  # one that routes to itself would be a loop
        path = folder.parent / f"{protocol}.toml"
        path.write_text(
            f'[models.far]\nbackend = "triton"\nmodel = "x2"\nprotocol = "{protocol}"\n'
            f'endpoints = ["{getattr(behind, protocol)}"]\n'
        )
        async with serving(folder, traces=config, routes=routes_file.load(path)) as front:
            response = await front.infer("far", **SAMPLED, baggage="user=7")
            assert response.status_code == 200
            [attempt] = await spans_of(collector, "attempt")
            await until(lambda: len(collector.named("decode")) >= 2)
    assert attempt.kind == attempt.SPAN_KIND_CLIENT
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    [inner] = [span for span in collector.spans if span.parent_span_id == attempt.span_id]
    assert inner.kind == inner.SPAN_KIND_SERVER


MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = [np.array([str(each.trace().get_context())], dtype=object) for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("context", each)]) for each in found]
"""


@pytest.mark.thorough
async def test_a_python_model_has_the_context_of_its_request(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.repository(tmp_path)
    (tmp_path / "seer" / "1").mkdir(parents=True)
    (tmp_path / "seer" / "1" / "model.py").write_text(MODEL)
    text = models.config("seer", ["x FP32 1,4"], ["context BYTES 1"], 0, "python")
    (tmp_path / "seer" / "config.pbtxt").write_text(text)
    config = use(monkeypatch, collector, "grpc")
    async with serving(tmp_path, traces=config, allow_python=True) as gateway:
        response = await gateway.infer("seer", **SAMPLED)
        [root] = await spans_of(collector, "POST /v2/models/{model}/infer")
        [seen] = response.json()["outputs"][0]["data"]
    assert json.loads(seen)["traceparent"] == f"00-{TRACE_ID}-{root.span_id.hex()}-01"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
async def test_a_collector_that_is_down_delays_nothing_and_is_called_no_more_after_the_end(
    folder: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    before = set(threading.enumerate())
    config = use(monkeypatch, collector, protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "32")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    async with serving(folder, traces=config) as gateway:
        for _ in range(50):
            assert (await gateway.infer("x2")).status_code == 200
    assert not collector.spans
    left = [each.name for each in set(threading.enumerate()) - before if each.is_alive()]
    assert not [name for name in left if "Otel" in name]
