"""The supervisor on small programs: what a process says, and what becomes of one that hangs."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from modelport.gateway.backends.managed import supervisor
from modelport.gateway.backends.managed.output import LINES_PER_SECOND, MAX_LINE_BYTES, ServerOutput
from modelport.gateway.backends.managed.supervisor import ServerLaunch, ServerSupervisor
from modelport.gateway.errors import Unavailable

SERVE = "import time; open('started', 'a').write('x'); time.sleep(600)"


class Log:
    """Takes what ``ServerOutput`` passes on."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, line: str) -> None:
        self.lines.append(line)

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(f"{event}: {fields}")


async def printed(*chunks: bytes) -> tuple[ServerOutput, Log]:
    log, stream = Log(), asyncio.StreamReader()
    output = ServerOutput("S", log)
    for chunk in chunks:
        stream.feed_data(chunk)
    stream.feed_eof()
    await output.read(stream)
    return output, log


async def test_lines_are_passed_on_whole_wherever_the_chunks_end() -> None:
    _, log = await printed(b"one\ntw", b"o\n\nthree")
    assert log.lines == ["S: one", "S: two", "S: three"]


async def test_a_line_without_end_is_cut_once_and_the_next_is_whole() -> None:
    _, log = await printed(b"x" * 3_000_000 + b"\nnext\n")
    assert log.lines == ["S: " + "x" * MAX_LINE_BYTES + "...", "S: next"]


async def test_what_could_play_with_a_terminal_is_taken_out() -> None:
    _, log = await printed(b"\x1b[31mred\x1b[0m \x07\xff\n")
    assert log.lines == ["S: red \ufffd"]


async def test_more_lines_than_fit_are_counted() -> None:
    _, log = await printed(b"line\n" * (LINES_PER_SECOND + 50))
    assert len(log.lines) == LINES_PER_SECOND + 1
    assert log.lines[-1] == "output lines of a managed server were dropped: {'lines': 50}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"starting\nError: no model\nbye\n", "Error: no model"),
        (b"starting\nbye\n", "bye"),
        (b"", ""),
        (b"cannot open /opt/secret/place/model.pt: gone\n", "cannot open ...: gone"),
        (
            b"2026-11-21T01:25:06,136 [ERROR] main org.pytorch.serve.X - it failed\n",
            "it failed",
        ),
        (b"E1121 01:25:06.136 77 main.cc:12] failed to load\n", "failed to load"),
    ],
)
async def test_the_reason_is_the_last_line_about_trouble_without_paths(
    text: bytes, reason: str
) -> None:
    assert (await printed(text))[0].reason() == reason


def of(folder: Path, alive: Any, code: str = SERVE, **changes: Any) -> ServerSupervisor:
    async def ready() -> bool:
        return (folder / "started").exists()

    def prepare() -> ServerLaunch:
        (folder / "started").unlink(missing_ok=True)
        return ServerLaunch(
            (sys.executable, "-c", code), dict(os.environ), folder, "", ready, alive
        )

    def nothing(*_: object) -> None:
        pass

    arguments = {"connected": nothing, "disconnected": nothing, **changes}
    return ServerSupervisor("S", ("m", 1), 20.0, prepare, **arguments)


async def test_a_server_that_answers_no_more_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PROBE_SECONDS", 0.02)
    hangs = asyncio.Event()
    seen: list[str] = []

    async def alive() -> None:
        if hangs.is_set():
            raise ConnectionError("no answer")

    connected = 0

    def connect(_: ServerLaunch) -> None:
        nonlocal connected
        connected += 1
        hangs.clear()

    kept = of(tmp_path, alive, connected=connect)
    await kept.start()
    assert kept.problem == ""
    waiting = asyncio.ensure_future(kept.while_up(asyncio.Event().wait()))
    hangs.set()
    with pytest.raises(Unavailable, match="of 'm' does not respond; it is being restarted"):
        await waiting
    async with asyncio.timeout(60):
        while connected < 2 or kept.problem:
            seen.append(kept.problem)
            await asyncio.sleep(0.01)
    assert "the server of 'm' does not respond; it is being restarted" in seen
    await kept.stop()


async def test_a_cancelled_start_leaves_no_process(tmp_path: Path) -> None:
    async def alive() -> None: ...

    kept = of(tmp_path, alive, code=f"import os; open('pid', 'w').write(str(os.getpid())); {SERVE}"
              .replace("'started'", "'other'"))  # fmt: skip
    starting = asyncio.ensure_future(kept.start())
    async with asyncio.timeout(60):
        while not (tmp_path / "other").exists():
            await asyncio.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not Path(f"/proc/{pid}").exists()


async def test_stopping_at_once_after_the_start_leaves_no_process(tmp_path: Path) -> None:
    async def alive() -> None: ...

    code = f"import os; open('pid', 'w').write(str(os.getpid())); {SERVE}"
    kept = of(tmp_path, alive, code=code)
    await kept.start()
    pid = int((tmp_path / "pid").read_text())
    await kept.stop()
    assert not Path(f"/proc/{pid}").exists()
    assert kept.problem


async def test_a_timeout_of_the_answers_own_making_passes(tmp_path: Path) -> None:
    async def alive() -> None: ...

    async def late() -> None:
        raise TimeoutError("its own")

    kept = of(tmp_path, alive)
    await kept.start()
    with pytest.raises(TimeoutError, match="its own"):
        await kept.while_up(late())
    await kept.stop()


async def test_a_client_that_does_not_connect_leaves_no_process(tmp_path: Path) -> None:
    async def alive() -> None: ...

    def refuse(_: ServerLaunch) -> None:
        raise Unavailable("it is not what it should be")

    code = f"import os; open('pid', 'w').write(str(os.getpid())); {SERVE}"
    with pytest.raises(Unavailable, match="not what it should be"):
        await of(tmp_path, alive, code=code, connected=refuse).start()
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
