"""A gateway in front of other servers: routes are written, and it is started on them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.server import Gateway, serving

SITE = Path(__file__).parent / "faults" / "site"


def table(model_name: str, endpoints: list[str], **keys: Any) -> str:
    """One ``[models.<name>]``."""
    lines = [f"[models.{model_name}]", f"endpoints = {endpoints!r}"]
    for key, value in {"backend": "triton", **keys}.items():
        lines.append(f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}")
    return "\n".join([*lines, ""])


@contextlib.contextmanager
def fronting(
    folder: Path,
    *tables: str,
    repository: Path | None = None,
    flags: tuple[str, ...] = (),
    wait_for: str = "started",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Gateway]:
    """A gateway with these routes. ``environment`` is for ``faults/site``, which then is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    routes = folder / "modelport.toml"
    routes.write_text("\n".join(tables))
    if repository is None:
        repository = folder / "empty"
        repository.mkdir(exist_ok=True)
    added = dict(environment or {})
    if added:
        added["PYTHONPATH"] = os.pathsep.join([str(SITE), str(SITE.parents[2])])
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        context = serving(repository, "--routes", str(routes), *flags, wait_for=wait_for)
        gateway = context.__enter__()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    try:
        yield gateway
    finally:
        context.__exit__(None, None, None)


@contextlib.contextmanager
def mirrored(folder: Path, repository: Path, protocol: str, own: bool) -> Iterator[Gateway]:
    """A gateway that routes every model of ``repository`` to a second one that serves it.

    ``own``: the first one has the repository's configurations too.
    """
    with serving(repository) as upstream:
        address = upstream.grpc if protocol == "grpc" else upstream.http
        tables = [
            table(model.name, [address], protocol=protocol)
            for model in sorted(repository.iterdir())
            if model.is_dir()
        ]
        with fronting(folder, *tables, repository=repository if own else None) as front:
            yield front
