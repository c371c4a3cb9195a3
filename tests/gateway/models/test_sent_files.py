"""The folders of files that came in load requests, while changes overlap."""

from __future__ import annotations

import asyncio
from pathlib import Path

from modelport.gateway.models.sent_files import SentFiles, is_sent
from modelport.gateway.types import ModelFiles

FILES = ModelFiles({"1/model.onnx": b"content"}, may_run_code=False)


class Folders:
    """The folder that a model is served from, and those before it."""

    def __init__(self) -> None:
        self.now: Path | None = None
        self.before: set[Path] = set()

    def serve(self, folder: str) -> None:
        if self.now is not None:
            self.before.add(self.now)
        self.now = Path(folder) if folder else None

    def used(self) -> set[Path]:
        return {self.now} if self.now is not None else set()

    def dropped(self) -> set[Path]:
        gone, self.before = self.before, set()
        return gone


async def test_a_folder_that_comes_and_goes_during_another_change_is_removed() -> None:
    folders = Folders()
    sent = SentFiles(folders.used, folders.dropped)
    turn, made = asyncio.Event(), list[Path]()

    async def load(folder: str) -> None:
        made.append(Path(folder))
        await turn.wait()
        folders.serve(folder)

    async def now(folder: str) -> None:
        made.append(Path(folder))
        folders.serve(folder)

    slow = asyncio.create_task(sent.completed(load, "m", "{}", FILES))
    while not made:
        await asyncio.sleep(0)
    await sent.completed(now, "m", "{}", FILES)
    first, second = made
    assert is_sent(first)
    assert first.is_dir()
    assert (second / "1" / "model.onnx").read_bytes() == b"content"
    turn.set()
    await slow
    assert (first.is_dir(), second.exists()) == (True, False)

    async def unload(_: str) -> None:
        folders.serve("")

    await sent.completed(unload)
    assert not first.parent.exists()


async def test_a_folder_stays_while_its_own_change_is_in_progress() -> None:
    folders = Folders()
    sent = SentFiles(folders.used, folders.dropped)
    turn, made = asyncio.Event(), list[Path]()

    async def load(folder: str) -> None:
        folders.serve(folder)
        made.append(Path(folder))
        await turn.wait()

    async def replace(_: str) -> None:
        folders.serve("")

    caller = asyncio.create_task(sent.completed(load, "m", "{}", FILES))
    while not made:
        await asyncio.sleep(0)
    await sent.completed(replace)
    assert made[0].is_dir()
    caller.cancel()  # a client that gives up
    await asyncio.gather(caller, return_exceptions=True)
    assert made[0].is_dir()
    turn.set()
    while made[0].parent.exists():  # the change goes on
        await asyncio.sleep(0)
