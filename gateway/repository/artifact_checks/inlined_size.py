"""The size of a program after inlining: every call replaced by the body of the function it calls.

Runtimes inline functions while they load a model. Functions that call each other twice, 30 levels
deep, fit into 3 KB and inline to 2³⁰ operators. Here the size is computed without inlining.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from modelport.gateway.errors import IntegrityError

#: Inlined operators that every file may have, and how many times its own operators.
MAX_OPERATORS = 20_000
MAX_RATIO = 4
#: Levels of calls. The deepest models of Keras and torch have about 30.
MAX_DEPTH = 200

K = TypeVar("K", bound=Hashable)


def check(what: str, bodies: Mapping[K, Mapping[K, int]]) -> None:
    """Refuse a program whose functions inline to much more than they are.

    Args:
        what: the file, as the message names it.
        bodies: for each function, how often it uses each operator or calls each function.

    Raises:
        IntegrityError: a function inlines to too many operators, calls too deeply, or calls itself.
    """
    most = max(MAX_OPERATORS, MAX_RATIO * sum(sum(body.values()) for body in bodies.values()))
    sizes: dict[K, int] = {}
    depths: dict[K, int] = {}
    begun: set[K] = set()
    waiting = list(bodies)
    while waiting:
        name = waiting[-1]
        calls = bodies[name].keys() & bodies.keys()
        missing = [] if name in sizes else [call for call in calls if call not in sizes]
        if missing:
            if name in begun:
                raise _refused(what, "has functions that call themselves")
            begun.add(name)
            waiting += missing
            continue
        waiting.pop()
        depths[name] = 1 + max((depths[call] for call in calls), default=0)
        sizes[name] = 1 + sum(count * sizes.get(used, 1) for used, count in bodies[name].items())
        if sizes[name] > most:
            raise _refused(what, f"has functions that inline to more than {most} operators")
        if depths[name] > MAX_DEPTH:
            raise _refused(what, f"has functions that call each other {MAX_DEPTH} levels deep")


def _refused(what: str, why: str) -> IntegrityError:
    return IntegrityError(
        f"{what} {why}: refused and not loaded; export the model with fewer calls, or sign the "
        "version"
    )
