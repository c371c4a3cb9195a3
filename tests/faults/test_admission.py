"""Ten times what a model can do, open loop, at a real gateway."""

from __future__ import annotations

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from benchmarks.open_loop import OpenLoopClient, Outcomes
from benchmarks.peers.clients import GRPC_PATH
from tests.faults.probes import ChangingRepository
from tests.server import serving

BOUNDED = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 60000 } }"
#: No policy: what is there by default, which a short test does not wait for.
SOONER = 'parameters { key: "admission_control_min_pending_requests" value { string_value: "24" } }'
OFF = 'parameters { key: "admission_control" value { string_value: "false" } }'
#: An execution takes about so long; what waits is answered within several of them.
EXECUTION_SECONDS = 0.02
SECONDS = 1.0
DEFAULT_SECONDS = 3.0
#: Without admission all of it is answered in the end, ten times later.
CONTROL_SECONDS = 0.4


def flooded(repository: ChangingRepository, config: str, seconds: float) -> tuple[float, Outcomes]:
    """Answers a second of a client that waits for each, and what becomes of ten times as many."""
    repository.count(config)
    with serving(repository.root) as gateway:
        turns = 20_000
        for _ in range(3):  # how long a turn takes here and now
            one = client(gateway.grpc, turns)
            one.ask()
            took = one.one_by_one(10).quantile(0.5)
            one.close()
            turns = max(1000, int(turns * EXECUTION_SECONDS / took))
        one = client(gateway.grpc, turns)
        took = one.one_by_one(20).quantile(0.5)
        outcomes = one.run(10 / took, seconds)
        one.close()
    return 1 / took, outcomes


def client(address: str, turns: int) -> OpenLoopClient:
    request = pb.ModelInferRequest(model_name="count")
    request.inputs.add(name="n", datatype="INT64", shape=[1])
    request.raw_input_contents.append(np.array([turns], np.int64).tobytes())
    return OpenLoopClient(address, GRPC_PATH, request.SerializeToString())


def holds(capacity: float, outcomes: Outcomes, seconds: float) -> bool:
    """Whether accepted requests were quick, most were refused, and the model stayed busy."""
    busy = len(outcomes.answered) >= 0.3 * capacity * seconds
    soon = outcomes.quantile(0.9) < 12 / capacity + 0.2
    return busy and soon and len(outcomes.failed) > len(outcomes.answered)


@pytest.mark.thorough
def test_ten_times_too_many_requests_leave_those_accepted_quick(
    repository: ChangingRepository,
) -> None:
    capacity, outcomes = flooded(repository, BOUNDED, SECONDS)
    said = (capacity, outcomes.quantile(0.9), len(outcomes.failed))
    assert holds(capacity, outcomes, SECONDS), said
    assert sorted(outcomes.failed)[len(outcomes.failed) // 2] < 0.25


@pytest.mark.thorough
def test_without_a_queue_policy_the_same_holds_once_it_is_known_to_be_an_overload(
    repository: ChangingRepository,
) -> None:
    capacity, outcomes = flooded(repository, SOONER, DEFAULT_SECONDS)
    said = (capacity, outcomes.quantile(0.9), len(outcomes.failed))
    assert holds(capacity, outcomes, DEFAULT_SECONDS), said
    assert sorted(outcomes.failed)[len(outcomes.failed) // 2] < 0.25


@pytest.mark.thorough
def test_the_check_sees_a_gateway_without_admission(repository: ChangingRepository) -> None:
    capacity, outcomes = flooded(repository, OFF, CONTROL_SECONDS)
    assert not holds(capacity, outcomes, CONTROL_SECONDS)
