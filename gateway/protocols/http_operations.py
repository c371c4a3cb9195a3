"""Operations of HTTP routes: FastAPI's routes declare theirs in ``dependencies``.

    @app.get("/v2/models/stats", dependencies=STATISTICS)

The dependency enters the operation before the route is called. The application is not built if a
route declares none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import Depends
from fastapi.params import Depends as Dependency
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from modelport.gateway.access.context import enter
from modelport.gateway.access.operations import Operation
from modelport.gateway.errors import Unsupported


class _EnterOperation:
    """Enters an operation, as a dependency of a route."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    async def __call__(self) -> None:
        enter(self.operation)


def declares(operation: Operation) -> Sequence[Dependency]:
    """Make the ``dependencies`` of a route with this operation."""
    return [Depends(_EnterOperation(operation))]


HEALTH = declares(Operation.HEALTH)
METADATA = declares(Operation.METADATA)
STATISTICS = declares(Operation.STATISTICS)
INFER = declares(Operation.INFER)
CONTROL = declares(Operation.CONTROL)
SHARED_MEMORY = declares(Operation.SHARED_MEMORY)


def operation_of(route: BaseRoute) -> Operation:
    """Return the operation that a route declares.

    Raises:
        Unsupported: It declares none, or more than one.
    """
    found = []
    if isinstance(route, APIRoute):
        entries = (dependency.dependency for dependency in route.dependencies)
        found = [entry.operation for entry in entries if isinstance(entry, _EnterOperation)]
    if len(found) != 1:
        raise Unsupported(
            f"the route '{getattr(route, 'path', route)}' declares {len(found)} operations; it "
            "needs one, such as dependencies=http_operations.METADATA"
        )
    return found[0]


def check(routes: Iterable[BaseRoute]) -> None:
    """Raise ``Unsupported`` if one of ``routes`` does not declare one operation."""
    for route in routes:
        operation_of(route)
