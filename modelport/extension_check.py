"""``python -m modelport.extension_check GROUP NAME``: import one extension, and say what is wrong.

``modelport doctor`` runs it for each extension, so that one that hangs costs its own row alone.
The last line is JSON: ``reason``, empty if the extension can be used, and ``libraries``.
"""

from __future__ import annotations

import importlib
import json
import sys

from modelport.gateway import extensions
from modelport.gateway.backend_registry import BACKENDS
from modelport.gateway.extensions import ExtensionError, ExtensionTable

#: Extension point → where its table of descriptors is; models have factories instead.
TABLES = {
    "modelport.authenticators": "modelport.gateway.access.authenticators:AUTHENTICATORS",
    "modelport.backends": "modelport.gateway.backend_registry:BACKENDS",
    "modelport.dialects": "modelport.gateway.protocols.dialects:DIALECTS",
    "modelport.formats": "modelport.exporters.formats.registry:FORMATS",
}
NOT_REGISTERED = "no installed package registers it"


def check(group: str, name: str) -> str:
    """The reason why the extension cannot be used; empty if it can."""
    try:
        if group in TABLES:
            module, _, attribute = TABLES[group].partition(":")
            table: ExtensionTable[object] = getattr(importlib.import_module(module), attribute)
            if name in table.builtin:
                return (
                    f"the name is built in; register the {extensions.GROUPS[group]} under another"
                )
            return "" if table.get(name) is not None else NOT_REGISTERED
        from modelport.exporters.model_registry import MODELS

        if name in MODELS:
            return "the name is built in; register the model under another"
        entry = extensions.find(group, name)
        if entry is None:
            return NOT_REGISTERED
        return "" if callable(extensions.load(entry)) else f"{entry.value} is not callable"
    except ExtensionError as error:
        return error.reason or str(error)


def libraries(group: str, name: str) -> list[tuple[str, str]]:
    """The distributions that a backend needs, each with how to install it."""
    backend = BACKENDS.get(name) if group == BACKENDS.group else None
    return [each[:2] for each in backend.libraries] if backend is not None else []


if __name__ == "__main__":
    wrong = check(*sys.argv[1:3])
    needed = [] if wrong else libraries(*sys.argv[1:3])
    print(json.dumps({"reason": wrong, "libraries": needed}))
