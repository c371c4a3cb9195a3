"""Servers for tests: a model's file or a repository, served on free ports of this process.

    def test_the_score_is_a_probability():
        with modelport.testing.serve("model.onnx") as server:
            score = modelport.Client(server.http_url).infer("model", {"x": x})["score"]
        assert 0 <= score <= 1

pytest finds the fixture ``modelport_serve`` by itself (``modelport.pytest_plugin``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from modelport.server import ServeOptions, Server

#: Tests leave no requests that are worth waiting for.
EXIT_TIMEOUT_SECONDS = 2.0


@contextmanager
def serve(*paths: Path | str, **options: Unpack[ServeOptions]) -> Iterator[Server]:
    """Serve ``paths`` in a thread while the block runs, every model loaded.

    Args:
        paths: model repositories, models' own folders, models' files.
        options: those of ``modelport serve``.

    Raises:
        InvalidArgument: an option is wrong.
        Unavailable: a model does not load; the message has the reason.
    """
    strict: ServeOptions = {"exit_on_error": True, "exit_timeout_secs": EXIT_TIMEOUT_SECONDS}
    merged: ServeOptions = {**strict, **options}
    with Server(*paths, **merged) as server:
        yield server
