"""A Locust file that loads a model server in any protocol, with or without Locust's web page.

    locust -f loadtests/locustfile.py --host http://localhost:8000 --model fraud
    locust -f loadtests/locustfile.py --host http://localhost:8000 --model fraud \\
        --headless --users 8 --arrival-rate 200 --load-seconds 30
    locust -f loadtests/locustfile.py --users 4 \\
        --mix oip-grpc://localhost:8001/fraud=3 --mix oip-http://localhost:8000/vit=1

``modelport loadtest`` runs it headless and takes percentiles from the raw samples; Locust's own
figures are rounded.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable
from typing import Any

# Locust puts this folder first, and removes the first entry again; here it would hide modules
# of the standard library (statistics).
sys.path[0] = sys.path[1]

import gevent  # noqa: E402
from locust import events  # noqa: E402
from locust.env import Environment  # noqa: E402

from modelport.gateway.errors import plain_reason  # noqa: E402
from modelport.loadtests.load import locust_arguments as plans  # noqa: E402
from modelport.loadtests.load.sample_recording import EXIT_UNWRITTEN  # noqa: E402
from modelport.loadtests.load.target import LoadTestTarget  # noqa: E402
from modelport.loadtests.users.load_driver import Impossible, LoadDriver, TargetLoad  # noqa: E402
from modelport.loadtests.users.locust_users import USERS, ModelUser  # noqa: E402
from modelport.loadtests.users.sockets import Sockets  # noqa: E402

#: Exit status if no request could be sent.
IMPOSSIBLE = 2
#: ``prctl``'s number for timer slack, and the smallest slack, in nanoseconds.
PR_SET_TIMERSLACK, SLACK_NANOSECONDS = 29, 1

events.init_command_line_parser.add_listener(plans.add_arguments)  # type: ignore[no-untyped-call]
globals().update({user.__name__: user for user in USERS.values()})  # Locust finds them here


class RunningLoad:
    """The load of this process, if one has begun."""

    driver: LoadDriver | None = None


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def prepare(environment: Environment, **_: Any) -> None:
    """Prepare targets, payloads and user classes before any user starts."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NANOSECONDS, 0, 0, 0)
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
        Sockets.lone = bool(options.headless) and plan.load.has_single_user
        driver = LoadDriver(plan, lambda: _end(environment), _reporter(environment, plan))
    except (ValueError, OSError) as error:
        _give_up(environment, plain_reason(error))
        return
    RunningLoad.driver = driver
    try:
        driver.prepare()
    except Impossible as error:
        driver.fail(str(error))
        _give_up(environment, str(error))
        return
    environment.user_classes[:] = [_user(driver, *kind) for kind in driver.shared_out()]


@events.spawning_complete.add_listener  # type: ignore[untyped-decorator]
def begin(**_: Any) -> None:
    if RunningLoad.driver is not None:
        RunningLoad.driver.begin()


@events.test_stop.add_listener  # type: ignore[untyped-decorator]
def save(**_: Any) -> None:
    """Keep the measurements when the test is stopped by hand or by a signal."""
    if RunningLoad.driver is not None:
        RunningLoad.driver.save()


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def leave(**_: Any) -> None:
    save()


def _user(driver: LoadDriver, target_loads: tuple[TargetLoad, ...], count: int) -> type[ModelUser]:
    """A Locust class for the ``count`` users of ``target_loads``."""
    first = target_loads[0]
    kind = USERS[first.target.protocol]
    told = {"driver": driver, "target_loads": target_loads, "host": first.target.address}
    return type(f"{kind.__name__}{first.number or ''}", (kind,), told | {"fixed_count": count})


def _reporter(environment: Environment, plan: plans.Plan) -> Any:
    """A callback that reports requests to Locust's charts; None if only the raw samples matter."""
    options = environment.parsed_options
    assert options is not None
    if options.headless and plan.samples_to is not None:
        return None
    fire: Callable[..., None] = environment.events.request.fire

    def report(target: LoadTestTarget, seconds: float, size: int, problem: str | None) -> None:
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
    """Stop the runner from within a user, in another greenlet; the runner waits for its users."""
    runner, options = environment.runner, environment.parsed_options
    assert runner is not None
    assert options is not None
    if RunningLoad.driver is not None and RunningLoad.driver.unwritten:
        environment.process_exit_code = EXIT_UNWRITTEN
    gevent.spawn(runner.quit if options.headless else runner.stop)


def _give_up(environment: Environment, message: str) -> None:
    """Report on stderr and on the web page that no request can be sent."""
    runner, options = environment.runner, environment.parsed_options
    assert runner is not None
    assert options is not None
    print(f"locust: error: {message}", file=sys.stderr, flush=True)
    runner.log_exception("local", message, "")
    for user in environment.user_classes:
        user.target_loads = ()  # type: ignore[attr-defined]  # without target_loads these users end at once
    if options.headless:
        environment.process_exit_code = IMPOSSIBLE
    _end(environment)
