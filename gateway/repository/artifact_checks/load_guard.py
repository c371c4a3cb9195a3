"""Protection against code from data while a model loads, whatever a library does with the file.

Artifacts are checked before a framework sees them. This is the second line of defence: within
``no_code`` Python itself refuses, in this thread, to unpickle objects by name, to start processes,
to open connections and to load native libraries. It uses an audit hook (PEP 578), which is added
when the first model for a framework written in Python loads.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from modelport.gateway.errors import IntegrityError

#: Audit events → their description in a message.
_REMOVE = "remove files"
_REFUSED = {
    "pickle.find_class": "unpickle {1}.{0}",
    **dict.fromkeys(
        ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty",
         "subprocess.Popen", "os.startfile", "pty.spawn", "_winapi.CreateProcess"),
        "start a program",
    ),
    **dict.fromkeys(
        ("socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "urllib.Request"),
        "use the network",
    ),
    **dict.fromkeys(("ctypes.dlopen", "ctypes.dlsym"), "load native code"),
    **dict.fromkeys(("os.remove", "os.rename", "os.rmdir", "shutil.rmtree"), _REMOVE),
}  # fmt: skip

_thread = threading.local()


@contextlib.contextmanager
def no_code(name: str) -> Iterator[None]:
    """Refuse, in this thread, operations that no artifact needs while it loads.

    Import libraries first, because an import may load its own native code.

    Args:
        name: of the artifact's file.

    Raises:
        IntegrityError: an operation was refused, even if the library continued without it.
    """
    _add_hook()
    tempfile.gettempdir()  # its first call makes a file and removes it
    _thread.refused = refused = list[str]()
    gc.callbacks.append(_note_collection)
    try:
        yield
    except Exception as error:
        if refused:
            raise _wants(name, refused) from error
        raise
    finally:
        gc.callbacks.remove(_note_collection)
        _thread.refused = None
    if refused:
        raise _wants(name, refused)


def _wants(name: str, refused: list[str]) -> IntegrityError:
    return IntegrityError(
        f"'{name}' wants to {refused[0]} while loading: refused and not run; export the model again"
    )


@functools.cache
def _add_hook() -> None:
    sys.addaudithook(_audit)


def _note_collection(phase: str, _: object) -> None:
    """Excuse finalizers of unrelated objects that remove files: temporary folders do."""
    _thread.collecting = phase == "start"


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in _REFUSED:
        return
    refused: list[str] | None = getattr(_thread, "refused", None)
    excused = _REFUSED[event] == _REMOVE and getattr(_thread, "collecting", False)
    if refused is not None and not excused:
        names = [*map(str, arguments[::-1]), "", ""]
        refused.append(_REFUSED[event].format(*names))
        raise PermissionError(f"refused while a model loads: {event}")
