"""The pytest fixture ``modelport_serve``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Unpack

import pytest

if TYPE_CHECKING:
    from modelport.server import ServeOptions, Server


class ServeFixture(Protocol):
    """The type of the fixture ``modelport_serve``."""

    def __call__(self, *paths: Path | str, **options: Unpack[ServeOptions]) -> Server:
        """A server of ``paths``; the same arguments give the same server."""


@pytest.fixture(scope="session")
def modelport_serve() -> Iterator[ServeFixture]:
    """A function that serves models until the end of the session (``modelport.testing.serve``).

    The same arguments give the same server, so that tests share what takes long to load.
    """
    from modelport import testing

    servers: dict[str, Server] = {}
    with ExitStack() as stack:

        def serve(*paths: Path | str, **options: Unpack[ServeOptions]) -> Server:
            """Start a server of ``paths``, or return the one with the same arguments."""
            key = repr(([str(Path(path).absolute()) for path in paths], sorted(options.items())))
            if key not in servers:
                servers[key] = stack.enter_context(testing.serve(*paths, **options))
            return servers[key]

        yield serve
