"""Ray Serve on a real cluster of several nodes, behind a gateway: what ``deploy/ray`` promises.

    python -m tests.ray

A head and two worker nodes are started on this machine with ``deploy/ray/serve.yaml`` (its models,
ports and delays replaced). They read the models from S3 (moto's); the plain gateway that they are
compared with reads the folder. Then: bits and refusals as the plain gateway's, a release and a
tampered one, SIGKILL of replicas under load without a gateway, scale up under load and down after
it, SIGKILL of a whole node under load, its return, SIGTERM of the gateway. As controls replicas are
killed once more with the Routers' retry turned off, and a node without the gateway: both must lose
requests, or the ledger proves nothing. Takes some five minutes; exits with 1 if anything is wrong.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from modelport.loadtests.system.processes import HOST, free_ports
from tests import verb
from tests.gateway.repository.storage.moto_server import Moto
from tests.ray import checks, cluster
from tests.ray.cluster import SOURCE, Cluster, RayNode, proxies, running
from tests.ray.traffic import Ledger, LedgerEntry, RayClient, load, over_grpc, over_http
from tests.server import Gateway

MOST_REPLICAS = 4
CLIENTS = 24
STEADY_SECONDS = 6.0
#: How long the load goes on after the kill, at least.
AFTER_SECONDS = 12.0
#: Within this the cluster knows that a node is gone (``HEALTH`` in ``cluster``), and has answered.
NOTICED_SECONDS = 10.0
WORKERS = 2
#: Of the models in the bucket.
PREFIX = "ray"
#: What a Router says that tries no more.
REPLICA_DIED = "the replica that ran the request died"


class Report:
    """Rows of the table at the end, told as they come."""

    def __init__(self) -> None:
        self._console = Console()
        self.rows: list[tuple[str, str, bool]] = []

    def say(self, what: str) -> None:
        self._console.print(f"[dim]{what}[/dim]")

    def row(self, what: str, seen: str, good: bool) -> None:
        self.rows.append((what, seen, good))
        self._console.print(f"{what}: {seen}" + ("" if good else "  [bold red]wrong[/bold red]"))

    def check(self, what: str, work: Callable[[], str]) -> None:
        try:
            self.row(what, work(), True)
        except AssertionError as error:
            self.row(what, str(error), False)

    def table(self) -> None:
        table = Table("check", "seen", "", title="deploy/ray on a real cluster")
        for what, seen, good in self.rows:
            table.add_row(what, seen, "[green]holds[/green]" if good else "[red]wrong[/red]")
        self._console.print(table)


def configuration(url: str, cache: Path) -> dict[str, Any]:
    """``serve.yaml`` with this test's models, and delays that it can wait for."""
    config: dict[str, Any] = yaml.safe_load((SOURCE / "serve.yaml").read_text())
    http_port, grpc_port = free_ports(2)  # of the head, which no client here asks
    config["http_options"] = {"host": HOST, "port": http_port}
    config["grpc_options"]["port"] = grpc_port
    application = config["applications"][0]
    application["args"] = {
        "model_repository": url,
        "models": ["dense", "slow"],
        "flags": ["--require-manifest", "--repository-cache", str(cache)],
    }
    router, model, _ = application["deployments"]
    model["ray_actor_options"] = {"num_cpus": 0.1}
    scaling = {
        "min_replicas": 1, "max_replicas": MOST_REPLICAS, "target_ongoing_requests": 3,
        "upscale_delay_s": 1, "downscale_delay_s": 5, "metrics_interval_s": 1,
        "look_back_period_s": 2,
    }  # fmt: skip
    application["deployments"] = [
        {**router, "num_replicas": WORKERS},
        {**model, "name": "dense", "autoscaling_config": None, "num_replicas": 1},
        {**model, "name": "slow", "autoscaling_config": scaling},
    ]
    return config


def routes(folder: Path, nodes: list[RayNode]) -> Path:
    """``routes.toml`` with this test's models and nodes."""
    file = folder / "routes.toml"
    endpoints = ", ".join(f'"{node.endpoint}"' for node in nodes)
    file.write_text(
        "".join(
            f'[models.{name}]\nbackend = "triton"\nprotocol = "grpc"\nendpoints = [{endpoints}]\n'
            for name in ("dense", "slow")
        )
    )
    return file


class Trial:
    """The cluster, a plain gateway over the repository, and one in front of Ray Serve."""

    def __init__(self, ray: Cluster, moto: Moto, folder: Path, report: Report) -> None:
        self.ray, self.moto, self.folder, self.report = ray, moto, folder, report
        self.repository = repository = folder / "models"
        checks.publish(repository)
        moto.upload(repository, PREFIX)
        self.nodes = ray.nodes[1:]
        self.config = configuration(moto.url(PREFIX), folder / "cache")
        ray.deploy(self.config)
        self.watcher = ray.watch()
        took = self.until_all("deployed")
        report.row("deployed: every model's replica, Router and proxy", f"{took:.0f} s", True)
        self._empty = folder / "empty"
        self._empty.mkdir()
        self._routes = routes(folder, self.nodes)
        self.plain = Gateway(repository, "--require-manifest")
        self.front = self.new_front()

    def new_front(self) -> Gateway:
        return Gateway(
            self._empty, "--routes", str(self._routes),
            "--model-control-mode", "poll", "--repository-poll-secs", "1",
        )  # fmt: skip

    def until_all(self, what: str) -> float:
        return self.watcher.until(what, self._complete)

    def _complete(self, status: Any) -> bool:
        counts = [running(status, name) for name in ("Router", "dense", "slow")]
        settled = status["applications"]["modelport"]["status"] == "RUNNING"
        return settled and counts == [WORKERS, 1, 1] and proxies(status) == WORKERS + 1

    def close(self) -> None:
        self.plain.close()
        self.front.close()

    # -- what is checked --------------------------------------------------------------------------

    def schema(self) -> str:
        """``serve.yaml`` as it is; and a misspelt key is found."""
        problems = cluster.unknown_keys(self.ray.bin_folder, SOURCE / "serve.yaml")
        assert not problems, problems
        misspelt = self.folder / "misspelt.yaml"
        text = (SOURCE / "serve.yaml").read_text()
        misspelt.write_text(text.replace("target_ongoing_requests", "target_ongoing_request"))
        assert "target_ongoing_request" in cluster.unknown_keys(self.ray.bin_folder, misspelt)
        return "every key is known"

    def same_bits(self) -> str:
        nodes = [node.endpoint for node in self.nodes]
        same = checks.parity(self.plain, self.front, nodes)
        return f"{same} of {same} bit-equal"

    def same_refusals(self) -> str:
        nodes = [node.endpoint for node in self.nodes]
        same = checks.refusals(self.plain, self.front, nodes)
        return f"{same} of {same} the same"

    def tampered(self) -> str:
        return checks.tampered(self.plain, self.front, [node.endpoint for node in self.nodes])

    def release(self) -> str:
        """A new version, loaded by a changed ``user_config`` while everybody asks."""
        ledger, before = Ledger(), self.replicas()
        checks.release(self.repository, 2)
        self.moto.upload(self.repository / "slow" / "2", f"{PREFIX}/slow/2")
        deployments = self.config["applications"][0]["deployments"]
        deployments[-1]["user_config"] = {"release": 2}
        seen = len(self.front.logs)
        with load(self.through_gateway(4), ledger):
            self.ray.deploy(self.config)
            self.front.wait_for("model version is ready", seen, model="slow", version=2)
        lost = ledger.lost()
        assert not lost, f"{len(lost)} of {len(ledger.entries)} requests lost {first(lost)}"
        assert before <= self.replicas(), "a replica was started anew"
        return f"0 of {len(ledger.entries)} requests lost, no replica started anew"

    def replicas(self) -> set[int]:
        """The processes that serve ``slow``."""
        return {process.pid for node in self.nodes for process in node.replicas("slow")}

    def through_gateway(self, count: int = CLIENTS) -> list[RayClient]:
        """Half of them over gRPC, half over HTTP."""
        grpc, http = self.front.grpc, self.front.http
        return [
            RayClient("gateway, gRPC", partial(over_grpc, grpc, "slow", "x"))
            if index % 2
            else RayClient("gateway, HTTP", partial(over_http, http, "slow", "x"))
            for index in range(count)
        ]

    def scale_up(self) -> str:
        return f"1 to {MOST_REPLICAS} in {self._until_slow(MOST_REPLICAS):.0f} s"

    def scale_down(self) -> str:
        return f"{MOST_REPLICAS} to 1 in {self._until_slow(1):.0f} s"

    def _until_slow(self, count: int) -> float:
        return self.watcher.until(
            f"{count} replicas", lambda status: running(status, "slow") == count, 60
        )

    def victim(self) -> RayNode:
        """The worker with the most replicas of the model that is asked."""
        return max(self.nodes, key=lambda node: len(node.replicas("slow")))

    def kill_under_load(
        self, clients: list[RayClient], ledger: Ledger
    ) -> tuple[RayNode, float, str]:
        """SIGKILL a node while everybody asks; which, when, and what died."""
        with load(clients, ledger):
            self._until_slow(MOST_REPLICAS)
            time.sleep(STEADY_SECONDS)  # to measure, not to wait for anything
            node = self.victim()
            died = len(node.replicas("slow"))
            assert died, "the node ran no replica of the model that is asked"
            at = time.monotonic()
            processes = node.kill()
            time.sleep(AFTER_SECONDS)
            self._until_slow(MOST_REPLICAS)
        return node, at, f"{processes} processes, {died} of {MOST_REPLICAS} replicas"

    def kill_a_node(self) -> RayNode:
        """With gateway and Routers as they are: nothing may be lost."""
        report, ledger = self.report, Ledger()
        report.check("scale up under load, in `serve status`", lambda: self._up(ledger))
        node, at, what = self.kill_under_load(self.through_gateway(), ledger)
        lost, total = ledger.lost(), len(ledger.entries)
        during = sum(at - 0.1 < e.sent_at < at + AFTER_SECONDS for e in ledger.entries)
        report.row(
            f"SIGKILL of a node under load ({what})",
            f"{len(lost)} of {total} requests lost, {during} around the kill {first(lost)}",
            not lost and during > CLIENTS,
        )
        before = ledger.p99_ms(at - STEADY_SECONDS, at - 0.1)
        window = ledger.p99_ms(at - 0.1, at + AFTER_SECONDS)
        slowest = max(e.seconds for e in ledger.entries if e.sent_at >= at - 1)
        seen = f"{before:.0f} ms before, {window:.0f} ms in 12 s after the kill, "
        report.row(
            "p99 of these", seen + f"slowest {slowest * 1000:.0f} ms", slowest < NOTICED_SECONDS
        )
        missed = [
            t for t, s in self.watcher.history if t > at and running(s, "slow") < MOST_REPLICAS
        ]
        noticed = missed[0] - at if missed else float("inf")
        report.row(
            "the dead replicas are missed in `serve status`",
            f"after {noticed:.1f} s",
            noticed < NOTICED_SECONDS,
        )
        report.check("scale down after the load", self.scale_down)
        return node

    def _up(self, ledger: Ledger) -> str:
        assert running(self.watcher.history[-1][1], "slow") == 1, "it was scaled up already"
        with load(self.through_gateway(), ledger):
            return self.scale_up()

    def bring_back(self, node: RayNode) -> str:
        """A node at the same address joins; the gateway's own probe finds it."""
        seen = len(self.front.logs)
        began = time.monotonic()
        back = self.ray.restart(node)
        self.nodes[self.nodes.index(node)] = back
        self.until_all("the node is back")
        event = "an endpoint is in use again"
        self.front.wait_for(event, seen, endpoint=back.endpoint, model="slow")
        return f"asked again after {time.monotonic() - began:.0f} s"

    def straight(self) -> list[RayClient]:
        """Clients that ask the nodes' proxies, without the gateway and its retry."""
        return [
            RayClient("straight", partial(over_grpc, node.endpoint, "slow", "x"))
            for node in self.nodes
            for _ in range(CLIENTS // WORKERS)
        ]

    def crash(self, ledger: Ledger) -> int:
        """SIGKILL every replica of a node that lives on, while everybody asks; how many it were.

        The clients ask straight: the gateway would hide whether the Routers try again, because it
        sends a request that failed to the other node.
        """
        with load(self.straight(), ledger):
            self._until_slow(MOST_REPLICAS)
            time.sleep(STEADY_SECONDS)  # new replicas have requests in flight, too
            died = self.victim().replicas("slow")
            for process in died:
                process.kill()
            self.watcher.until("they are missed", lambda s: running(s, "slow") < MOST_REPLICAS)
            self._until_slow(MOST_REPLICAS)
        return len(died)

    def crash_replicas(self) -> str:
        """Crash replicas with a model; no request may be lost."""
        ledger = Ledger()
        died, lost = self.crash(ledger), ledger.lost()
        self._until_slow(1)
        assert not lost, f"{len(lost)} of {len(ledger.entries)} requests lost {first(lost)}"
        return f"{died} replicas: 0 of {len(ledger.entries)} requests lost"

    def control(self) -> None:
        """No retry in the Routers, and clients without a gateway: requests must be lost."""
        self.config["applications"][0]["args"]["attempts"] = 1
        self.ray.deploy(self.config)
        self.watcher.until("redeployed", lambda s: not self._complete(s), 30)
        self.until_all("redeployed")
        ledger = Ledger()
        died = self.crash(ledger)
        lost = [entry for entry in ledger.lost() if REPLICA_DIED in entry.error]
        seen = f"{died} replicas: {len(lost)} of {len(ledger.entries)} lost {first(lost)}"
        self.report.row("control, SIGKILL of replicas without the Routers' retry", seen, bool(lost))
        ledger = Ledger()
        _, at, what = self.kill_under_load(self.straight(), ledger)
        lost = [e for e in ledger.lost() if e.sent_at < at]  # in flight, not only refused since
        seen = f"{len(lost)} in flight, {len(ledger.lost())} of {len(ledger.entries)} lost"
        way = f"control, SIGKILL of a node without the gateway ({what})"
        self.report.row(way, f"{seen} {first(lost)}", bool(lost))

    def drain(self) -> str:
        """SIGTERM while every client waits for an answer: each gets it, and the gateway ends."""
        ledger = Ledger()
        front = self.front
        with load(self.through_gateway(), ledger, requests=1):
            time.sleep(0.03)  # less than the model takes
            status = front.terminate()
        assert status == 0, f"exit status {status}"
        assert not ledger.lost(), first(ledger.lost())
        return f"{len(ledger.entries)} of {CLIENTS} in flight answered, exit status 0"


def first(lost: list[LedgerEntry]) -> str:
    return f"({lost[0].client}: {lost[0].error})" if lost else ""


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        report.say(f"starting a head and {WORKERS} worker nodes")
        with closing(Moto(folder / "moto.log")) as moto, cluster.started(WORKERS) as ray:
            trial = Trial(ray, moto, folder, report)
            try:
                report.check("serve.yaml in Ray's own schema", trial.schema)
                report.check("the same bits: plain gateway, gateway, proxies", trial.same_bits)
                report.check("the same refusals of bad requests", trial.same_refusals)
                report.check("a tampered version", trial.tampered)
                report.check("a version released under load", trial.release)
                report.check("SIGKILL of a node's replicas under load", trial.crash_replicas)
                node = trial.kill_a_node()
                report.check("the node returns", lambda: trial.bring_back(node))
                report.check("SIGTERM of the gateway", trial.drain)
                trial.front = trial.new_front()
                trial.control()
            finally:
                trial.close()


def main() -> int:
    report = Report()
    began = time.monotonic()
    try:
        run(report)
    except AssertionError as error:
        report.row("the test itself", str(error), False)
    report.table()
    report.say(f"{time.monotonic() - began:.0f} s")
    return int(not all(good for _, _, good in report.rows))


if __name__ == "__main__":
    verb.run(main)
