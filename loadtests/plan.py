"""What one Locust process is to do, and its arguments, there and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelport.loadtests import shapes
from modelport.loadtests.samples import Load
from modelport.loadtests.target import Protocol, Target, address, parse

#: Where no end is set: longer than somebody watches the web page.
ENDLESS_SECONDS = 3600.0
#: Above it a machine runs out of ports.
MOST_USERS = 10_000
MOST_ROWS = 1_000_000
#: 30 days.
MOST_SECONDS = 30 * 24 * 3600
#: gRPC's header of it has eight digits of milliseconds.
MOST_TIMEOUT_SECONDS = 24 * 3600
#: Whose moments an open loop knows beforehand.
MOST_REQUESTS = 100_000_000


@dataclass(frozen=True)
class Plan:
    """Targets with their weights, asked at once; ``data`` are files, one for each or none."""

    targets: tuple[tuple[Target, int], ...]
    load: Load
    data: tuple[Path, ...] = ()
    config: Path | None = None
    #: Where the samples go; None: nowhere, Locust's own statistics are all there is.
    samples_to: Path | None = None
    #: This process' share of the load: the i-th of n.
    part: tuple[int, int] = (0, 1)

    def arguments(self) -> list[str]:
        """For ``locust``, besides ``-f`` and ``--headless``."""
        load = self.load
        found = [f"--mix={target.url}={weight}" for target, weight in self.targets]
        found += [f"--data={path}" for path in self.data]
        if self.config is not None:
            found.append(f"--signature={self.config}")
        if self.samples_to is not None:
            found.append(f"--samples-to={self.samples_to}")
        if load.rate is not None:
            found.append(f"--arrival-rate={load.rate!r}")
        return [
            *found,
            f"--users={load.users}",
            f"--spawn-rate={load.users}",
            f"--load-shape={load.shape}",
            f"--load-seconds={load.duration_seconds!r}",
            f"--warmup={load.warmup_seconds!r}",
            f"--batch-size={load.batch_size}",
            f"--seed={load.seed}",
            f"--request-timeout={load.timeout_seconds!r}",
            f"--part={self.part[0]}/{self.part[1]}",
        ]


def add_arguments(parser: Any) -> None:
    """What ``locust`` takes besides its own; most of it is on the web page's form too."""
    group = parser.add_argument_group("model server", "what is asked, and how")
    group.add_argument(
        "--protocol",
        choices=list(Protocol),
        default=Protocol.OIP_HTTP.value,
        help="dialect in which --host is asked",
    )
    group.add_argument("--model", default="", help="name of the model")
    group.add_argument("--model-version", default="", help="its version; default: the server's")
    parser.add_argument(
        "--mix",
        action="append",
        default=[],
        metavar="PROTOCOL://HOST:PORT/MODEL[/VERSION][=WEIGHT]",
        help="instead of --host, --protocol and --model; several are asked at once, by weight",
        include_in_web_ui=False,
    )
    group.add_argument(
        "--arrival-rate",
        type=float,
        default=None,
        help="open loop: this many intended requests a second, up to --users in flight; latency "
        "counts from the intended sending. Default: closed loop, every user asks again when it is "
        "answered",
    )
    group.add_argument("--load-shape", choices=shapes.SHAPES, default="constant")
    group.add_argument(
        "--load-seconds", type=float, default=0.0, help="end after this and the warm-up; 0: an hour"
    )
    group.add_argument("--warmup", type=float, default=0.0, help="seconds that are not counted")
    group.add_argument("--batch-size", type=int, default=1, help="rows in a request")
    group.add_argument("--seed", type=int, default=0, help="of the requests that are drawn")
    group.add_argument("--request-timeout", type=float, default=30.0, help="seconds")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        help="file with requests, and what must come back; one for each --mix",
        include_in_web_ui=False,
    )
    parser.add_argument(
        "--signature",
        default=None,
        help="the model's config.pbtxt, for servers that do not tell what it takes",
        include_in_web_ui=False,
    )
    parser.add_argument(
        "--samples-to", default=None, help="folder for the raw samples", include_in_web_ui=False
    )
    parser.add_argument(
        "--part",
        default="0/1",
        help="i/n: this process sends the i-th n-th of the load",
        include_in_web_ui=False,
    )


def read(options: Namespace, host: str | None, protocols: Sequence[Protocol] = ()) -> Plan:
    """The plan that ``options`` of ``locust`` tell.

    Args:
        protocols: of the User classes that were named on the command line.

    Raises:
        ValueError: something is missing or impossible; the message names the argument.
    """
    load = Load(
        shape=options.load_shape,
        users=options.num_users or 1,
        rate=options.arrival_rate or None,
        duration_seconds=options.load_seconds or ENDLESS_SECONDS,
        warmup_seconds=options.warmup,
        batch_size=options.batch_size,
        seed=options.seed,
        timeout_seconds=options.request_timeout,
    )
    check(load)
    targets = [_weighted(text) for text in options.mix]
    if not targets:
        if not host:
            raise ValueError("--host is missing: http://HOST:PORT of the server")
        if not options.model:
            raise ValueError("--model is missing: the name of the model to ask")
        where, name, version = address(host), options.model, options.model_version
        spoken = protocols or [Protocol(options.protocol)]
        targets = [(Target(one, where, name, version), 1) for one in spoken]
    check_mix(load, len(targets))
    if options.data and len(options.data) not in (1, len(targets)):
        raise ValueError(f"--data: {len(options.data)} files for {len(targets)} targets")
    number, _, count = options.part.partition("/")
    return Plan(
        tuple(targets),
        load,
        tuple(Path(path) for path in options.data),
        Path(options.signature) if options.signature else None,
        Path(options.samples_to) if options.samples_to else None,
        (int(number), int(count or 1)),
    )


def check(load: Load) -> None:
    """Raises ValueError where a figure of ``load`` cannot be."""
    for name, value, least, most in (
        ("number of users", load.users, 1, MOST_USERS),
        ("batch size", load.batch_size, 1, MOST_ROWS),
        ("warm-up", load.warmup_seconds, 0, MOST_SECONDS),
        ("duration", load.duration_seconds, 0, MOST_SECONDS),
        ("time-out of a request", load.timeout_seconds, 0, MOST_TIMEOUT_SECONDS),
        ("seed", load.seed, 0, float("inf")),
    ):
        if not value >= least:
            raise ValueError(f"{name}: {value} is below {least}")
        if value > most:
            raise ValueError(f"{name}: {value} is above {most:,}")
    for name, number in (
        ("rate", load.rate),
        ("duration", load.duration_seconds),
        ("time-out of a request", load.timeout_seconds),
    ):
        if number is not None and not 0 < number < float("inf"):
            raise ValueError(f"{name}: {number} is not above 0")
    if load.shape not in shapes.SHAPES:
        raise ValueError(f"shape '{load.shape}' is none of {', '.join(shapes.SHAPES)}")
    seconds = load.warmup_seconds + load.duration_seconds
    if load.rate is not None and load.rate * seconds > MOST_REQUESTS:
        raise ValueError(
            f"rate: {load.rate:g} a second for {seconds:g} s are more than {MOST_REQUESTS:,} "
            "requests; lower it, or shorten the duration"
        )


def check_mix(load: Load, targets: int) -> None:
    """Raises ValueError where one of so many targets would have no user."""
    if load.users < targets and not load.is_lone:
        raise ValueError(
            f"number of users: {load.users} for {targets} targets; each needs one (a single user "
            "without a rate asks all in turn)"
        )


def _weighted(text: str) -> tuple[Target, int]:
    url, separator, weight = text.rpartition("=")
    if not separator:
        return parse(text), 1
    if not weight.isdigit() or int(weight) < 1:
        raise ValueError(f"--mix '{text}': the weight '{weight}' is no whole number above 0")
    return parse(url), int(weight)
