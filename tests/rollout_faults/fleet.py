"""Three gateways on one repository: the leader is killed at each stage, then a person decides."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from modelport.gateway.errors import ModelportError
from modelport.gateway.rollout.lease import LEASE_SECONDS
from tests.polling import eventually
from tests.rollout_faults.clients import BASELINE, LedgerClients
from tests.rollout_faults.served import PATH, GatewayPlace, StatusWatcher, place, repository

STEPS = (0.2, 0.5, 0.8)


@dataclass
class FleetResult:
    violations: list[str] = field(default_factory=list)
    requests: int = 0
    killed: int = 0
    #: The longest time for which a gateway kept to a stage after another was in a later one.
    split_seconds: float = 0.0
    #: The longest time after a rollback's acknowledgement at which another gateway's request began
    #: that reached the candidate.
    late_seconds: float = 0.0


def run() -> FleetResult:
    """Kill the leader at each stage, roll back at one gateway, and judge."""
    result = FleetResult()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = repository(Path(folder))
        places = [place(root) for _ in range(3)]
        gateways = {each: each.start() for each in places}
        stack.callback(_close, gateways)
        clients = [LedgerClients(each.http_port, each.grpc_port) for each in places]
        watchers = [StatusWatcher(each.admin) for each in places]
        try:
            _run(result, gateways, watchers)
        except (TimeoutError, AssertionError, ModelportError) as error:
            result.violations.append(f"{type(error).__name__}: {str(error)[:500]}")
        finally:
            for client in clients:
                client.finish()
            for watcher in watchers:
                watcher.finish()
        _judge(result, clients, watchers)
    return result


def _run(
    result: FleetResult, gateways: dict[GatewayPlace, Any], watchers: list[StatusWatcher]
) -> None:
    places = list(gateways)
    request = {
        "candidate": "2", "steps": STEPS, "min_requests": 50, "min_seconds": 1.0,
        "power": 0.0,
        "limits": dict.fromkeys(("max_p50_regression", "max_p99_regression")),
    }  # fmt: skip
    plan = places[0].admin.post(PATH, {**request, "manual": True})["plan"]["id"]
    for stage in range(len(STEPS)):
        for watcher in watchers:
            eventually(lambda w=watcher, n=stage: w.looks and w.looks[-1].state["stage"] == n,  # type: ignore[misc]
                       f"stage {stage} at all gateways")  # fmt: skip
        leader = eventually(lambda: _leader(places), "a leader")
        gateways[leader].process.kill()
        gateways[leader].close()
        result.killed += 1
        eventually(lambda dead=leader: _leader([e for e in places if e is not dead]),  # type: ignore[misc]
                   "another leader")  # fmt: skip
        gateways[leader] = leader.start()
        if stage + 1 < len(STEPS):
            places[(stage + 1) % 3].admin.post(f"{PATH}/promote", {})
    places[1].admin.post(f"{PATH}/rollback", {"reason": "a hunch"})
    result_at = time.monotonic()
    for watcher in watchers:
        eventually(lambda w=watcher: w.looks[-1].state["settled"], "the end at all gateways")  # type: ignore[misc]
    time.sleep(1.0)
    for each in places:
        found = [(e["plan"]["id"], e["phase"]) for e in each.admin.get(f"{PATH}/history")]
        if found != [(plan, "rolled back")]:
            result.violations.append(f"the history has {found}")
    result.late_seconds = -result_at


def _close(gateways: dict[GatewayPlace, Any]) -> None:
    for gateway in gateways.values():
        gateway.close()


def _leader(places: list[GatewayPlace]) -> GatewayPlace | None:
    for each in places:
        try:
            if each.admin.get(PATH)["leads"]:
                return each
        except ModelportError:
            continue
    return None


def _judge(
    result: FleetResult, clients: list[LedgerClients], watchers: list[StatusWatcher]
) -> None:
    rolled_back, attempts = -result.late_seconds, [each.attempts for each in clients]
    result.requests = sum(not each.error for found in attempts for each in found)
    result.late_seconds = 0.0
    for number, found in enumerate(attempts):
        wrong = [each.wrong for each in found if each.wrong]
        late = [
            each.began - rolled_back for each in found
            if rolled_back and each.version not in ("", BASELINE) and each.began > rolled_back
        ]  # fmt: skip
        result.late_seconds = max([result.late_seconds, *late])
        if wrong:
            result.violations.append(f"answered wrongly: {wrong[:2]}")
        if late and (number == 1 or max(late) > LEASE_SECONDS):
            result.violations.append(f"gateway {number}: {len(late)} reached the candidate late")
    lost = sum(each.lost for each in clients)
    if lost:
        result.violations.append(f"{lost} requests were never answered")
    result.split_seconds = _split_seconds(watchers)
    if result.split_seconds > LEASE_SECONDS:
        result.violations.append(f"two stages at once for {result.split_seconds:.1f} s")


def _split_seconds(watchers: list[StatusWatcher]) -> float:
    """The longest time for which a gateway split by a stage after another one had a later stage."""
    looks = [look for watcher in watchers for look in watcher.looks]
    longest, began = 0.0, dict[int, float]()
    for look in sorted(looks, key=lambda each: each.at):
        if look.state["share"]:
            began.setdefault(look.state["stage"], look.at)
            later = [at for stage, at in began.items() if stage > look.state["stage"]]
            longest = max([longest, *(look.at - at for at in later)])
    return longest
