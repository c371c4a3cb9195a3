"""Extension points: descriptors that are built in, and those that installed packages register.

A package adds a backend, an export format, a model family, a dialect or an authenticator by one
entry point, whose group is the extension point and which names the descriptor (for a model family,
the factory):

    [project.entry-points."modelport.backends"]
    numpy = "acme_backend:BACKEND"

A built-in name cannot be replaced. An extension is code that the operator has installed: a model
repository can name it, and cannot bring it. Reading the entry points takes about 10 ms, so it is
left until a name is asked for that is not built in, or a list.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

import structlog

from modelport.gateway.errors import Unsupported

log = structlog.get_logger("modelport.extensions")

T = TypeVar("T")
#: Extension point → its word in messages.
GROUPS: Mapping[str, str] = {
    "modelport.authenticators": "authenticator",
    "modelport.backends": "backend",
    "modelport.dialects": "dialect",
    "modelport.formats": "format",
    "modelport.models": "model",
}


class ExtensionError(Unsupported):
    """An installed extension cannot be used; ``reason`` is not public, it may hold paths."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def installed(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of ``group`` by name; none is imported, more than one is a clash."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        same = found.setdefault(entry.name, [])
        if all(entry.value != other.value for other in same):  # a package may be seen twice
            same.append(entry)
    return found


def find(group: str, name: str) -> EntryPoint | None:
    """The entry point called ``name``; None: no package registers one.

    Raises:
        ExtensionError: two packages register different objects under the name.
    """
    entries = installed(group).get(name, [])
    if len(entries) > 1:
        both = " and ".join(f"{entry.value} by {package_of(entry)}" for entry in entries)
        raise ExtensionError(
            f"{GROUPS[group]} '{name}' is registered twice, as {both}; uninstall one package"
        )
    return entries[0] if entries else None


def load(entry: EntryPoint) -> Any:
    """The object that ``entry`` names.

    Raises:
        ExtensionError: it cannot be imported.
    """
    try:
        return entry.load()
    except (Exception, SystemExit) as error:
        raise broken(entry, f"{type(error).__name__}: {error}") from error


def broken(entry: EntryPoint, reason: str) -> ExtensionError:
    """The error for an extension that its package registers and that does not work."""
    reason = " ".join(reason.split())[:200]
    log.error("an extension cannot be used", group=entry.group, name=entry.name, reason=reason)
    return ExtensionError(
        f"{GROUPS[entry.group]} '{entry.name}' is an extension of the package "
        f"'{package_of(entry)}' and cannot be used; 'modelport doctor' has the reason",
        reason,
    )


def package_of(entry: EntryPoint) -> str:
    """The distribution that registers ``entry``."""
    return entry.dist.name if entry.dist is not None else "unknown"


class ExtensionTable(Generic[T]):
    """The descriptors of one extension point."""

    def __init__(self, group: str, kind: type[T], builtin: dict[str, T]) -> None:
        self.group, self._kind, self.builtin = group, kind, builtin

    def get(self, name: str) -> T | None:
        """The descriptor called ``name``; None: there is none.

        Raises:
            ExtensionError: a package registers it, and it cannot be used.
        """
        if name in self.builtin:
            return self.builtin[name]
        entry = find(self.group, name)
        return None if entry is None else self._loaded(entry)

    def names(self) -> list[str]:
        """All names, the built-in ones first; no extension is imported."""
        return list(dict.fromkeys((*self.builtin, *installed(self.group))))

    def all(self) -> dict[str, T]:
        """All descriptors by name; an extension that cannot be used is logged and left out."""
        found = dict(self.builtin)
        for name in self.names()[len(found) :]:
            try:
                descriptor = self.get(name)
            except ExtensionError:
                continue
            if descriptor is not None:
                found[name] = descriptor
        return found

    def _loaded(self, entry: EntryPoint) -> T:
        descriptor = load(entry)
        if not isinstance(descriptor, self._kind):
            kind = f"{self._kind.__module__}.{self._kind.__qualname__}"
            raise broken(entry, f"{entry.value} is a {type(descriptor).__name__}, not a {kind}")
        name = getattr(descriptor, "name", None)
        if name != entry.name:
            raise broken(entry, f"{entry.value} calls itself '{name}', not '{entry.name}'")
        return descriptor
