"""The plan of one Locust process, and its command-line arguments, in both directions."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelport.gateway.cli.server_credentials import CREDENTIAL_HELP, ServerCredentials
from modelport.loadtests.load import load_shapes
from modelport.loadtests.load.samples import LoadProfile
from modelport.loadtests.load.target import (
    LoadTestProtocol,
    LoadTestTarget,
    address,
    is_tls,
    parse,
)

#: Duration if no end is set: longer than anyone watches the web page.
ENDLESS_SECONDS = 3600.0
#: With more, a machine runs out of ports.
MOST_USERS = 10_000
MOST_ROWS = 1_000_000
#: 30 days.
MOST_SECONDS = 30 * 24 * 3600
#: gRPC's header for it has eight digits of milliseconds.
MOST_TIMEOUT_SECONDS = 24 * 3600
#: An open loop computes the times of all requests beforehand.
MOST_REQUESTS = 100_000_000


@dataclass(frozen=True)
class Plan:
    """Targets with their weights, loaded concurrently; ``data`` has one file for each, or none."""

    targets: tuple[tuple[LoadTestTarget, int], ...]
    load: LoadProfile
    data: tuple[Path, ...] = ()
    config: Path | None = None
    #: Folder for the samples; None: only Locust's own statistics are kept.
    samples_to: Path | None = None
    #: This process' share of the load: the i-th of n.
    part: tuple[int, int] = (0, 1)

    @property
    def credentials(self) -> ServerCredentials | None:
        """The credentials of the targets that a command was given; all of them have the same."""
        found = (target.credentials for target, _ in self.targets)
        return next((each for each in found if each is not None), None)

    def arguments(self) -> list[str]:
        """Arguments for ``locust``, besides ``-f`` and ``--headless``."""
        load = self.load
        found = [f"--mix={target.url}={weight}" for target, weight in self.targets]
        found += [f"--data={path}" for path in self.data]
        if self.config is not None:
            found.append(f"--signature={self.config}")
        for name, path in (self.credentials or ServerCredentials())._asdict().items():
            if path is not None:
                found.append(f"--{name.replace('_', '-')}={path}")
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
    """Add the options to ``locust``; most appear in the web page's form too."""
    group = parser.add_argument_group("model server", "target and requests")
    group.add_argument(
        "--protocol",
        choices=list(LoadTestProtocol),
        default=LoadTestProtocol.OIP_HTTP.value,
        help="protocol of --host",
    )
    group.add_argument("--model", default="", help="name of the model")
    group.add_argument("--model-version", default="", help="the version; default: the server's")
    parser.add_argument(
        "--mix",
        action="append",
        default=[],
        metavar="PROTOCOL://HOST:PORT/MODEL[/VERSION][=WEIGHT]",
        help="instead of --host, --protocol and --model; several are loaded at once, by weight",
        include_in_web_ui=False,
    )
    group.add_argument(
        "--arrival-rate",
        type=float,
        default=None,
        help="open loop: intended requests per second, up to --users in flight; latency counts "
        "from the intended sending. Default: a closed loop",
    )
    group.add_argument("--load-shape", choices=load_shapes.SHAPES, default="constant")
    group.add_argument(
        "--load-seconds",
        type=float,
        default=0.0,
        help="duration in seconds after the warm-up; 0: an hour",
    )
    group.add_argument(
        "--warmup", type=float, default=0.0, help="warm-up in seconds, which does not count"
    )
    group.add_argument("--batch-size", type=int, default=1, help="rows in a request")
    group.add_argument("--seed", type=int, default=0, help="seed of random requests")
    group.add_argument("--request-timeout", type=float, default=30.0, help="seconds")
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        help="file with requests and expected answers; one for each --mix",
        include_in_web_ui=False,
    )
    parser.add_argument(
        "--signature",
        default=None,
        help="the model's config.pbtxt, for servers without metadata",
        include_in_web_ui=False,
    )
    for name, help_text in CREDENTIAL_HELP.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=Path,
            default=None,
            metavar="FILE",
            help=help_text,
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


def read(options: Namespace, host: str | None, protocols: Sequence[LoadTestProtocol] = ()) -> Plan:
    """Read the plan from ``options`` of ``locust``.

    Args:
        protocols: protocols of the User classes named on the command line.

    Raises:
        ValueError: something is missing or impossible; the message names the argument.
    """
    load = LoadProfile(
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
            raise ValueError("--model is missing: the name of the model")
        where, name, version = address(host), options.model, options.model_version
        spoken, tls = protocols or [LoadTestProtocol(options.protocol)], is_tls(host.split(":")[0])
        targets = [(LoadTestTarget(one, where, name, version, tls), 1) for one in spoken]
    credentials = ServerCredentials(*(getattr(options, name) for name in CREDENTIAL_HELP))
    targets = [(replace(target, credentials=credentials), weight) for target, weight in targets]
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


def check(load: LoadProfile) -> None:
    """Raise ``ValueError`` if a figure of ``load`` is out of range."""
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
    if load.shape not in load_shapes.SHAPES:
        raise ValueError(f"shape '{load.shape}' is none of {', '.join(load_shapes.SHAPES)}")
    seconds = load.warmup_seconds + load.duration_seconds
    if load.rate is not None and load.rate * seconds > MOST_REQUESTS:
        raise ValueError(
            f"rate: {load.rate:g} a second for {seconds:g} s are more than {MOST_REQUESTS:,} "
            "requests; lower it, or shorten the duration"
        )


def check_mix(load: LoadProfile, targets: int) -> None:
    """Raise ``ValueError`` if there are fewer users than targets."""
    if load.users < targets and not load.has_single_user:
        raise ValueError(
            f"number of users: {load.users} for {targets} targets; each needs one (a single user "
            "without a rate sends to all in turn)"
        )


def _weighted(text: str) -> tuple[LoadTestTarget, int]:
    url, separator, weight = text.rpartition("=")
    if not separator:
        return parse(text), 1
    if not weight.isdigit() or int(weight) < 1:
        raise ValueError(f"--mix '{text}': the weight '{weight}' is not a whole number above 0")
    return parse(url), int(weight)
