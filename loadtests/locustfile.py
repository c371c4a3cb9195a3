"""Load on a model server, in any of its dialects, with Locust's web page or without.

    locust -f loadtests/locustfile.py --host http://localhost:8000 --model fraud
    locust -f loadtests/locustfile.py --host http://localhost:8000 --model fraud \\
        --headless --users 8 --arrival-rate 200 --load-seconds 30
    locust -f loadtests/locustfile.py --users 4 \\
        --mix oip-grpc://localhost:8001/fraud=3 --mix oip-http://localhost:8000/vit=1

``modelport loadtest`` runs it headless and takes percentiles from the raw samples; Locust's own
figures are rounded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

# Locust puts this folder first, and takes the first entry away again: here it would hide modules
# of the standard library (statistics).
sys.path[0] = sys.path[1]

import gevent  # noqa: E402
from locust import events  # noqa: E402
from locust.env import Environment  # noqa: E402

from modelport.loadtests import plan as plans  # noqa: E402
from modelport.loadtests.recording import EXIT_UNWRITTEN  # noqa: E402
from modelport.loadtests.target import Target  # noqa: E402
from modelport.loadtests.users import timers  # noqa: E402
from modelport.loadtests.users.conductor import Conductor, Impossible, Lane  # noqa: E402
from modelport.loadtests.users.sockets import Sockets  # noqa: E402
from modelport.loadtests.users.user import (  # noqa: E402, F401  # Locust finds them by their names here
    USERS,
    ModelUser,
    OipGrpcUser,
    OipHttpBinaryUser,
    OipHttpUser,
    TfServingGrpcUser,
    TfServingHttpUser,
    TorchServeGrpcUser,
    TorchServeHttpUser,
    TritonGrpcUser,
    TritonHttpUser,
)

#: Exit status where nothing could be asked.
IMPOSSIBLE = 2

events.init_command_line_parser.add_listener(plans.add_arguments)  # type: ignore[no-untyped-call]


class Loads:
    """Of one process: the load that runs."""

    def __init__(self) -> None:
        self.conductor: Conductor | None = None
        self.plan: plans.Plan | None = None


LOADS = Loads()


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def prepare(environment: Environment, **_: Any) -> None:
    """Before any user starts: the targets, the payloads, and which users there are."""
    timers.exact()
    options = environment.parsed_options
    assert options is not None
    chosen = options.user_classes or ()  # by name, on the command line
    named = [protocol for protocol, user in USERS.items() if user.__name__ in chosen]
    try:
        plan = plans.read(options, environment.host or options.host, named)
        if any(target.protocol.is_grpc for target, _ in plan.targets):
            from grpc.experimental import (  # type: ignore[attr-defined]
                gevent as grpc_gevent,
            )

            grpc_gevent.init_gevent()  # before the first channel of grpcio's
        Sockets.lone = bool(options.headless) and plan.load.is_lone
        conductor = Conductor(plan, lambda: _end(environment), _reporter(environment, plan))
    except (ValueError, OSError) as error:
        _give_up(environment, str(error))
        return
    LOADS.conductor, LOADS.plan = conductor, plan
    try:
        conductor.prepare()
    except Impossible as error:
        conductor.fail(str(error))
        _give_up(environment, str(error))
        return
    environment.user_classes[:] = [_user(conductor, *kind) for kind in conductor.shared_out()]


@events.spawning_complete.add_listener  # type: ignore[untyped-decorator]
def begin(**_: Any) -> None:
    if LOADS.conductor is not None:
        LOADS.conductor.begin()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def save(**_: Any) -> None:
    """Stopped by hand, or by a signal: what was measured is kept."""
    if LOADS.conductor is not None:
        LOADS.conductor.save()


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def leave(**_: Any) -> None:
    save()


def _user(conductor: Conductor, lanes: tuple[Lane, ...], count: int) -> type[ModelUser]:
    """A class of Locust's for the ``count`` users who ask ``lanes``."""
    first = lanes[0]
    kind = USERS[first.target.protocol]
    told = {"conductor": conductor, "lanes": lanes, "host": first.target.address}
    return type(f"{kind.__name__}{first.number or ''}", (kind,), told | {"fixed_count": count})


def _reporter(environment: Environment, plan: plans.Plan) -> Any:
    """Tells Locust of every request, for its charts; not where only the raw samples count."""
    options = environment.parsed_options
    assert options is not None
    if options.headless and plan.samples_to is not None:
        return None
    fire: Callable[..., None] = environment.events.request.fire

    def report(target: Target, seconds: float, size: int, problem: str | None) -> None:
        fire(
            request_type=target.protocol.value,
            name=target.model,
            response_time=seconds * 1e3,
            response_length=size,
            exception=None if problem is None else RuntimeError(problem),
            context={},
        )

    return report


def _end(environment: Environment) -> None:
    """From within a user: another greenlet stops the runner, or it would wait for itself."""
    runner, options = environment.runner, environment.parsed_options
    assert runner is not None
    assert options is not None
    if LOADS.conductor is not None and LOADS.conductor.unwritten:
        environment.process_exit_code = EXIT_UNWRITTEN
    gevent.spawn(runner.quit if options.headless else runner.stop)


def _give_up(environment: Environment, message: str) -> None:
    """Nothing can be asked: said on the error stream, and on the web page's list of exceptions."""
    runner, options = environment.runner, environment.parsed_options
    assert runner is not None
    assert options is not None
    print(f"locust: error: {message}", file=sys.stderr, flush=True)
    runner.log_exception("local", message, "")
    for user in environment.user_classes:
        user.lanes = ()  # type: ignore[attr-defined]  # all are ours: they end at once
    if options.headless:
        environment.process_exit_code = IMPOSSIBLE
    _end(environment)
