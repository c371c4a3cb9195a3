"""A server behind a proxy that makes it slow, or wrong: what a comparison must find.

    python -m tests.loadtests.proxy --port 20001 --to 20002 [--delay-ms 20] [--wrong-every 100] \
        -- COMMAND...

COMMAND is the server, which listens on the port ``--to``. Answers come ``--delay-ms`` later than it
gives them; of every ``--wrong-every``-th answer in JSON the first digit of the data is another.
Ends with the server, and ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from modelport.loadtests.load.target import LoadTestProtocol, LoadTestTarget
from modelport.loadtests.serving.server import MeasuredServerLaunch, ServedBackend
from modelport.loadtests.system.processes import HOST, free_ports

CHUNK_BYTES = 1 << 20
_DIGIT = re.compile(rb'("data":\[[^0-9]*)([0-9])')
COMMAND = (sys.executable, "-m", "tests.loadtests.proxy")


@dataclass(frozen=True)
class Behind:
    """``backend``, asked in JSON over HTTP through the proxy."""

    backend: ServedBackend
    delay_ms: float = 0.0
    wrong_every: int = 0

    def launch(self, work: Path) -> MeasuredServerLaunch:
        inner = self.backend.launch(work)
        asked = (LoadTestProtocol.OIP_HTTP, LoadTestProtocol.TORCHSERVE_HTTP)
        protocol = next(protocol for protocol in asked if protocol in inner.targets)
        target = inner.targets[protocol]
        _, _, port = target.address.rpartition(":")
        (front,) = free_ports(1)
        flags = ("--port", str(front), "--to", port, "--delay-ms", str(self.delay_ms))
        return replace(
            inner,
            command=(
                *COMMAND,
                *flags,
                "--wrong-every",
                str(self.wrong_every),
                "--",
                *inner.command,
            ),
            targets={protocol: LoadTestTarget(protocol, f"{HOST}:{front}", target.model)},
        )


class Proxy:
    def __init__(self, to: int, delay_seconds: float, wrong_every: int) -> None:
        self.to = to
        self.delay_seconds = delay_seconds
        self.wrong_every = wrong_every
        self.answers = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection(HOST, self.to)
            await asyncio.gather(self._pass(reader, ours, False), self._pass(theirs, writer, True))
        writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(CHUNK_BYTES):
                if answers:
                    await asyncio.sleep(self.delay_seconds)
                    chunk = self._answer(chunk)
                writer.write(chunk)
                await writer.drain()
        writer.close()

    def _answer(self, chunk: bytes) -> bytes:
        if not self.wrong_every or b'"data":[' not in chunk:
            return chunk
        self.answers += 1
        if self.answers % self.wrong_every:
            return chunk
        return _DIGIT.sub(lambda m: m[1] + b"%d" % ((int(m[2]) + 5) % 10), chunk, count=1)


async def run(options: argparse.Namespace) -> int:
    child = await asyncio.create_subprocess_exec(*options.command)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, child.terminate)
    proxy = Proxy(options.to, options.delay_ms / 1e3, options.wrong_every)
    server = await asyncio.start_server(proxy.connected, HOST, options.port)
    status = await child.wait()
    server.close()
    return status


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.loadtests.proxy", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--wrong-every", type=int, default=0)
    parser.add_argument("command", nargs="+")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
