"""Model files that came in a load request, as Triton's ``file:1/model.onnx``.

They are in a private folder of their own, which lasts while a model is served from it. Nothing is
trusted in it that is not in a repository.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path, PurePosixPath

from modelport.gateway.errors import Internal, InvalidArgument
from modelport.gateway.models.registered_names import check_name
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.scan import VERSION_NAME, is_model_name
from modelport.gateway.types import ModelFiles

_PREFIX = "modelport-sent-"
#: Of folders whose files may be code where those of a repository may.
_CODE_PREFIX = f"{_PREFIX}code-"
#: Most files of a request, and folders in the path of one.
MAX_FILES, MAX_DEPTH = 1000, 16


def is_sent(folder: Path) -> bool:
    """Whether a model's folder is one of this module."""
    home = folder.parent
    return home.name.startswith(_PREFIX) and home.parent == Path(tempfile.gettempdir()).resolve()


def may_run_code(folder: Path) -> bool:
    """Whether the files of a model may be code where those of a repository may."""
    return not is_sent(folder) or folder.parent.name.startswith(_CODE_PREFIX)


def checked(name: str, override: str | None, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a request to load the model ``name``, by normal paths in its folder.

    Raises:
        InvalidArgument: there is no configuration, or a path leaves the folder, or is no path of
            files that can be together in one.
    """
    check_name(name)
    if not override:
        raise InvalidArgument(
            f"failed to load '{name}', failed to poll from model repository: model files of a "
            "request need the parameter 'config', the configuration in JSON"
        )
    if len(files) > MAX_FILES:
        raise InvalidArgument(f"failed to load '{name}': more than {MAX_FILES} files")
    # As in Triton, a path may begin with the slash of the model's folder.
    found = {path.removeprefix("/"): content for path, content in files.items()}
    folders = {str(folder) for path in found for folder in PurePosixPath(path).parents}
    if len(found) < len(files):
        raise InvalidArgument(f"failed to load '{name}': two files have the same path")
    for path in found:
        parts = path.split("/")
        if not all(map(is_model_name, parts)) or len(parts) > MAX_DEPTH:
            reason = "must be a path below the model's folder, without '..' and hidden names"
        elif path in folders:
            reason = "is the folder of another file"
        elif path == configuration.FILENAME:
            reason = "is sent as the parameter 'config', in JSON"
        else:
            continue
        raise InvalidArgument(f"failed to load '{name}': file '{path[:256]}' {reason}")
    if not any(VERSION_NAME.match(path.partition("/")[0]) for path in found):
        raise InvalidArgument(
            f"failed to load '{name}': no file is of a version, as 'file:1/model.onnx' is"
        )
    return found


def _store(name: str, files: ModelFiles) -> Path:
    """Write ``files``; return the model's folder.

    Raises:
        Internal: there is no room.
    """
    prefix = _CODE_PREFIX if files.may_run_code else _PREFIX
    home = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    try:
        for path, content in files.contents.items():
            file = home / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    except OSError as error:
        remove(home / name)
        raise Internal(
            f"failed to load '{name}': its files cannot be written: {error.strerror}; set the "
            "environment variable TMPDIR to a folder with room"
        ) from error
    return home / name


class SentFiles:
    """The folders of files that came in load requests, for changes of the models of one process.

    Args:
        used: the folders outside of the repositories that models use now.
        dropped: those that they used and no longer do, each told once.
    """

    def __init__(self, used: Callable[[], set[Path]], dropped: Callable[[], set[Path]]) -> None:
        self._used, self._dropped = used, dropped
        #: Those that changes in progress have made: another change may drop one while it loads.
        self._new: set[Path | None] = set()
        self._unused: set[Path] = set()

    async def completed(
        self,
        change: Callable[[str], Awaitable[None]],
        name: str = "",
        override: str | None = None,
        files: ModelFiles | None = None,
    ) -> None:
        """Make a change, with the folder of ``files``, and remove folders that it left unused.

        It goes on if its caller is cancelled.

        Raises: as ``checked``, and as ``change``.
        """
        if files is not None:
            files = ModelFiles(checked(name, override, files.contents), files.may_run_code)
        task = asyncio.ensure_future(self._change(change, name, files))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _change(
        self, change: Callable[[str], Awaitable[None]], name: str, files: ModelFiles | None
    ) -> None:
        folder = None if files is None else await asyncio.to_thread(_store, name, files)
        self._new.add(folder)
        try:
            await change("" if folder is None else str(folder))
        finally:
            self._new.discard(folder)
            self._unused |= {*filter(is_sent, self._dropped())}
            if folder is not None and folder not in self._used():
                self._unused.add(folder)
            unused = self._unused - self._new
            self._unused -= unused
            for each in unused:
                await asyncio.to_thread(remove, each)


def remove(folder: Path) -> None:
    """Remove the folder of a model, unless it has gone."""
    shutil.rmtree(folder.parent, ignore_errors=True)
