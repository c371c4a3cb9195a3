"""Latency of a model while a rollout copies requests to a candidate, and without.

The model is the demo's fraud transformer; its candidate is the same artifact as another version.
One gateway serves both, pinned to one core, and an open-loop client on another core sends half of
what the gateway can answer. Each turn has a round with a shadow stage and two without, in changing
order. A noisy moment disturbs all of a turn, so the figures are medians of ratios within turns;
many short turns are less noisy than few long ones. The two rounds without a shadow stage give the
noise: their ratio, which is 1 but for it. The rate of answers to clients that saturate the gateway
stands beside them, without a limit.
"""

from __future__ import annotations

import argparse
import http
import json
import os
import shutil
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import script
from benchmarks.open_loop import OpenLoopHttpClient
from benchmarks.peers.servers.modelport import executable
from modelport.loadtests.system import environments
from modelport.loadtests.system.processes import HOST, free_ports, running

P99_RATIO, THROUGHPUT_RATIO = 1.05, 0.97
LOAD, IN_FLIGHT, TOKENS = 0.5, 4, 32
#: Warm-up of each round, and most time that the end of a rollout takes.
WARM_UP_SECONDS, END_SECONDS = 1.0, 30.0
POLICY = "version_policy { specific { versions: 1 } }"


@dataclass(frozen=True)
class ShadowRound:
    """One round, with the shadow stage or without."""

    p50_seconds: float
    p99_seconds: float
    failed: int
    #: Answers per second at half load, and to clients that saturate the gateway.
    throughput: float
    saturated: float


class ShadowedGateway:
    """A gateway, and the commands of its rollout."""

    def __init__(self, port: int, metrics: int, share: float) -> None:
        value = [number * 7 % 500 for number in range(TOKENS)]
        body = {
            "inputs": [
                {"name": "tokens", "datatype": "INT64", "shape": [1, TOKENS], "data": value},
                {"name": "seq_lens", "datatype": "INT64", "shape": [1, 1], "data": [TOKENS]},
            ]
        }
        self.client = OpenLoopHttpClient(
            f"{HOST}:{port}", "/v2/models/fraud/infer", json.dumps(body).encode()
        )
        self._url = f"http://{HOST}:{metrics}/v2/rollouts/fraud"
        self._share = share
        self.copies: dict[str, int] = dict.fromkeys(("compared", "disagreed", "dropped"), 0)

    def _post(self, path: str, document: dict[str, Any]) -> None:
        content, header = json.dumps(document).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, content, header)):
            pass

    def begin(self) -> None:
        """Start a rollout that stays in its shadow stage, once the last one has ended."""
        plan = {"candidate": "2", "shadow": self._share, "manual": True, "keep": True}
        until = time.monotonic() + END_SECONDS
        while True:
            try:
                return self._post("", plan)
            except urllib.error.HTTPError as error:
                if error.code != http.HTTPStatus.CONFLICT or time.monotonic() > until:
                    raise
                time.sleep(0.2)

    def end(self) -> None:
        """Add the counts of the rollout, and end it."""
        time.sleep(1.5)  # the counts of the last second
        with urllib.request.urlopen(self._url) as answer:
            stage = json.load(answer)["counts"][0]
        for name in self.copies:
            self.copies[name] += stage[name]
        self._post("/rollback", {"reason": "the round is over"})

    def measure(self, requests_per_second: float, seconds: float) -> ShadowRound:
        self.client.saturate(IN_FLIGHT, WARM_UP_SECONDS)
        outcomes = self.client.run(requests_per_second, seconds)
        saturated = self.client.saturate(IN_FLIGHT, seconds / 2)
        last = max(due + took for due, took, _ in outcomes.due)
        return ShadowRound(
            outcomes.quantile(0.5),
            outcomes.quantile(0.99),
            len(outcomes.failed),
            len(outcomes.answered) / last,
            saturated,
        )


def _repository(model: Path, folder: Path) -> Path:
    """A repository with the artifact of ``model`` as versions 1, which is served, and 2."""
    versions = [path for path in model.iterdir() if path.name.isdigit()]
    newest = max(versions, key=lambda path: int(path.name))
    # The files that the configuration names, such as labels and warm-up requests, come along.
    others = shutil.ignore_patterns(*(path.name for path in versions))
    shutil.copytree(model, folder / "fraud", ignore=others)
    for number in "12":
        shutil.copytree(newest, folder / "fraud" / number)
    config = (model / "config.pbtxt").read_text()
    before, _, rest = config.partition("version_policy {")
    depth = 1
    for at, mark in enumerate(rest):  # behind the brace that closes the policy
        depth += {"{": 1, "}": -1}.get(mark, 0)
        if not depth:
            rest = rest[at + 1 :]
            break
    (folder / "fraud" / "config.pbtxt").write_text(f"{before}{rest}\n{POLICY}\n")
    return folder


def _turn(gateway: ShadowedGateway, rate: float, seconds: float, number: int) -> list[ShadowRound]:
    """Two rounds without a shadow stage, and one with it, which is turn by turn another one."""
    rounds: dict[int, ShadowRound] = {}
    for place in range(3):
        kind = (place + number) % 3
        if kind == 2:
            gateway.begin()
        rounds[kind] = gateway.measure(rate, seconds)
        if kind == 2:
            gateway.end()
    return [rounds[kind] for kind in range(3)]


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _ratio(turns: Iterable[list[ShadowRound]], figure: Callable[[ShadowRound], float]) -> float:
    """The median, over the turns, of a figure with a shadow stage relative to without."""
    return _median(2 * figure(after) / (figure(one) + figure(two)) for one, two, after in turns)


def _show(name: str, rounds: list[ShadowRound]) -> None:
    print(
        f"{name:8} p50 {_median(r.p50_seconds for r in rounds) * 1e3:8.3f} ms"
        f"   p99 {_median(r.p99_seconds for r in rounds) * 1e3:8.3f} ms"
        f"   {_median(r.throughput for r in rounds):6.0f} requests/s"
        f"   saturated {_median(r.saturated for r in rounds):6.0f}"
        f"   failed {sum(r.failed for r in rounds)}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = sorted(os.sched_getaffinity(0))
    model = environments.ROOT / "model_repository" / "fraud"
    parser.add_argument("--model", type=Path, default=model, help="of the demo")
    parser.add_argument("--share", type=float, default=0.1, help="of the requests that are copied")
    parser.add_argument("--rounds", type=script.count, default=24)
    parser.add_argument("--seconds", type=script.positive, default=3.0, help="of a round")
    parser.add_argument("--server-core", type=script.core, default=cores[0])
    parser.add_argument("--client-core", type=script.core, default=cores[-1])
    return parser.parse_args()


def main() -> int:
    options = _options()
    os.sched_setaffinity(0, {options.client_core})
    with tempfile.TemporaryDirectory() as folder:
        repository = _repository(options.model, Path(folder) / "models")
        port, grpc, metrics = free_ports(3)
        command = [*executable(), "serve", "--model-repository", str(repository)]
        command += ["--http-port", str(port), "--grpc-port", str(grpc)]
        command += ["--metrics-port", str(metrics)]
        ready = f"http://{HOST}:{port}/v2/health/ready"
        log = Path(folder) / "gateway.log"
        with running(command, log=log, ready=ready, cores=(options.server_core,)):
            gateway = ShadowedGateway(port, metrics, options.share)
            gateway.client.saturate(IN_FLIGHT, WARM_UP_SECONDS)
            rate = LOAD * gateway.client.saturate(IN_FLIGHT, options.seconds)
            print(f"{rate:.0f} requests/s, half of the capacity; {options.share:.0%} are copied")
            turns = [_turn(gateway, rate, options.seconds, n) for n in range(options.rounds)]
    first, again, shadowed = ([turn[kind] for turn in turns] for kind in range(3))
    _show("without", first + again)
    _show("shadow", shadowed)
    print("copies: " + ", ".join(f"{count} {name}" for name, count in gateway.copies.items()))
    p99 = _ratio(turns, lambda each: each.p99_seconds)
    throughput = _ratio(turns, lambda each: each.throughput)
    saturated = _ratio(turns, lambda each: each.saturated)
    noise = [two.p99_seconds / one.p99_seconds for one, two, _ in turns]
    quartiles = statistics.quantiles(noise, n=4)
    print(
        f"noise: p99 {_median(noise):.3f} x without a shadow stage, half of the turns within "
        f"{quartiles[0]:.3f} and {quartiles[2]:.3f}"
    )
    without = first + again
    failed = sum(each.failed for each in (*without, *shadowed))
    print(
        f"p99 {p99:.3f} x (at most {P99_RATIO}), throughput {throughput:.3f} x "
        f"(at least {THROUGHPUT_RATIO}), saturated {saturated:.3f} x"
    )
    compared = gateway.copies["compared"] and not gateway.copies["disagreed"]
    good = p99 <= P99_RATIO and throughput >= THROUGHPUT_RATIO and not failed and compared
    return 0 if good else 1


if __name__ == "__main__":
    script.run(main)
