"""The cost of access: TLS, API keys and tokens beside clear text, and new connections beside nginx.

Every variant is a gateway of its own with the 4-float model, all pinned to one core; `wrk` drives
one at a time from another core, in rounds. A saturated core answers as many requests as its CPU
time allows, so rates are per second of the server's CPU time: neighbours on the machine disturb
them least. A program's speed differs by a few percent from start to start, with the places of its
objects in memory, so the servers are started several times. The figures are medians of the ratios
within each round.

At last, one principal floods a gateway with 20 times its quota, while the latency of another's
requests is measured. In every second round the flood goes to an nginx on the gateway's core, as the
client that floods takes time of the measuring client's core in any case. The rates are shares of
what the gateway can answer, so a slow machine is as busy as a fast one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import programs, script, tiny_model
from benchmarks.open_loop import OpenLoopHttpClient
from benchmarks.peers.clients import wrk_sample
from benchmarks.peers.servers.modelport import executable
from benchmarks.script import pinned
from benchmarks.server_certificate import certificate
from modelport.loadtests.system.processes import HOST, ServerFailed, free_ports, running

IN_FLIGHT = 16
PATH = f"/v2/models/{tiny_model.NAME}/infer"
BODY = b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}'
WRK_SCRIPT = Path(__file__).parent / "peers" / "post.lua"
CLOSE = ("Connection: close",)
SLACK_SECONDS = 60.0
ISSUER = "https://issuer.example.com"
#: The quota of the principal that floods, and the rate of the other one, as parts of the requests
#: that the gateway answers in a second of CPU time.
QUOTA, OTHER = 0.0025, 0.025
#: How many times its quota a principal sends.
FLOOD = 20
FLOOD_P99_RATIO = 1.2
#: Rounds with the flood, as many with the flood elsewhere, and the measured requests of each.
FLOOD_PAIRS, FLOOD_REQUESTS = 8, 1000
ACCESS = """
[[rules]]
principals = ["bench", "flood", "jwt:bench"]
operations = ["infer"]

[[quotas]]
principals = ["flood"]
requests_per_second = {quota}

[keys]
file = "keys.toml"

[jwt]
issuer = "{issuer}"
audience = "modelport"
algorithms = ["RS256"]
jwks = "jwks.json"
"""
NGINX = """
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;
events {{ worker_connections 1024; }}
http {{
    access_log off; client_body_temp_path {folder}; proxy_temp_path {folder};
    fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
    server {{
        listen {host}:{port} {tls};
        location / {{ return 200 '{{"ready":true}}'; }}
    }}
}}
"""
NGINX_TLS = """ssl reuseport;
        ssl_protocols TLSv1.2 TLSv1.3; ssl_session_tickets off; ssl_session_cache off;
        ssl_certificate {certificate}; ssl_certificate_key {key}"""


@dataclass(frozen=True, eq=False)
class ServerVariant:
    """A server; ``at_least`` is the least ratio to the first of its table.

    Attributes:
        url: Where ``wrk`` sends requests, with ``headers``.
        command: The program; it is ready when ``ready`` answers 200.
    """

    name: str
    url: str
    ready: str
    command: Sequence[str]
    at_least: float = 0.0
    headers: Sequence[str] = ()


@dataclass(frozen=True)
class CpuRate:
    """Requests for each second of the server's CPU time, and of the clock."""

    per_cpu_second: float
    per_second: float


class AccessFiles:
    """``access.toml``, its keys, and a token of its issuer."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "access.toml"
        self.limit(1.0)
        self._keys = folder / "keys.toml"
        self._token = _token(folder / "jwks.json")

    def limit(self, requests_per_second: float) -> None:
        """Set the quota of the principal that floods."""
        self.path.write_text(ACCESS.format(quota=requests_per_second, issuer=ISSUER))

    def key(self, name: str) -> str:
        """Make a key; return the header that has it."""
        command = [*executable(), "key", "create", "--name", name, "--file", str(self._keys)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return f"Authorization: Bearer {done.stdout.strip()}"

    @property
    def token(self) -> str:
        return f"Authorization: Bearer {self._token}"


def _token(key_set: Path) -> str:
    """Write the key set of an issuer; return a token of its."""
    import jwt
    from cryptography.hazmat.primitives.asymmetric import rsa

    private = rsa.generate_private_key(65537, 2048)
    public = jwt.algorithms.RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
    named = {**public, "kid": "bench", "alg": "RS256", "use": "sig"}
    key_set.write_text(json.dumps({"keys": [named]}))
    claims = {"iss": ISSUER, "aud": "modelport", "sub": "bench", "exp": int(time.time()) + 86_400}
    token: str = jwt.encode(claims, private, "RS256", {"kid": "bench"})
    return token


def gateway(
    name: str, flags: Sequence[str] = (), at_least: float = 0.0, headers: Sequence[str] = ()
) -> ServerVariant:
    http, grpc, metrics = free_ports(3)
    scheme = "https" if "--tls-cert" in flags else "http"
    command = [*executable(), "serve", "--model-repository", str(tiny_model.repository())]
    command += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    address = f"{scheme}://{HOST}:{http}"
    ready = f"{address}/v2/health/ready"
    return ServerVariant(name, address + PATH, ready, [*command, *flags], at_least, headers)


def nginx(folder: Path, pair: tuple[Path, Path] | None = None) -> ServerVariant:
    """An nginx that answers in its own right; ``pair`` is its certificate and key."""
    program = programs.debian_program("nginx", "nginx-light")
    [port] = free_ports(1)
    tls = NGINX_TLS.format(certificate=pair[0], key=pair[1]) if pair else ""
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, host=HOST, port=port, tls=tls))
    url = f"{'https' if pair else 'http'}://{HOST}:{port}{PATH}"
    command = [program, "-p", str(folder), "-e", str(folder / "nginx.log"), "-c"]
    return ServerVariant("nginx", url, url, [*command, str(configuration)])


class BenchmarkedServers:
    """Servers that run at the same time on one core, and are driven in turn from another."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._options = options
        self._body = folder / "body.json"
        self._body.write_bytes(BODY)
        self._folder = folder
        self._pids: dict[ServerVariant, int] = {}

    @contextlib.contextmanager
    def running(self, variants: Sequence[ServerVariant]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for each in variants:
                process = stack.enter_context(
                    running(
                        each.command,
                        log=self._folder / f"{each.name.replace(' ', '-')}.log",
                        ready=each.ready,
                        cores=(self._options.server_core,),
                    )
                )
                self._pids[each] = process.pid
            yield

    def drive(self, variant: ServerVariant, headers: Sequence[str], seconds: int) -> CpuRate:
        wrk = programs.debian_program("wrk", "wrk")
        command = [wrk, "-t1", f"-c{IN_FLIGHT}", f"-d{seconds}s", "-s", str(WRK_SCRIPT)]
        command += [variant.url, "--", str(self._body), *variant.headers, *headers]
        before = _cpu_seconds(self._pids[variant])
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=seconds + SLACK_SECONDS,
            preexec_fn=lambda: pinned(self._options.client_core),
        )
        used = _cpu_seconds(self._pids[variant]) - before
        sample = wrk_sample(done.stdout)
        if sample.failed or not used:
            raise ServerFailed(f"{variant.name}: {sample.failed} requests failed\n{done.stdout}")
        return CpuRate(sample.requests_per_second * seconds / used, sample.requests_per_second)

    def compare(self, variants: Sequence[ServerVariant], headers: Sequence[str]) -> bool:
        """Print the table; return whether every variant reaches its least ratio to the first."""
        rates: dict[ServerVariant, list[CpuRate]] = {each: [] for each in variants}
        for _ in range(self._options.starts):
            with self.running(variants):
                for each in variants:
                    self.drive(each, headers, 1)  # warm-up
                for number in range(self._options.rounds):
                    for each in variants if number % 2 else variants[::-1]:
                        rates[each].append(self.drive(each, headers, self._options.seconds))
        first, kept = rates[variants[0]], True
        for each in variants:
            rows = list(zip(rates[each], first, strict=True))
            ratio = statistics.median(row.per_cpu_second / one.per_cpu_second for row, one in rows)
            cpu = statistics.median(row.per_cpu_second for row, _ in rows)
            clock = statistics.median(row.per_second for row, _ in rows)
            aim = f"at least {each.at_least}" if each.at_least else ""
            print(
                f"  {each.name:12} {cpu:8.0f} /CPU s {clock:8.0f} /s   x {ratio:.3f}   {aim}",
                flush=True,
            )
            kept &= ratio >= each.at_least
        return kept

    def flood(
        self, variant: ServerVariant, elsewhere: ServerVariant, files: AccessFiles, key: str
    ) -> bool:
        """Print the latency of one principal's requests, by where another's flood goes."""
        flooding = files.key("flood")
        with self.running([variant]):
            capacity = self.drive(variant, [key], 1).per_cpu_second
        client = _client(variant, key)
        quota, other = QUOTA * capacity, OTHER * capacity
        seconds = FLOOD_REQUESTS / other
        files.limit(quota)
        rounds: dict[bool, list[float]] = {False: [], True: []}
        with self.running([variant, elsewhere]), pinned_now(self._options.client_core):
            client.run(other, 1.0)  # warm-up
            for number in range(2 * FLOOD_PAIRS):
                flooded = number % 2 == (number // 2) % 2
                flood = _client(variant if flooded else elsewhere, flooding)
                with _beside(flood, FLOOD * quota, seconds):
                    outcomes = client.run(other, seconds)
                if outcomes.failed:
                    raise ServerFailed(f"{len(outcomes.failed)} requests failed")
                rounds[flooded].append(outcomes.quantile(0.99))
        pairs = zip(rounds[True], rounds[False], strict=True)
        ratio = statistics.median(during / without for during, without in pairs)
        print(f"p99 of {other:.0f} requests/s while another sends {FLOOD} times its {quota:.0f}/s")
        for flooded, name in ((False, "elsewhere"), (True, "here")):
            print(f"  {name:12} {statistics.median(rounds[flooded]) * 1e3:8.3f} ms")
        print(f"  x {ratio:.2f}   at most {FLOOD_P99_RATIO}")
        return ratio <= FLOOD_P99_RATIO


def _client(variant: ServerVariant, header: str) -> OpenLoopHttpClient:
    address, slash, path = variant.url.removeprefix("http://").partition("/")
    return OpenLoopHttpClient(address, slash + path, BODY, [header])


@contextlib.contextmanager
def _beside(client: OpenLoopHttpClient, rate: float, seconds: float) -> Iterator[None]:
    """Send requests for ``seconds`` from a process of its own, whatever becomes of them."""
    process = multiprocessing.get_context("fork").Process(target=client.run, args=(rate, seconds))
    process.start()
    yield
    process.join()


@contextlib.contextmanager
def pinned_now(core: int) -> Iterator[None]:
    """Run this process on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def options(description: str | None) -> argparse.ArgumentParser:
    """The options of a comparison of ``BenchmarkedServers``."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    cores = sorted(os.sched_getaffinity(0))
    parser.add_argument("--starts", type=script.count, default=20, help="of all servers")
    parser.add_argument("--rounds", type=script.count, default=2, help="after each start")
    parser.add_argument("--seconds", type=script.count, default=1, help="of each measurement")
    parser.add_argument("--server-core", type=script.core, default=cores[0])
    parser.add_argument("--client-core", type=script.core, default=cores[-1])
    return parser


def main() -> int:
    chosen = options(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pair = certificate(folder)
        tls = ["--tls-cert", str(pair[0]), "--tls-key", str(pair[1])]
        servers = BenchmarkedServers(folder, chosen)
        print(f"requests on {IN_FLIGHT} open connections, 4 floats, HTTP/1.1", flush=True)
        files = AccessFiles(folder)
        flags, key = ["--access", str(files.path)], files.key("bench")
        variants = [
            gateway("clear text"),
            gateway("TLS", tls, 0.75),
            gateway("API key", flags, 0.95, [key]),
            gateway("cached JWT", flags, 0.92, [files.token]),
        ]
        kept = servers.compare(variants, ())
        print(f"requests on new TLS connections, {IN_FLIGHT} at a time", flush=True)
        kept &= servers.compare([nginx(folder, pair), gateway("TLS", tls, 0.5)], CLOSE)
        flooded = gateway("flooded", flags)
        kept &= servers.flood(flooded, nginx(folder), files, key)
    return 0 if kept else 1


if __name__ == "__main__":
    script.run(main)
