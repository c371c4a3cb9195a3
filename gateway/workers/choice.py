"""Which front serves, and in how many processes: ``--front`` and ``--workers``."""

from __future__ import annotations

from pathlib import Path

from gateway.errors import Unsupported
from gateway.settings import FrontKind, Settings

#: Whether ``auto`` takes Envoy where it can run.
AUTO_IS_ENVOY = False
#: What Envoy's Python imports (``inside_envoy.py``).
APPLICATION = "gateway.workers.inside_envoy:application"


def is_envoy(settings: Settings) -> bool:
    """Whether Envoy is the front.

    Raises:
        Unsupported: it is asked for, and cannot run here; the message has the remedy.
    """
    if settings.front is FrontKind.PORTABLE or (
        settings.front is FrontKind.AUTO and not AUTO_IS_ENVOY
    ):
        return False
    from gateway.front.envoy import launch

    problem = launch.problem()
    if problem and settings.front is FrontKind.ENVOY:
        raise Unsupported(problem)
    return not problem


def is_alone(settings: Settings) -> bool:
    """Whether one process is all there is: no parent, no hub."""
    return settings.workers == 1 and not is_envoy(settings)


def front_configuration(settings: Settings) -> str:
    """Envoy's configuration, as one of the workers would get it.

    Raises:
        Unsupported: the front is another.
    """
    if settings.front is FrontKind.PORTABLE:
        raise Unsupported("the portable front has no configuration to print; give --front envoy")
    from gateway.front.envoy import launch

    return launch.configuration(settings, Path("worker-0"), APPLICATION)
