"""Latency of a model while a rollout copies requests to a candidate, and without.

The model is the demo's fraud transformer; its candidate is the same artifact as another version.
One gateway serves both, pinned to one core, and an open-loop client on another core sends half of
what the gateway can answer. Rounds with a shadow stage and without alternate, and start with either
in turn. The rounds that a noisy moment disturbs disturb both: the figures are medians over pairs of
neighbouring rounds. Throughput is what saturating clients get.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.loadtests.benchmarks.open_loop import OpenLoopHttpClient
from modelport.loadtests.peers.servers.modelport import executable
from modelport.loadtests.system import environments, script
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
        quantiles = outcomes.quantile(0.5), outcomes.quantile(0.99)
        return ShadowRound(*quantiles, len(outcomes.failed), saturated)


def _repository(model: Path, folder: Path) -> Path:
    """A repository with the artifact of ``model`` as versions 1, which is served, and 2."""
    newest = max(path for path in model.iterdir() if path.name.isdigit())
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


def _show(name: str, rounds: list[ShadowRound]) -> None:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    print(
        f"{name:8} p50 {median([r.p50_seconds for r in rounds]) * 1e3:8.3f} ms"
        f"   p99 {median([r.p99_seconds for r in rounds]) * 1e3:8.3f} ms"
        f"   {median([r.saturated for r in rounds]):8.0f} requests/s"
        f"   failed {sum(r.failed for r in rounds)}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    cores = sorted(os.sched_getaffinity(0))
    model = environments.ROOT / "model_repository" / "fraud"
    parser.add_argument("--model", type=Path, default=model, help="of the demo")
    parser.add_argument("--share", type=float, default=0.1, help="of the requests that are copied")
    parser.add_argument("--rounds", type=script.count, default=10)
    parser.add_argument("--seconds", type=script.positive, default=6.0, help="of a round")
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
        with running(command, log=log, ready=ready, core=options.server_core):
            gateway = ShadowedGateway(port, metrics, options.share)
            gateway.client.saturate(IN_FLIGHT, WARM_UP_SECONDS)
            rate = LOAD * gateway.client.saturate(IN_FLIGHT, options.seconds)
            print(f"{rate:.0f} requests/s, half of the capacity; {options.share:.0%} are copied")
            without, shadowed = [], []
            for number in range(options.rounds):
                for copies in (False, True) if number % 2 else (True, False):
                    if copies:
                        gateway.begin()
                        shadowed.append(gateway.measure(rate, options.seconds))
                        gateway.end()
                    else:
                        without.append(gateway.measure(rate, options.seconds))
    _show("without", without)
    _show("shadow", shadowed)
    print("copies: " + ", ".join(f"{count} {name}" for name, count in gateway.copies.items()))
    pairs = list(zip(without, shadowed, strict=True))
    p99 = statistics.median(after.p99_seconds / before.p99_seconds for before, after in pairs)
    throughput = statistics.median(after.saturated / before.saturated for before, after in pairs)
    failed = sum(each.failed for each in (*without, *shadowed))
    print(
        f"p99 {p99:.3f} x (at most {P99_RATIO}), throughput {throughput:.3f} x "
        f"(at least {THROUGHPUT_RATIO})"
    )
    compared = gateway.copies["compared"] and not gateway.copies["disagreed"]
    good = p99 <= P99_RATIO and throughput >= THROUGHPUT_RATIO and not failed and compared
    return 0 if good else 1


if __name__ == "__main__":
    script.run(main)
