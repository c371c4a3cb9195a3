"""The routing of the request in progress: its route key, and the version that answered it.

Only while a rollout runs, servers set ``CURRENT`` in the task of each request, and tell the client
the version under ``HEADER``: in a header over HTTP, in trailing metadata over gRPC.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

HEADER = b"x-modelport-model-version"


@dataclass(slots=True)
class RequestRouting:
    """The route key that a request came with, and the version that answers it.

    ``answered`` is a version of the requested model, or ``NAME/VERSION`` of another model. It is
    empty for a request that no rollout assigns. ``is_copy``: no client waits for the answer.
    """

    key: bytes = b""
    answered: str = ""
    is_copy: bool = False


CURRENT: ContextVar[RequestRouting | None] = ContextVar("routing", default=None)


def begin(key: bytes) -> RequestRouting:
    """Make the routing of the request that the current task serves."""
    routing = RequestRouting(key)
    CURRENT.set(routing)
    return routing
